"""Counting a footprint without hardware: one step on tensors that have sizes but no data.

:class:`~torch._subclasses.fake_tensor.FakeTensorMode` on CPU tensors makes every operation of the model choose its real
kernel and allocate nothing. A dispatch mode sees each result come and go; saved-tensor hooks let go of everything autograd
saves, so that what stays alive is what offloading cannot reach.
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from hf_offload.engine.selection import WeightIndex, record_span
from hf_offload.errors import OffloadPlanError
from hf_offload.forecast.fake import any_data, mode_of, run_backward, with_values
from hf_offload.interrupts import signals_deferred
from hf_offload.methods.protocol import OptimizerBytes
from hf_offload.plan.footprint import Footprint, Saved
from hf_offload.planning.recorder import StepRecorder
from hf_offload.planning.state_bytes import unit_weights
from hf_offload.structure.units import find_units, one_stack
from hf_offload.tensors import byte_span, nbytes_of, parameter_count

Cost = Callable[[int, int, torch.dtype], float]
"""(floating-point operations, bytes read and written, dtype) of one operation -> seconds."""


def count_footprint(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    *,
    cost: Cost,
    optimizer: OptimizerBytes,
    min_bytes: int,
    as_on_cuda: bool,
    autocast: torch.dtype | None = None,
    update_in_backward: bool = False,
    has_backward: bool = True,
) -> Footprint:
    """Count one training step of ``model`` on ``batch``, both on fake CPU tensors.

    They are made inside :func:`~hf_offload.forecast.fake.fake_mode`.

    Args:
        model: Its forward takes the batch by keywords and returns an output with a loss.
        batch: Integer tensors of shape (rows, tokens), ``labels`` among them.
        cost: How long an operation takes.
        optimizer: What the optimizer needs.
        min_bytes: Smaller tensors are not moved; they count as live.
        as_on_cuda: Whether dropout is CUDA's, whose kernels keep a mask of one byte an element, and for attention draw it
            again. The CPU's keep a mask of the input's dtype, and the attention matrix.
        autocast: The dtype of autocast, or None.
        update_in_backward: Whether every gradient goes as soon as it is complete, used up by the optimizer.
        has_backward: Without, the step is two forwards.

    Raises :class:`~hf_offload.errors.OffloadPlanError` if the forward needs data, for example because it reads a value.
    """
    counter = _Counter(model, cost, min_bytes)
    cast = contextlib.nullcontext() if autocast is None else torch.autocast("cpu", autocast)
    model.zero_grad(set_to_none=True)
    updates = [
        parameter.register_post_accumulate_grad_hook(_use_up)
        for parameter in model.parameters()
        if update_in_backward and parameter.requires_grad
    ]
    try:
        # Raised under a dispatch mode, in the midst of backward's C++, Ctrl-C may end the process with SIGABRT.
        with signals_deferred, counter.in_fake_mode(), any_data(as_on_cuda):
            if has_backward:
                with cast, torch.autograd.graph.saved_tensors_hooks(counter.pack, counter.unpack):
                    loss = model(**batch).loss
                counter.backward = True
                run_backward(loss)
                del loss
            else:
                model.eval()
                for _ in range(2):
                    with cast, torch.no_grad():
                        model(**batch)
    except OffloadPlanError:
        raise
    except Exception as error:  # whatever an architecture trips over: data-dependent shapes, custom kernels, C++
        raise OffloadPlanError(
            f"{type(model).__name__} cannot be counted on tensors without data ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no message'}). Its plan has to come from a measured step: "
            "train with offload='auto'."
        ) from error
    finally:
        for handle in updates:
            handle.remove()
    model.zero_grad(set_to_none=True)
    return Footprint(
        segments=tuple(counter.segments),
        saved=tuple(counter.saved()),
        blocks=tuple(counter.block_spans()),
        units=counter.units,
        classes=counter.classes,
        head=counter.head,
        optimizer_step_bytes=optimizer.step,
        optimizer_step_s=cost(0, optimizer.moved, torch.float32),
        source="counted",
        largest_operation_bytes=counter.largest_operation_bytes,
        state_bytes=optimizer.state,
        buffer_bytes=optimizer.buffers,
        is_one_stack=not has_backward and bool(one_stack(model)),
        **bytes_of_weights(model, optimizer, update_in_backward=update_in_backward, has_backward=has_backward),
    )


def bytes_of_weights(
    model: nn.Module, optimizer: OptimizerBytes, *, update_in_backward: bool, has_backward: bool = True
) -> dict[str, Any]:
    """Fields of a footprint that weights and optimizer decide alone."""
    weights = sum(nbytes_of(tensor) for tensor in {*model.parameters(), *model.buffers()})
    trained = [nbytes_of(tensor) for tensor in model.parameters() if tensor.requires_grad]
    gradients = max(trained, default=0) if update_in_backward else sum(trained) * has_backward
    return {
        "parameters": parameter_count(model),
        "base_bytes": weights + optimizer.state + optimizer.buffers,
        "gradient_bytes": max(gradients, optimizer.gradients),
        "weights": unit_weights(model, find_units(model), optimizer.state),
    }


def _use_up(parameter: torch.Tensor) -> None:
    parameter.grad = None


class _Draft:
    """A saved tensor's bytes while the step is counted. It lives as long as autograd's handles."""

    __slots__ = ("__weakref__", "span", "times", "unit", "version")

    def __init__(self, unit: str, span: tuple[int, int], version: int, times: "_Times"):
        self.unit = unit
        self.span = span
        self.version = version
        self.times = times


@dataclasses.dataclass(slots=True)
class _Times:
    unit: str
    nbytes: int
    packed: int
    gone: int | None = None
    needed: int | None = None
    released: int | None = None


class _Handle:
    """What autograd holds: how to look at a draft's bytes."""

    __slots__ = ("draft", "dtype", "known", "size", "stride")

    def __init__(self, draft: _Draft, tensor: torch.Tensor):
        self.draft = draft
        self.known: torch.Tensor | None = getattr(tensor, "constant", None)
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()


class _Kept:
    __slots__ = ("tensor", "unit")

    def __init__(self, tensor: torch.Tensor, unit: str):
        self.tensor = tensor
        self.unit = unit


class _Counter(StepRecorder):
    """One step on tensors without data: compute takes as long as ``cost`` says."""

    def __init__(self, model: nn.Module, cost: Cost, min_bytes: int):
        super().__init__(model)
        self._cost = cost
        self._min_bytes = min_bytes
        self._weights = WeightIndex(model)
        self._fake = mode_of(model)
        self._seconds = 0.0
        self.largest_operation_bytes = 0
        self._drafts: dict[int, list[weakref.ref[_Draft]]] = {}  # id of a storage -> what was saved of it
        self._times: list[_Times] = []

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        signals_deferred.deliver()  # of a step that takes seconds: in forward, where Python has called
        super()._enter(name, module, args, kwargs)

    def elapsed(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def ran(self, func: Any, args: Any, kwargs: Any, result: Any, results: Sequence[torch.Tensor], fresh: bool) -> None:
        if not results or not (fresh or func._schema.is_mutable):
            return  # a view
        if not any(one.numel() for one in results):
            return  # nothing is computed, nor read for it
        counted = flop_registry.get(func._overloadpacket)
        flops = counted(*args, **kwargs, out_val=result) if counted is not None else 0
        moved = sum(nbytes_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        moved += sum(map(nbytes_of, results))
        if not self._adds_up_gradients(func, args, kwargs, results):  # it may need no memory for its result
            self._see_operation((args, kwargs), results)
        self._seconds += self._cost(int(flops), moved, results[0].dtype)

    def _see_operation(self, operands: Any, results: Sequence[torch.Tensor]) -> None:
        inputs = (
            leaf for leaf in tree_leaves(operands) if isinstance(leaf, torch.Tensor) and leaf not in self._weights
        )
        storages = {id(one.untyped_storage()): nbytes_of(one) for one in (*inputs, *results)}
        self.largest_operation_bytes = max(self.largest_operation_bytes, sum(storages.values()))

    def died(self, key: int) -> None:
        drafts = [draft for reference in self._drafts.pop(key, ()) if (draft := reference()) is not None]
        if drafts:
            now = self.end_segment()
            for draft in drafts:
                draft.times.gone = now

    @contextlib.contextmanager
    def in_fake_mode(self) -> Iterator[None]:
        """Count what happens inside."""
        with self._fake, self.watching():
            yield
        self.end_segment()

    # -- autograd's hooks ---------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> _Handle | _Kept:
        """Let go of the tensor, but remember when it was saved."""
        if not self._may_move(tensor):
            return _Kept(tensor.detach(), self.unit)
        storage = tensor.untyped_storage()
        begin, end = byte_span(tensor)
        draft = self._find(id(storage), tensor._version, begin, end)
        if draft is None:
            span = record_span(begin, end, storage.nbytes())
            times = _Times(self.unit, span[1] - span[0], self.end_segment())
            self._times.append(times)
            draft = _Draft(self.unit, span, tensor._version, times)
            self._drafts.setdefault(id(storage), []).append(weakref.ref(draft))
            weakref.finalize(draft, self._release, times)
        return _Handle(draft, tensor)

    def unpack(self, handle: _Handle | _Kept) -> torch.Tensor:
        """A tensor like the one that was saved."""
        if isinstance(handle, _Kept):
            self.unit = handle.unit
            return handle.tensor
        now = self.end_segment()
        self.unit = handle.draft.unit
        if handle.draft.times.needed is None:
            handle.draft.times.needed = now
        # The saved tensor's bytes are counted as the saved tensor's, not as alive.
        with _disable_current_modes(), self._fake:
            if handle.known is None:
                tensor = torch.empty_strided(handle.size, handle.stride, dtype=handle.dtype)
            else:
                tensor = with_values(self.model, handle.known)
        self.see(tensor.untyped_storage(), counts=False)
        return tensor

    def _release(self, times: _Times) -> None:
        times.released = self.end_segment()

    def _may_move(self, tensor: torch.Tensor) -> bool:
        return (
            type(tensor) is FakeTensor
            and tensor.layout is torch.strided
            and torch._C._current_graph_task_id() == -1
            and nbytes_of(tensor) >= self._min_bytes
            and tensor not in self._weights
            and byte_span(tensor)[1] - byte_span(tensor)[0] >= self._min_bytes
        )

    def _find(self, key: int, version: int, begin: int, end: int) -> _Draft | None:
        for reference in self._drafts.get(key, ()):
            draft = reference()
            if draft is not None and draft.version == version and draft.span[0] <= begin and end <= draft.span[1]:
                return draft
        return None

    # -- what was found -----------------------------------------------------------------------------------------------

    def saved(self) -> Iterator[Saved]:
        """All that was saved and used again."""
        end = len(self.segments)
        for times in self._times:
            released = end if times.released is None else times.released
            needed = released if times.needed is None else times.needed
            gone = released if times.gone is None else times.gone
            yield Saved(times.unit, times.nbytes, times.packed, gone, needed, released)
