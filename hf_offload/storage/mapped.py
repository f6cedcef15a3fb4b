"""Copies of tensors in files without a name that are mapped into memory."""

import os
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from hf_offload.errors import StorageError
from hf_offload.storage.disk_io import open_nameless


class MappedFiles:
    """Files in ``directory``: the system reads them when their tensors are looked at, and may drop them from memory again.
    Their room is free once the tensors have gone, also after a kill.
    """

    def __init__(self, directory: Path):
        self.directory = directory

    def open(self) -> IO[bytes]:
        """A file to write to. Raises ``OSError``."""
        return os.fdopen(open_nameless(self.directory), "wb")

    def write(self, file: IO[bytes], tensor: Tensor) -> None:
        """Append the elements of ``tensor``. Raises ``OSError`` where the drive has no room."""
        host = tensor.detach().to("cpu").reshape(-1)
        file.write(host.view(torch.uint8).numpy().data)

    def map(self, file: IO[bytes], dtype: torch.dtype, shape: torch.Size) -> Tensor:
        """What was written, as a tensor."""
        file.flush()
        nbytes = shape.numel() * dtype.itemsize
        # The system finds the file by its descriptor.
        storage: Any = torch.UntypedStorage.from_file(f"/proc/self/fd/{file.fileno()}", shared=True, nbytes=nbytes)
        return torch.empty(0, dtype=dtype).set_(storage).view(shape)

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of a dense ``tensor``, with its strides.

        Raises :class:`~hf_offload.errors.StorageError` where the drive has no room.
        """
        try:
            with self.open() as file:
                self.write(file, tensor.as_strided((tensor.numel(),), (1,)))
                return self.map(file, tensor.dtype, torch.Size([tensor.numel()])).as_strided(
                    tensor.size(), tensor.stride()
                )
        except OSError as error:
            raise StorageError(
                f"A copy of a weight cannot be written to be saved: {error}. {self.directory} needs room for a copy of the "
                "model: free some space there, or name another directory."
            ) from error
