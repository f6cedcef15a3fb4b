"""Host buffers with a chosen address, so that direct I/O needs no staging copy."""

import torch

PAGE = 4096
# Smaller blocks are cut from the heap, wherever there is room: to hit the address by chance is not worth the attempt.
_LARGE_BYTES = 128 << 10


def empty_at_phase(nbytes: int, phase: int) -> torch.Tensor:
    """A fresh ``uint8`` buffer of ``nbytes`` bytes whose address is ``phase`` modulo :data:`PAGE`.

    Allocators that put large blocks on page boundaries give the address at once, and the block then has the size of the
    one it replaces, which keeps the heap from fragmenting. Otherwise one page more is allocated and the start shifted. In
    both cases the buffer is a storage of its own: operations exist that mishandle a tensor that begins inside of one.
    """
    if nbytes >= _LARGE_BYTES:
        exact = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if (phase - exact.data_ptr()) % PAGE == 0:
            return exact
        del exact
    raw = torch.empty(nbytes + PAGE, dtype=torch.uint8, device="cpu")
    shift = (phase - raw.data_ptr()) % PAGE
    return torch.from_numpy(raw.numpy()[shift : shift + nbytes])


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the tensor's storage, as a ``uint8`` buffer that shares it."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
