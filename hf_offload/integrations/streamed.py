"""Streamed optimizers in accelerate's wrappers, for Accelerators and the Trainer's."""

from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer, patch_optimizer_step
from accelerate.utils import DistributedType
from torch import Tensor

from hf_offload.errors import OffloadConfigError
from hf_offload.session import OffloadSession
from hf_offload.settings.schema import OffloadConfig
from hf_offload.state.optimizer import clip_grad_norm_, streaming_of
from hf_offload.state.registry import parked_of

_OWN_STATE = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.XLA, DistributedType.MEGATRON_LM)

_OF_FSDP = "use FSDP2's CPUOffloadPolicy, fsdp_offload_params: true in the file of `hf-offload config --where fsdp2`"
_INSTEAD = {
    ("params", DistributedType.DEEPSPEED): "use ZeRO-3, with offload_param_device: cpu in the file of "
    "`hf-offload config --where zero3`",
    ("params", DistributedType.FSDP): _OF_FSDP,
    ("optimizer", DistributedType.DEEPSPEED): "use offload_optimizer_device: cpu in the file of "
    "`hf-offload config --where zero2`",
    ("optimizer", DistributedType.FSDP): _OF_FSDP,
}


def stream_prepared(session: OffloadSession, optimizer: Any) -> None:
    """Let ``session`` stream an optimizer that may be in accelerate's wrappers. Idempotent."""
    wrapper = None
    while isinstance(optimizer, AcceleratedOptimizer):
        wrapper, optimizer = optimizer, optimizer.optimizer
    if streaming_of(optimizer) is not None:
        session.prepare_optimizer(optimizer)
        return
    session.prepare_optimizer(optimizer)
    if wrapper is None or wrapper.scaler is None:
        return
    if streaming_of(optimizer) is None:
        session.when_streamed(lambda: _step_as_streamed(wrapper, optimizer))
    else:
        _step_as_streamed(wrapper, optimizer)


def _step_as_streamed(wrapper: AcceleratedOptimizer, optimizer: Any) -> None:
    # It has kept the method of the class that the optimizer had.
    wrapper._optimizer_original_step_method = optimizer.step
    wrapper._optimizer_patched_step_method = patch_optimizer_step(wrapper, optimizer.step)


def unwrapped(optimizer: Any) -> Any:
    """The optimizer in accelerate's wrappers."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def own_resident_state(optimizer: Any) -> None:
    """Copy what stays in memory of the state: it may lie in a checkpoint's file, which another one can take the place of."""
    for state in list(unwrapped(optimizer).state.values()):
        for name, value in state.items():
            if type(value) is Tensor and parked_of(value) is None:
                state[name] = value.clone()


def has_own_state(accelerator: Accelerator) -> bool:
    """Whether weights, or the optimizer's state, belong to another library."""
    return accelerator.distributed_type in _OWN_STATE


def refuse_own_state(accelerator: Accelerator, config: OffloadConfig) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` where weights, or the optimizer's state, belong to another
    library.
    """
    kind = accelerator.distributed_type
    if not has_own_state(accelerator):
        return
    for setting, what in (("params", "the model's weights"), ("optimizer", "the optimizer's state")):
        place = getattr(config, setting)
        if place not in (None, "none"):
            instead = _INSTEAD.get((setting, kind), "leave that to it")
            raise OffloadConfigError(
                f"{setting}={place!r} moves {what}, which {kind.value} makes or shards in its own way: {instead}, or set "
                f"{setting}='none'."
            )


class ClipsStreamedGradients(Accelerator):
    """An accelerator that clips gradients where they are."""

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not any(_streams_gradients(optimizer) for optimizer in self._optimizers):
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        self.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type)


def _streams_gradients(optimizer: Any) -> bool:
    streaming = streaming_of(unwrapped(optimizer))
    return streaming is not None and streaming.streams_gradients
