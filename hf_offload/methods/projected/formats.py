"""Formats of an optimizer's state: a dtype, or 8 bits with a scale for each block."""

from typing import Any

import torch
from torch import Tensor

from hf_offload.errors import OffloadConfigError

EIGHT_BIT = "8bit"
_SCALES = "_absmax"
# What the eight bits stand for, by device and whether there is a sign: a constant of bitsandbytes, no state.
_Maps = dict[tuple[torch.device, bool], Tensor]


class StateFormat:
    """Reads and writes named tensors of one parameter's state.

    ``dtype`` is a torch dtype's name, ``"8bit"`` (blockwise dynamic quantisation of bitsandbytes: Dettmers et al., ICLR 2022,
    arXiv 2110.02861), or None for the parameter's own. In 8 bits a tensor is its codes, uint8, and one float32 scale for each
    ``block_size`` of them under the name with ``_absmax``.
    """

    def __init__(self, dtype: str | None, block_size: int):
        self._dtype = dtype
        self._block_size = block_size
        self._maps: _Maps = {}

    def require(self) -> None:
        """Raise :class:`OffloadConfigError` if what it needs is not installed. (Bytes can be counted without.)"""
        if self.eight_bit:
            _functional()

    @property
    def eight_bit(self) -> bool:
        """Whether tensors are quantised."""
        return self._dtype == EIGHT_BIT

    def dtype(self, parameter_dtype: torch.dtype) -> torch.dtype:
        """What one element is stored as."""
        if self._dtype is None:
            return parameter_dtype
        return torch.uint8 if self.eight_bit else getattr(torch, self._dtype)

    def count_bytes(self, elements: int, parameter_dtype: torch.dtype) -> int:
        """Of a tensor with so many elements, its scales included."""
        scales = 4 * -(-elements // self._block_size) if self.eight_bit else 0
        return elements * self.dtype(parameter_dtype).itemsize + scales

    def write(self, state: dict[str, Any], name: str, value: Tensor, parameter_dtype: torch.dtype) -> None:
        """Keep ``value``, which may be what :meth:`read` returned, changed in place."""
        if not self.eight_bit:
            kept = state.get(name)
            if kept is None or kept.shape != value.shape:
                state[name] = value.to(self.dtype(parameter_dtype))
            elif kept is not value:
                kept.copy_(value)
        elif value.numel() == 0:
            state[name], state[name + _SCALES] = value.to(torch.uint8), value.new_empty(0, dtype=torch.float32)
        else:
            signed = not name.endswith("_sq")  # a second moment has no sign
            codes, scales = _functional().quantize_blockwise(
                value.float().contiguous(), code=self._map(value.device, signed), blocksize=self._block_size
            )
            state[name], state[name + _SCALES] = codes, scales.absmax

    def read(self, state: dict[str, Any], name: str, dtype: torch.dtype) -> Tensor:
        """The tensor in ``dtype``: the stored one itself if it has it."""
        kept = state[name]
        if not self.eight_bit or kept.numel() == 0:
            return kept.to(dtype)
        signed = not name.endswith("_sq")
        return (
            _functional()
            .dequantize_blockwise(
                kept,
                absmax=state[name + _SCALES],
                code=self._map(kept.device, signed),
                blocksize=self._block_size,
            )
            .to(dtype)
        )

    def _map(self, device: torch.device, signed: bool) -> Tensor:
        if (device, signed) not in self._maps:
            self._maps[device, signed] = _functional().create_dynamic_map(signed=signed).to(device)
        return self._maps[device, signed]


def drop(state: dict[str, Any], name: str) -> None:
    """Forget the tensor ``name`` and its scales."""
    state.pop(name, None)
    state.pop(name + _SCALES, None)


def _functional() -> Any:
    try:
        import bitsandbytes.functional
    except ImportError as error:
        raise OffloadConfigError(
            "8-bit state needs bitsandbytes: pip install 'hf-offload[low-bit]', or choose another dtype."
        ) from error
    return bitsandbytes.functional
