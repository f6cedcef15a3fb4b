"""What comes and goes together: the parameters of a block, of an embedding, of a head; and in which order.

Note: the floor
    The unit in use stays, whatever the limit. Next to it is room for the one that is read ahead: two blocks are the fewest
    weights that are ever in memory.
"""

import contextlib
import functools
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_offload.checkpointing import in_recompute
from hf_offload.interrupts import signals_deferred
from hf_offload.state import guard
from hf_offload.state.contexts import is_outside, outside
from hf_offload.state.order import UseOrder
from hf_offload.state.parked import Parked, Where
from hf_offload.state.refusals import is_compiled
from hf_offload.state.registry import before_user_code
from hf_offload.state.state_dict_copies import check_loaded
from hf_offload.storage.handling import Handling
from hf_offload.storage.service import WEIGHTS
from hf_offload.structure.units import find_blocks
from hf_offload.surgery import EagerHook

_CALL = nn.Module._call_impl.__code__
_AHEAD = 8
"""How many units are looked at to read them ahead."""
_BEGIN = -1
"""In the order of uses: a forward of the model begins. Nothing is read ahead of it: before it, others may write."""


class OwedUpdate(Protocol):
    """An update that a parameter waits for."""

    def finish(self) -> None:
        """Compute it."""

    def check_stepped(self) -> None:
        """Raise where the parameter has the value of half a step."""

    def overwritten(self) -> None:
        """The parameter gets another value, which is loaded."""

    def read_ahead(self) -> bool:
        """Begin to read what it needs; false if there is no room for that."""


class Unit:
    """Parameters that come and go together.

    Attributes:
        name: Of the module that owns them.
        number: Its place among the model's units.
        weights: Those of them that may leave memory.
        nbytes: Bytes of these.
        owed_updates: What computes updates that they wait for, by the optimizer and the parameter.
        pin_count: How many use it now.
        was_called: Its owner was called in the last forward: updates may wait for that.
        is_in_fast_path: A module that takes a fast path in evaluation reads its weights, without calling their owner.
    """

    def __init__(self, name: str, number: int, parameters: Iterable[nn.Parameter]):
        self.name = name
        self.number = number
        self.parameters = [weakref.ref(parameter) for parameter in parameters]
        self.weights: list[Parked] = []
        self.nbytes = 0
        self.owed_updates: weakref.WeakValueDictionary[Any, OwedUpdate] = weakref.WeakValueDictionary()
        self.pin_count = 0
        self.was_called = False
        self.is_in_fast_path = False

    def set_weights(self, weights: list[Parked]) -> None:
        """These may leave memory from now on."""
        self.weights, self.nbytes = weights, sum(weight.nbytes for weight in weights)

    @property
    def is_here(self) -> bool:
        """Whether all of them are in memory."""
        return all(weight.where is Where.HERE for weight in self.weights)

    @property
    def bytes_here(self) -> int:
        """Bytes of those that are in memory."""
        return sum(weight.nbytes for weight in self.weights if weight.where is Where.HERE)

    @property
    def bytes_taken(self) -> int:
        """Those, and what is being read."""
        return sum(weight.nbytes for weight in self.weights if weight.where is Where.HERE or weight.is_coming)


class Units:
    """The units of one model, which hooks on their owners bring.

    Attributes:
        limit_bytes: Most bytes of weights in memory that may leave it, but for the floor.
        most_bytes: Most bytes of them that were in memory at any time since the run began.
    """

    def __init__(self, model: nn.Module):
        self.limit_bytes = 0
        self.most_bytes = 0
        self.lock = threading.RLock()
        self.handling: Handling | None = None
        self.throttle: Callable[[], None] = lambda: None
        self.adopt: Callable[[nn.Parameter], object] = lambda parameter: None
        self._model = weakref.ref(model)
        self._handles: list[RemovableHandle] = []
        self._in_fast_paths: list[tuple[weakref.ref[nn.Module], EagerHook, RemovableHandle]] = []
        self._used_by: weakref.WeakKeyDictionary[threading.Thread, Unit] = weakref.WeakKeyDictionary()
        self._process = os.getpid()
        self.units: list[Unit] = []
        self._by_parameter: dict[int, Unit] = {}
        self._order = UseOrder(0)
        self.refresh(model)

    def refresh(self, model: nn.Module) -> None:
        """Look at the model again: it may have other modules and weights by now. Idempotent."""
        self.remove()
        for unit in self.units:
            unit.set_weights([weight for weight in unit.weights if weight.is_alive])
        self._handles.append(model.register_forward_pre_hook(EagerHook(self._begin), prepend=True))
        self._handles.append(model.register_forward_hook(EagerHook(self._end), always_call=True))
        self._handles.append(model.register_load_state_dict_pre_hook(EagerHook(self._loads)))
        encoders = [one for one in model.modules() if isinstance(one, nn.TransformerEncoderLayer)]
        fast_paths = {module for encoder in encoders for module in encoder.modules()}
        not_called = {one.out_proj for one in model.modules() if isinstance(one, nn.MultiheadAttention)}
        for name, owner, parameters in _owners(model):
            new = [p for p in parameters if self.unit_of(p) is None]
            if new:
                unit = Unit(name, len(self.units), new)
                self.units.append(unit)
                for parameter in new:
                    self._by_parameter[id(parameter)] = unit
                    _units_of[id(parameter)] = weakref.ref(parameter, _forget(id(parameter))), self, unit
            mine = list({id(its): its for p in parameters if (its := self.unit_of(p)) is not None}.values())
            if mine:
                arrive = EagerHook(_Arrive(self, mine))
                self._handles.append(owner.register_forward_pre_hook(arrive))
                for unit in mine:
                    unit.is_in_fast_path |= owner in fast_paths or owner in not_called
                if owner in fast_paths:
                    self._in_fast_paths.append((weakref.ref(owner), arrive, self._handles[-1]))
        self._order = UseOrder(len(self.units))

    def _is_in_forward(self) -> bool:
        """Whether this thread is in a forward of the model."""
        model = self._model()
        frame: FrameType | None = sys._getframe()
        while frame is not None and not (frame.f_code is _CALL and frame.f_locals["self"] is model):
            frame = frame.f_back
        return frame is not None

    def _is_busy(self) -> bool:
        """Whether a forward, a backward or a step goes on, rather than code of the user."""
        return bool(_steps.depth or torch._C._current_graph_task_id() >= 0 or self._is_in_forward())

    @property
    def is_compiled(self) -> bool:
        """Whether parts of the model are compiled: hooks inside of them are not called."""
        model = self._model()
        return model is not None and any(map(is_compiled, model.modules()))

    def unit_of(self, parameter: Tensor) -> Unit | None:
        """The unit of a parameter of this model."""
        unit = self._by_parameter.get(id(parameter))
        if unit is None or not any(reference() is parameter for reference in unit.parameters):
            return None
        return unit

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in (*self._handles, *(handle for _, _, handle in self._in_fast_paths)):
            handle.remove()
        self._handles.clear()
        self._in_fast_paths.clear()

    @signals_deferred
    def _begin(self, module: nn.Module, args: Any) -> None:
        """A forward of the model begins."""
        if in_recompute():
            return
        with self._section(), self.lock:
            self._order.used(_BEGIN)
            before_user_code()
            transformed = torch._C._functorch.peek_interpreter_stack() is not None
            evaluates = transformed or not torch.is_grad_enabled() or not module.training
            for unit in self.units:
                unit.was_called = False
                if unit.owed_updates and (transformed or (evaluates and unit.is_in_fast_path)):
                    self.need(unit)
            if evaluates:
                for _, _, handle in self._in_fast_paths:
                    handle.remove()  # with any hook inside, PyTorch computes in another way

    @signals_deferred
    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        """A forward of the model has ended."""
        if not in_recompute():
            self._in_fast_paths = [
                (owner, hook, _again(owner, hook, handle)) for owner, hook, handle in self._in_fast_paths
            ]
            before_user_code()

    def _loads(self, module: nn.Module, state_dict: Any, prefix: str, *_: Any) -> None:
        """Values are about to be loaded into the model."""
        for tensor in state_dict.values():
            if isinstance(tensor, Tensor):
                check_loaded(tensor)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            unit = self.unit_of(parameter) if prefix + name in state_dict else None
            for (_, key), owed in [] if unit is None else list(unit.owed_updates.items()):
                if key == id(parameter):
                    owed.overwritten()

    # -- uses -------------------------------------------------------------------------------------------------------------

    def all_stay(self, units: Iterable[Unit]) -> bool:
        """Whether ``units`` are in memory, and none leaves it: all of the model may be there at a time."""
        return self.limit_bytes >= self.total_bytes and all(unit.is_here for unit in units)

    @torch._disable_dynamo
    def need(self, unit: Unit) -> None:
        """Let ``unit`` be in memory, with all its updates: it is about to be used."""
        if not unit.owed_updates and self.all_stay([unit]):
            self._order.used(unit.number)
            for weight in unit.weights:
                weight.note_stream()
            return
        with self.using([unit]):
            pass

    @contextlib.contextmanager
    def using(self, units: Iterable[Unit], finishes: bool = True) -> Iterator[None]:
        """A block in which ``units`` are in memory, and updated unless it is for an update."""
        if os.getpid() != self._process:  # a child reads where the bytes are, and cannot move them
            for owed in [owed for unit in units if finishes for owed in list(unit.owed_updates.values())]:
                owed.finish()
            yield
            return
        used: list[Unit] = []
        try:
            with signals_deferred, self._section(), self.lock:
                for unit in units:
                    self._order.used(unit.number)
                    unit.pin_count += 1
                    used.append(unit)
                    with contextlib.nullcontext() if is_outside() else outside():
                        self._bring(unit, finishes)
            yield
        finally:
            for unit in used:
                unit.pin_count -= 1
            if not self._is_busy():
                before_user_code()

    def complete(self, unit: Unit) -> None:
        """Let ``unit`` owe nothing. Outside of forwards and backwards, it leaves again at once: aliases that are made now
        would keep it in memory.
        """
        with self.using([unit]):
            pass
        if not self._is_busy():
            with self.lock, outside():
                self._used_by.pop(threading.current_thread(), None)
                for weight in [] if unit.pin_count else unit.weights:  # another thread may use it
                    weight.leave()
                for weight in unit.weights:
                    weight.wait_until_written()

    def _section(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.handling is None else self.handling.of(WEIGHTS)

    def _bring(self, unit: Unit, finishes: bool) -> None:
        self._used_by[threading.current_thread()] = unit
        if any(not weight.tensors for weight in unit.weights):  # they were given other memory
            unit.set_weights([weight for weight in unit.weights if weight.tensors])
            for parameter in (found for reference in unit.parameters if (found := reference()) is not None):
                self.adopt(parameter)
        if not unit.is_here:
            self._begin_to_bring(unit, must=True)
            for weight in unit.weights:
                weight.come()
            self.most_bytes = max(self.most_bytes, self.bytes_here)
        for weight in unit.weights:
            weight.note_stream()
        self._read_ahead()
        if finishes and unit.owed_updates:
            for owed in list(unit.owed_updates.values()):
                owed.finish()
            self._read_ahead()
        self.throttle()

    def _begin_to_bring(self, unit: Unit, keeps: Sequence[Unit] = (), must: bool = False) -> bool:
        """Begin to read the rest of a unit, for which others leave but those that are used now and those that it ``keeps``.
        False if there is no room for it, unless it ``must``.
        """
        missing = [weight for weight in unit.weights if weight.where is not Where.HERE and not weight.is_coming]
        if missing:
            has_room = self.make_room(sum(weight.nbytes for weight in missing), [unit, *keeps])
            if not (has_room or must):
                return False
            for weight in missing:
                weight.begin_to_read(urgent=must)
        return True

    def make_room(self, nbytes: int, keeps: Sequence[Unit] = ()) -> bool:
        """Let units leave that are used last, but not now, and none that it ``keeps``, until so many bytes may come. False if
        they may not.
        """
        excess = sum(unit.bytes_taken for unit in self.units) + nbytes - self.limit_bytes
        keeps = [*keeps, *self._used_by.values()]
        for unit in self._farthest_first() if excess > 0 else ():
            if unit.pin_count or unit in keeps:
                continue
            for weight in unit.weights:
                if excess > 0 and weight.leave_or_drop_reads():
                    excess -= weight.nbytes
            self.throttle()
        return excess <= 0

    @property
    def bytes_here(self) -> int:
        """Bytes of the weights in memory that may leave it."""
        weights = itertools.chain.from_iterable(unit.weights for unit in self.units)
        return sum(weight.nbytes for weight in weights if weight.where is Where.HERE)

    @property
    def total_bytes(self) -> int:
        """Bytes of all that may leave."""
        return sum(unit.nbytes for unit in self.units)

    def _farthest_first(self) -> list[Unit]:
        next_use: dict[int, int] = {}
        for place, number in enumerate(self._order.coming()):
            next_use.setdefault(number, place)
        never = len(self.units) * 1000
        present = [unit for unit in self.units if unit.bytes_taken]
        return sorted(present, key=lambda unit: next_use.get(unit.number, never), reverse=True)

    def _read_ahead(self) -> None:
        if not self._is_busy():
            return  # code of the user runs next
        coming = self.coming()
        _read_for_updates(coming)
        # As much as the largest unit: for more, what is needed again would have to leave.
        room = max((unit.nbytes for unit in self.units), default=0)
        for place, unit in enumerate(coming):
            if not unit.is_here:
                room -= unit.nbytes - unit.bytes_here
                if room < 0 or not self._begin_to_bring(unit, keeps=coming[:place]):
                    return

    def read_ahead_for_updates(self) -> None:
        """Begin to read what the first updates that wait for the next forward need: while they wait, they are guarded."""
        _read_for_updates(self.coming(skips=True))

    def coming(self, skips: bool = False) -> list[Unit]:
        """The first that are probably used from now on, in order, before another forward begins; or in that one, if it
        ``skips`` its beginning.
        """
        coming = iter(self._order.coming())
        if skips:
            coming = itertools.dropwhile(lambda number: number == _BEGIN, coming)
        found: dict[int, Unit] = {}
        for number in itertools.takewhile(lambda number: number != _BEGIN, coming):
            found[number] = self.units[number]
            if len(found) == _AHEAD:
                break
        return list(found.values())


def _read_for_updates(coming: list[Unit]) -> None:
    all(owed.read_ahead() for unit in coming for owed in list(unit.owed_updates.values()))  # until there is no room


class _Steps(threading.local):
    """By thread, how many blocks of :func:`stepping` it is in."""

    def __init__(self) -> None:
        self.depth = 0


_steps = _Steps()


@contextlib.contextmanager
def stepping() -> Iterator[None]:
    """A block that updates several parameters: code of the user runs when it has ended."""
    _steps.depth += 1
    try:
        yield
    finally:
        _steps.depth -= 1
        if not (_steps.depth or any(units._is_busy() for units in list(_of_models.values()))):
            before_user_code()


class _Backwards(threading.local):
    """By thread, the backward that is known to end."""

    def __init__(self) -> None:
        self.number = -1


_backwards = _Backwards()


def note_backward() -> None:
    """A hook of a backward runs: :func:`before_user_code` is called once it has ended."""
    number = torch._C._current_graph_task_id()
    if number >= 0 and number != _backwards.number:
        _backwards.number = number
        torch.autograd.Variable._execution_engine.queue_callback(before_user_code)


class _Arrive:
    """What the hook in front of an owner's forward calls."""

    def __init__(self, units: Units, mine: list[Unit]):
        self._units = units
        self._mine = mine

    def __call__(self, module: nn.Module, args: Any) -> None:
        for unit in self._mine:
            unit.was_called = True
            for owed in list(unit.owed_updates.values()):
                owed.check_stepped()
            self._units.need(unit)


_units_of: dict[int, tuple[weakref.ref[Tensor], Units, Unit]] = {}
"""By the parameter's id, which its reference checks."""
_of_models: "weakref.WeakKeyDictionary[nn.Module, Units]" = weakref.WeakKeyDictionary()


def units_of(model: nn.Module) -> Units:
    """The units of a model, made when they are first asked for."""
    found = _of_models.get(model)
    if found is None:
        found = _of_models[model] = Units(model)
    return found


def unit_with(parameter: Tensor) -> tuple[Units, Unit] | None:
    """Where a parameter belongs, if it belongs to any model's units."""
    found = _units_of.get(id(parameter))
    return None if found is None or found[0]() is not parameter else found[1:]


@contextlib.contextmanager
def pinned(tensors: list[Any], unseen: bool = False, finishes: bool = True) -> Iterator[None]:
    """A block in which the units of ``tensors`` are in memory, and stay there, after their updates unless it is for one;
    ``unseen``, they may be written to without a new version.
    """
    found = [found for tensor in tensors if (found := unit_with(tensor)) is not None]
    with contextlib.ExitStack() as stack:
        for units in {id(units): units for units, _ in found}.values():
            mine = {unit.number: unit for other, unit in found if other is units}
            stack.enter_context(units.using(mine.values(), finishes))
            for weight in (weight for unit in mine.values() if unseen for weight in unit.weights):
                weight.note_uncounted_writes()
        yield


def _again(owner: "weakref.ref[nn.Module]", hook: EagerHook, handle: RemovableHandle) -> RemovableHandle:
    module = owner()
    return (
        handle if module is None or handle.id in module._forward_pre_hooks else module.register_forward_pre_hook(hook)
    )


guard.keep_in_memory = pinned


def _forget(key: int) -> Any:
    return functools.partial(_units_of.pop, key)


def _owners(model: nn.Module) -> list[tuple[str, nn.Module, list[nn.Parameter]]]:
    """The blocks, and what has parameters of its own outside of them, in the order of registration, with these."""
    blocks = find_blocks(model)
    found = [(name, block, list(block.parameters())) for name, block in blocks.items()]
    inside = {module for block in blocks.values() for module in block.modules()}
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if own and module not in inside and not isinstance(module, torch.jit.ScriptModule):
            found.append((name or type(model).__name__, module, own))
    return found
