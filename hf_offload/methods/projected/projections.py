"""Projections of gradients on a small space, and back.

Gradients are ``[m, n]`` = ``[out, in]`` here, however the weight is stored. A projected gradient is called small; it is
``[m, r]`` (inputs projected, "right"), ``[r, n]`` (outputs projected, "left"), ``[r, r]`` ("full").
"""

import dataclasses
import logging
from collections.abc import Callable

import torch
from torch import Tensor

from hf_offload.methods.projected.config import ApolloConfig, FrugalConfig, GaLoreConfig, ProjectedConfig

logger = logging.getLogger(__name__)

_OVERSAMPLE = 8
_POWER_ITERATIONS = 2
_BASES = ("svd", "random")


@dataclasses.dataclass(frozen=True)
class Projection:
    """What one matrix is projected on: a function of the settings and of its shape.

    Attributes:
        kind: ``"svd"`` and ``"random"`` (an orthonormal basis, stored), ``"gaussian"`` (drawn again from a stored seed each
            time), or ``"blocks"`` (all of the matrix, or nothing).
        side: ``"left"``, ``"right"`` or ``"full"``; of bases and Gaussian projections.
        rank: Of the projected gradient.
        shape: ``[out, in]``.
    """

    kind: str
    side: str
    rank: int
    shape: tuple[int, int]

    @property
    def small_shape(self) -> tuple[int, ...]:
        """Of the projected gradient, and so of its moments."""
        m, n = self.shape
        if self.kind == "blocks":
            return m, n
        return {"left": (self.rank, n), "right": (m, self.rank), "full": (self.rank, self.rank)}[self.side]

    @property
    def basis_shapes(self) -> dict[str, tuple[int, int]]:
        """The parts of a basis by name; empty if the space has none."""
        if self.kind == "blocks":
            return {}
        parts = {"left": (self.shape[0], self.rank), "right": (self.rank, self.shape[1])}
        return {name: shape for name, shape in parts.items() if self.side in (name, "full")}

    @property
    def stored_shapes(self) -> dict[str, tuple[int, int]]:
        """The parts of a basis that the state holds."""
        return self.basis_shapes if self.kind in _BASES else {}

    @property
    def drawn_again(self) -> bool:
        """Whether the state holds a seed instead of a projection."""
        return self.kind == "gaussian"


def projection_of(config: ProjectedConfig, shape: tuple[int, int]) -> Projection:
    """The projection that ``config`` means for a weight of ``shape`` ``[out, in]``."""
    m, n = shape
    shorter = "right" if m >= n else "left"
    if isinstance(config, GaLoreConfig):
        longer = "left" if m >= n else "right"
        side = {"std": shorter, "reverse_std": longer}.get(config.proj_type, config.proj_type)
        return Projection("svd", side, config.rank, shape)
    if isinstance(config, ApolloConfig):
        return Projection("gaussian", shorter, config.rank, shape)
    assert isinstance(config, FrugalConfig)
    return Projection(config.projection, shorter, round(config.density * min(m, n)), shape)


def matrix_shape(parameter: Tensor, transposed: bool) -> tuple[int, int]:
    """``[out, in]`` of a weight, which is stored the other way round if ``transposed``."""
    rows, columns = reversed(parameter.shape) if transposed else parameter.shape
    return rows, columns


@dataclasses.dataclass(frozen=True)
class Basis:
    """Columns ``left`` ``[m, r]`` and rows ``right`` ``[r, n]``. One may be missing; without both, it is everything."""

    left: Tensor | None
    right: Tensor | None

    def project(self, gradient: Tensor) -> Tensor:
        """``[m, n]`` to small."""
        small = gradient
        if self.left is not None:
            small = self.left.to(gradient.dtype).t() @ small
        if self.right is not None:
            small = small @ self.right.to(gradient.dtype).t()
        return small

    def residual(self, gradient: Tensor, small: Tensor) -> Tensor:
        """What of ``gradient`` is not in the space, ``[m, n]``: a new tensor."""
        if self._is_whole(gradient):  # what rounding leaves has a sign too
            return torch.zeros_like(gradient)
        first, second = self._factors(small, gradient.dtype)
        return torch.addmm(gradient, first, second, alpha=-1)

    def add_back(self, weight: Tensor, small: Tensor, factor: float) -> None:
        """``weight += factor * back(small)``, without a matrix of the weight's size in between where that is possible."""
        if self.left is None and self.right is None:
            weight.add_(small, alpha=factor)
            return
        first, second = self._factors(small, weight.dtype)
        weight.addmm_(first, second, alpha=factor)

    def _is_whole(self, gradient: Tensor) -> bool:
        left = self.left is None or self.left.shape[1] == gradient.shape[0]
        return left and (self.right is None or self.right.shape[0] == gradient.shape[1])

    def _factors(self, small: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Two matrices whose product is ``small`` brought back."""
        small = small.to(dtype)
        if self.left is None:
            assert self.right is not None
            return small, self.right.to(dtype)
        if self.right is not None:
            small = small @ self.right.to(dtype)
        return self.left.to(dtype), small


def drawn_space(projection: Projection, seed: int, like: Tensor) -> Basis:
    """The Gaussian space with variance ``1/rank`` that ``seed`` stands for, on ``like``'s device and in its dtype."""
    generator = torch.Generator(like.device).manual_seed(seed)
    parts: dict[str, Tensor] = {
        name: torch.randn(shape, generator=generator, device=like.device, dtype=like.dtype) * projection.rank**-0.5
        for name, shape in projection.basis_shapes.items()
    }
    return Basis(parts.get("left"), parts.get("right"))


def new_basis(projection: Projection, gradient: Tensor, seed: int, *, exact: bool) -> Basis | None:
    """A basis for ``gradient``, at least in float32; None if no SVD of it can be had."""
    generator = torch.Generator(gradient.device).manual_seed(seed)
    if projection.kind == "random":
        return random_basis(projection, gradient, generator)
    vectors = leading_vectors(gradient, projection.rank, projection.side, exact=exact, generator=generator)
    return None if vectors is None else Basis(*vectors)


def random_basis(projection: Projection, like: Tensor, generator: torch.Generator) -> Basis:
    """An orthonormal basis of a uniformly random space."""
    dtype = torch.promote_types(like.dtype, torch.float32)

    def draw(length: int) -> Tensor:
        numbers = torch.randn(length, projection.rank, generator=generator, device=like.device, dtype=dtype)
        return torch.linalg.qr(numbers).Q

    left = draw(projection.shape[0]) if "left" in projection.basis_shapes else None
    right = draw(projection.shape[1]).t().contiguous() if "right" in projection.basis_shapes else None
    return Basis(left, right)


def draw_seed(seed: int, place: int, step: int) -> int:
    """A seed for the parameter at ``place`` and its ``step``: well mixed, and the same everywhere (splitmix64's end)."""
    mask = (1 << 64) - 1
    mixed = (seed * 0x9E3779B97F4A7C15 + place * 0xD1B54A32D192ED03 + step * 0x8CB92BA72F3D8DD7 + 1) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return (mixed ^ (mixed >> 31)) >> 1  # a positive int64


def is_refreshed(config: ProjectedConfig, place: int, count: int, step: int) -> bool:
    """Whether the parameter at ``place`` of ``count`` gets a new projection at its ``step`` (the first one is 0)."""
    if step == 0:
        return True
    gap = config.update_proj_gap
    offset = place * gap // count if config.stagger else 0
    return step % gap == offset


def turns(config: FrugalConfig, count: int) -> list[int | None]:
    """In which turn each of ``count`` matrices has Adam's state (``"blocks"``); None: never, with density 0.

    A turn lasts ``update_proj_gap`` steps, and they follow each other in a circle. Who is in which is drawn from the seed.
    """
    if config.density == 0:
        return [None] * count
    length = max(1, round(config.density * count))
    generator = torch.Generator("cpu").manual_seed(draw_seed(config.seed, 0, 0))
    return [int(rank) // length for rank in torch.randperm(count, generator=generator, device="cpu")]


def is_active(config: FrugalConfig, all_turns: list[int | None], place: int, step: int) -> bool:
    """Whether it is the turn of the matrix at ``place``, by :func:`turns`, at ``step``."""
    last = max((turn for turn in all_turns if turn is not None), default=0)
    return all_turns[place] == step // config.update_proj_gap % (last + 1)


# -- singular vectors ---------------------------------------------------------------------------------------------------

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
