"""A step on one of several GPUs that share a model, from the step of one GPU that has all of it.

The engines are DDP, FSDP2 and DeepSpeed's ZeRO, as Accelerate sets them up. With FSDP2, each block is a group of weights, and
so is each module outside of the blocks: a group is gathered while it computes, the next one is gathered meanwhile, and their
gradients are reduced in the same way. ZeRO has limits in numbers of elements instead.
"""

import dataclasses
from collections.abc import Iterator

from hf_offload.errors import OffloadConfigError
from hf_offload.forecast.options import DDP, FSDP2, ZERO2, ZERO3
from hf_offload.forecast.workload import Workload
from hf_offload.plan.footprint import Footprint, Segment, UnitWeights
from hf_offload.plan.hardware import Hardware
from hf_offload.settings.memory_modes import NONE

# DeepSpeed's defaults, in elements: `reduce_bucket_size`, and `stage3_max_live_parameters`.
_BUCKET = 500_000_000
_MOST_LIVE = 1_000_000_000
_MASTER_ITEMSIZE = 4  # of weights that the optimizer updates in 32 bits, where they compute in 16
_WITH_SHARDS = (NONE, "lora", "dora", "qlora")


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How GPUs share a model.

    Attributes:
        kind: ``ddp``, ``fsdp2``, ``zero2`` or ``zero3``.
        gpus: How many.
        link_bytes_per_s: Between two of them, in one direction.
        itemsize: Bytes of a weight as it computes, and as it was counted.
        master_ratio: Bytes of a trained weight as the optimizer sees it, as a multiple of that.
    """

    kind: str
    gpus: int
    link_bytes_per_s: float
    itemsize: int
    master_ratio: float

    @property
    def shards_weights(self) -> bool:
        """Whether each GPU has only a part of the weights."""
        return self.kind in (FSDP2, ZERO3)

    def seconds(self, nbytes: float) -> float:
        """To gather tensors of ``nbytes`` in all, or to reduce and scatter them, in a ring."""
        return nbytes * (self.gpus - 1) / self.gpus / self.link_bytes_per_s


@dataclasses.dataclass
class _Group:
    """Bytes of weights that are gathered at once, and of those of them that are trained."""

    weights: int = 0
    trained: int = 0


def sharding_of(workload: Workload, hardware: Hardware) -> Sharding | None:
    """How the GPUs of ``hardware`` share the model; None for a single one.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for memory modes that need whole weights.
    """
    if hardware.peer_bytes_per_s is None:
        return None
    kind = workload.sharding
    if kind != DDP and workload.memory_mode not in _WITH_SHARDS:
        raise OffloadConfigError(
            f"memory_mode={workload.memory_mode!r} needs whole weights, and {kind} leaves a part of each to every GPU: "
            f"choose sharding={DDP!r}, or one of the modes {', '.join(_WITH_SHARDS)}."
        )
    itemsize = workload.dtype.itemsize
    # FSDP2 has masters under mixed precision alone, and DeepSpeed always. Adapters are in 32 bits anyway.
    has_masters = workload.memory_mode == NONE and itemsize < _MASTER_ITEMSIZE
    has_masters = has_masters and (kind in (ZERO2, ZERO3) or (kind == FSDP2 and workload.autocast is not None))
    return Sharding(
        kind,
        hardware.gpus,
        hardware.peer_bytes_per_s.value,
        itemsize,
        _MASTER_ITEMSIZE / itemsize if has_masters else 1.0,
    )


def as_it_computes(workload: Workload) -> Workload:
    """With weights of the dtype in which they are gathered, and autocast finds nothing to cast."""
    if workload.autocast is None or workload.sharding == DDP:
        return workload
    return workload.changed(dtype=workload.autocast)


def shard(footprint: Footprint, how: Sharding) -> Footprint:
    """``footprint``, of one GPU that has everything, for one of those that share the model."""
    if footprint.elementwise is not None:
        footprint = dataclasses.replace(footprint, elementwise=shard(footprint.elementwise, how))
    return _replicated(footprint, how) if how.kind == DDP else _Shards(footprint, how).footprint()


def _replicated(footprint: Footprint, how: Sharding) -> Footprint:
    """With DDP: all GPUs have everything, and buckets with a copy of all gradients (``gradient_as_bucket_view=False``)."""
    backward_s = sum(one.seconds for one in footprint.segments if one.backward)
    late_s = max(0.0, 2 * how.seconds(footprint.gradient_bytes) - backward_s)  # an all-reduce goes round twice
    *others, last = footprint.segments
    return dataclasses.replace(
        footprint,
        base_bytes=footprint.base_bytes + footprint.gradient_bytes,
        segments=(*others, dataclasses.replace(last, seconds=last.seconds + late_s)),
    )


class _Shards:
    """Optimizer state and gradients in equal parts, and weights too, unless it is ZeRO-2."""

    def __init__(self, footprint: Footprint, how: Sharding):
        self._footprint, self._how = footprint, how
        groups: dict[str, _Group] = {}
        for unit, one in footprint.weights.items():
            own = groups.setdefault(self._group_of(unit), _Group())
            own.weights += one.weight_bytes
            own.trained += one.trained_bytes
        self._weights = sum(group.weights for group in groups.values())
        self._trained = sum(group.trained for group in groups.values())
        # A weight that other modules use, too, as a tied head does, is whole from the beginning of a step to its end.
        self._shared = _Group()
        for unit, index in {place for one in footprint.weights.values() for place in one.borrowed}:
            one, group = footprint.weights[unit], groups[self._group_of(unit)]
            nbytes = one.each[index]
            for each, sign in ((self._shared, 1), (group, -1)):
                each.weights += sign * nbytes
                each.trained += sign * min(nbytes, one.trained_bytes)
        blocks = [groups[span.name] for span in footprint.blocks if span.name in groups]
        self._groups = groups
        self._next = max(blocks, key=lambda group: group.weights, default=_Group())

    def _group_of(self, unit: str) -> str:
        return self._footprint.units.get(unit) or unit

    def footprint(self) -> Footprint:
        """The whole step."""
        footprint, how = self._footprint, self._how
        part = 1 / how.gpus
        part_of_weights = part if how.shards_weights else 1.0
        state, step = footprint.state_bytes * how.master_ratio, footprint.optimizer_step_bytes * how.master_ratio
        gradients, masters = float(footprint.gradient_bytes), 0.0
        if how.master_ratio > 1 and how.kind == FSDP2:  # masters are the weights that are left, gradients are like them
            gradients *= how.master_ratio
            masters = self._trained * (how.master_ratio - 1)
        elif how.master_ratio > 1:  # masters are copies, and so are gradients in 32 bits, for the time of a step
            masters = self._trained * how.master_ratio
            step += footprint.gradient_bytes * how.master_ratio
        rest = footprint.base_bytes - self._weights - footprint.state_bytes
        step_s = footprint.optimizer_step_s * part
        if how.kind == ZERO2:  # gets the weights that others have updated
            step_s += how.seconds(self._weights)
        return dataclasses.replace(
            footprint,
            base_bytes=round(rest + self._weights * part_of_weights + (masters + state) * part),
            state_bytes=round(state * part),
            gradient_bytes=round(gradients * part),
            optimizer_step_bytes=round(step * part),
            optimizer_step_s=step_s,
            segments=tuple(self._segments(gradients * part / max(1, footprint.gradient_bytes))),
            weights={
                unit: UnitWeights(
                    round(one.weight_bytes * part_of_weights),
                    round(one.trained_bytes * part),
                    round(one.state_bytes * how.master_ratio * part),
                )
                for unit, one in footprint.weights.items()
            },
        )

    def _segments(self, gradient_ratio: float) -> Iterator[Segment]:
        late_s = {backward: self._late_seconds(backward) for backward in (False, True)}
        last = {one.backward: index for index, one in enumerate(self._footprint.segments)}
        for index, one in enumerate(self._footprint.segments):
            gradients = round(one.gradient_bytes * gradient_ratio)
            live = one.live_bytes - one.gradient_bytes + gradients
            yield dataclasses.replace(
                one,
                live_bytes=live + self._whole_bytes(self._group_of(one.unit), one.backward),
                gradient_bytes=gradients,
                seconds=one.seconds + late_s[one.backward] * (index == last[one.backward]),
            )

    def _late_seconds(self, backward: bool) -> float:
        """What is sent in one direction of the step and not hidden by the compute of the group before."""
        how = self._how
        computes: dict[str, float] = {}
        for one in self._footprint.segments:
            if one.backward == backward:
                name = self._group_of(one.unit)
                computes[name] = computes.get(name, 0.0) + one.seconds
        late_s = hidden_s = 0.0
        for name, compute_s in computes.items():
            group = self._groups.get(name, _Group())
            sent_s = how.seconds(group.weights * how.shards_weights + group.trained * backward)
            late_s += max(0.0, sent_s - hidden_s)
            hidden_s = compute_s
        return late_s

    def _whole_bytes(self, name: str, backward: bool) -> int:
        """Weights and gradients that are whole while a group computes, without those that a GPU has anyway."""
        how, group = self._how, self._groups.get(name, _Group())
        weights = min(self._weights, self._shared.weights + group.weights + self._next.weights)
        gradients = min(self._trained, self._shared.trained + group.trained + self._next.trained)
        bucket = min(self._trained, _BUCKET * how.itemsize)
        if how.kind == FSDP2:
            return weights + gradients * backward
        if how.kind == ZERO2:
            return bucket * backward
        return max(weights, min(self._weights, _MOST_LIVE * how.itemsize)) + bucket * backward
