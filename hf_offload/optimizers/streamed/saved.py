"""The state of an optimizer as ``state_dict`` returns it, without holding it in memory."""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from hf_offload.errors import StorageError
from hf_offload.optimizers.streamed.parts import is_of_elements, own
from hf_offload.optimizers.streamed.record import Record
from hf_offload.storage.mapped import MappedFiles

_SMALLEST_BYTES = 1 << 16


class StateFiles:
    """Copies of states on a drive, mapped into memory."""

    def __init__(self, directory: Path):
        self._files = MappedFiles(directory)

    def state(self, parts: Iterable[dict[str, Any]], record: Record) -> dict[str, Any]:
        """The state of the whole parameter from that of its ``parts``, which are needed one after the other.

        Raises :class:`~hf_offload.errors.StorageError` where the drive has no room.
        """
        whole: dict[str, Any] = {}
        with contextlib.ExitStack() as stack:
            files: dict[str, IO[bytes]] = {}
            try:
                for number, part in enumerate(parts):
                    for name, value in part.items():
                        if number == 0 and self._is_large(value, record):
                            files[name] = stack.enter_context(self._files.open())
                        if name in files:
                            self._files.write(files[name], value)
                        if number == 0:
                            whole[name] = value if name in files else own(value)
                return {
                    name: self._mapped(files[name], value, record) if name in files else value
                    for name, value in whole.items()
                }
            except OSError as error:
                raise StorageError(
                    f"The optimizer's state cannot be gathered to be saved: {error}. {self._files.directory} needs room for "
                    "a copy of it: free some space there, or name another directory."
                ) from error

    def _is_large(self, value: Any, record: Record) -> bool:
        if is_of_elements(value, record):
            return True
        return (
            type(value) is Tensor
            and len(record.sizes) == 1
            and value.nbytes >= _SMALLEST_BYTES
            and value.is_contiguous()
        )

    def _mapped(self, file: IO[bytes], first: Tensor, record: Record) -> Tensor:
        shape = record.shape if is_of_elements(first, record) else first.shape
        return self._files.map(file, first.dtype, shape)
