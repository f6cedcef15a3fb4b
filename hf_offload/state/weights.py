"""The setting ``params``: which weights leave memory, how many stay, and where the rest goes."""

import logging
import weakref

import torch
from torch import Tensor, nn

from hf_offload.plan.rules import weights_window
from hf_offload.settings.schema import OffloadConfig
from hf_offload.settings.sizes import format_bytes
from hf_offload.state.contexts import outside
from hf_offload.state.parked import Parked
from hf_offload.state.refusals import refuse
from hf_offload.state.registry import can_leave, parked_of
from hf_offload.state.units import Units, unit_with, units_of
from hf_offload.storage.host_memory import ram_bytes
from hf_offload.storage.opening import named_directories, open_tier
from hf_offload.storage.service import WEIGHTS, RunStorage, share_storage, storage_of
from hf_offload.storage.store import Store
from hf_offload.structure.units import find_blocks
from hf_offload.tensors import nbytes_of

logger = logging.getLogger(__name__)

_KEPT_SHARE = 0.5
"""The part of a memory budget that weights may take."""
_BLOCKS = 2

_weights: "weakref.WeakKeyDictionary[nn.Module, Weights]" = weakref.WeakKeyDictionary()


class ParkedWeight(Parked):
    """The storage of a weight."""

    is_weight = True

    def done(self) -> None:
        """See :class:`~hf_offload.state.guard.Debt`. Its unit lets it leave."""

    def count_change(self, tensor: Tensor) -> None:
        """A change of ``tensor``, which is one of its, is counted now and made later."""
        before = self.present_version()
        torch.autograd.graph.increment_version(tensor)
        if before == self.version:
            self.version = self.present_version()
        if before == self.reads.version:
            self.reads.version = self.present_version()


class Weights:
    """The weights of one model that leave memory.

    Attributes:
        store: Where they go.
        is_home: The model was made with its weights on the tier: settings that leave them in memory do not bring them there.
        parked_bytes: Bytes of all of them, also once the model has gone.
    """

    def __init__(self, store: Store, limit_bytes: int, largest_bytes: int):
        self.store = store
        self.is_home = False
        self.parked_bytes = 0
        self._limit_bytes = limit_bytes
        self._largest_bytes = largest_bytes
        self._parked: dict[int, Parked] = {}
        self._units: Units | None = None
        self._moved_before = (0, 0)
        store.storage.members.add(self)

    def park(self, model: nn.Module, config: OffloadConfig) -> None:
        """Let all that may leave do so from now on, but for as many as fit."""
        model_ref, self_ref = weakref.ref(model), weakref.ref(self)
        units = self._units = units_of(model)
        units.refresh(model)
        units.handling, units.throttle = self.store.storage.handling, self.store.throttle
        units.limit_bytes = self._limit_bytes

        def adopt(parameter: nn.Parameter) -> None:
            weights = self_ref()  # which holds the units
            if weights is not None:
                weights._drop_dead()
                weights.receive(_name_of(parameter, model_ref()), parameter, config)

        units.adopt = adopt
        self._drop_dead()
        with units.lock, outside():
            for name, parameter in model.named_parameters():
                self.receive(name, parameter, config)
            self._know_aliases(model)
            self.parked_bytes = self.total_bytes
            units.make_room(0)
        self.store.settle()

    def receive(self, name: str, parameter: nn.Parameter, config: OffloadConfig) -> Parked | None:
        """Let one parameter leave memory later, if it may."""
        parked = parked_of(parameter)
        if parked is None:
            if not weight_may_leave(parameter, config):
                return None
            parked = ParkedWeight(parameter, name, self.store)
            self._parked[id(parked)] = parked
            self._largest_bytes = max(self._largest_bytes, parked.nbytes)
        else:
            parked.add(parameter)
        parked.name = name
        found = unit_with(parameter)
        if found is not None and parked not in found[1].weights:
            found[1].set_weights([*found[1].weights, parked])
        return parked

    def _know_aliases(self, model: nn.Module) -> None:
        """Layers of bitsandbytes keep aliases of an 8-bit weight as its attribute, and in a state object."""
        for module in model.modules():
            of_layer = vars(module.state).values() if hasattr(getattr(module, "state", None), "CB") else ()
            for parameter in module.parameters(recurse=False):
                parked = parked_of(parameter)
                for alias in (*of_layer, *vars(parameter).values()):
                    if parked is not None and type(alias) is Tensor and parked_of(alias) is parked:
                        parked.add(alias)

    def take_in(self, name: str, parameter: nn.Parameter, config: OffloadConfig) -> None:
        """A parameter of a model that is being made: it stays until others need its room, for its values may be about to
        come.
        """
        with outside():
            excess = self.bytes_in_memory + parameter.nbytes - self._limit_bytes
            for parked in self.weights():
                if excess > 0 and parked.is_here and parked.leave():
                    excess -= parked.nbytes
                    self.store.throttle()
            self.receive(name, parameter, config)

    @property
    def limit_bytes(self) -> int:
        """What may be in memory of them, unless what is used at once takes more."""
        return self._limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.store.window_bytes = weights_window(limit_bytes, self._largest_bytes)
        if self._units is not None:
            self._units.limit_bytes = limit_bytes
            with self._units.lock, outside():
                self._units.make_room(0)
            self.store.settle()  # code of the user may run next, whose writes PyTorch need not count

    def begin_run(self) -> None:
        """Another run begins."""
        if self._units is not None:
            self._units.most_bytes = self.bytes_in_memory
        self._moved_before = self._moved_in_all

    def _drop_dead(self) -> None:
        """Those whose storages have gone hold memory."""
        self._parked = {key: parked for key, parked in self._parked.items() if parked.is_alive}

    def weights(self) -> list[Parked]:
        """Those that are still there."""
        return [parked for parked in self._parked.values() if parked.is_alive]

    @property
    def bytes_in_memory(self) -> int:
        """Bytes of those that are in memory."""
        return sum(parked.nbytes for parked in self.weights() if parked.is_here)

    @property
    def total_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(parked.nbytes for parked in self.weights())

    @property
    def most_bytes(self) -> int:
        """Most bytes of them that were in memory at any time of the present run."""
        return 0 if self._units is None else self._units.most_bytes

    @property
    def budget_bytes(self) -> int:
        """Most bytes of memory that they take, with those on their way to the tier and back."""
        total = self.total_bytes
        return total if self.limit_bytes >= total else self.limit_bytes + self.store.window_bytes

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """Bytes written to the tier and read from it in the present run."""
        (written, read), (written_before, read_before) = self._moved_in_all, self._moved_before
        return written - written_before, read - read_before

    @property
    def _moved_in_all(self) -> tuple[int, int]:
        stats = self.store.tier.stats
        return stats.written_bytes, stats.read_bytes

    def bring_all(self) -> None:
        """Let all weights be in memory, for good."""
        with outside():
            for parked in self.weights():
                parked.bring_for_good()
        if self._units is not None:
            for unit in self._units.units:
                unit.set_weights([])
        self.store.settle()
        for parked in self.weights():
            parked.unmanage()
        self._parked.clear()

    def tell(self) -> None:
        """Say in the log what has left memory."""
        logger.info(
            "%d weights with %s are on %s when they are not used; %s of them may be in memory.",
            len(self._parked),
            format_bytes(self.total_bytes),
            self.store.tier.name,
            format_bytes(min(self.limit_bytes, self.total_bytes)),
        )


def _name_of(parameter: nn.Parameter, model: nn.Module | None) -> str:
    named = [] if model is None else model.named_parameters()
    return next((name for name, one in named if one is parameter), "a weight")


def weights_of(model: nn.Module) -> Weights | None:
    """The weights of a model that leave memory, or of the model that it wraps."""
    found = _weights.get(model)
    if found is None:
        ids = {id(parked) for p in model.parameters() if (parked := parked_of(p)) is not None}
        homes = (one for one in _weights.values() if one.is_home and not ids.isdisjoint(one._parked))
        found = next(homes, None)
    return found


def run_storage(model: nn.Module) -> RunStorage:
    """The storage of the run that trains ``model``: that of its weights, if they are on a tier already."""
    present = weights_of(model)
    if present is not None:
        share_storage(model, present.store.storage)
    return storage_of(model)


def park_weights(model: nn.Module, config: OffloadConfig, storage: RunStorage, processes: int) -> Weights | None:
    """Let the weights of ``model`` leave memory as ``config.weights_place`` says. Idempotent; with "none", they come back.

    What is returned lives as long as the model does, whichever session has made it.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for a model whose weights cannot.
    """
    on_host = next((p.device.type == "cpu" for p in model.parameters()), True)
    present = weights_of(model)
    place = config.weights_place
    if present is not None and present.is_home:
        place = "there"
    elif place == "auto":
        place = place_for("params", "weights", sum(nbytes_of(p) for p in model.parameters()), config, on_host)
    if place == "none":
        if present is not None:
            present.bring_all()
            del _weights[model]
        return None
    refuse(model, config, processes)
    if present is None:
        largest = max((nbytes_of(p) for p in model.parameters()), default=0)
        present = open_weights(config, place, storage, on_host, weights_at_a_time(model, config), largest)
    return settle(model, present, config)


def open_weights(
    config: OffloadConfig, place: str, storage: RunStorage, on_host: bool, limit_bytes: int, largest_bytes: int
) -> Weights:
    """The weights of a model to come, whose largest parameter has ``largest_bytes``."""
    directories = named_directories(config) if place == "ssd" else ()
    tier = open_tier(storage, config, on_host, WEIGHTS, directories)
    store = Store(storage, tier, WEIGHTS, weights_window(limit_bytes, largest_bytes), counts_reads=False)
    return Weights(store, limit_bytes, largest_bytes)


def settle(model: nn.Module, weights: Weights, config: OffloadConfig) -> Weights:
    """Let ``weights`` have all of ``model`` that may leave memory, and as many of them in memory as ``config`` says."""
    _weights[model] = weights
    wanted = weights_at_a_time(model, config) if config.weights_place != "none" else weights.limit_bytes
    weights.limit_bytes = wanted
    before = len(weights.weights())
    weights.park(model, config)
    weights.begin_run()
    if len(weights.weights()) > before and not weights.is_home:
        weights.tell()
    return weights


def memory_for_weights(config: OffloadConfig) -> int:
    """Bytes of the memory budget that weights may take; 0 without a budget."""
    return 0 if config.memory_budget is None else int(_KEPT_SHARE * int(config.memory_budget))


def weights_at_a_time(model: nn.Module, config: OffloadConfig) -> int:
    """Bytes of weights that may be in memory: a share of the memory budget, and at least two blocks."""
    return max(blocks_at_a_time(model), memory_for_weights(config))


def blocks_at_a_time(model: nn.Module) -> int:
    """Bytes of the fewest weights that are ever left in memory: two blocks."""
    sizes = [sum(nbytes_of(p) for p in block.parameters()) for block in find_blocks(model).values()]
    single = max((nbytes_of(p) for p in model.parameters()), default=0)
    return _BLOCKS * max([single, *sizes])


def place_for(setting: str, what: str, nbytes: int, config: OffloadConfig, on_host: bool) -> str:
    """Where ``"auto"``, as the value of a ``setting``, lets ``nbytes`` of ``what`` be: in memory if they take at most half of
    the budget, or of all memory.
    """
    if config.memory_budget is not None:
        limit = int(config.memory_budget)
    else:
        limit = (ram_bytes()[0] or 0) if on_host else torch.accelerator.get_memory_info()[1]
    place = "none"
    if nbytes > _KEPT_SHARE * limit:
        place = "ssd" if on_host or config.drive_settings else "ram"
    logger.info(
        "%s='auto': %s take about %s of %s, so they %s.",
        setting,
        what,
        format_bytes(nbytes),
        format_bytes(limit),
        "stay in memory" if place == "none" else f"go to {place}",
    )
    return place


def weight_may_leave(parameter: nn.Parameter, config: OffloadConfig) -> bool:
    """Whether the memory of ``parameter`` may come and go."""
    is_large = nbytes_of(parameter) >= config.smallest_bytes(parameter.device.type == "cpu")
    return is_large and can_leave(parameter)
