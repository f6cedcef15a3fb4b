"""The user's own optimizer, whose state and gradients are on a tier: :func:`stream`."""

import collections
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_offload.errors import OffloadConfigError
from hf_offload.interrupts import signals_deferred
from hf_offload.optimizers.streamed.clipping import clip_stored
from hf_offload.optimizers.streamed.held import shares_memory
from hf_offload.optimizers.streamed.kept import kept_state
from hf_offload.optimizers.streamed.known import state_per_weight as state_per_weight_of
from hf_offload.optimizers.streamed.known import steps_by_weight, steps_in_parts
from hf_offload.optimizers.streamed.parts import joined
from hf_offload.optimizers.streamed.record import Record
from hf_offload.optimizers.streamed.saved import StateFiles
from hf_offload.optimizers.streamed.shadow import Shadow, make_shadow, options_of, step_of
from hf_offload.optimizers.streamed.streaming import Streaming
from hf_offload.parameters.demand import ask_in_transforms
from hf_offload.parameters.scripts import ask_in_scripts
from hf_offload.parameters.unasked import ask_everywhere
from hf_offload.plan.windows import PART_BYTES, STATE_WINDOW_BYTES
from hf_offload.storage.disk import DiskTier
from hf_offload.storage.kept import kept_for
from hf_offload.storage.service import GRADIENTS, OPTIMIZER_STATE, RunStorage
from hf_offload.storage.spill import SpillTier
from hf_offload.storage.stored import Store
from hf_offload.storage.tier import Tier
from hf_offload.surgery import Undo, extend

_streamed: "weakref.WeakKeyDictionary[Optimizer, Streaming]" = weakref.WeakKeyDictionary()


def streaming_of(optimizer: Any) -> Streaming | None:
    """The streaming of an optimizer, if its state is streamed."""
    try:
        return _streamed.get(optimizer)
    except TypeError:  # it cannot be referred to weakly
        return None


def _streamings() -> list[Streaming]:
    """All that there are."""
    with signals_deferred:  # an iteration that Ctrl-C ends keeps the dictionary from dropping optimizers that have gone
        return list(_streamed.values())


def clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_``, bit for bit, that leaves gradients of streamed optimizers where they are."""
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    streamings = [one for one in _streamings() if one.streams_gradients]
    if not streamings:
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

    def record_of(parameter: Tensor) -> Record | None:
        found = (one.record_of(parameter) for one in streamings)
        return next((record for record in found if record is not None), None)

    return clip_stored(parameters, max_norm, norm_type, error_if_nonfinite, record_of)


def stream(
    optimizer: Optimizer,
    storage: RunStorage,
    open_tier: Callable[[str], Tier],
    names: dict[int, str],
    *,
    smallest_bytes: int,
    gradients: bool,
    lazy: bool = True,
    part_bytes: int = PART_BYTES,
    window_bytes: int = STATE_WINDOW_BYTES,
    must_stream: bool = True,
) -> Streaming:
    """Move the state of ``optimizer`` to a tier, and with ``gradients`` the gradients between backward and step. Idempotent.

    It is the same object as before: its groups, hooks and schedulers stay. What it computes are the bits of the optimizer
    without this. ``open_tier`` opens the tier of an account, ``names`` are those of parameters, by their id. Unless it
    ``must_stream``, parameters whose gradients turn out to be sparse stay in memory.

    An optimizer of a class that is not :mod:`known <hf_offload.optimizers.streamed.known>` steps as a whole.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for an optimizer of a memory mode, for one whose ``step`` was
    replaced, and unless it ``must_stream`` for one that steps as a whole.
    """
    present = _streamed.get(optimizer)
    if present is not None:
        return present
    kind = type(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if _first_streamed(parameters) is not None:
        gc.collect()  # an optimizer and its scheduler refer to each other
    twice = _first_streamed(parameters)
    if twice is not None:
        raise OffloadConfigError(
            f"{names.get(id(twice), 'A parameter')} is in two optimizers whose state is to be streamed: give each parameter "
            "to one optimizer."
        )
    whole = not steps_by_weight(optimizer, kind)
    check_streamable(optimizer, must_stream)
    resident = StreamedState()
    streaming = Streaming(
        Shadow(optimizer, kind),
        Store(storage, open_tier(OPTIMIZER_STATE), OPTIMIZER_STATE, window_bytes),
        Store(storage, open_tier(GRADIENTS), GRADIENTS, window_bytes) if gradients else None,
        resident,
        smallest_bytes=smallest_bytes,
        part_bytes=part_bytes,
        lazy=lazy and gradients,
        must_stream=must_stream,
        whole=whole,
    )
    resident.streaming = streaming
    streaming.entries.replace(optimizer.state)
    dict.update(resident, optimizer.state)
    streaming.add(
        _named(parameters, names), steps_in_parts(kind), state_holders=2
    )  # optimizer.state is another one yet
    storage.members.add(streaming)
    optimizer.state = resident
    _keep_scheduler(optimizer, extend(optimizer, StreamedOptimizer))
    streaming.use_optimizer(weakref.ref(optimizer))
    _streamed[optimizer] = streaming
    if lazy and gradients:
        ask_in_transforms()
        ask_everywhere()
        ask_in_scripts()
    return streaming


def check_streamable(optimizer: Optimizer, must_stream: bool = False) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` where the state of ``optimizer`` cannot be streamed, or, unless it
    ``must_stream``, needs all memory in each step nonetheless.
    """
    kind = type(optimizer)
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise OffloadConfigError(
            f"The step of this {kind.__name__} was replaced by {step!r}, which would not be called any more: "
            "prepare the optimizer first, and replace its step then."
        )
    if kind.__module__.startswith("hf_offload."):
        raise OffloadConfigError(f"{kind.__name__} decides about all weights together.")
    if not must_stream and not steps_by_weight(optimizer, kind):
        raise OffloadConfigError(
            f"{kind.__name__} is not known to step each weight by itself, so its step needs all state in memory. With "
            "optimizer='ssd' or 'ram', state is on a tier between steps."
        )


def state_per_weight(optimizer: Optimizer) -> float:
    """Bytes of state for each byte of a large weight, whether ``optimizer`` is streamed or not."""
    return state_per_weight_of(optimizer, type(optimizer) if streaming_of(optimizer) is None else _own_class(optimizer))


def _first_streamed(parameters: list[nn.Parameter]) -> nn.Parameter | None:
    """The first one that is in a streamed optimizer."""
    streamings = _streamings()
    return next((p for p in parameters if any(one.known_record_of(p) is not None for one in streamings)), None)


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
    """The methods of an optimizer whose state is streamed, in front of those of its class."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """A step, to be completed when parameters are used next; see
        :class:`~hf_offload.optimizers.streamed.streaming.Streaming`.
        """
        streaming = _streamed[self]
        own = _own_class(self)
        if streaming.whole or not steps_by_weight(self, own):  # options for single weights may have come since
            with streaming.all_in_memory(self.state):
                return step_of(own)(self, *([] if closure is None else [closure]))
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        streaming.step(self)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients wherever they are."""
        _streamed[self].zero_grad(set_to_none)
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the optimizer's own class. State on disk is copied to files that are mapped into memory;
        placeholders stand for it inside of :func:`~hf_offload.storage.kept.keeping`. That of a class which steps as a whole
        comes to memory.
        """
        streaming = _streamed[self]
        if streaming.whole:
            streaming.damage.check_states(streaming.records)
            return super().state_dict()
        streaming.damage.check_states(streaming.records)
        streaming.finish()
        files = _mapped_files(streaming)
        whole = self._without_streaming()
        kept = kept_for(self) if _is_plain(whole) and "state_dict" not in vars(self) else None
        for parameter in streaming.parameters_by_state():
            record = streaming.record_of(parameter)
            if record is not None and record.moved:
                held = None if kept is None else kept_state(kept, record)
                if held is not None:
                    whole.state[parameter] = held
                    continue
                parts = streaming.states.parts(record, parameter)
                whole.state[parameter] = joined(list(parts), record) if files is None else files.state(parts, record)
                record.given.add(whole.state[parameter])
            elif dict.__contains__(self.state, parameter):
                whole.state[parameter] = dict.__getitem__(self.state, parameter)
        return whole.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of the optimizer's own class, one parameter after the other, unless it steps as a whole."""
        streaming = _streamed[self]
        if streaming.whole:
            self._load_whole(state_dict)
            return
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        streaming.finish()  # after the hooks, which may look at the parameters
        whole = self._without_streaming()
        whole.load_state_dict({**state_dict, "state": {}})  # checks the groups, and reads them
        parameters = [p for group in self.param_groups for p in group["params"]]
        places = [place for group in state_dict["param_groups"] for place in group["params"]]
        groups = [group for group in whole.param_groups for _ in group["params"]]
        for parameter, place in zip(parameters, places, strict=True):
            record = streaming.known_record_of(parameter)
            if record is not None:
                record.given.check(state_dict["state"].get(place) or {})
        fresh: dict[Any, dict[str, Any]] = {}
        loaded: list[nn.Parameter] = []
        with streaming.damage.loading():
            for parameter, place, group in zip(parameters, places, groups, strict=True):
                state = state_dict["state"].get(place)
                if state is None:
                    continue
                state = streaming.loaded(parameter, options_of(group), state)
                present = dict.get(self.state, parameter)
                if streaming.record_of(parameter) is None or (present is not None and shares_memory(state, present)):
                    fresh[parameter] = state  # what is in memory may be held by others, and goes on being the state
                else:
                    streaming.put_state(parameter, state)
                    loaded.append(parameter)
            known = set(places)
            fresh |= {key: value for key, value in state_dict["state"].items() if key not in known}
            streaming.forget_states(but=loaded)
            dict.clear(self.state)
            dict.update(self.state, fresh)
            of_places = dict(zip(places, parameters, strict=True))
            streaming.entries.replace(of_places.get(key, key) for key in state_dict["state"])
            self.param_groups = whole.param_groups  # not __setstate__, which looks at the state of each parameter
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _load_whole(self, state_dict: dict[str, Any]) -> None:
        """Load by the class's own code, which finds a plain state in memory."""
        present: StreamedState = vars(self)["state"]
        vars(self)["state"] = collections.defaultdict(dict, present.items())
        try:
            super().load_state_dict(state_dict)
            loaded = vars(self)["state"]
        finally:
            vars(self)["state"] = present
        present.replace(loaded)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose parameters are streamed, too."""
        super().add_param_group(param_group)
        streaming = _streamed.get(self)
        if streaming is not None:
            parameters = self.param_groups[-1]["params"]
            streaming.add(_named(parameters, {}), steps_in_parts(_own_class(self)))

    def __setattr__(self, name: str, value: Any) -> None:
        present = vars(self).get("state")
        if name == "state" and isinstance(present, StreamedState) and value is not present:
            present.replace(value)
        else:
            super().__setattr__(name, value)

    def _without_streaming(self) -> Optimizer:
        """One of its own class with the same groups and hooks, and no state."""
        whole = make_shadow(self, _own_class(self))
        whole.__dict__ |= {name: value for name, value in vars(self).items() if name.endswith("state_dict_post_hooks")}
        whole.__dict__ |= {
            name: value for name, value in vars(self).items() if name == "_optimizer_state_dict_pre_hooks"
        }
        whole._optimizer_load_state_dict_post_hooks = collections.OrderedDict()
        whole.param_groups = self.param_groups
        return whole


def _own_class(optimizer: Optimizer) -> type[Optimizer]:
    own: type[Optimizer] = type(optimizer).__mro__[2]  # behind StreamedOptimizer
    return own


def _is_plain(whole: Optimizer) -> bool:
    """Whether its state dict has the tensors of its state as they are: nothing else looks at them."""
    hooks: Any = (whole._optimizer_state_dict_pre_hooks, whole._optimizer_state_dict_post_hooks)
    return type(whole).state_dict is Optimizer.state_dict and not any(hooks)


def _mapped_files(streaming: Streaming) -> StateFiles | None:
    tier = streaming.states.store.tier
    tier = tier.then if isinstance(tier, SpillTier) else tier
    return StateFiles(Path(tier.files[0].directory)) if isinstance(tier, DiskTier) else None


class StreamedState(collections.defaultdict[Any, Any]):
    """``optimizer.state``: what is on the tier comes to memory when it is looked at, and goes back with the next step."""

    streaming: Streaming

    def __init__(self) -> None:
        super().__init__(dict)

    def __missing__(self, key: Any) -> Any:
        if isinstance(key, Tensor) and self._is_streamed(key):
            self.streaming.finish()
            value = self.streaming.state_of(key)
            with signals_deferred:
                dict.__setitem__(self, key, value)
                self.streaming.forget_state(key)
            return value
        return super().__missing__(key)

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self, key) or (isinstance(key, Tensor) and self._is_streamed(key))

    def __iter__(self) -> Iterator[Any]:
        self.streaming.finish()
        ordered = [p for p in self.streaming.parameters_by_state() if p in self]
        return iter(dict.fromkeys([*ordered, *dict.keys(self)]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if self.__contains__(key) else default

    def keys(self) -> Any:
        return list(self)

    def values(self) -> Any:
        return [self[key] for key in self]

    def items(self) -> Any:
        return [(key, self[key]) for key in self]

    def pop(self, key: Any, *default: Any) -> Any:
        if key in self:
            value = self[key]
            dict.pop(self, key)
            self.streaming.entries.remove(key)
            return value
        return dict.pop(self, key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def popitem(self) -> tuple[Any, Any]:
        key = list(self)[-1]
        return key, self.pop(key)

    def copy(self) -> Any:
        return collections.defaultdict(dict, self.items())

    __copy__ = copy

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def replace(self, state: Mapping[Any, Any]) -> None:
        """Let ``state`` take the place of all that is here."""
        state = dict(state)
        self.clear()
        self.update(state)

    def clear(self) -> None:
        self.streaming.finish()
        self.streaming.forget_states()
        self.streaming.entries.replace(())
        dict.clear(self)

    def resident(self) -> list[dict[str, Any]]:
        """The states that are in memory now."""
        return list(dict.values(self))

    def _is_streamed(self, key: Tensor) -> bool:
        return self.streaming.has_state(key)

    update = MutableMapping.update

    def __setitem__(self, key: Any, value: Any) -> None:
        self.streaming.entries.add(key)
        if isinstance(key, Tensor) and self._is_streamed(key):
            self.streaming.finish()
            with signals_deferred:
                self.streaming.forget_state(key)
                dict.__setitem__(self, key, value)
            return
        dict.__setitem__(self, key, value)

    def __delitem__(self, key: Any) -> None:
        self.pop(key)

    def __reduce__(self) -> Any:
        return collections.defaultdict, (dict,), None, None, iter(self.items())
