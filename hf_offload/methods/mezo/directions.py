"""The random direction of a step: weights move along it, and the update goes along it. It is drawn again each time.

Note: whose bits
    The operations and their order are those of the authors' code, ``p + scale * z * eps`` and
    ``p - lr * (g * z + weight_decay * p)``, each result rounded to the weight's dtype, as there. ``z`` has the numbers that
    one call draws for a whole weight, and one generator runs through all weights. On a CPU, PyTorch draws the same numbers
    in pieces, which is tried for each dtype before it is relied on: one piece is then all of ``z`` that there is.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

PLUS, MINUS, BACK = 1, -2, 1
"""The weights' way in units of ``eps z``: to ``+1``, from there to ``-1``, and back."""

# So few elements that PyTorch computes with one thread: others would have to wake up for each operation, between which one
# thread draws for a millisecond.
_PIECE = 1 << 15
_GROUP = 16  # elements that PyTorch's kernel for CPUs makes at a time, of as many uniform numbers


class Shift(NamedTuple):
    """A weight moves by ``scale * eps`` along a direction."""

    scale: int
    eps: float

    def apply(self, part: Tensor, z: Tensor) -> None:
        """Change ``part``, whose direction is ``z``."""
        part.add_(torch.mul(z, self.scale).mul_(self.eps))


class Update(NamedTuple):
    """A weight moves by ``rate`` against ``gradient`` along a direction, and against its ``decay``."""

    gradient: float
    rate: float
    decay: float

    def apply(self, part: Tensor, z: Tensor) -> None:
        """Change ``part``, whose direction is ``z``."""
        change = torch.mul(z, self.gradient)
        if self.decay:
            change.add_(part * self.decay)
        part.sub_(change.mul_(self.rate))


Move = Shift | Update


class Direction:
    """That of one step on a ``device``, for weights like those of ``metas``, which have no data."""

    def __init__(self, seed: int, metas: Sequence[Tensor], device: torch.device):
        self._metas, self._device = metas, device
        # Of the generator at the beginning of each weight's direction, as far as they are known, by number.
        self._states = {0: torch.Generator(device).manual_seed(seed).get_state()}

    def generator(self, number: int) -> torch.Generator:
        """At the beginning of the direction of the weight of this number."""
        place = max(known for known in self._states if known <= number)
        generator = torch.Generator(self._device)
        generator.set_state(self._states[place])
        for passed, meta in enumerate(self._metas[place:number], place):
            memory = memory_for(meta, self._device)
            for count in _counts(meta, self._device):
                memory[:count].normal_(generator=generator)
            self.passed(passed, generator)
        return generator

    def passed(self, number: int, generator: torch.Generator) -> None:
        """``generator`` has drawn for the weight of this number."""
        self._states.setdefault(number + 1, generator.get_state())


def memory_for(weight: Tensor, device: torch.device) -> Tensor:
    """For as much of a direction of ``weight`` as is drawn at a time."""
    return torch.empty(max(_counts(weight, device)), dtype=weight.dtype, device=device)


def make_moves(weight: Tensor, memory: Tensor, generator: torch.Generator, moves: Sequence[Move]) -> None:
    """Change ``weight`` by ``moves`` along its direction, which is drawn in ``memory``. The generator is at the beginning of
    the weight's direction, and then at its end.
    """
    flat = weight.view(-1) if weight.is_contiguous() else None
    begin = 0
    for count in _counts(weight, weight.device):
        part = weight if flat is None else flat[begin : begin + count]
        begin += count
        z = memory[:count].view(part.shape).normal_(generator=generator)
        for some, some_z in zip(_pieces(part), _pieces(z), strict=True):
            for move in moves:
                move.apply(some, some_z)


def _counts(weight: Tensor, device: torch.device) -> list[int]:
    """How many numbers are drawn at a time for ``weight``."""
    count, counts = weight.numel(), []
    if device.type == "cpu" and weight.is_contiguous() and count > 2 * _PIECE and _may_draw_pieces(weight.dtype):
        while count > 2 * _PIECE:  # the last piece has more than one group
            counts.append(_PIECE)
            count -= _PIECE
    return [*counts, count]


@functools.cache
def _may_draw_pieces(dtype: torch.dtype) -> bool:
    """Whether numbers that a CPU draws in pieces are those of a whole."""
    whole, pieces = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
    expected = torch.empty(4 * _GROUP + 5, dtype=dtype, device="cpu").normal_(generator=whole)
    found = torch.empty_like(expected)
    for part in (found[: 2 * _GROUP], found[2 * _GROUP :]):
        part.normal_(generator=pieces)
    return torch.equal(expected, found) and torch.equal(whole.get_state(), pieces.get_state())


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    """Elementwise operations have the bits of the whole in pieces."""
    rows = tensor if tensor.dim() else tensor.view(1)
    per_row = rows[:1].numel()
    return rows.split(max(1, _PIECE // max(1, per_row)))


def direction_bytes(weight: Tensor, *, on_cpu: bool) -> int:
    """Most bytes that a direction of ``weight`` takes, with results of operations."""
    piece = weight.element_size() * min(weight.numel(), _PIECE)
    drawn = min(weight.nbytes, 2 * piece) if on_cpu and weight.is_contiguous() else weight.nbytes
    return drawn + 2 * piece


def checksum(weight: Tensor) -> int:
    """64 bits of XXH3 over a weight's bytes in the order of its elements, whatever its strides and its device, as a signed
    integer.
    """
    digest = xxhash.xxh3_64()
    for piece in _pieces(weight.detach()):
        digest.update(piece.contiguous().view(torch.uint8).cpu().numpy().data)
    return int.from_bytes(digest.digest(), "big", signed=True)
