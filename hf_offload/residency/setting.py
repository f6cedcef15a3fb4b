"""The setting ``params``: which weights leave memory, how many stay, and where the rest goes."""

import logging
import weakref
from pathlib import Path

import torch
from torch import nn

from hf_offload.parameters.demand import ask_in_transforms
from hf_offload.parameters.fast_paths import keep_fast_paths
from hf_offload.parameters.scripts import ask_in_scripts
from hf_offload.parameters.unasked import ask_everywhere
from hf_offload.parameters.views import follow_attributes
from hf_offload.parameters.waiting import in_memory, residence_of
from hf_offload.plan.windows import weights_window
from hf_offload.residency.refusals import refuse
from hf_offload.residency.residency import Residency
from hf_offload.residency.weight import Weight, is_dense
from hf_offload.settings.schema import OffloadConfig
from hf_offload.settings.sizes import format_bytes
from hf_offload.storage.disk import DiskTier
from hf_offload.storage.host_memory import ram_bytes
from hf_offload.storage.mapped import MappedFiles
from hf_offload.storage.opening import named_directories, open_tier
from hf_offload.storage.service import WEIGHTS, RunStorage, share_storage, storage_of
from hf_offload.storage.spill import SpillTier
from hf_offload.storage.stored import Store
from hf_offload.storage.tier import Tier
from hf_offload.structure.units import find_blocks
from hf_offload.tensors import nbytes_of

logger = logging.getLogger(__name__)

_KEPT_SHARE = 0.5
"""The part of a memory budget that weights may take."""
_BLOCKS = 2

_residencies: "weakref.WeakKeyDictionary[nn.Module, Residency]" = weakref.WeakKeyDictionary()


def residency_of(model: nn.Module) -> Residency | None:
    """The residency of a model whose weights leave memory, or of the model that it wraps."""
    found = _residencies.get(model)
    if found is None:
        homes = (residence_of(parameter) for parameter in model.parameters())
        found = next((each.residency for each in homes if isinstance(each, Weight) and each.residency.is_home), None)
    return found


def run_storage(model: nn.Module) -> RunStorage:
    """The storage of the run that trains ``model``: that of its weights, if they are on a tier already."""
    present = residency_of(model)
    if present is not None:
        share_storage(model, present.store.storage)
    return storage_of(model)


def park_weights(model: nn.Module, config: OffloadConfig, storage: RunStorage, processes: int) -> Residency | None:
    """Let the weights of ``model`` leave memory as ``config.weights_place`` says. Idempotent; with "none", they come back.

    The residency lives as long as the model does, whichever session has made it.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for a model whose weights cannot.
    """
    on_host = next((p.device.type == "cpu" for p in model.parameters()), True)
    present = residency_of(model)
    place = config.weights_place
    if present is not None and present.is_home:
        place = "there"
    elif place == "auto":
        place = place_for(sum(nbytes_of(p) for p in model.parameters()), config, on_host)
    if place == "none":
        if present is not None:
            present.bring_all()
            del _residencies[model]
        return None
    refuse(model, config, processes)
    if present is None:
        largest = max((nbytes_of(p) for p in model.parameters()), default=0)
        present = open_residency(config, place, storage, on_host, weights_at_a_time(model, config), largest)
    return settle(model, present, config)


def open_residency(
    config: OffloadConfig, place: str, storage: RunStorage, on_host: bool, limit_bytes: int, largest_bytes: int
) -> Residency:
    """The residency of a model to come, whose largest parameter has ``largest_bytes``."""
    directories = named_directories(config) if place == "ssd" else ()
    tier = open_tier(storage, config, on_host, WEIGHTS, directories)
    store = Store(storage, tier, WEIGHTS, weights_window(limit_bytes, largest_bytes))
    residency = Residency(store, limit_bytes, _files(tier), largest_bytes)
    storage.members.add(residency)
    ask_in_transforms()
    ask_everywhere()
    ask_in_scripts()
    return residency


def settle(model: nn.Module, residency: Residency, config: OffloadConfig) -> Residency:
    """Let ``residency`` have all weights of ``model`` that may leave memory, and as many of them in memory as ``config``
    says.
    """
    if _residencies.get(model) is not residency:
        _residencies[model] = residency
    keep_fast_paths(model)  # of modules that are new, too
    wanted = weights_at_a_time(model, config) if config.weights_place != "none" else residency.limit_bytes
    residency.begin_run(wanted)
    before = residency.count
    residency.park((name, p) for name, p in model.named_parameters() if may_leave(p, config))
    _follow_states(model)
    for name, parameter in model.named_parameters():
        weight = residence_of(parameter)
        if isinstance(weight, Weight):
            weight.name = name
    if residency.count > before and not residency.is_home:
        residency.tell()
    return residency


def is_large(parameter: nn.Parameter, config: OffloadConfig) -> bool:
    """Whether ``config`` lets tensors of this size leave memory."""
    return nbytes_of(parameter) >= config.smallest_bytes(parameter.device.type == "cpu")


def memory_for_weights(config: OffloadConfig) -> int:
    """Bytes of the memory budget that weights may take; 0 without a budget."""
    return 0 if config.memory_budget is None else int(_KEPT_SHARE * int(config.memory_budget))


def _follow_states(model: nn.Module) -> None:
    """Layers of bitsandbytes keep their weight in a state object, too, once they have run."""
    for module in model.modules():
        state = getattr(module, "state", None)
        if hasattr(state, "CB"):
            for parameter in module.parameters(recurse=False):
                with in_memory([parameter]):
                    follow_attributes(parameter, vars(state))


def weights_at_a_time(model: nn.Module, config: OffloadConfig) -> int:
    """Bytes of weights that may be in memory: a share of the memory budget, and at least two blocks."""
    return max(blocks_at_a_time(model), memory_for_weights(config))


def blocks_at_a_time(model: nn.Module) -> int:
    """Bytes of the fewest weights that are ever left in memory: two blocks."""
    sizes = [sum(nbytes_of(p) for p in block.parameters()) for block in find_blocks(model).values()]
    single = max((nbytes_of(p) for p in model.parameters()), default=0)
    return _BLOCKS * max([single, *sizes])


def place_for(weights: int, config: OffloadConfig, on_host: bool) -> str:
    """Where ``params="auto"`` lets so many bytes of weights be."""
    if config.memory_budget is not None:
        limit = int(config.memory_budget)
    else:
        limit = (ram_bytes()[0] or 0) if on_host else torch.accelerator.get_memory_info()[1]
    place = "none"
    if weights > _KEPT_SHARE * limit:
        place = "ssd" if on_host or config.drive_settings else "ram"
    logger.info(
        "params='auto': weights take %s of %s, so they %s.",
        format_bytes(weights),
        format_bytes(limit),
        "stay in memory" if place == "none" else f"go to {place}",
    )
    return place


def may_leave(parameter: nn.Parameter, config: OffloadConfig) -> bool:
    """Whether the memory of ``parameter`` may come and go, and does not yet."""
    if not is_large(parameter, config):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        shared = parameter.device.type == "cpu" and parameter.is_shared()
        return residence_of(parameter) is None and is_dense(parameter) and not shared and not parameter.is_inference()


def _files(tier: Tier) -> MappedFiles | None:
    tier = tier.then if isinstance(tier, SpillTier) else tier
    return MappedFiles(Path(tier.files[0].directory)) if isinstance(tier, DiskTier) else None
