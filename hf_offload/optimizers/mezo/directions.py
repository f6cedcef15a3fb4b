"""The random direction of a step: weights move along it, and the update goes along it. It is drawn again each time.

Note: whose bits
    The operations and their order are those of the authors' code, ``p + scale * z * eps`` and
    ``p - lr * (g * z + weight_decay * p)``, each result rounded to the weight's dtype, as there. Here they are made in place,
    so that one ``z`` of the largest weight is all that is allocated. ``z`` is drawn for a whole weight at a time: in pieces,
    kernels would draw other numbers. One generator runs through all weights.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

PLUS, MINUS, BACK = 1, -2, 1
"""The weights' way in units of ``eps z``: to ``+1``, from there to ``-1``, and back."""

RESTORES = ("reference", "pristine")
"""``reference``: weights go back along the direction, as in the authors' code, which leaves rounding errors behind.
``pristine``: they are as they were.
"""

_CHUNK_ELEMENTS = 1 << 20


class Directions:
    """Draws directions for ``weights``, all on one device. It allocates what it needs at once, so that nothing fails while
    some weights have moved and others have not.
    """

    def __init__(self, weights: Sequence[Tensor], eps: float):
        self._weights = weights  # not views of them, which would hold memory of weights that may be elsewhere
        self._eps = eps
        self._generator = torch.Generator(weights[0].device)
        largest = max(weight.numel() * weight.element_size() for weight in weights)
        self._space = torch.empty(largest, dtype=torch.uint8, device=weights[0].device)

    def move(self, seed: int, scale: int) -> None:
        """Every weight by ``scale * eps`` along the direction of ``seed``."""
        for weight, z in self._drawn(seed):
            weight.add_(z.mul_(scale).mul_(self._eps))

    def update(self, seed: int, gradient: float, rates: Sequence[float], decays: Sequence[float]) -> None:
        """Every weight by its rate against ``gradient`` along the direction of ``seed``, and against its decay."""
        for (weight, z), rate, decay in zip(self._drawn(seed), rates, decays, strict=True):
            z.mul_(gradient)
            if decay:
                # Elementwise, so that pieces have the bits of the whole.
                for step, part in zip(_pieces(z), _pieces(weight), strict=True):
                    step.add_(part * decay)
            weight.sub_(z.mul_(rate))

    def _drawn(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        self._generator.manual_seed(seed)
        for weight in self._weights:
            size = weight.numel() * weight.element_size()
            z = self._space[:size].view(weight.dtype).view(weight.shape)
            yield weight, z.normal_(generator=self._generator)


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    rows = tensor if tensor.dim() else tensor.view(1)
    per_row = rows[:1].numel()
    return rows.split(max(1, _CHUNK_ELEMENTS // max(1, per_row)))


def checksum(weight: Tensor) -> int:
    """The sum of a weight's bits, as integers, modulo ``2 ** 64``: it does not depend on the order."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    total = 0
    for piece in _pieces(weight.detach()):
        total += int(piece.contiguous().view(kind).sum(dtype=torch.int64).item())
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)
