"""One update of one parameter, computed by the class of its optimizer: as a whole, or a part at a time."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hf_offload.errors import StorageError
from hf_offload.interrupts import signals_deferred
from hf_offload.state import guard
from hf_offload.state.contexts import StepContext, outside
from hf_offload.state.gradients import ParkedGradient, gradient_of, scaled, set_gradient
from hf_offload.state.parked import Parked, Where
from hf_offload.state.registry import can_leave, parked_of
from hf_offload.state.shadow import CUT_ELEMENTS, Shadow, captured
from hf_offload.state.storages import swap_pointer
from hf_offload.storage.store import Slab, Store, whole_pages
from hf_offload.tensors import is_ordinary

SMALLEST_STATE_BYTES = 4096
"""Smaller tensors of a state, such as counters, stay in memory."""


@dataclasses.dataclass
class Update:
    """A step that has been taken and not computed yet.

    Attributes:
        state: That of the optimizer, which may go.
        context: What the step's updates have in common.
        options: Those of the parameter's group, at the step.
        gradient: That of the step.
        spans: The parameter's bytes of each part, as they were when the first one was computed; None for all at once.
        done: How many parts are computed.
        is_computed: The optimizer's class has computed all of it, as a whole.
        counted: Changes of the parameter's version that were counted when it was noted.
        is_given_up: The optimizer's class has raised an error, as it does in memory: the step is not taken.
        is_torn: A part was stepped, and not all of its state is stored: the step cannot be completed.
    """

    state: dict[Any, Any]
    context: StepContext
    options: dict[str, Any]
    gradient: Tensor
    spans: list[tuple[int, int]] | None = None
    done: int = 0
    is_computed: bool = False
    counted: int = 0
    is_given_up: bool = False
    is_torn: bool = False

    @property
    def unscales(self) -> bool:
        """Whether the step divides the gradient by the scale of a ``GradScaler``, as fused ones do: no version counts it."""
        return self.context.attributes.get("grad_scale") is not None


def state_tensors(state: Mapping[Any, Any], parameter: Tensor) -> list[Tensor]:
    """The tensors of the parameter's state that may leave memory: of shards, what this process has of them."""
    found = [one for one in tree_leaves(state.get(parameter) or {}) if isinstance(one, Tensor)]
    local = [getattr(one, "_local_tensor", one) for one in found]
    return [tensor for tensor in local if state_may_leave(tensor, SMALLEST_STATE_BYTES)]


def state_may_leave(tensor: Tensor, smallest_bytes: int) -> bool:
    """Whether a gradient, or a tensor of a state, may leave memory."""
    if not is_ordinary(guard.own_class(tensor)) or tensor.requires_grad or tensor.nbytes < smallest_bytes:
        return False
    return can_leave(tensor)


class UpdateComputer:
    """Computes updates.

    Args:
        shadow: Steps some of the optimizer's parameters.
        store: Where its state goes.
        part_bytes: Size of the parts that parameters are cut into; None leaves them whole.

    Attributes:
        staying: Ids of the parameters whose state stays in memory for now.
    """

    def __init__(self, shadow: Shadow, store: Store, part_bytes: int | None):
        self.shadow = shadow
        self._store = store
        self._part_bytes = part_bytes
        self.staying: set[int] = set()

    def park(self, parameter: Tensor, name: str, state: Mapping[Any, Any]) -> None:
        """Let the parameter's state leave memory."""
        if id(parameter) in self.staying:
            return
        for tensor in state_tensors(state, parameter):
            parked = parked_of(tensor) or Parked(tensor, f"the state of {name}", self._store)
            parked.add(tensor)  # which may be another one by now
            parked.leave()
            self._store.throttle()

    def spans(
        self, parameter: Tensor, state: Mapping[Any, Any], gradient: Tensor | None
    ) -> list[tuple[int, int]] | None:
        """Ranges of the parameter's bytes that step one after the other; None where it steps as a whole."""
        if self._part_bytes is None or parameter.nbytes <= self._part_bytes:
            return None
        elements = max(1, self._part_bytes // parameter.itemsize // CUT_ELEMENTS) * CUT_ELEMENTS
        others = [tensor for tensor in state_tensors(state, parameter) if tensor.shape == parameter.shape]
        others += [] if gradient is None else [gradient]
        if parameter.numel() <= elements or not all(tensor.is_contiguous() for tensor in (parameter, *others)):
            return None
        if any((parked := parked_of(tensor)) is not None and parked.is_held for tensor in others):
            return None  # who has the address reads there
        size = elements * parameter.itemsize
        return [(begin, min(begin + size, parameter.nbytes)) for begin in range(0, parameter.nbytes, size)]

    def compute(
        self, parameter: Tensor, name: str, update: Update, read_ahead: Callable[[Update, int], object]
    ) -> None:
        """Compute the update of a parameter, which is called ``name``: ``read_ahead`` begins to read for its next part.

        After an error of the optimizer's class, the update is given up, as in memory.
        """
        if update.is_torn:
            raise StorageError("The state of a part that was updated could not be stored.")
        if update.done == 0:
            update.spans = self.spans(parameter, update.state, update.gradient)
        spans = update.spans
        before = parameter._version
        if update.is_computed:  # and was interrupted then
            changes = 0
            self._end(parameter, name, update)
        elif spans is None:
            self._compute_whole(parameter, name, update)
            changes = parameter._version - before
        else:
            changes = self._compute_parts(parameter, name, update, spans, read_ahead)
        parked = parked_of(parameter)
        if parked is not None:
            parked.note_change()
        if changes:  # fused steps count none
            # As often as in memory, where an update is one step.
            version = before - update.counted + changes
            torch._C._autograd._unsafe_set_version_counter((parameter,), (version,))

    def _compute_whole(self, parameter: Tensor, name: str, update: Update) -> None:
        state = update.state
        needed = state_tensors(state, parameter)
        guard.settle(needed)
        moved = [parked for tensor in needed if (parked := parked_of(tensor)) is not None]
        for parked in moved:
            parked.begin_to_read()
        gradient = _Part.whole(update.gradient)
        for parked in moved:
            parked.come()
        live = gradient_of(parameter)
        set_gradient(parameter, gradient.tensor)
        version = gradient.tensor._version
        try:
            its = {parameter: state[parameter]} if parameter in state else {}
            after = self.shadow.step([{**update.options, "params": [parameter]}], its, update.context.attributes)
        except Exception:
            update.is_given_up = True  # the class has raised an error, as it does in memory: the step is not taken
            raise
        finally:
            set_gradient(parameter, live)
        for parked in moved:
            parked.note_change()  # fused steps count none
        if parameter in after:
            state[parameter] = after[parameter]
        update.is_computed = True
        gradient.release(gradient.tensor if update.unscales or gradient.tensor._version != version else None)
        self._end(parameter, name, update)

    def _compute_parts(
        self,
        parameter: Tensor,
        name: str,
        update: Update,
        spans: list[tuple[int, int]],
        read_ahead: Callable[[Update, int], object],
    ) -> int:
        state, changes = update.state, 0
        flat, size = parameter.view(-1), parameter.itemsize
        while update.done < len(spans):
            span = [at // size for at in spans[update.done]]
            target = flat[slice(*span)].detach()
            its: dict[str, Any] = state.get(parameter, {})  # which others may hold, also while it is empty
            parts = {} if _are_new(its) else {key: _Part.of(value, parameter, *span) for key, value in its.items()}
            gradient = _Part.of(update.gradient, parameter, *span)
            assert gradient is not None
            read_ahead(update, update.done + 1)  # arrives while this part is computed
            target.grad = gradient.tensor
            version, counted = target.grad._version, parameter._version
            before = {key: captured(its[key]) if part is None else part.tensor for key, part in parts.items()}
            try:
                after = self.shadow.step(
                    [{**update.options, "params": [target]}],
                    {target: before} if parts else {},
                    update.context.attributes,
                ).get(target)
            except Exception:
                update.is_given_up = update.done == 0  # of the parts before, the step is taken
                raise
            update.is_torn = True
            changes = parameter._version - counted
            self._put_part(parameter, name, its, after or {}, parts, span, update.done + 1 == len(spans))
            if after and parameter not in state:
                state[parameter] = its
            gradient.release(target.grad if update.unscales or target.grad._version != version else None)
            update.is_torn = False
            update.done += 1
            self._store.throttle()
            signals_deferred.deliver()
        self._end(parameter, name, update)
        return changes

    def _end(self, parameter: Tensor, name: str, update: Update) -> None:
        """All is computed, and all parts that have changed are stored: the state leaves memory."""
        for tensor in (update.gradient, *state_tensors(update.state, parameter)):
            moved = parked_of(tensor)
            if moved is not None and moved.is_being_made:
                moved.is_being_made = False
            if moved is not None and moved.parts.are_written:
                moved.parts.end()
                if isinstance(moved, ParkedGradient):  # what was stored was multiplied
                    moved.factors, moved.norm = (), None
        self.park(parameter, name, update.state)

    def _put_part(
        self,
        parameter: Tensor,
        name: str,
        its: dict[str, Any],
        after: Mapping[str, Any],
        parts: "Mapping[str, _Part | None]",
        span: list[int],
        is_last: bool,
    ) -> None:
        """Let ``after`` be the state of a part: numbers for each element where it belongs, what is the same for all parts
        once, after the last one.
        """
        for key, value in after.items():
            part = parts.get(key)
            of_elements = isinstance(value, Tensor) and value.dim() == 1 and value.numel() == span[1] - span[0]
            if part is None and of_elements:
                if key not in its:
                    like = torch.empty(parameter.shape, dtype=value.dtype, device="meta")
                    its[key] = _empty_away(like, parameter.device, f"the state of {name}", self._store)
                part = _Part.empty(its[key], *span)
            if part is not None:
                part.put(value)
            elif key not in its:
                its[key] = value
            elif is_last and isinstance(value, Tensor) and isinstance(its[key], Tensor):
                its[key].copy_(value)
            elif is_last:
                its[key] = value


class _Part:
    """The elements from ``begin`` to ``end`` of a tensor, flat: where they are in memory, or in a slab of the tier."""

    def __init__(self, parked: Parked | None, first_byte: int, slab: Slab | None, tensor: Tensor):
        self.tensor = tensor
        self._parked, self._first_byte, self._slab = parked, first_byte, slab

    @classmethod
    def of(cls, value: Any, parameter: Tensor, begin: int, end: int) -> "_Part | None":
        """Those of a tensor of the parameter's shape; None for anything else."""
        if not isinstance(value, Tensor) or value.shape != parameter.shape:
            return None
        found = cls._away(value, begin * value.itemsize, end * value.itemsize)
        return found or cls(None, 0, None, value.view(-1)[begin:end].detach())

    @classmethod
    def whole(cls, tensor: Tensor) -> "_Part":
        """All of them, in the tensor's shape."""
        part = cls._away(tensor, 0, tensor.nbytes)
        if part is None:
            return cls(None, 0, None, tensor)
        part.tensor = part.tensor.as_strided(tensor.shape, tensor.stride())
        return part

    @classmethod
    def _away(cls, tensor: Tensor, first: int, last: int) -> "_Part | None":
        """The elements in these bytes of a tensor that is away: of a gradient, multiplied with its factors. None where the
        tensor is in memory, then with its own factors.
        """
        parked = parked_of(tensor)
        if parked is None or not parked.is_away:
            guard.settle([tensor])
            if parked is not None:
                parked.come()
            return None
        slab = parked.parts.load(first, last - first)
        content = slab.content[: last - first].view(tensor.dtype).to(tensor.device)
        return cls(parked, first, slab, scaled(content, parked.factors if isinstance(parked, ParkedGradient) else ()))

    @classmethod
    def empty(cls, tensor: Tensor, begin: int, end: int) -> "_Part":
        """Those of a tensor that has no values yet."""
        parked = parked_of(tensor)
        if parked is None or not parked.is_away:
            return cls(None, 0, None, tensor.view(-1)[begin:end].detach())
        nbytes = (end - begin) * tensor.itemsize
        slab = parked.store.new_slab(nbytes)
        return cls(parked, begin * tensor.itemsize, slab, slab.content[:nbytes].view(tensor.dtype))

    def put(self, value: Tensor) -> None:
        """Let these be the elements."""
        if self._parked is None:
            if value.data_ptr() != self.tensor.data_ptr():
                self.tensor.copy_(value)
            return
        assert self._slab is not None
        content = self._slab.content[: value.nbytes].view(value.dtype)
        if value.data_ptr() != content.data_ptr():
            content.as_strided(value.shape, value.stride()).copy_(value)
        self._parked.parts.write(self._first_byte, self._slab)

    def release(self, changed: Tensor | None) -> None:
        """The elements are not needed any more; they were ``changed`` into these, if they were."""
        if changed is not None and self._parked is not None and self._parked.tensors:
            self.put(changed)
        elif self._slab is not None and self._parked is not None:
            self._parked.store.recycle(self._slab)


def _are_new(its: Mapping[str, Any]) -> bool:
    """Whether a state is being made, by the first update, which was interrupted."""
    tensors = (value for value in its.values() if isinstance(value, Tensor))
    return any((parked := parked_of(tensor)) is not None and parked.is_being_made for tensor in tensors)


def _empty_away(like: Tensor, device: torch.device, name: str, store: Store) -> Tensor:
    """A tensor as ``like`` on ``device``, whose bytes are to be stored in parts: it takes no memory until then. In memory,
    where the tier has no room.
    """
    nbytes = like.numel() * like.element_size()
    slot = store.try_reserve(whole_pages(nbytes))
    with outside():  # it is not to be counted
        if device.type == "cpu":
            storage = Slab(nbytes).storage(nbytes)  # whose pages take memory when they are touched
        elif slot is None:
            storage = torch.UntypedStorage(nbytes, device=device)
        else:
            storage = torch._C._construct_storage_from_data_pointer(0, device, nbytes)  # type: ignore[assignment]
            swap_pointer(storage, torch.UntypedStorage(0, device=device))
        made = torch.empty(0, dtype=like.dtype, device=device).set_(storage, 0, like.shape, like.stride())
        parked = Parked(made, name, store)
        if slot is None:
            parked.stays = True
        else:
            parked.parts.begin(slot, storage)
            parked.where = Where.AWAY
            if device.type != "cpu":
                guard.put(made, parked)
    parked.is_being_made = True
    return made
