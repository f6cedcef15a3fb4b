"""Bytes of an optimizer's state, computed from shapes."""

from collections.abc import Iterable, Sequence
from math import prod

import torch

from hf_offload.methods.projected.config import ApolloConfig, FrugalConfig, ProjectedConfig
from hf_offload.methods.projected.formats import StateFormat
from hf_offload.methods.projected.projections import Projection, projection_of, turns

_MATRIX = 2
_COUNTER_BYTES = 4
_SEED_BYTES = 8


def adamw_bytes(shapes: Iterable[Sequence[int]], dtype: torch.dtype = torch.float32) -> int:
    """The state of ``torch.optim.AdamW`` for parameters of ``shapes`` in ``dtype``."""
    return sum(2 * prod(shape) * dtype.itemsize + _COUNTER_BYTES for shape in shapes)


def state_bytes(
    projected: Sequence[tuple[int, int]],
    plain: Iterable[Sequence[int]],
    method: ProjectedConfig,
    dtype: torch.dtype = torch.float32,
) -> int:
    """The state of :class:`ProjectedAdamW` with ``method``, once every parameter has had a step.

    ``projected`` are ``[out, in]``, in the optimizer's order; ``plain`` are the shapes of all others; ``dtype`` is that of
    the parameters. With FRUGAL's ``"blocks"`` it is the most that any period takes.
    """
    projections = [projection_of(method, shape) for shape in projected]
    vectors = StateFormat(method.projector_dtype, method.block_size)
    total = _moment_bytes(projections, method, dtype)
    for projection in projections:
        total += sum(vectors.count_bytes(prod(shape), dtype) for shape in projection.stored_shapes.values())
        total += _COUNTER_BYTES + _SEED_BYTES * projection.drawn_again
    if isinstance(method, ApolloConfig) and method.norm_growth_limit is not None:
        total += _COUNTER_BYTES * len(projections)
    for shape in plain:
        narrow = method.plain_state_dtype if len(shape) >= _MATRIX else None
        total += 2 * StateFormat(narrow, method.block_size).count_bytes(prod(shape), dtype) + _COUNTER_BYTES
    return total


def _moment_bytes(projections: Sequence[Projection], method: ProjectedConfig, dtype: torch.dtype) -> int:
    """Of the moments, with the counters of the step in which they began."""
    form = StateFormat(method.state_dtype, method.block_size)
    counter = _COUNTER_BYTES if method.on_refresh == "reset" else 0
    each = [2 * form.count_bytes(prod(projection.small_shape), dtype) + counter for projection in projections]
    if not isinstance(method, FrugalConfig) or method.projection != "blocks":
        return sum(each)
    every = turns(method, len(each))
    return max(
        (sum(n for n, turn in zip(each, every, strict=True) if turn == one) for one in set(every) - {None}), default=0
    )
