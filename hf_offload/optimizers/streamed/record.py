"""One streamed parameter: its state, its gradient and the update it waits for."""

import dataclasses
import weakref
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor, nn

from hf_offload.errors import OffloadError, StorageError
from hf_offload.optimizers.streamed.given import GivenStates
from hf_offload.optimizers.streamed.shadow import CUT_ELEMENTS, pieces
from hf_offload.parameters.contexts import StepContext
from hf_offload.parameters.demand import demanded
from hf_offload.parameters.waiting import demand_of
from hf_offload.storage.kept import KeptRange, KeptSlot
from hf_offload.storage.packing import Packing
from hf_offload.storage.stored import Store, Stored, as_bytes

if TYPE_CHECKING:
    from hf_offload.optimizers.streamed.streaming import Streaming

SMALLEST_STATE_BYTES = 4096
"""Smaller parts of a state, such as counters, stay in memory."""

_UPDATE_LATER = (
    "go on from the last checkpoint, with max_grad_norm=1e9, which clips nothing and updates after backward, or without "
    "update_in_backward()."
)


class PartState:
    """The optimizer's state of one part of a parameter, on the tier between two updates."""

    def __init__(self) -> None:
        self._packing: Packing | None = None
        self._stored: Stored | None = None
        self._digests: dict[str, bytes] = {}  # of its tensors, as they were written

    @property
    def nbytes(self) -> int:
        """Bytes that are on the tier."""
        return 0 if self._packing is None else self._packing.tensor_bytes

    def read_ahead(self) -> None:
        """Begin to read it."""
        if self._stored is not None:
            self._stored.read_ahead()

    def load(self) -> None:
        """Wait until it is in host memory: :meth:`take` then waits for nothing."""
        if self._stored is not None:
            self._stored.load()

    def take(self, device: torch.device, last: bool) -> tuple[dict[str, Any] | None, Tensor | None]:
        """The state, whose tensors are views of the buffer that comes with it; the ``last`` time, it is gone from here. None
        before the first one is put here.
        """
        if self._packing is None:
            return None, None
        if self._stored is None:
            return self._packing.views(torch.empty(0, dtype=torch.uint8)), None
        buffer = self._stored.take(last).to(device)
        if last:
            self._stored = None
        return self._packing.views(buffer), buffer

    def put(
        self,
        state: dict[str, Any] | None,
        before: dict[str, Any] | None,
        buffer: Tensor | None,
        store: Store,
        device: torch.device,
    ) -> None:
        """Let ``state``, which was ``before``, in ``buffer``, be what :meth:`send` sends."""
        if state is None:
            self._packing = self._stored = None
            return
        if self._packing is None or before is None or not self._packing.keep(state, before):
            self._packing = Packing(state, SMALLEST_STATE_BYTES, device)
            buffer = None
        if self._packing.nbytes == 0:
            self._stored = None
            return
        if buffer is None:
            buffer = store.new_buffer(self._packing.nbytes)
            self._packing.fill(buffer, state)
        content = as_bytes(buffer)
        self._digests = {}
        if store.storage.takes_digests:
            self._digests = {
                name: xxhash.xxh3_128_digest(content[begin : begin + like.nbytes].numpy().data)
                for name, (begin, like) in (self._packing.places or {}).items()
            }
        self._stored = Stored(store, content)

    def send(self) -> None:
        """Begin to write it, once."""
        if self._stored is not None:
            self._stored.send()

    def keep(self) -> "KeptPart | None":
        """Hold it where it is on a drive; None if a part of it is anywhere else."""
        packing = self._packing
        if packing is None:
            return KeptPart([], None, {}, {}, {})
        if packing.places is None:
            return None
        slot = None if self._stored is None else self._stored.keep()
        if slot is None and packing.places:
            return None
        return KeptPart(packing.names, slot, packing.places, packing.rest, self._digests)


@dataclasses.dataclass(frozen=True)
class KeptPart:
    """The state of a part with these ``names``: tensors that lie in ``slot``, as :attr:`Packing.places` has them, with
    digests where these were taken, and the ``rest``.
    """

    names: list[str]
    slot: KeptSlot | None
    places: dict[str, tuple[int, Tensor]]
    rest: dict[str, Any]
    digests: dict[str, bytes]

    def range_of(self, name: str) -> KeptRange:
        """The bytes of one of the tensors."""
        begin, like = self.places[name]
        assert self.slot is not None
        return KeptRange(self.slot, begin, begin + like.nbytes, self.digests.get(name))


class StoredGradient:
    """A gradient on the tier, in the parts of its parameter. Parts that are None are zeros.

    Attributes:
        factors: What it is still to be multiplied with, one after the other: by clipping.
        norm: Its 2-norm without the ``factors``, if it was computed.
    """

    def __init__(
        self,
        parts: list[Stored | None],
        sizes: list[int],
        dtype: torch.dtype,
        device: torch.device,
        norm: Tensor | None = None,
    ):
        self.factors: tuple[Tensor, ...] = ()
        self.norm = norm
        self._parts = parts
        self._applied = [0] * len(parts)  # factors that a part was multiplied with before it was stored
        self._sizes = sizes
        self._dtype = dtype
        self._device = device

    def part(self, number: int, last: bool, factors: tuple[Tensor, ...]) -> Tensor:
        """One part, flat, times ``factors``. The ``last`` time, it is gone from here."""
        stored = self._parts[number]
        if stored is None:
            gradient = torch.zeros(self._sizes[number], dtype=self._dtype, device=self._device)
        else:
            gradient = stored.take(last).view(self._dtype).to(self._device)
        return scaled(gradient, factors[self._applied[number] :])

    def add_to(self, number: int, arrived: Tensor) -> None:
        """Add one part to one that has ``arrived``, flat, as autograd accumulates gradients. It is gone from here then."""
        if self._parts[number] is None and not self.factors:
            arrived.add_(0.0)  # which makes 0.0 of -0.0, as the zeros would, and takes no memory for them
        else:
            torch.add(self.part(number, last=True, factors=self.factors), arrived, out=arrived)

    def load(self, number: int) -> None:
        """Wait until a part is in host memory: :meth:`part` then waits for nothing."""
        stored = self._parts[number]
        if stored is not None:
            stored.load()

    def send(self) -> None:
        """Begin to write all parts, once."""
        for stored in self._parts:
            if stored is not None:
                stored.send()

    def rewrite(self, number: int, part: Tensor, factors: tuple[Tensor, ...], store: Store) -> None:
        """Keep what has become of a part, which was multiplied with ``factors``: in memory, for it is rarely needed."""
        self._parts[number] = Stored(store, as_bytes(part))
        self._applied[number] = len(factors)
        self.norm = None

    def read_ahead(self, number: int) -> None:
        """Begin to read a part."""
        stored = self._parts[number]
        if stored is not None:
            stored.read_ahead()


class LostGradient:
    """A gradient that was lost, or is incomplete, since another one could not be added to it."""

    factors: tuple[Tensor, ...] = ()
    norm: Tensor | None = None

    def __init__(self, name: str, why: str):
        self._name = name
        self._why = why

    @property
    def error(self) -> StorageError:
        """What is to be done."""
        return StorageError(
            f"A part of the gradient of {self._name} was lost in backward: call zero_grad() and repeat it. {self._why}"
        )

    def part(self, number: int, last: bool, factors: tuple[Tensor, ...]) -> Tensor:
        raise self.error

    def add_to(self, number: int, arrived: Tensor) -> None:
        raise self.error

    def load(self, number: int) -> None:
        pass

    def rewrite(self, number: int, part: Tensor, factors: tuple[Tensor, ...], store: Store) -> None:
        pass

    def read_ahead(self, number: int) -> None:
        pass


Gradient = StoredGradient | LostGradient


def scaled(gradient: Tensor, factors: tuple[Tensor, ...]) -> Tensor:
    """``gradient``, multiplied in place as ``torch.nn.utils.clip_grad_norm_`` does it."""
    for factor in factors:
        torch._foreach_mul_([gradient], factor.to(gradient.device))
    return gradient


@dataclasses.dataclass
class Update:
    """A step that has been taken and not computed yet.

    ``gradient`` is None where it is in the parameter's ``.grad``. ``done`` is the number of parts that are updated. While it
    ``waits``, one change has been counted.
    """

    context: StepContext
    options: dict[str, Any]
    gradient: Gradient | None
    factors: tuple[Tensor, ...]
    done: int = 0
    waits: bool = False

    def begin_to_wait(self, parameter: nn.Parameter) -> None:
        """The parameter counts as changed from now on: backward of older graphs is an error."""
        torch.autograd.graph.increment_version(parameter)
        self.waits = True

    def count_once(self, parameter: nn.Parameter, changes: int, parts: int) -> None:
        """All ``parts`` are updated: let the parameter count the ``changes`` of one of them, as that of a run in memory."""
        too_many = changes * (parts - 1) + self.waits
        if changes and too_many:  # fused ones count none
            version = parameter._version - too_many
            torch._C._autograd._unsafe_set_version_counter((parameter,), (version,))


class Record:
    """One streamed parameter. All calls hold the lock of ``streaming``, or take it.

    Attributes:
        name: For messages.
        gradient: On the tier; None if there is none, or it is in memory.
        update: What is to be done before anyone reads the parameter.
        given: What others have of its state.
        spent_norm: 2-norm of the gradient that it was updated with in this step's backward.
        spent_options: The options of that update.
        arrivals: How many gradients came from reentrant checkpoints since the last step.
        comes_once: Whether one of them was all there was in a step before.
        is_dropped: Its gradient was to be replaced, or set to nothing, after that update and before the step.
        moved: Whether its state was put on the tier; else it is in the optimizer's ``state``, if there is one.
        state_stays: Others hold its state: the optimizer's step updates it in memory, there and then.
        is_doubtful: Its state was made for another dtype or shape, so that its next update may be an error.
    """

    def __init__(self, parameter: nn.Parameter, name: str, streaming: "Streaming", part_elements: int | None):
        self.name = name
        self.streaming = streaming
        self.parameter_ref = weakref.ref(parameter)
        self.moved = self.state_stays = self.is_doubtful = False
        self.gradient: Gradient | None = None
        self.update: Update | None = None
        self.spent_norm: Tensor | None = None
        self.spent_options: dict[str, Any] = {}
        self.is_dropped = self.comes_once = False
        self.arrivals = 0
        self.given = GivenStates(name)
        self.lay_out(parameter, part_elements)

    def lay_out(self, parameter: nn.Parameter, part_elements: int | None) -> None:
        """Cut it into parts, or leave it whole. There is no state then."""
        self.shape = parameter.shape
        self.dtype = parameter.dtype
        whole = part_elements is None or not parameter.is_contiguous() or parameter.numel() <= part_elements
        self.part_elements = None if whole else part_elements
        self.sizes = [parameter.numel()] if whole else [one.numel() for one in pieces(parameter, part_elements or 0)]
        self.states = [PartState() for _ in self.sizes]

    def fits(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter still is as it was laid out."""
        cut = self.part_elements is not None
        return (
            parameter.shape == self.shape
            and parameter.dtype == self.dtype
            and not (cut and not parameter.is_contiguous())
        )

    def refresh(self, parameter: nn.Parameter) -> None:
        """Let PyTorch ask before it uses the parameter, or not any more."""
        waits = self.update is not None or self.gradient is not None or self.spent_norm is not None
        if waits != (demand_of(parameter) is not None):
            demanded(parameter, self if waits else None)

    def end_backward(self) -> None:
        """What was updated in backward belongs to a step now."""
        parameter = self.parameter_ref()
        self.spent_norm, self.is_dropped = None, False
        if self.arrivals:
            self.arrivals, self.comes_once = 0, self.arrivals == 1
        if parameter is not None:
            self.refresh(parameter)

    def targets(self, parameter: nn.Parameter) -> list[Tensor]:
        """What the optimizer updates: the parameter, or its parts."""
        return [parameter] if self.part_elements is None else pieces(parameter, self.part_elements)

    def parts_of(self, gradient: Tensor) -> list[Tensor]:
        """A gradient in parts, flat, which share its memory if it is contiguous."""
        flat = gradient.detach().contiguous().view(-1)
        return [flat] if self.part_elements is None else pieces(flat, self.part_elements)

    def whole(self, gradient: "Gradient", last: bool) -> Tensor:
        """A gradient in one piece, in memory."""
        parts = [gradient.part(number, last, gradient.factors) for number in range(len(self.sizes))]
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        return flat.view(self.shape).data  # no view, which would hold the flat one

    @property
    def has_gradient(self) -> bool:
        """Whether a step is one of this parameter, by what is on the tier or was used up in backward."""
        return self.gradient is not None or self.spent_norm is not None

    @property
    def state_bytes(self) -> int:
        """Bytes of its state on the tier."""
        return sum(state.nbytes for state in self.states)

    def read_ahead(self, state_for_later: bool = False) -> None:
        """Begin to read what its update needs, as far as the window has room; without an update, with
        ``state_for_later``, its state.
        """
        if self.update is None and not state_for_later:
            return
        for number in range(0 if self.update is None else self.update.done, len(self.states)):
            self.states[number].read_ahead()
            if self.update is not None and self.update.gradient is not None:
                self.update.gradient.read_ahead(number)

    # -- Demand ---------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        self.streaming.finish_record(self)
        self.check_stepped()

    def overwrite(self) -> None:
        self.streaming.overwrite(self)

    def _finish_step(self) -> None:
        """A step that was interrupted still needs what is in ``.grad``."""
        if self.update is not None and self.update.gradient is None:
            self.streaming.finish_record(self)

    def check_stepped(self) -> None:
        """Raise :class:`~hf_offload.errors.OffloadError` for a parameter that was updated in a backward without a step."""
        if self.spent_norm is not None:
            raise OffloadError(
                f"{self.name} was updated in a backward that no step of the optimizer has followed, so that the weights are "
                "those of half a step: go on from the last checkpoint. If backward was not interrupted, something reads "
                "weights before the step: set max_grad_norm, which then updates after backward."
            )

    def check_gradient(self) -> None:
        """Raise :class:`~hf_offload.errors.OffloadError` where its gradient is to be read or changed, and is used up."""
        if self.spent_norm is not None:
            raise OffloadError(
                f"The gradient of {self.name} is to be read or changed before the step, and backward has updated {self.name} "
                f"with it already: {_UPDATE_LATER}"
            )

    def drop_gradient(self) -> None:
        """Its gradient is to be another one, or none: too late for a step that backward has taken."""
        self.is_dropped = self.is_dropped or self.spent_norm is not None

    def check_step(self, options: dict[str, Any]) -> None:
        """Raise :class:`~hf_offload.errors.OffloadError` where a step with these ``options`` would not do what backward has
        done.
        """
        if self.spent_norm is None:
            return
        if self.is_dropped:
            self.check_gradient()
        before = self.spent_options
        changed = [name for name in {**before, **options} if not _are_same(before.get(name), options.get(name))]
        if changed:
            raise OffloadError(
                f"The optimizer's {', '.join(changed)} changed between a backward, which has updated {self.name}, and its "
                f"step: {_UPDATE_LATER}"
            )

    def reveal_gradient(self) -> None:
        self._finish_step()
        self.streaming.gradients.reveal(self)

    def replace_gradient(self, zeros: bool) -> None:
        self.drop_gradient()
        self._finish_step()
        self.streaming.gradients.replace(self, zeros)


def _are_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def part_elements(part_bytes: int, itemsize: int) -> int:
    """Elements of a part of about ``part_bytes``."""
    return max(1, part_bytes // itemsize // CUT_ELEMENTS) * CUT_ELEMENTS
