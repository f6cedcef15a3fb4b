"""Where forward begins and ends: entering and leaving the saved-tensor hooks, and naming the module that runs.

Note: scopes
    Saved-tensor hooks belong to a thread. Where the user writes ``with``, a real ``with`` enters and leaves them. Under a
    trainer, module hooks do: on the model, and on every :class:`~transformers.modeling_layers.GradientCheckpointingLayer`
    in it, for trainers that call inner modules and never the model itself. A forward that raises something that is no
    ``Exception`` (Ctrl-C) runs no forward hook, so an exit can be missing: a thread's stack is unwound at the model's
    next forward and when the session ends.

Note: forwards inside of backward
    A recompute of activation checkpointing enters nothing: what it saves is needed at once. Any other forward inside of a
    backward enters hooks of its own, which take what that very backward runs and nothing of one inside of it.
"""

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_offload.checkpointing import in_recompute
from hf_offload.engine.hooks import Engine
from hf_offload.interrupts import signals_deferred
from hf_offload.surgery import InertInCopies

logger = logging.getLogger(__name__)


class Phases:
    """Enters and leaves the engine's hooks, per thread."""

    def __init__(self, engine: Engine):
        self._engine = engine
        # Kept as they are: autograd's stack is searched for these very objects.
        self._pack = engine.pack
        self._unpack = engine.unpack
        self._thread = threading.local()
        self._handles: list[RemovableHandle] = []
        self._on_forward: Callable[[tuple[Any, ...], Any, bool], None] | None = None
        self._on_forward_end: Callable[[], None] | None = None
        self._warned = False

    # -- by `with` ----------------------------------------------------------------------------------------------------

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Offload what this thread saves inside the ``with`` block."""
        depth = len(self._pushed)
        try:
            self._push(is_scope=True)
            yield
            self._engine.operation_ended()
        finally:
            self._unwind(depth)

    # -- by module hooks ----------------------------------------------------------------------------------------------

    @signals_deferred
    def install(
        self,
        model: nn.Module,
        units: Mapping[str, nn.Module],
        on_forward: Callable[[tuple[Any, ...], Any, bool], None] | None,
        on_forward_end: Callable[[], None] | None = None,
    ) -> None:
        """Follow the model's forwards from now on. ``on_forward`` gets the inputs of every forward of the whole model, and
        whether that is compiled; ``on_forward_end`` is called in the same thread when it has ended, unless by Ctrl-C.
        """
        self._on_forward, self._on_forward_end = on_forward, on_forward_end
        for name, module in {type(model).__name__: model, **units}.items():
            root = module is model
            self._handles.append(module.register_forward_pre_hook(_Enter(self, name, root), with_kwargs=True))
            self._handles.append(module.register_forward_hook(_Leave(self, root), always_call=True))

    def remove(self) -> None:
        """Take every hook off the model and off this thread."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.leave_thread()

    def leave_thread(self) -> None:
        """Leave whatever was entered in this thread: the model has gone, and no other forward will do it. Takes no lock."""
        self._unwind(0)

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], compiled: bool) -> None:
        """A forward of the whole model begins in this thread."""
        if in_recompute():
            return
        self._engine.begin_forward()
        if self._on_forward is not None:
            self._on_forward(args, kwargs, compiled)

    @signals_deferred
    def enter(self, unit: str, root: bool) -> None:
        """A module's forward begins in this thread."""
        if in_recompute():
            return
        backward = torch._C._current_graph_task_id()
        if root and backward == -1:
            self._unwind_forwards()
        enters = not self._pushed or self._engine.backward != backward
        if enters and _in_others_hooks():
            return  # activation checkpointing, of this module or around the whole model: theirs must stay innermost
        if enters:
            self._push()
        self._units.append(self._engine.unit)
        self._engine.unit = unit

    @signals_deferred
    def leave(self, root: bool) -> None:
        """A module's forward ended, maybe by an exception."""
        if in_recompute():
            return
        if root and self._on_forward_end is not None:
            self._on_forward_end()
        if not self._units or self._engine.backward != torch._C._current_graph_task_id():
            return  # it was not entered
        self._engine.unit = self._units.pop()
        if len(self._units) == self._pushed[-1].units:
            if not self._pushed[-1].is_scope:
                self._unwind(len(self._pushed) - 1)
            self._engine.operation_ended()

    # -- the thread's stack -------------------------------------------------------------------------------------------

    @property
    def _pushed(self) -> list["_Pushed"]:
        if not hasattr(self._thread, "pushed"):
            self._thread.pushed = []
        return self._thread.pushed

    @property
    def _units(self) -> list[str]:
        if not hasattr(self._thread, "units"):
            self._thread.units = []
        return self._thread.units

    @signals_deferred
    def _push(self, is_scope: bool = False) -> None:
        hooks = None
        refusal = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
        if refusal is None:
            hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            hooks.__enter__()
        elif not self._warned:
            self._warned = True
            logger.warning("What a forward saves here stays in memory: %s", refusal)
        self._pushed.append(_Pushed(hooks, is_scope, self._engine.backward, len(self._units)))
        self._engine.backward = torch._C._current_graph_task_id()

    @signals_deferred
    def _unwind(self, depth: int) -> None:
        """Leave all hooks above ``depth``. Those that are no longer on top of autograd's stack have been left already."""
        while len(self._pushed) > depth:
            pushed = self._pushed.pop()
            top = torch._C._autograd._top_saved_tensors_default_hooks(True)
            if pushed.hooks is not None and top is not None and top[0] is self._pack:
                pushed.hooks.__exit__()
            self._engine.backward = pushed.backward
            self._leave_units(pushed.units)

    def _unwind_forwards(self) -> None:
        """Leave what forwards inside of the innermost ``with`` block have entered: they have ended without their hooks."""
        scopes = [index for index, pushed in enumerate(self._pushed, 1) if pushed.is_scope]
        self._unwind(max(scopes, default=0))
        self._leave_units(self._pushed[-1].units if self._pushed else 0)

    def _leave_units(self, count: int) -> None:
        """All but the outermost ``count``."""
        if len(self._units) > count:
            self._engine.unit = self._units[count]
            del self._units[count:]


@dataclasses.dataclass(frozen=True, slots=True)
class _Pushed:
    """What was entered, None where hooks are disabled, and what was there before: ``Engine.backward``, and how many units."""

    hooks: torch.autograd.graph.saved_tensors_hooks | None
    is_scope: bool
    backward: int
    units: int


class _Enter(InertInCopies):
    """A hook that a compiler traces as far as it is called in compiled code. It hands on no output: to trace a tensor, a
    compiler looks at its gradient.
    """

    def __init__(self, phases: Phases, unit: str, root: bool):
        super().__init__()
        self._phases, self._unit, self._root = phases, unit, root

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        compiled = torch.compiler.is_compiling()
        if self._root or not compiled:
            _enter(self._phases, self._unit, self._root, args, kwargs, compiled)


class _Leave(InertInCopies):
    """See :class:`_Enter`."""

    def __init__(self, phases: Phases, root: bool):
        super().__init__()
        self._phases, self._root = phases, root

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._root or not torch.compiler.is_compiling():
            _leave(self._phases, self._root)


@torch._dynamo.disable
def _enter(phases: Phases, unit: str, root: bool, args: Any, kwargs: Any, compiled: bool) -> None:
    if root:
        phases.begin(args, kwargs, compiled)
    phases.enter(unit, root)


@torch._dynamo.disable
def _leave(phases: Phases, root: bool) -> None:
    phases.leave(root)


def _in_others_hooks() -> bool:
    """Whether what this thread saves goes to hooks that are none of ours, of whichever model."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and not isinstance(getattr(top[0], "__self__", None), Engine)
