"""The state of an optimizer as ``state_dict`` returns it, without holding it in memory."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_offload.errors import StorageError
from hf_offload.storage.disk_io import open_nameless

_SMALLEST_BYTES = 1 << 16


class MappedFiles:
    """Copies of tensors in files without a name, mapped into memory: the system reads them when they are looked at, and may
    drop them from memory again. Their room is free once the tensors have gone.

    Raises :class:`~hf_offload.errors.StorageError` where ``directory`` has no room.
    """

    def __init__(self, directory: Path):
        self._directory = directory

    def state(self, state: dict[str, Any]) -> dict[str, Any]:
        """``state``, whose large tensors are mapped copies."""
        return {name: self._mapped(value) for name, value in state.items()}

    def _mapped(self, value: Any) -> Any:
        if type(value) is not Tensor or value.nbytes < _SMALLEST_BYTES or not value.is_contiguous():
            return value
        host = value.detach().to("cpu")
        try:
            # Without a name: a process that is killed leaves nothing. The system finds the file by its descriptor.
            with os.fdopen(open_nameless(self._directory), "wb") as file:
                file.write(host.reshape(-1).view(torch.uint8).numpy().data)
                file.flush()
                path = f"/proc/self/fd/{file.fileno()}"
                storage: Any = torch.UntypedStorage.from_file(path, shared=True, nbytes=value.nbytes)
        except OSError as error:
            raise StorageError(
                f"The optimizer's state cannot be gathered to be saved: {error}. {self._directory} needs room for a copy of "
                "it: free some space there, or name another directory."
            ) from error
        return torch.empty(0, dtype=value.dtype).set_(storage, 0, value.shape, value.stride())
