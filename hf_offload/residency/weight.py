"""One parameter whose memory comes and goes.

Note: a hull
    Between uses, the parameter has the memory of a hull: a tensor of the same shape, strides and dtype without any bytes. Its
    identity, version, gradient and hooks stay. PyTorch keeps what still needs the former memory: a view that is alive keeps
    it, and the parameter stays in memory then.
"""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import xxhash
from torch import Tensor, nn

from hf_offload.errors import OffloadError, StorageError, WriteLimitError
from hf_offload.parameters.casts import fill_cast
from hf_offload.parameters.contexts import outside
from hf_offload.parameters.demand import housed
from hf_offload.parameters.derivation import Derivation
from hf_offload.parameters.given import GivenCopy
from hf_offload.parameters.holders import hull_of, storage_holders
from hf_offload.parameters.saved import Former, whereabouts
from hf_offload.parameters.waiting import residence_of
from hf_offload.storage.buffers import whole_storage
from hf_offload.storage.kept import KeptRange, KeptSlot
from hf_offload.storage.mapped import MappedFiles
from hf_offload.storage.stored import Store, Stored

if TYPE_CHECKING:
    from hf_offload.residency.residency import Residency


class Weight:
    """The memory of one parameter: there, or on the tier. Calls hold the lock of ``residency``, or take it.

    Attributes:
        name: For messages.
        number: That of the weight in the order of uses.
        uses: How many use it now; it stays in memory then.
        stays: It is not to leave memory any more: its address is known.
        nbytes: Bytes of its memory.
        derivation: What makes the value to use from the one that the tier has.
        former: The memory of views in graphs, should the parameter get other memory.
    """

    def __init__(self, parameter: nn.Parameter, name: str, number: int, residency: "Residency"):
        self.name = name
        self.number = number
        self.residency = residency
        self.uses = 0
        self.stays = False
        self.derivation: Derivation | None = None
        self.former = Former()
        self._parameter: Callable[[], nn.Parameter | None] = weakref.ref(parameter)
        self._stored: Stored | None = None
        self._buffer: Tensor | None = None  # what the parameter lies in, and the tier has, too
        self._changed = True  # since it was on the tier
        self._exposed = False  # to views, NumPy arrays and the like, whose writes do not show
        self._digest = b""  # of what is on the tier: 128 bits, which tell whether such a write has come
        self._hull: Tensor | None = None
        self._copy: weakref.ref[Tensor] | None = None  # for a state dict
        self._copies: list[GivenCopy] = []
        self._memory: int | None = None  # where it is; None while it is on the tier only
        self._version = 0
        self._note_memory(parameter)

    # -- Residence ------------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        self.residency.enter(self)

    def leave(self, changed: bool = False) -> None:
        self.residency.leave(self, changed)

    def note_address(self) -> None:
        if self.uses == 1:  # else an operation that goes on uses it
            self.stays = True

    def let_go(self) -> None:
        self.residency.let_go(self)

    def saved(self) -> Tensor | None:
        parameter = self._parameter()
        if parameter is None or not is_dense(parameter):  # which stays
            return None
        return self.residency.saved(self)

    def keep(self) -> KeptRange | None:
        return self.residency.keep(self)

    def derive(self, derivation: Derivation) -> None:
        if self.derivation is not None:
            self.enter()  # the value to use by what made it so far
            self.leave(changed=True)
        derivation.kept()
        self.derivation = derivation

    def count_change(self) -> None:
        """Its version is to be another one; the value is not that of anybody else."""
        parameter = self._parameter()
        if parameter is not None:
            with torch._C.DisableTorchFunctionSubclass():
                is_known = parameter._version == self._version
                torch.autograd.graph.increment_version(parameter)
                if is_known:
                    self._version = parameter._version

    @property
    def is_mostly_away(self) -> bool:
        return self.residency.total_bytes > 2 * self.residency.limit_bytes

    @property
    def may_be_seen(self) -> bool:
        return self.is_in_memory and (self.uses > 0 or self.stays or self.is_held)

    @property
    def is_held(self) -> bool:
        """Whether others may read its memory without asking: views of it, NumPy arrays, other processes."""
        parameter = self._parameter()
        if parameter is None or self._memory is None:
            return False
        if self.stays:
            return True
        if parameter.device.type == "cpu" and parameter.is_shared():
            return True
        return storage_holders(parameter) > (1 if self._buffer is None else 2)

    # -- what residency asks --------------------------------------------------------------------------------------------

    @property
    def is_in_memory(self) -> bool:
        """Whether its memory is there."""
        return self._memory is not None

    def may_leave(self) -> bool:
        """Whether nothing needs its memory now."""
        parameter = self._parameter()
        return (
            self.uses == 0
            and not self.stays
            and self._memory is not None
            and parameter is not None
            and residence_of(parameter) is self
            and not self.is_held
            and is_dense(parameter)
            and parameter.untyped_storage().nbytes() == self._storage_bytes  # which was resized otherwise
        )

    def note_changes(self, changed: bool) -> None:
        """It was used, and ``changed`` perhaps in a way that does not show."""
        parameter = self._parameter()
        if parameter is None:
            return
        replaced = parameter.untyped_storage()._cdata != self._memory
        is_fixed = self.derivation is not None and self.derivation.is_fixed
        other = is_fixed and (replaced or _layout(parameter) != self._layout)
        if is_fixed and (other or parameter._version != self._version):
            if self._memory is not None and self._stored is not None:
                whereabouts.remove(self._memory, self)
                self._memory = self._buffer = None
                self.bring()
            how = "given other memory, such as by .data = ... or half()" if other else "changed in place"
            raise OffloadError(
                f"The weight {self.name} was {how}, while a loss is computed that goes on from what it was: leave that out, "
                "change it between steps, or let weights be in memory (params='none')."
            )
        if replaced:
            if self._memory is not None:
                whereabouts.remove(self._memory, self)
            self._buffer = self._stored = self._hull = None
            self._note_memory(parameter)
        if changed or replaced or parameter._version != self._version:
            self._changed = True
            self._copy = None
            self._version = parameter._version
        elif self.is_held:
            self._exposed = True
            self._copy = None

    def send(self, store: Store) -> None:
        """Give its memory up for a hull, and write what has changed of it."""
        parameter = self._parameter()
        if parameter is None or self._memory is None:
            return
        buffer, stored = self._buffer, self._stored
        if self.derivation is not None and not self.derivation.may_go:
            self._changed = True
        elif self.derivation is not None and self.derivation.may_come_again:
            self._changed = self._exposed = False  # what is kept stays as it is
        if self._changed or self._exposed:
            buffer = self._bytes(parameter) if buffer is None else buffer
            digest = xxhash.xxh3_128_digest(buffer.numpy().data)
            self._changed = self._changed or digest != self._digest
            self._exposed, self._digest = False, digest
        if self._changed:
            assert buffer is not None
            self._stored = Stored(store, buffer)
        self._layout = _layout(parameter)
        hull = self._hull
        if hull is None or hull.shape != parameter.shape or hull.dtype != parameter.dtype:
            hull = hull_of(parameter)
            self._hull = None if parameter.device.type == "cpu" else hull
        whereabouts.remove(self._memory, self)
        parameter.data = hull
        self._memory = self._buffer = None
        if self._changed:
            self._changed = False
            if self.derivation is not None:
                self.derivation.kept()
            del stored  # its room is free
            assert self._stored is not None
            self._stored.send()
        elif buffer is not None and stored is not None:
            stored.give_back(buffer)  # on an accelerator, the copy that was compared

    def bring(self) -> None:
        """Let its memory be there.

        Raises :class:`~hf_offload.errors.StorageError` if it cannot be read; it can be asked for again.
        """
        parameter = self._parameter()
        if parameter is None or self._memory is not None:
            return
        assert self._stored is not None
        comes_again = self.derivation is not None and self.derivation.may_come_again
        try:
            buffer = self._stored.take(last=False) if comes_again else self._stored.lend()
        except StorageError as error:
            raise StorageError(
                f"The weight {self.name} cannot be read back: go on from the last checkpoint. {error}"
            ) from error
        size, stride, dtype = self._layout
        flat = buffer.view(dtype)
        if parameter.device.type == "cpu":
            self._buffer = buffer
        else:
            flat = flat.to(parameter.device)
            self._stored.give_back(buffer)
        parameter.data = flat.as_strided(size, stride, 0)
        self._note_memory(parameter)
        if self.derivation is not None:
            self.derivation.arrived()

    def prepare(self) -> None:
        """It is in memory: let its value be the one to use."""
        derivation, parameter = self.derivation, self._parameter()
        if derivation is None or parameter is None or not derivation.is_due:
            return
        with outside():
            if self.may_be_seen:
                derivation.changes_in_sight()
            if derivation.is_lost:
                self._restore(derivation, parameter)
            if derivation.is_kept_next:
                self._derive(derivation, parameter)
                if self.may_leave():
                    self._keep(derivation, parameter)
                else:
                    derivation.copy(parameter.detach())
            self._derive(derivation, parameter)
            self._copy = None

    def _restore(self, derivation: Derivation, parameter: nn.Parameter) -> None:
        """Let the value that is kept be in memory again."""
        if derivation.may_go and self.may_leave():
            self.send(self.residency.store)
            self.bring()
            return
        assert self._stored is not None
        flat = self._stored.take(last=False).view(parameter.dtype)
        parameter.detach().copy_(flat.as_strided(parameter.size(), parameter.stride(), 0))
        derivation.arrived()

    def _derive(self, derivation: Derivation, parameter: nn.Parameter) -> None:
        if not derivation.is_due:
            return
        stored, buffer = self._stored, self._buffer
        if stored is not None and buffer is not None and not stored.is_safe_without(buffer):
            self._changed = True  # else the value that is kept would change
        derivation.derive(parameter.detach())
        self._version = parameter._version  # others have changed nothing

    def _keep(self, derivation: Derivation, parameter: nn.Parameter) -> None:
        """Write what is in memory, and let the parameter have a copy: what is written may not change."""
        store = self.residency.store
        written = self._bytes(parameter) if self._buffer is None else self._buffer
        fresh = parameter.detach().clone()
        assert self._memory is not None
        whereabouts.remove(self._memory, self)
        parameter.data = fresh
        self._buffer = None
        self._stored = Stored(store, written)
        self._digest = b""  # it was not taken
        self._note_memory(parameter)
        self._changed = self._exposed = False
        derivation.kept()
        self._stored.send()
        store.throttle()

    def read_ahead(self) -> bool:
        """Begin to read it, if there is room for that; false otherwise."""
        if self._memory is not None or self._stored is None or not self._stored.is_away:
            return True
        with outside():
            return self._stored.read_ahead()

    def hold(self) -> KeptRange | None:
        """What :meth:`keep` returns."""
        parameter = self._parameter()
        if parameter is None or not parameter.is_contiguous() or not parameter.numel():
            return None
        if self._memory is None:
            slot = None if self._stored is None else self._stored.keep()
        else:
            slot = self._held_from_memory(parameter)
        return None if slot is None else KeptRange(slot, 0, self.nbytes, self._digest or None)

    def _held_from_memory(self, parameter: nn.Parameter) -> KeptSlot | None:
        """Write what the tier has not got, while the parameter stays in memory, and hold it."""
        if self.derivation is not None and (self.derivation.is_due or self.derivation.may_come_again):
            return None
        self.note_changes(False)
        may_change_unseen = self.uses > 0 or self.is_held
        if self._changed or self._exposed or may_change_unseen or self.derivation is not None:
            content = self._bytes(parameter) if self._buffer is None else self._buffer
            digest = xxhash.xxh3_128_digest(content.numpy().data)
            if self._changed or digest != self._digest:
                self._changed = True
                self._stored = self._buffer = None  # its room is free
                store = self.residency.store
                buffer = store.new_buffer(self.nbytes).copy_(content)  # the parameter may change while it is written
                stored = Stored(store, buffer)
                try:
                    slot = stored.write()
                except WriteLimitError:
                    return None
                if slot is None:
                    return None
                self._stored, self._digest, self._changed = stored, digest, False
                if self.derivation is not None:
                    self.derivation.kept()
                self._exposed = may_change_unseen
                return slot
            self._exposed = may_change_unseen
        return None if self._stored is None else self._stored.keep()

    def copy(self, files: MappedFiles) -> Tensor:
        """A copy in a file that is mapped into memory: the same one while it is alive and the parameter is as it was."""
        if self._memory is not None:
            self.note_changes(False)
        if self.derivation is not None and self.derivation.is_due:
            self._copy = None
        found = None if self._copy is None else self._copy()
        if found is None:
            self.residency.enter(self)
            try:
                parameter = self._parameter()
                assert parameter is not None
                found = files.copy(parameter)
            finally:
                self.residency.leave(self, False)
            self._copy = None if self.is_held else weakref.ref(found)
            self._copies = [each for each in self._copies if each.is_alive]
            self._copies.append(GivenCopy(found))
        return found

    @property
    def has_copies(self) -> bool:
        """Whether a state dict holds any."""
        return any(each.is_alive for each in self._copies)

    def check_copies(self) -> None:
        """Raise :class:`~hf_offload.errors.OffloadError` if a copy was changed that would be the weight itself in memory."""
        if any(each.was_changed for each in self._copies):
            raise OffloadError(
                f"A tensor that state_dict() returned for the weight {self.name} was changed in place. In memory, that would "
                "have changed the weight, but this one is on a tier, and the tensor is a copy: change the parameter itself "
                "under torch.no_grad(), or take the state inside of session.weights()."
            )

    def check_source(self, source: Tensor) -> None:
        if not any(each.shares_memory(source) for each in self._copies):
            return
        parameter = self._parameter()
        assert parameter is not None
        self.enter()
        try:
            with outside():
                is_same = parameter.shape == source.shape and _has_bits_of(parameter.detach(), source.detach())
        finally:
            self.leave()
        if not is_same:
            raise OffloadError(
                f"The weight {self.name} is to be set to a tensor that state_dict() returned for it, and has changed since. "
                "In memory, that tensor would be the weight itself, with its present values, and nothing would change; this "
                "weight is on a tier, and the tensor is a copy of then. To go back to former values, load a copy: "
                "copy.deepcopy(model.state_dict()), taken then."
            )

    def release(self) -> None:
        """Let the parameter be a plain one, which is in memory for good."""
        parameter = self._parameter()
        if parameter is not None and self._memory is not None and residence_of(parameter) is self:
            fill_cast(parameter)
            whereabouts.remove(self._memory, self)
            housed(parameter, None)

    def forget(self) -> None:
        """Its parameter is another's from now on: hold no reference to it."""
        self._parameter = _nothing

    def _note_memory(self, parameter: nn.Parameter) -> None:
        self.nbytes = parameter.nbytes
        self._layout = _layout(parameter)
        self._storage_bytes = parameter.untyped_storage().nbytes()
        self._version = parameter._version
        self._memory = whereabouts.put(parameter, self)

    def _bytes(self, parameter: nn.Parameter) -> Tensor:
        """Its memory as bytes on the host, without a copy where it has a storage of its own there."""
        data = parameter.detach()
        if data.device.type == "cpu" and data.untyped_storage().nbytes() == self.nbytes:
            return whole_storage(data)
        flat = data.as_strided((data.numel(),), (1,))
        return (flat.clone() if data.device.type == "cpu" else flat.to("cpu")).view(torch.uint8)


def _nothing() -> None:
    return None


def _has_bits_of(tensor: Tensor, other: Tensor) -> bool:
    one, two = (each.to("cpu").contiguous().view(-1).view(torch.uint8) for each in (tensor, other))
    return torch.equal(one, two)


def _layout(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.size(), tensor.stride(), tensor.dtype


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements lie one behind the other, in whichever order."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return tensor.numel() > 0
