"""Which part of a matrix stands for all of it: unbiased estimates of ``G.T @ X`` that need only a part of ``X``.

Every function here keeps shapes fixed and reads no value on the host, so that an accelerator is never waited for.
"""

import torch
from torch import Tensor

_WHOLE = 2.0**62


def winners(sorted_probabilities: Tensor, count: int) -> Tensor:
    """How many of the most probable are kept for certain when ``count`` are kept: a scalar, ``0 <= winners < count``.

    ``argmin over c of (1 - P(c)) / (count - c)``, ``P(c)`` the sum of the ``c`` largest (WTA-CRS, arXiv 2305.15265).
    ``sorted_probabilities`` is ``[rows]``, from the largest down.
    """
    before = torch.cat([sorted_probabilities.new_zeros(1), running_sums(sorted_probabilities)])[:count]
    left = count - torch.arange(len(before), device=before.device, dtype=before.dtype)
    return ((1 - before).clamp_min(0) / left).argmin()


def running_sums(probabilities: Tensor) -> Tensor:
    """The sums of the first one, of the first two, and so on, of ``probabilities`` whose sum is 1."""
    return probabilities.cumsum(0) if probabilities.device.type == "cpu" else _whole_sums(probabilities)


def _whole_sums(probabilities: Tensor) -> Tensor:
    # CUDA adds floating-point numbers up in any order, and not at all where algorithms have to be deterministic. Sums of
    # whole numbers are the same in each order, and these are finer than what float64 can tell apart next to 1.
    whole = (probabilities.double() * _WHOLE).round().long()
    return (whole.cumsum(0).double() / _WHOLE).to(probabilities.dtype)


def draw_rows(importance: Tensor, random: Tensor, *, keep_winners: bool) -> tuple[Tensor, Tensor]:
    """Some of the rows, and what each is multiplied by so that their sum is on average that of all rows.

    ``importance`` is ``[rows]``, at least zero: any is unbiased as long as it is positive where a row is not zero. The best
    is proportional to the norm of the row's part of the sum. ``random`` is ``[count]``, float64, uniform in 0..1. Returns
    indices ``[count]`` (repeated where a row was drawn more than once) and factors ``[count]`` in float64. ``keep_winners``
    is WTA-CRS; without it, column-row sampling (CRS).
    """
    probabilities = importance.double()
    total = probabilities.sum()
    probabilities = torch.where(total > 0, probabilities / total, 1.0 / len(probabilities))
    ordered, order = probabilities.sort(descending=True, stable=True)
    upto = running_sums(ordered)
    count = len(random)
    slots = torch.arange(count, device=order.device)
    certain = winners(ordered, count) if keep_winners else slots.new_zeros(())
    mass = torch.cat([upto.new_zeros(1), upto]).take(certain)  # an index in brackets would be read on the host
    rest = (upto[-1] - mass).clamp_min(0)
    # One of the others each: the first whose sum of probabilities is above a random height.
    heights = mass + rest * random
    drawn = torch.searchsorted(upto, heights, right=True).clamp_max(_last_positive(ordered))
    drawn = torch.maximum(drawn, certain)
    chances = ordered[drawn] * (count - certain)
    factors = torch.where(chances > 0, rest / chances.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
    is_certain = slots < certain
    return order[torch.where(is_certain, slots, drawn)], torch.where(is_certain, 1.0, factors)


def _last_positive(ordered: Tensor) -> Tensor:
    return (ordered > 0).sum().clamp_min(1) - 1


def signs(shape: tuple[int, int], seed: int, like: Tensor) -> Tensor:
    """A matrix of random signs over the root of its columns: ``S`` with ``E[S @ S.T] = I``. The same for the same seed."""
    generator = torch.Generator(like.device).manual_seed(seed)
    values = torch.randint(0, 2, shape, generator=generator, device=like.device, dtype=torch.int8)
    return (2 * values - 1).to(like.dtype) * shape[1] ** -0.5
