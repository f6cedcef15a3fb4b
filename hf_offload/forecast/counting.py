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
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from hf_offload.engine.selection import WeightIndex, byte_span, record_span
from hf_offload.errors import OffloadPlanError
from hf_offload.plan.footprint import Footprint, Saved
from hf_offload.planning.recorder import StepRecorder, nbytes_of

_MOST_KNOWN = 1 << 20

Cost = Callable[[int, int, torch.dtype], float]
"""(floating-point operations, bytes read and written, dtype) of one operation -> seconds."""


@dataclasses.dataclass(frozen=True)
class OptimizerNeeds:
    """Memory of an optimizer: bytes that stay, bytes during its step, and how long that takes.

    ``gradient_bytes`` is what the gradients need at most, where other weights than those of the counted step may need more.
    """

    state_bytes: int
    step_bytes: int
    step_s: float
    gradient_bytes: int = 0


def count_footprint(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    *,
    cost: Cost,
    optimizer: OptimizerNeeds,
    min_offload_bytes: int,
    as_on_cuda: bool,
    autocast: torch.dtype | None = None,
    update_in_backward: bool = False,
) -> Footprint:
    """Count one training step of ``model`` on ``batch``, both on fake CPU tensors (see :func:`fake_mode`).

    Args:
        model: Its forward takes the batch by keywords and returns an output with a loss.
        batch: Integer tensors of shape (rows, tokens), ``labels`` among them.
        cost: How long an operation takes.
        optimizer: What the optimizer holds.
        min_offload_bytes: Smaller tensors are not moved; they count as live.
        as_on_cuda: Whether dropout is CUDA's, whose kernels keep a mask of one byte an element, and for attention draw it
            again. The CPU's keep a mask of the input's dtype, and the attention matrix.
        autocast: The dtype of autocast, or None.
        update_in_backward: Whether every gradient goes as soon as it is complete, used up by the optimizer.

    Raises :class:`~hf_offload.errors.OffloadPlanError` if the forward needs data, for example because it reads a value.
    """
    counter = _Counter(model, cost, min_offload_bytes)
    dropout = _DropoutAsOnCuda() if as_on_cuda else contextlib.nullcontext()
    cast = contextlib.nullcontext() if autocast is None else torch.autocast("cpu", autocast)
    model.zero_grad(set_to_none=True)
    updates = [
        parameter.register_post_accumulate_grad_hook(_use_up)
        for parameter in model.parameters()
        if update_in_backward and parameter.requires_grad
    ]
    try:
        with counter.in_fake_mode(), dropout, _AnyData(), _rows_that_are_not_packed(), _known_values():
            with cast, torch.autograd.graph.saved_tensors_hooks(counter.pack, counter.unpack):
                loss = model(**batch).loss
            counter.backward = True
            loss.backward()
            del loss
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
    weights = sum(nbytes_of(tensor) for tensor in {*model.parameters(), *model.buffers()})
    gradients = sum(nbytes_of(tensor) for tensor in model.parameters() if tensor.requires_grad)
    model.zero_grad(set_to_none=True)
    if update_in_backward:
        gradients = max((nbytes_of(tensor) for tensor in model.parameters() if tensor.requires_grad), default=0)
    return Footprint(
        moments=tuple(counter.moments),
        saved=tuple(counter.saved()),
        blocks=tuple(counter.block_spans()),
        units=counter.units,
        kinds=counter.kinds,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        base_bytes=weights + optimizer.state_bytes,
        gradient_bytes=max(gradients, optimizer.gradient_bytes),
        optimizer_step_bytes=optimizer.step_bytes,
        optimizer_step_s=optimizer.step_s,
        source="counted",
        largest_operation_bytes=counter.largest_operation_bytes,
        state_bytes=optimizer.state_bytes,
    )


def _use_up(parameter: torch.Tensor) -> None:
    parameter.grad = None


@contextlib.contextmanager
def _rows_that_are_not_packed() -> Iterator[None]:
    """Transformers looks whether several texts share a row, and takes what it cannot look into to be such a row. Its mask
    would make attention take another kernel than a real batch of whole rows does.
    """
    from transformers import masking_utils

    name = "find_packed_sequence_indices"
    found = getattr(masking_utils, name, None)
    if found is None:
        yield
        return
    setattr(masking_utils, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        setattr(masking_utils, name, found)


@contextlib.contextmanager
def _known_values() -> Iterator[None]:
    """Inside, what is computed from values that are known, is known: losses may look at their labels."""
    name = "CONSTANT_NUMEL_LIMIT"
    found = getattr(fake_tensor, name)
    setattr(fake_tensor, name, _MOST_KNOWN)
    try:
        yield
    finally:
        setattr(fake_tensor, name, found)


def with_values(model: nn.Module, real: torch.Tensor) -> torch.Tensor:
    """A tensor without data like ``real``, for ``model`` on tensors without data, whose values may be asked for nevertheless
    unless there are very many. Called outside of :func:`fake_mode`.
    """
    mode, converter = _mode_of(model), _mode_of(model).fake_tensor_converter
    return converter.from_real_tensor(mode, real, make_constant=real.numel() <= _MOST_KNOWN)


@contextlib.contextmanager
def fake_mode() -> Iterator[None]:
    """Inside, tensors have sizes but no data: models of any size are built in no time and no memory."""
    with FakeTensorMode() as mode, _KnownSchedules(mode), _known_values():
        yield


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

    def __init__(self, model: nn.Module, cost: Cost, min_offload_bytes: int):
        super().__init__(model)
        self._cost = cost
        self._min_bytes = min_offload_bytes
        self._weights = WeightIndex(model)
        self._fake = _mode_of(model)
        self._seconds = 0.0
        self.largest_operation_bytes = 0
        self._drafts: dict[int, list[weakref.ref[_Draft]]] = {}  # id of a storage -> what was saved of it
        self._times: list[_Times] = []

    def elapsed(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def ran(self, func: Any, args: Any, kwargs: Any, result: Any, results: Sequence[torch.Tensor], fresh: bool) -> None:
        if not results or not (fresh or func._schema.is_mutable):
            return  # a view
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
            now = self.end_moment()
            for draft in drafts:
                draft.times.gone = now

    @contextlib.contextmanager
    def in_fake_mode(self) -> Iterator[None]:
        """Count what happens inside."""
        with self._fake, self.watching():
            yield
        self.end_moment()

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
            times = _Times(self.unit, span[1] - span[0], self.end_moment())
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
        now = self.end_moment()
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
        times.released = self.end_moment()

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
        end = len(self.moments)
        for times in self._times:
            released = end if times.released is None else times.released
            needed = released if times.needed is None else times.needed
            gone = released if times.gone is None else times.gone
            yield Saved(times.unit, times.nbytes, times.packed, gone, needed, released)


def _mode_of(model: nn.Module) -> FakeTensorMode:
    for tensor in model.parameters():
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    raise OffloadPlanError(f"{type(model).__name__} was not built on tensors without data: build it in fake_mode().")


class _DropoutAsOnCuda(TorchFunctionMode):
    """Lets dropout save what CUDA's kernels save, and attention take its fused kernel with dropout, too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif "dropout_p" in kwargs:
                kwargs = kwargs | {"dropout_p": 0.0}
        elif func is nn.functional.dropout:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return torch.native_dropout(input, p, training)[0] if training and p > 0 else input


class _KnownSchedules(TorchFunctionMode):
    """Lets constructors read numbers off a line: how often each layer of a model drops its path."""

    def __init__(self, mode: FakeTensorMode):
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.linspace:
            return func(*args, **(kwargs or {}))
        with unset_fake_temporarily():
            real = func(*args, **((kwargs or {}) | {"device": "cpu"}))
        return self._mode.fake_tensor_converter.from_real_tensor(self._mode, real, make_constant=True)


class _AnyData(TorchFunctionMode):
    """Lets some operations be counted whatever their data are.

    However tokens are routed to experts, each goes to as many of them, and all that is computed for them has as many rows:
    memory does not depend on the routing. A coin that decides whether a layer is skipped does not skip it, which is what
    needs most.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _GROUPED and len(args) == 2 and args[0].dim() == 2 and args[1].dim() == 3:
            with torch.autocast("cpu", enabled=False):
                return _GroupedProduct.apply(*args)  # type: ignore[no-untyped-call]
        if func is torch.rand and args in (([],), ((),)):
            return torch.tensor(0.5)
        if func is nn.functional.ctc_loss:
            return _ctc_loss(*args, **kwargs)
        return func(*args, **kwargs)


_GROUPED = tuple(
    found
    for found in (getattr(torch.nn.functional, "grouped_mm", None), getattr(torch, "_grouped_mm", None))
    if found is not None
)


def _ctc_loss(log_probs: torch.Tensor, targets: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Targets of rows of the same length, one behind the other where they have one dimension."""
    length = targets.shape[-1] if targets.dim() > 1 else -(-targets.numel() // log_probs.shape[1])
    return _CtcLoss.apply(log_probs, length)  # type: ignore[no-untyped-call,no-any-return]


class _CtcLoss(torch.autograd.Function):
    """Keeps what torch's does: the likelihoods of every part of the targets, with blanks in between, at every time."""

    @staticmethod
    def forward(ctx: Any, log_probs: torch.Tensor, length: int) -> torch.Tensor:
        times, rows, _ = log_probs.shape
        ctx.save_for_backward(log_probs, log_probs.new_empty(rows, times, 2 * length + 1))
        return log_probs.new_empty(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        log_probs, likelihoods = ctx.saved_tensors
        torch.empty_like(likelihoods)  # the same from behind
        return torch.empty_like(log_probs), None


class _GroupedProduct(torch.autograd.Function):
    """Rows times the matrix of the group that each is in: of the cost of one product, whatever the groups are."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, matrices)
        return rows @ matrices[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (gradient,) = gradients
        rows, matrices = ctx.saved_tensors
        of_matrices = matrices.new_empty(matrices.shape)
        torch.mm(rows.t(), gradient, out=of_matrices[0])
        return gradient @ matrices[0].t(), of_matrices
