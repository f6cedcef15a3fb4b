"""The engine: autograd's pack and unpack hooks on top of records, transfer and prefetch.

Note: when saved bytes are final
    An operation saves its arguments before it runs, and a few then write to one without a new version: RReLU fills its
    noise, batch norm moves its statistics. Autograd refuses such an argument where it requires a gradient. So what does is
    stored at once, and everything else when its operation has run: when the next one saves, when a forward ends, or when
    backward begins, whichever comes first.
"""

import logging
import threading
import weakref
from typing import Protocol

import torch
from torch import nn

from hf_offload.engine.device import Device
from hf_offload.engine.movers import Mover
from hf_offload.engine.prefetch import Prefetcher, Tape
from hf_offload.engine.record import PackedView, Record, RecordIndex, root_of
from hf_offload.engine.selection import WeightIndex, record_span
from hf_offload.engine.staged import StagedMover
from hf_offload.engine.stats import OffloadStats
from hf_offload.engine.transfer import Transfer
from hf_offload.interrupts import signals_deferred
from hf_offload.plan import rules
from hf_offload.plan.plan import Plan
from hf_offload.settings.sizes import format_bytes
from hf_offload.state.saved import KeptTensor, SavedWeight, modified, saved_weight
from hf_offload.storage.buffers import whole_storage
from hf_offload.storage.handling import Handling
from hf_offload.storage.service import ACTIVATIONS
from hf_offload.storage.tier import Tier
from hf_offload.tensors import byte_span, is_plain

logger = logging.getLogger(__name__)

# Views of a storage whose address is not a multiple of this could not be laid over a copy.
_STORAGE_ALIGNMENT = 16
# Operations are noted in a graph (make_fx, torch.func.linearize), and the engine's would be, too.
_TRACING = torch._C._TorchDispatchModeKey.PROXY

Handle = KeptTensor | PackedView | SavedWeight


class Observer(Protocol):
    """Is notified of what is saved, and when it is needed."""

    def packed(self, record: Record) -> None:
        """``record`` is new."""

    def left(self, tensor: torch.Tensor, min_bytes: int) -> None:
        """``tensor`` stays in memory, since it is smaller than ``min_bytes``."""

    def asked(self, record: Record) -> None:
        """Backward is about to use ``record``."""


class Engine:
    """Saved tensors of one model, on one device, in one tier.

    :meth:`pack` and :meth:`unpack` are the pair that :class:`torch.autograd.graph.saved_tensors_hooks` takes.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        device: Device,
        tier: Tier,
        ring_bytes: int | None = None,
        handling: Handling | None = None,
    ):
        self._handling = handling or Handling()
        self.stats = OffloadStats(tier)
        self.closed = False
        self._device = device
        self._weights = WeightIndex(model)
        ring = rules.RING_BYTES if ring_bytes is None else ring_bytes
        mover = Mover(tier) if device.is_host else StagedMover(device, tier, ring, self._on_failed_store)
        self.transfer = Transfer(device, tier, mover, self.stats)
        self.prefetch = Prefetcher(self.transfer)
        self.observer: Observer | None = None
        self._made_graph = False
        self._records = RecordIndex()
        self._nothing = torch.empty(0, device=device.torch_device)
        self._thread = _Thread()
        self._forward = 0
        self._reported_room = False
        self.apply_plan(plan)

    def apply_plan(self, plan: Plan) -> None:
        """Follow ``plan`` from now on; what is already packed is unaffected."""
        # Tensors without bytes have no memory of their own to tell them by.
        self._min_bytes = max(1, plan.min_bytes)
        self._tier_of = {unit: placement.tier for unit, placement in plan.placements.items()}
        self._default_tier = plan.default.tier
        self._keeping = plan.keeping
        self._write_behind_bytes = plan.write_behind_bytes
        self.prefetch.apply_plan(
            plan.read_ahead_bytes, plan.keeping.resident_bytes if plan.keeping else None, plan.most_ahead_bytes
        )

    # -- what an observer asks ----------------------------------------------------------------------------------------

    def resident_bytes(self) -> int:
        """Bytes of saved tensors that the engine holds in memory now."""
        self.transfer.reap()
        return self.transfer.ledger.resident_bytes

    def resident_storages(self) -> list[torch.UntypedStorage]:
        """That memory."""
        return self.transfer.resident_storages()

    def waited_s(self) -> float:
        """Seconds that the training has waited for the engine since it began, on the host or in streams."""
        return self.stats.waited_s + self.transfer.mover.stalled_s()

    def handled(self) -> tuple[float, int]:
        """Seconds that the training's threads were busy with tensors that move, without waits, and bytes of these on both
        ways, since the session began.
        """
        return self._handling.seconds(ACTIVATIONS) - self.stats.waited_s, 2 * self.stats.total.offloaded_bytes

    @property
    def awaits_backward(self) -> bool:
        """Whether graphs of forwards are alive whose backward has not begun: another forward now joins them."""
        self.transfer.reap()
        return self.transfer.live_records > 0 and not self.prefetch.tape.in_backward

    def made_graph(self) -> bool:
        """Whether a backward has made a graph of itself (``create_graph``) since the last call."""
        made, self._made_graph = self._made_graph, False
        return made

    def bandwidth(self) -> dict[str, tuple[float, float]]:
        """Bytes a second that each part of the tier has stored and loaded so far; zero where that is not known."""
        return {part.name: part.stats.bytes_per_s for part in self.transfer.tier.parts}

    # -- where forward is ---------------------------------------------------------------------------------------------

    @property
    def unit(self) -> str:
        """Name of the module whose forward runs in this thread."""
        return self._thread.unit

    @unit.setter
    def unit(self, name: str) -> None:
        self._thread.unit = name

    @property
    def backward(self) -> int:
        """Autograd's number of the backward in which this thread has entered the hooks; -1 outside of any."""
        return self._thread.backward

    @backward.setter
    def backward(self, number: int) -> None:
        self._thread.backward = number

    def begin_forward(self) -> None:
        """Another forward of the whole model begins: its inputs may be buffers that have been filled again."""
        self._forward += 1

    # -- autograd's hooks: where a compiled model breaks its graph, they would be compiled, too ------------------------

    @torch._disable_dynamo
    def pack(self, tensor: torch.Tensor) -> Handle:
        """Called when an operation saves ``tensor`` for backward."""
        if self._thread.unfinished and self._thread.operation != torch.autograd._get_sequence_nr():
            self.operation_ended()
        weight = saved_weight(tensor)
        if weight is not None:
            return weight
        if not is_plain(tensor) or tensor.device != self._device.torch_device or tensor.is_inference():
            return _keep(tensor)
        if self.closed or torch._C._current_graph_task_id() != self._thread.backward:
            # Saved in a recompute, or for a double backward: needed again at once.
            return self._keep(tensor)
        nbytes = tensor.nbytes
        if nbytes < self._min_bytes:
            if self.observer is not None:
                self.observer.left(tensor, self._min_bytes)
            return self._keep(tensor)
        if tensor in self._weights:
            return _keep_plain(tensor)
        if torch._C._get_dispatch_mode(_TRACING) is not None or self._device.is_capturing():
            # A replay would neither move it nor wait for it.
            return self._keep(tensor)
        return self._pack_activation(tensor)

    @signals_deferred
    def _pack_activation(self, tensor: torch.Tensor) -> Handle:
        with self._handling.of(ACTIVATIONS):
            if self.prefetch.tape.in_backward:
                self._begin_tape()
            begin, end = byte_span(tensor)
            if end - begin < self._min_bytes:
                return self._keep(tensor)  # an expanded tensor is smaller than it looks
            storage = tensor.untyped_storage()
            record = self._records.find(tensor, storage, begin, end, self._forward)
            if record is not None:
                # Also where this unit is to keep what it saves: a second hold would pin what the first unit moves.
                self.stats.step.deduplicated_bytes += tensor.nbytes
            else:
                keep = self._tier_of.get(self.unit, self._default_tier) is None
                if (keep and self._keeping is None) or storage.data_ptr() % _STORAGE_ALIGNMENT:
                    return self._keep(tensor)
                record = self._new_record(tensor, storage, begin, end, keep)
                if self.observer is not None:
                    self.observer.packed(record)
            return PackedView(record, tensor, begin - record.start)

    @torch._disable_dynamo
    def unpack(self, handle: Handle) -> torch.Tensor:
        """Called when backward needs what :meth:`pack` packed. Any thread, any number of times."""
        if self._thread.unfinished:
            self.operation_ended()
        if torch.is_grad_enabled():
            self._made_graph = True
        if not isinstance(handle, PackedView):
            return handle.unpack()
        return self._unpack_view(handle)

    @signals_deferred
    def _unpack_view(self, handle: PackedView) -> torch.Tensor:
        with self._handling.of(ACTIVATIONS):
            record = handle.record
            version = record.probe._version
            if version != record.version:
                raise modified(version, record.version, str(handle.dtype), handle.size, record.unit)
            is_first = not record.tape.in_backward
            if is_first:
                self._report_room(record.tape)
            if self.observer is not None:
                self.observer.asked(record)
            self.prefetch.asked(record)
            tensor = handle.view(*self.transfer.fetch(record))
            self.transfer.reap()
            self.prefetch.fill(record.tape)
            if is_first:  # what is not needed early goes now: nothing is stored any more that would push it out
                self.transfer.mover.advance(0)
            self.transfer.evict_beyond(rules.consumed_bytes(self.prefetch.window(record.tape), record.tape.largest))
            return tensor

    @signals_deferred
    def operation_ended(self) -> None:
        """The operation that packed last in this thread has run: what it may have written to is final, and can be stored."""
        thread = self._thread
        with self._handling.of(ACTIVATIONS):
            records, thread.unfinished = thread.unfinished, []
            for reference in records:
                record = reference()
                if record is not None and not record.wanted:  # by another thread's backward
                    self._place(record)

    # -- records ------------------------------------------------------------------------------------------------------

    def _keep(self, tensor: torch.Tensor) -> KeptTensor:
        self.stats.step.kept_bytes += tensor.nbytes
        return _keep_plain(tensor)

    def _begin_tape(self) -> None:
        self.prefetch.begin_tape()
        self._weights.refresh()

    def _new_record(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, begin: int, end: int, keep: bool
    ) -> Record:
        whole = storage.nbytes()
        begin, end = record_span(begin, end, whole)
        probe = tensor.detach()
        probe.data = self._nothing  # shares the version counter, holds no storage
        self.transfer.reap()
        buffer = whole_storage(tensor)
        if end - begin < whole:
            buffer = buffer[begin:end]
        record = Record(buffer, probe, weakref.ref(root_of(tensor)), begin, self.unit, self.transfer.finalized)
        record.forward = self._forward
        del buffer
        if self._keeping is not None:
            keep = keep and self.prefetch.tape.may_keep(self.unit, record.nbytes, self._keeping)
            self.transfer.make_room(self._keeping.resident_bytes - record.nbytes, self._write_behind_bytes)
        self.transfer.adopt(record)
        with self.transfer.lock:
            self._records.add(storage, record)
        stays = self.prefetch.packed(record, keep)
        if keep:
            self.stats.step.kept_bytes += record.nbytes
        if stays and not keep:
            self.stats.step.offloaded_bytes += record.nbytes
            self.transfer.keep_for_backward(record)
        elif tensor.requires_grad:
            self._place(record)
        else:
            self._thread.unfinished.append(weakref.ref(record))
            self._thread.operation = torch.autograd._get_sequence_nr()
        return record

    def _place(self, record: Record) -> None:
        if record.ordinal in record.tape.kept:
            self.transfer.keep(record)
        else:
            # Only a unit that the plan names has a place of its own; others go wherever the tier has room first.
            self.transfer.store(record, self._write_behind_bytes, self._tier_of.get(record.unit))

    def _report_room(self, tape: Tape) -> None:
        """Forward has ended: now it is known how many bytes it really saves. Say so once if they found no room."""
        if self.stats.step.refused_bytes and not self._reported_room:
            self._reported_room = True
            refused = sum(record.nbytes for found in tape.records if (record := found()) and record.slot is None)
            logger.warning(
                "This forward saved %s that could be offloaded; the %s tier took %s, and %s stay in memory. Make room "
                "there (a larger budget, another directory), or use a smaller batch.",
                format_bytes(tape.nbytes),
                self.transfer.tier.name,
                format_bytes(tape.nbytes - refused),
                format_bytes(refused),
            )

    # -- the end ------------------------------------------------------------------------------------------------------

    def _on_failed_store(self, nbytes: int, unit: str, error: BaseException) -> None:
        self.transfer.refused(nbytes, unit, error)

    def end_step(self) -> None:
        """Close the running step's statistics."""
        self.transfer.reap()
        self.stats.end_step(self.transfer.ledger.resident_bytes)

    def enter_thread(self) -> None:
        """Called first in a thread of the engine's own, which has no device yet."""
        self._device.make_current()

    def close(self) -> None:
        """Take in no more tensors. The tier stays open as long as graphs still need it."""
        if not self.closed:
            self.closed = True
            self.transfer.close_when_unused()


class _Thread(threading.local):
    """Where forward is in a thread."""

    def __init__(self) -> None:
        self.unit = "the model"
        self.backward = -1
        self.operation = -1  # autograd numbers its nodes, and an operation makes its own before it saves anything
        self.unfinished: list[weakref.ref[Record]] = []


def _keep(tensor: torch.Tensor) -> KeptTensor:
    # Never the tensor itself (see record.py), except a Parameter: a leaf holds no graph, and ZeRO and FSDP, which
    # swap its data, rely on autograd seeing the new one.
    return KeptTensor(tensor, tensor._version) if isinstance(tensor, nn.Parameter) else _keep_plain(tensor)


def _keep_plain(tensor: torch.Tensor) -> KeptTensor:
    # is_plain() has ruled a Parameter out already, and isinstance() of a Parameter runs in Python.
    return KeptTensor(tensor.detach(), tensor._version)
