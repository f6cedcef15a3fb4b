"""Leading singular vectors of a gradient: from random numbers by default, exactly by choice, and what to do when that fails.

Shapes: matrix ``[m, n]``; left vectors ``[m, rank]``, right vectors ``[rank, n]``, both orthonormal, the strongest first.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_OVERSAMPLE = 8
_POWER_ITERATIONS = 2

Vectors = tuple[Tensor | None, Tensor | None]


def leading_vectors(
    matrix: Tensor, rank: int, side: str, *, exact: bool = False, generator: torch.Generator | None = None
) -> Vectors | None:
    """The ``rank`` leading left and right singular vectors (None for one that ``side``, left, right or full, leaves out).

    The randomised way (Halko et al., 2011), or if that fails or ``exact`` is asked for, LAPACK's gesdd (cuSOLVER's default on
    CUDA). None if no finite numbers can be had. ``generator`` is on the matrix's device. The result has the matrix's dtype,
    but at least float32.
    """
    matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    ways: list[Callable[[], Vectors]] = [] if exact else [lambda: _randomised(matrix, rank, side, generator)]
    for way in (*ways, lambda: _of(torch.linalg.svd(matrix, full_matrices=False), rank, side)):
        try:
            vectors = way()
        except torch.linalg.LinAlgError as error:
            logger.debug("Singular vectors of a %s gradient: %s", tuple(matrix.shape), error)
            continue
        # One value is read on the host, and only where a projection is made: CUDA may return NaN where LAPACK raises.
        if all(bool(found.isfinite().all()) for found in vectors if found is not None):
            return vectors
    return None


def _of(decomposed: tuple[Tensor, Tensor, Tensor], rank: int, side: str) -> Vectors:
    left, _, right = decomposed
    # Copies: a slice would keep all vectors alive.
    return (
        left[:, :rank].clone(memory_format=torch.contiguous_format) if side != "right" else None,
        right[:rank].clone(memory_format=torch.contiguous_format) if side != "left" else None,
    )


def _randomised(matrix: Tensor, rank: int, side: str, generator: torch.Generator | None) -> Vectors:
    if side == "right":
        right, _ = _randomised(matrix.t(), rank, "left", generator)
        return None, None if right is None else right.t().contiguous()
    drawn = min(rank + _OVERSAMPLE, *matrix.shape)
    start = torch.randn(matrix.shape[1], drawn, generator=generator, device=matrix.device, dtype=matrix.dtype)
    basis = torch.linalg.qr(matrix @ start).Q
    for _ in range(_POWER_ITERATIONS):
        basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.t() @ basis).Q).Q
    small = basis.t() @ matrix  # [drawn, n]
    turn = torch.linalg.eigh((small @ small.t()).double()).eigenvectors.flip(1)[:, :rank].to(matrix.dtype)
    left = basis @ turn
    return left, _orthonormal((turn.t() @ small).t()).t().contiguous() if side == "full" else None


def _orthonormal(columns: Tensor) -> Tensor:
    """The columns over their norms, made orthonormal where rounding has not left them so; directions are kept."""
    found, triangle = torch.linalg.qr(columns)
    return found * torch.where(triangle.diagonal() < 0, -1.0, 1.0).to(found)
