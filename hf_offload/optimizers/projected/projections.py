"""Projections of gradients on a small space, and back.

Gradients are ``[m, n]`` = ``[out, in]`` here, however the weight is stored. A projected gradient is called small; it is
``[m, r]`` (inputs projected, "right"), ``[r, n]`` (outputs projected, "left"), ``[r, r]`` ("full"), ``[m, r]`` for columns,
``[r]`` for single entries.
"""

import dataclasses
from typing import Protocol

import torch
from torch import Tensor

from hf_offload.optimizers.projected.config import ApolloConfig, FrugalConfig, GaLoreConfig, ProjectedConfig
from hf_offload.optimizers.projected.svd import leading_vectors

_BASES = ("svd", "random")
_DRAWN_AGAIN = ("gaussian", "columns", "random-k")


@dataclasses.dataclass(frozen=True)
class Projection:
    """What one matrix is projected on: a function of the settings and of its shape.

    Attributes:
        kind: ``"svd"`` and ``"random"`` (an orthonormal basis, stored), ``"gaussian"``, ``"columns"`` and ``"random-k"``
            (drawn again from a stored seed each time), or ``"blocks"`` (all of the matrix, or nothing).
        side: ``"left"``, ``"right"`` or ``"full"``; of bases and Gaussian projections.
        rank: Or the number of columns or entries.
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
        if self.kind == "random-k":
            return (self.rank,)
        if self.kind == "columns":
            return m, self.rank
        return {"left": (self.rank, n), "right": (m, self.rank), "full": (self.rank, self.rank)}[self.side]

    @property
    def basis_shapes(self) -> dict[str, tuple[int, int]]:
        """The parts of a basis by name; empty if the space has none."""
        if self.kind not in (*_BASES, "gaussian"):
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
        return self.kind in _DRAWN_AGAIN


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
    whole = {"columns": n, "random-k": m * n}.get(config.projection, min(m, n))
    return Projection(config.projection, shorter, round(config.density * whole), shape)


def matrix_shape(parameter: Tensor, transposed: bool) -> tuple[int, int]:
    """``[out, in]`` of a weight, which is stored the other way round if ``transposed``."""
    rows, columns = reversed(parameter.shape) if transposed else parameter.shape
    return rows, columns


class Space(Protocol):
    """One projection with its numbers."""

    def project(self, gradient: Tensor) -> Tensor:
        """``[m, n]`` to small."""
        ...

    def residual(self, gradient: Tensor, small: Tensor) -> Tensor:
        """What of ``gradient`` is not in the space, ``[m, n]``: a new tensor."""
        ...

    def add_back(self, weight: Tensor, small: Tensor, factor: float) -> None:
        """``weight += factor * back(small)``, without a matrix of the weight's size in between where that is possible."""
        ...


@dataclasses.dataclass(frozen=True)
class Basis:
    """Columns ``left`` ``[m, r]`` and rows ``right`` ``[r, n]``; one of them may be missing."""

    left: Tensor | None
    right: Tensor | None

    def project(self, gradient: Tensor) -> Tensor:
        small = gradient
        if self.left is not None:
            small = self.left.to(gradient.dtype).t() @ small
        if self.right is not None:
            small = small @ self.right.to(gradient.dtype).t()
        return small

    def residual(self, gradient: Tensor, small: Tensor) -> Tensor:
        if self._is_whole(gradient):  # what rounding leaves has a sign too
            return torch.zeros_like(gradient)
        first, second = self._factors(small, gradient.dtype)
        return torch.addmm(gradient, first, second, alpha=-1)

    def add_back(self, weight: Tensor, small: Tensor, factor: float) -> None:
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


@dataclasses.dataclass(frozen=True)
class Columns:
    """The columns ``indices`` ``[r]``."""

    indices: Tensor

    def project(self, gradient: Tensor) -> Tensor:
        return gradient.index_select(1, self.indices)

    def residual(self, gradient: Tensor, small: Tensor) -> Tensor:
        return gradient.index_fill(1, self.indices, 0)

    def add_back(self, weight: Tensor, small: Tensor, factor: float) -> None:
        weight.index_add_(1, self.indices, small.to(weight.dtype), alpha=factor)


@dataclasses.dataclass(frozen=True)
class Entries:
    """The entries ``indices`` ``[r]``, counted row by row."""

    indices: Tensor

    def project(self, gradient: Tensor) -> Tensor:
        return gradient.take(self.indices)

    def residual(self, gradient: Tensor, small: Tensor) -> Tensor:
        return gradient.contiguous().view(-1).index_fill(0, self.indices, 0).view(gradient.shape)

    def add_back(self, weight: Tensor, small: Tensor, factor: float) -> None:
        # `put_` on a transposed weight works too, a flat view of it would not
        weight.put_(self.indices, small.to(weight.dtype) * factor, accumulate=True)


@dataclasses.dataclass(frozen=True)
class Everything:
    """The whole matrix."""

    def project(self, gradient: Tensor) -> Tensor:
        return gradient

    def residual(self, gradient: Tensor, small: Tensor) -> Tensor:
        return torch.zeros_like(gradient)

    def add_back(self, weight: Tensor, small: Tensor, factor: float) -> None:
        weight.add_(small, alpha=factor)


def drawn_space(projection: Projection, seed: int, like: Tensor) -> Space:
    """The space that ``seed`` stands for: Gaussian with variance ``1/rank``, some columns, or some entries.

    On ``like``'s device and, if Gaussian, in its dtype.
    """
    generator = torch.Generator(like.device).manual_seed(seed)
    if projection.kind == "columns":
        order = torch.randperm(projection.shape[1], generator=generator, device=like.device)
        return Columns(order[: projection.rank].sort().values)
    if projection.kind == "random-k":
        return Entries(_spread_entries(projection, generator, like.device))
    parts: dict[str, Tensor] = {
        name: torch.randn(shape, generator=generator, device=like.device, dtype=like.dtype) * projection.rank**-0.5
        for name, shape in projection.basis_shapes.items()
    }
    return Basis(parts.get("left"), parts.get("right"))


def _spread_entries(projection: Projection, generator: torch.Generator, device: torch.device) -> Tensor:
    """One entry from each of ``rank`` intervals of nearly equal length: distinct, sorted, each as likely as any other up to
    rounding. A permutation of all entries would take longer than the rest of the step.
    """
    whole, count = projection.shape[0] * projection.shape[1], projection.rank
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=device)
    ends = torch.arange(count + 1, device=device) * whole // count
    heights = torch.rand(count, generator=generator, device=device, dtype=torch.float64)
    return ends[:-1] + (heights * (ends[1:] - ends[:-1])).long()


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


def turn_moments(old: Basis, new: Basis, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Both moments read in the new space: the first exactly (what of it lies there), the second as if its entries were
    uncorrelated, so that it stays positive.
    """
    if old.left is not None and new.left is not None:
        turn = (new.left.t() @ old.left).to(first.dtype)
        first, second = turn @ first, turn.square() @ second
    if old.right is not None and new.right is not None:
        turn = (old.right @ new.right.t()).to(first.dtype)
        first, second = first @ turn, second @ turn.square()
    return first, second


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
