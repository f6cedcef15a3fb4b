"""The state of an optimizer as ``state_dict`` returns it, without holding it in memory."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from hf_offload.errors import StorageError
from hf_offload.optimizers.streamed.parts import is_of_elements, own
from hf_offload.optimizers.streamed.record import Record
from hf_offload.storage.disk_io import open_nameless

_SMALLEST_BYTES = 1 << 16


class MappedFiles:
    """Copies of states in files without a name, mapped into memory: the system reads them when they are looked at, and may
    drop them from memory again. Their room is free once the tensors have gone.

    Raises :class:`~hf_offload.errors.StorageError` where ``directory`` has no room.
    """

    def __init__(self, directory: Path):
        self._directory = directory

    def state(self, parts: Iterable[dict[str, Any]], record: Record) -> dict[str, Any]:
        """The state of the whole parameter from that of its ``parts``, which are needed one after the other."""
        whole: dict[str, Any] = {}
        with contextlib.ExitStack() as stack:
            files: dict[str, IO[bytes]] = {}
            try:
                for number, part in enumerate(parts):
                    for name, value in part.items():
                        if number == 0 and self._is_large(value, record):
                            # Without a name: a process that is killed leaves nothing.
                            files[name] = stack.enter_context(os.fdopen(open_nameless(self._directory), "wb"))
                        if name in files:
                            host = value.detach().to("cpu").reshape(-1)
                            files[name].write(host.view(torch.uint8).numpy().data)
                        if number == 0:
                            whole[name] = value if name in files else own(value)
                return {
                    name: self._mapped(files[name], value, record) if name in files else value
                    for name, value in whole.items()
                }
            except OSError as error:
                raise StorageError(
                    f"The optimizer's state cannot be gathered to be saved: {error}. {self._directory} needs room for a copy "
                    "of it: free some space there, or name another directory."
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
        file.flush()
        shape = record.shape if is_of_elements(first, record) else first.shape
        nbytes = shape.numel() * first.itemsize
        # The system finds the file by its descriptor.
        storage: Any = torch.UntypedStorage.from_file(f"/proc/self/fd/{file.fileno()}", shared=True, nbytes=nbytes)
        return torch.empty(0, dtype=first.dtype).set_(storage).view(shape)
