"""What counting a step and measuring one have in common: whose turn it is, what is alive, and where one segment ends."""

import contextlib
import dataclasses
import queue
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from hf_offload.checkpointing import in_recompute
from hf_offload.engine.recompute import Versions, changed_name, versions_of, why_not_twice
from hf_offload.plan.footprint import BlockSpan, Segment
from hf_offload.planning.operations import count_changes_of_lists, in_python_of_backward, workspace_bytes
from hf_offload.state.gradients import gradient_of, has_gradient_here
from hf_offload.state.registry import is_parked
from hf_offload.storage.handling import Handling
from hf_offload.storage.store import is_slab
from hf_offload.structure.units import find_blocks, find_units
from hf_offload.surgery import EagerHook
from hf_offload.tensors import has_storage, nbytes_of, parts_of
from hf_offload.transforms.tiling.head import head_name


class _Seen(weakref.ref[torch.UntypedStorage]):
    """A storage that is counted."""

    __slots__ = ("key", "nbytes")
    key: int
    nbytes: int


@dataclasses.dataclass(slots=True)
class _Sum:
    """A sum of two gradients that was just made: whether it took the place of the first is seen by whether that is gone."""

    key: int  # of the first one's storage
    needed: int  # bytes alive, with both of them
    elsewhere: int
    nbytes: int
    spared: int = 0  # where the mode does not keep autograd from it


class StepRecorder(TorchDispatchMode):
    """Follows one step of ``model``: which unit computes, and how many bytes its operations keep alive.

    Subclasses say how long a segment took (:meth:`elapsed`) and which of the live bytes are not the model's
    (:meth:`elsewhere`).

    A recorder does not keep the model: a training that is given up in the middle of a step leaves it on its thread's stack
    of modes.

    Attributes:
        units: Unit -> the repeated block it lies in, if it lies in one.
        classes: Unit -> the class of its module.
        head, is_tiled: The head whose loss can be tiled, and whether it is.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        units = find_units(model)
        self.units = {name: unit.block for name, unit in units.items()}
        self.classes = {name: unit.kind for name, unit in units.items()}
        self.head, self.is_tiled = head_name(model)
        self.segments: list[Segment] = []
        self.backward = False
        self.unit = next(iter(self.units))
        self._model_ref = weakref.ref(model)
        self._device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
        self._blocks = frozenset(find_blocks(model))
        self._not_twice: dict[str, str] = {}  # block -> why its forward cannot run a second time
        self._buffers: dict[str, Versions] = {}  # of a block before its forward
        self._stack: list[str] = []
        self._handles: list[RemovableHandle] = []
        self._live = self._most = self._most_measured = self._gradients = 0
        self._reached: set[int] = set()  # ids of the weights that got a gradient
        self._used_up: set[int] = set()  # and of those whose gradient was used up at once
        self._in_memory: set[int] = set()  # and of those whose gradient is in memory
        self._own = Handling()  # the recorder's own time, which is not compute
        self.peak_live_bytes = 0  # saved tensors included, weights not
        self._sum: _Sum | None = None
        self._known: set[int] = set()
        self._seen: dict[int, _Seen] = {}
        self._there: dict[int, _Seen] = {}  # weights and state, which are not counted
        self._dead: queue.SimpleQueue[_Seen] = queue.SimpleQueue()
        self._entered: dict[str, int] = {}
        self._left: dict[str, int] = {}
        self._boundary: dict[str, int] = {}

    @property
    def model(self) -> nn.Module:
        """The model, as long as it is alive."""
        model = self._model_ref()
        assert model is not None, "nothing is asked of a recorder whose model has gone"
        return model

    is_recording = True
    """Whether operations are looked at. A mode stays on the stack of a thread that did not take it off."""

    # -- what subclasses add ------------------------------------------------------------------------------------------

    def elapsed(self) -> float:
        """Seconds of compute since the last call."""
        raise NotImplementedError

    def elsewhere(self) -> int:
        """Bytes among the live ones that belong to saved tensors and are counted there."""
        return 0

    def ran(self, func: Any, args: Any, kwargs: Any, result: Any, results: Sequence[torch.Tensor], fresh: bool) -> None:
        """An operation ran; ``fresh``: it made new storages."""

    def died(self, key: int) -> None:
        """The storage whose Python object had the id ``key`` is gone."""

    # -- modules ------------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Follow the model's forwards and gradients from now on."""
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            for part in {tensor, *parts_of(tensor)}:
                if has_storage(part):
                    self.know(part.untyped_storage())
        self._see_gradients()  # kept from the step before, or from another micro-batch
        for name, unit in find_units(self.model).items():
            enter, leave = EagerHook(partial(self._enter, name)), EagerHook(partial(self._leave, name))
            self._handles.append(unit.module.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(unit.module.register_forward_hook(leave, always_call=True))
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.is_leaf:  # else it is computed, in torch.func.functional_call
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._count_gradient))

    def unwatch(self) -> None:
        """Take every hook off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """:meth:`watch`, and the dispatch mode, inside the block."""
        self.watch()
        try:
            with self:
                yield
        finally:
            self.unwatch()

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        # Without kwargs: PyTorch still calls a hook that another one of the same module has removed.
        if in_recompute():
            return
        self.end_segment()
        self._stack.append(self.unit)
        self.unit = name
        self.backward = False
        if name in self._blocks:
            self._entered.setdefault(name, len(self.segments))
            # What activation checkpointing keeps of a block: its positional arguments.
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self._boundary[name] = sum(nbytes_of(tensor) for tensor in tensors if tensor.is_floating_point())
            self._not_twice[name] = self._not_twice.get(name) or why_not_twice(args, kwargs or {})
            self._buffers[name] = versions_of(module.named_buffers())

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if in_recompute() or not self._stack:
            return
        self.end_segment()
        if name in self._blocks:
            self._left.setdefault(name, len(self.segments))
            written = changed_name(self._buffers.pop(name, {}), versions_of(module.named_buffers()))
            if written:
                self._not_twice[name] = f"its forward writes to {written}"
        self.unit = self._stack.pop()

    def _count_gradient(self, parameter: torch.Tensor) -> None:
        self._reached.add(id(parameter))
        if has_gradient_here(parameter):
            self._add_gradient(parameter)
            return
        self._used_up.add(id(parameter))
        if id(parameter) in self._in_memory:
            self._in_memory.discard(id(parameter))
            self._gradients -= nbytes_of(parameter)

    def _add_gradient(self, parameter: torch.Tensor) -> None:
        """It is in memory. Another one is added to it."""
        if id(parameter) not in self._in_memory:
            self._in_memory.add(id(parameter))
            self._gradients += nbytes_of(parameter)

    def _see_gradients(self) -> int:
        """Count those in memory; returns how many bytes of them had left it, and came back, for clipping or the like."""
        back = 0
        for parameter in self.model.parameters():
            gradient = gradient_of(parameter) if parameter.is_leaf and has_gradient_here(parameter) else None
            if gradient is None or gradient.layout is not torch.strided:
                continue
            self.see(gradient.untyped_storage())
            self._add_gradient(parameter)
            if id(parameter) in self._used_up:
                self._used_up.discard(id(parameter))
                back += nbytes_of(parameter)
        if back:
            self._reach(self._live, self.elsewhere())
        return back

    # -- operations ---------------------------------------------------------------------------------------------------

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled function stays compiled in a measured step, and has the same bits as in others."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._run_higher_order(func, args, kwargs)
        result = func(*args, **kwargs)
        count_changes_of_lists(func, args)
        if self._model_ref() is None or not self.is_recording:
            return result
        with self._bookkeeping():
            self._after(func, args, kwargs, result)
        return result

    def _run_higher_order(self, func: HigherOrderOperator, args: Any, kwargs: Any) -> Any:
        """An operator that is called with functions (``torch.cond``, ``scan``): what these run is seen, and its results."""
        args, kwargs = tree_map(self._seeing, (args, kwargs))
        result = func(*args, **kwargs)
        if self._model_ref() is not None and self.is_recording:
            with self._bookkeeping():
                self._clean_up()
                self._see_results([leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)])
                self._reach(self._live, self.elsewhere())
        return result

    def _seeing(self, argument: Any) -> Any:
        if not callable(argument) or isinstance(argument, torch.Tensor):
            return argument

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return argument(*args, **kwargs)

        return run

    def _bookkeeping(self) -> contextlib.AbstractContextManager[None]:
        """What runs in it is neither compute, nor what moving bytes takes."""
        return self._own.of("bookkeeping")

    def _after(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self._clean_up()
        # lift_fresh wraps memory that belongs to something else, such as a buffer that was shifted to a wanted address.
        fresh = self._see_results(results, func is not torch.ops.aten.lift_fresh.default)
        needed = self._live + (workspace_bytes(func, args, results) if fresh and self._device.type == "cpu" else 0)
        if fresh and self._adds_up_gradients(func, args, kwargs, results):
            self._sum = _Sum(id(args[0].untyped_storage()), needed, self.elsewhere(), results[0].nbytes)
        else:
            self._reach(needed, self.elsewhere())
        self.ran(func, args, kwargs, result, results, fresh)

    def _see_results(self, results: Sequence[torch.Tensor], counts: bool = True) -> bool:
        """Returns whether there are new storages among them."""
        fresh = False
        for tensor in results:
            if tensor.layout is torch.strided and self.see(
                tensor.untyped_storage(), counts and tensor.device == self._device
            ):
                fresh = True
        return fresh

    def _reach(self, needed: int, elsewhere: int, spared: int = 0) -> None:
        self._most_measured = max(self._most_measured, needed - elsewhere)
        self._most = max(self._most, needed - spared - elsewhere)
        self.peak_live_bytes = max(self.peak_live_bytes, needed - spared)

    def _adds_up_gradients(self, func: Any, args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> bool:
        """Whether this may be autograd, adding up the gradients of a tensor that was used twice.

        Where nothing else needs the first of them, it takes the sum, but under a dispatch mode autograd makes a new tensor
        (torch's ``can_accumulate_inplace``).
        """
        return (
            func is torch.ops.aten.add.Tensor
            and len(args) == 2
            and not kwargs
            and not torch.is_grad_enabled()
            and torch._C._current_graph_task_id() != -1
            and isinstance(args[1], torch.Tensor)
            and args[0].shape == args[1].shape
            and args[0].dtype == args[1].dtype
            and args[0].layout is torch.strided
            and args[0].untyped_storage().nbytes() == results[0].nbytes
            and not in_python_of_backward()
        )

    def see(self, storage: torch.UntypedStorage, counts: bool = True) -> bool:
        """Count a storage until it goes; returns whether it is new."""
        key = id(storage)
        if key in self._known:
            return False
        # Weights that come and go are a part of what is there all the time. A mapped file, such as a state dict's, may be
        # dropped by the system.
        counts = counts and not is_parked(storage) and not is_slab(storage) and storage.filename is None
        nbytes = storage.nbytes() if counts else 0
        self._live += nbytes
        self._seen[key] = self._note_end(storage, nbytes)
        return True

    def know(self, storage: torch.UntypedStorage) -> None:
        """A storage that was there before: it is not counted. Where it goes, another may have its id."""
        if id(storage) not in self._known:
            self._there[id(storage)] = self._note_end(storage, 0)

    def _note_end(self, storage: torch.UntypedStorage, nbytes: int) -> _Seen:
        self._known.add(id(storage))
        # A callback may run in any thread and under any lock: it only leaves a note, in C (see interrupts.py).
        seen = _Seen(storage, self._dead.put)
        seen.key, seen.nbytes = id(storage), nbytes
        return seen

    def forget(self, storage: torch.UntypedStorage) -> None:
        """Count a storage no more."""
        seen = self._seen.get(id(storage))
        if seen is not None:
            self._live -= seen.nbytes
            seen.nbytes = 0

    def _clean_up(self) -> None:
        while True:
            try:
                seen = self._dead.get_nowait()
            except queue.Empty:  # another thread may have been sooner
                break
            self._known.discard(seen.key)
            for those in (self._seen, self._there):
                if those.get(seen.key) is seen:
                    del those[seen.key]
            self.died(seen.key)
            self._live -= seen.nbytes
            if self._sum is not None and self._sum.key == seen.key:
                self._sum.spared = self._sum.nbytes
        if self._sum is not None:
            self._reach(self._sum.needed, self._sum.elsewhere, self._sum.spared)
            self._sum = None

    def end_segment(self) -> int:
        """Close the running segment; returns the index of the next one."""
        self._clean_up()
        seconds = self.elapsed()
        live = self._live - self.elsewhere()
        if seconds > 0 or self._most > live or not self.segments:
            more = max(0, self._most_measured - self._most)
            self.segments.append(Segment(self.unit, self.backward, max(0, self._most), self._gradients, seconds, more))
        self._most = self._most_measured = live
        return len(self.segments)

    def block_spans(self) -> Iterator[BlockSpan]:
        """The blocks that ran, once each."""
        begun: dict[str, int] = {}
        for index, segment in enumerate(self.segments):
            block = self.units[segment.unit]
            if segment.backward and block is not None:
                begun.setdefault(block, index)
        for name, entered in self._entered.items():
            if name in self._left and name in begun:
                forward, why_not = (entered, self._left[name]), self._not_twice[name]
                yield BlockSpan(name, self._boundary[name], forward, begun[name], why_not)
