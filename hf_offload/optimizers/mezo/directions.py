"""The random direction of a step: weights move along it, and the update goes along it. It is drawn again each time.

Note: whose bits
    The operations and their order are those of the authors' code, ``p + scale * z * eps`` and
    ``p - lr * (g * z + weight_decay * p)``, each result rounded to the weight's dtype, as there. ``z`` has the numbers that
    one call draws for a whole weight, and one generator runs through all weights. On a CPU, PyTorch draws the same numbers
    in pieces, which is tried for each dtype before it is relied on: one piece is then all of ``z`` that there is.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

PLUS, MINUS, BACK = 1, -2, 1
"""The weights' way in units of ``eps z``: to ``+1``, from there to ``-1``, and back."""

RESTORES = ("reference", "pristine")
"""``reference``: weights go back along the direction, as in the authors' code, which leaves rounding errors behind.
``pristine``: they are as they were.
"""

# So few elements that PyTorch computes with one thread: others would have to wake up for each operation, between which one
# thread draws for a millisecond.
_PIECE = 1 << 15
_GROUP = 16  # elements that PyTorch's kernel for CPUs makes at a time, of as many uniform numbers


class Shift(NamedTuple):
    """Weights move by ``scale * eps`` along the direction of ``seed``."""

    seed: int
    scale: int
    eps: float

    def make(self, part: Tensor, z: Tensor, result: Tensor) -> None:
        """Change ``part``, whose direction is ``z``. ``result`` is memory for results, of the same shape."""
        part.add_(torch.mul(z, self.scale, out=result).mul_(self.eps))


class Update(NamedTuple):
    """One weight moves by ``rate`` against ``gradient`` along the direction of ``seed``, and against its ``decay``."""

    seed: int
    gradient: float
    rate: float
    decay: float

    def make(self, part: Tensor, z: Tensor, result: Tensor) -> None:
        """Change ``part``, whose direction is ``z``. ``result`` is memory for results, of the same shape."""
        torch.mul(z, self.gradient, out=result)
        if self.decay:
            result.add_(part * self.decay)
        part.sub_(result.mul_(self.rate))


Move = Shift | Update


class Directions:
    """Draws directions for weights like ``weights``, all on one device, of which it holds no memory. It allocates what it
    needs at once, so that nothing fails while some weights have moved and others have not.
    """

    def __init__(self, weights: Sequence[Tensor]):
        self._device = weights[0].device
        self._draws = [(weight.dtype, list(_drawn(weight))) for weight in weights]
        self._z, self._result = (
            torch.empty(max(count(one) * one.element_size() for one in weights), dtype=torch.uint8, device=self._device)
            for count in (lambda one: max(_drawn(one), default=0), _largest_piece)
        )

    def generator(self, seed: int) -> torch.Generator:
        """That of a seed, in front of the first weight."""
        return torch.Generator(self._device).manual_seed(seed)

    def move(self, weights: Sequence[Tensor], shift: Shift) -> None:
        """All weights."""
        self._make_all(weights, [shift] * len(weights))

    def update(self, weights: Sequence[Tensor], updates: Sequence[Update]) -> None:
        """Each weight by its update, all along one direction."""
        self._make_all(weights, updates)

    def _make_all(self, weights: Sequence[Tensor], moves: Sequence[Move]) -> None:
        generator = self.generator(moves[0].seed)
        for weight, move in zip(weights, moves, strict=True):
            self.make([(generator, [move])], weight)

    def make(self, ways: Sequence[tuple[torch.Generator, Sequence[Move]]], weight: Tensor) -> None:
        """Change ``weight`` by moves along one direction after the other. Each generator is at the beginning of the weight's
        direction, and then at its end.
        """
        flat = weight.view(-1) if weight.is_contiguous() else None
        begin = 0
        for count in _drawn(weight):
            part = weight if flat is None else flat[begin : begin + count]
            begin += count
            for generator, moves in ways:
                z = _as(self._z, part).normal_(generator=generator)
                for some, some_z in zip(_pieces(part), _pieces(z), strict=True):
                    for move in moves:
                        move.make(some, some_z, _as(self._result, some))

    def skip(self, number: int, generator: torch.Generator) -> None:
        """Let ``generator`` pass the weight of this number."""
        dtype, counts = self._draws[number]
        for count in counts:
            self._z[: count * dtype.itemsize].view(dtype).normal_(generator=generator)


def _as(memory: Tensor, like: Tensor) -> Tensor:
    nbytes = like.numel() * like.element_size()
    if nbytes > memory.numel():  # a weight has other strides by now
        memory = torch.empty(nbytes, dtype=torch.uint8, device=memory.device)
    return memory[:nbytes].view(like.dtype).view(like.shape)


def _drawn(weight: Tensor) -> Iterator[int]:
    """How many numbers to draw at a time for ``weight``."""
    count = weight.numel()
    if weight.device.type == "cpu" and weight.is_contiguous() and count > 2 * _PIECE and _may_draw_pieces(weight.dtype):
        while count > 2 * _PIECE:  # the last piece has more than one group
            yield _PIECE
            count -= _PIECE
    yield count


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


def _largest_piece(weight: Tensor) -> int:
    per_row = 1 if weight.is_contiguous() else weight[:1].numel()
    return min(weight.numel(), max(_PIECE, per_row))


def checksum(weight: Tensor) -> int:
    """64 bits of XXH3 over a weight's bytes in the order of its elements, whatever its strides and its device, as a signed
    integer.
    """
    digest = xxhash.xxh3_64()
    for piece in _pieces(weight.detach()):
        digest.update(piece.contiguous().view(torch.uint8).cpu().numpy().data)
    return int.from_bytes(digest.digest(), "big", signed=True)
