"""The user's own optimizer, whose state and gradients leave memory: :func:`stream`.

Note: classes that are not in the table
    The step of another class may look at all weights together, count, or draw random numbers. It runs as it is, as a whole.
    On an accelerator, gradients and state are in memory for the step, and leave after it; on a CPU, it reads and writes them
    where they are mapped. That is exact for any class.
"""

import collections
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from hf_offload.errors import OffloadConfigError
from hf_offload.interrupts import signals_deferred
from hf_offload.plan.rules import PART_BYTES, STATE_WINDOW_BYTES
from hf_offload.state import guard
from hf_offload.state.clip import clip_parked
from hf_offload.state.gradients import gradient_of
from hf_offload.state.parameter import StreamedParameter
from hf_offload.state.registry import before_user_code
from hf_offload.state.shadow import Shadow, attributes_of, make_shadow, options_of, step_of
from hf_offload.state.state_dict_copies import check_loaded, for_state_dict
from hf_offload.state.step import Streaming
from hf_offload.state.units import pinned
from hf_offload.storage.service import GRADIENTS, OPTIMIZER_STATE, RunStorage
from hf_offload.storage.store import Store
from hf_offload.storage.tier import Tier
from hf_offload.surgery import Undo, extend

_BY_ELEMENT = {
    "torch.optim.adadelta.Adadelta",
    "torch.optim.adagrad.Adagrad",
    "torch.optim.adam.Adam",
    "torch.optim.adamax.Adamax",
    "torch.optim.adamw.AdamW",
    "torch.optim.asgd.ASGD",
    "torch.optim.nadam.NAdam",
    "torch.optim.radam.RAdam",
    "torch.optim.rmsprop.RMSprop",
    "torch.optim.rprop.Rprop",
    "torch.optim.sgd.SGD",
}
"""The update of an element depends on that element alone, so that a weight may step in parts."""
_BY_WEIGHT = {
    "torch.optim.Adafactor",
    "torch.optim.Muon",
    "transformers.optimization.Adafactor",
}
_BITSANDBYTES = "bitsandbytes.optim."
_OVERRIDES = ("module_weight_config_triple", "pid2config", "index2config")
_LARGE = (264, 260)
"""A matrix that is large enough for classes that factor their state, or quantise it, from 128 or 256 elements on."""
USUAL_STATE = 2.0
"""Bytes for each byte of a weight, as AdamW has: of an optimizer that is not known."""

_streamed: "weakref.WeakKeyDictionary[Optimizer, Streaming]" = weakref.WeakKeyDictionary()


def streaming_of(optimizer: Any) -> Streaming | None:
    """What moves the state of an optimizer, if anything does."""
    try:
        return _streamed.get(optimizer)
    except TypeError:  # it cannot be referred to weakly
        return None


@signals_deferred
def _streamings() -> list[Streaming]:
    # An iteration that Ctrl-C ends would keep the dictionary from dropping optimizers that have gone.
    return list(_streamed.values())


def clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_``, bit for bit, that leaves gradients where they are."""
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    streamings = [one for one in _streamings() if one.streams_gradients]
    if not streamings:
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

    def streamed_of(parameter: Tensor) -> StreamedParameter | None:
        found = (one.streamed_of(parameter) for one in streamings)
        return next((trained for trained in found if trained is not None), None)

    return clip_parked(parameters, max_norm, norm_type, error_if_nonfinite, streamed_of)


def stream(
    optimizer: Optimizer,
    storage: RunStorage,
    open_tier: Callable[[str], Tier],
    names: dict[int, str],
    *,
    smallest_bytes: int,
    gradients: bool,
    part_bytes: int = PART_BYTES,
    window_bytes: int = STATE_WINDOW_BYTES,
    must_stream: bool = True,
) -> Streaming:
    """Let the state of ``optimizer`` leave memory, and with ``gradients`` the gradients between backward and step.

    Idempotent.

    It is the same object as before: its groups, state, hooks and schedulers stay. What it computes are the bits of the
    optimizer without this. ``open_tier`` opens the tier of an account, ``names`` are those of parameters, by their id.
    Unless it ``must_stream``, parameters whose gradients turn out to be sparse stay in memory.

    An optimizer of a class that is not :mod:`known <hf_offload.state.optimizer>` steps as a whole.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for an optimizer whose ``step`` was replaced, and unless it
    ``must_stream`` for one that steps as a whole.
    """
    present = _streamed.get(optimizer)
    if present is not None:
        return present
    kind = type(optimizer)
    check_streamable(optimizer, must_stream)
    streaming = Streaming(
        optimizer,
        Shadow(optimizer, kind),
        Store(storage, open_tier(OPTIMIZER_STATE), OPTIMIZER_STATE, window_bytes),
        Store(storage, open_tier(GRADIENTS), GRADIENTS, window_bytes) if gradients else None,
        smallest_bytes=smallest_bytes,
        part_bytes=part_bytes if steps_in_parts(kind) else None,
        must_stream=must_stream,
        whole=not steps_by_weight(optimizer, kind),
    )
    streaming.add(_named([p for group in optimizer.param_groups for p in group["params"]], names))
    storage.members.add(streaming)
    _keep_scheduler(optimizer, extend(optimizer, StreamedOptimizer))
    _streamed[optimizer] = streaming
    return streaming


def check_streamable(optimizer: Optimizer, must_stream: bool = False) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` where the state of ``optimizer`` cannot leave memory.

    Unless it ``must_stream``, also where each step needs all of it in memory nonetheless.
    """
    kind = type(optimizer)
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise OffloadConfigError(
            f"The step of this {kind.__name__} was replaced by {step!r}, which would not be called any more: "
            "prepare the optimizer first, and replace its step then."
        )
    if not must_stream and not steps_by_weight(optimizer, kind):
        raise OffloadConfigError(
            f"{kind.__name__} is not known to step each weight by itself, so its step needs all state in memory. With "
            "optimizer='ssd' or 'ram', state is on a tier between steps."
        )


def steps_in_parts(kind: type[Optimizer]) -> bool:
    """Whether a weight may step in parts."""
    return _name(kind) in _BY_ELEMENT


def steps_by_weight(optimizer: Optimizer, kind: type[Optimizer]) -> bool:
    """Whether ``kind``, the class of ``optimizer``, steps each weight by its gradient, its state and its group's options.
    Shards of FSDP2 step as a whole.
    """
    if any(isinstance(parameter, DTensor) for group in optimizer.param_groups for parameter in group["params"]):
        return False
    if _name(kind).startswith(_BITSANDBYTES):
        # Options for single weights are found by the place of a weight in the groups.
        manager = vars(optimizer).get("mng")
        return not any(getattr(manager, name, None) for name in _OVERRIDES)
    return _name(kind) in _BY_ELEMENT | _BY_WEIGHT


def _name(kind: type[Optimizer]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def state_per_weight(optimizer: Optimizer) -> float:
    """Bytes of state that ``optimizer`` keeps for each byte of a large weight: the most of its groups."""
    kind = type(optimizer) if streaming_of(optimizer) is None else _own_class(optimizer)
    if not steps_by_weight(optimizer, kind):
        return USUAL_STATE
    shadow, most = Shadow(optimizer, kind), 0.0
    attributes = attributes_of(optimizer)
    for group in optimizer.param_groups:
        examples = [p for p in group["params"] if p.requires_grad]
        if not examples:
            continue
        weight = torch.zeros(_LARGE, dtype=examples[0].dtype, device=examples[0].device)
        weight.grad = torch.ones_like(weight)
        with torch.no_grad():
            state = shadow.step([{**options_of(group), "params": [weight]}], {}, attributes).get(weight) or {}
        tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor) and leaf.dim()]
        most = max(most, sum(tensor.nbytes for tensor in tensors) / weight.nbytes)
    return most


def _named(parameters: list[nn.Parameter], names: dict[int, str]) -> Iterator[tuple[str, nn.Parameter]]:
    for number, parameter in enumerate(parameters):
        yield names.get(id(parameter), f"parameter {number}"), parameter


def _keep_scheduler(optimizer: Optimizer, _: Undo[Any]) -> None:
    """A scheduler that was made before has put a ``step`` on the object, which calls that of the class it had then."""
    optimizer._patch_step_function()
    if "step" not in vars(optimizer):
        return
    reference = weakref.ref(optimizer)
    own = type(optimizer).step

    def step(*args: Any, **kwargs: Any) -> Any:
        found: Any = reference()
        found._opt_called = True
        return own(found, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]


class StreamedOptimizer(Optimizer):
    """The methods of an optimizer whose state moves, in front of those of its class."""

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state, after all steps that were taken."""
        streaming = _streamed.get(self)
        if streaming is not None:
            streaming.finish()
        return vars(self)["state"]

    @state.setter
    def state(self, state: Any) -> None:
        streaming = _streamed.get(self)
        if streaming is not None:
            streaming.finish()
        vars(self)["state"] = state

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """A step, to be completed when parameters are used next; see :class:`~hf_offload.state.step.Streaming`."""
        streaming = _streamed[self]
        own = _own_class(self)
        if streaming.whole or not steps_by_weight(self, own):  # options for single weights may have come since
            streaming.finish()
            guard.settle([g for p in streaming.parameters() if (g := gradient_of(p)) is not None])
            guard.settle([t for p in streaming.parameters() for t in streaming.state_tensors(p)])
            away = [p for p in streaming.parameters() if not p.is_cpu]  # on a CPU, what is away can be read
            try:
                with pinned(away):
                    return step_of(own)(self, *([] if closure is None else [closure]))
            finally:
                for parameter in streaming.parameters():
                    streaming.park_state(parameter)
                before_user_code()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        streaming.step(self)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the optimizer's own class. It has state that is not in an accelerator's memory on the CPU."""
        state = self.state
        for trained in _streamed[self].records:
            trained.check_stepped()
        if all(parameter.device.type == "cpu" for parameter in _streamed[self].parameters()):
            return super().state_dict()
        mapped = collections.defaultdict(
            dict, {key: tree_map_only(Tensor, for_state_dict, its) for key, its in state.items()}
        )
        vars(self)["state"] = mapped
        try:
            return super().state_dict()
        finally:
            vars(self)["state"] = state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of the optimizer's own class, one parameter after the other, unless it steps as a whole."""
        streaming = _streamed[self]
        streaming.finish()
        for leaf in tree_leaves(state_dict["state"]):
            if isinstance(leaf, Tensor):
                check_loaded(leaf)
        if streaming.whole:
            super().load_state_dict(state_dict)
        else:
            self._load_by_parameter(state_dict, streaming)
        for parameter in streaming.parameters():
            streaming.park_state(parameter)
        before_user_code()

    def _load_by_parameter(self, state_dict: dict[str, Any], streaming: Streaming) -> None:
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        streaming.finish()  # after the hooks, which may look at the parameters
        whole = make_shadow(self, _own_class(self))
        whole.param_groups = self.param_groups
        whole.load_state_dict({**state_dict, "state": {}})  # checks the groups, and reads them
        parameters = [p for group in self.param_groups for p in group["params"]]
        places = [place for group in state_dict["param_groups"] for place in group["params"]]
        groups = [group for group in whole.param_groups for _ in group["params"]]
        of_places = dict(zip(places, zip(parameters, groups, strict=True), strict=True))
        present = vars(self)["state"]
        fresh: dict[Any, Any] = {}
        for place, state in state_dict["state"].items():
            if place not in of_places:
                fresh[place] = state
                continue
            parameter, group = of_places[place]
            with torch._C.DisableTorchFunctionSubclass():
                fresh[parameter] = streaming.shadow.loaded(parameter, options_of(group), state)
            present.pop(parameter, None)
            present[parameter] = fresh[parameter]
            streaming.park_state(parameter)
        present.clear()
        present.update(fresh)
        self.param_groups = whole.param_groups
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose parameters' state moves, too."""
        super().add_param_group(param_group)
        streaming = _streamed.get(self)
        if streaming is not None:
            streaming.add(_named(self.param_groups[-1]["params"], {}))


def _own_class(optimizer: Optimizer) -> type[Optimizer]:
    own: type[Optimizer] = type(optimizer).__mro__[2]  # behind StreamedOptimizer
    return own
