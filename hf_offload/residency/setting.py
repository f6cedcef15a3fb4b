"""The setting ``params``: which weights leave memory, how many stay, and where the rest goes."""

import logging
import weakref
from pathlib import Path

import torch
from torch import nn

from hf_offload.parameters.demand import ask_in_transforms, residence_of
from hf_offload.parameters.fast_paths import keep_fast_paths
from hf_offload.parameters.unasked import ask_everywhere
from hf_offload.residency.refusals import refuse
from hf_offload.residency.residency import Residency
from hf_offload.residency.weight import is_dense
from hf_offload.settings.schema import OffloadConfig
from hf_offload.settings.sizes import format_bytes
from hf_offload.storage.disk import DiskTier
from hf_offload.storage.host_memory import ram_bytes
from hf_offload.storage.mapped import MappedFiles
from hf_offload.storage.opening import named_directories, open_tier
from hf_offload.storage.service import WEIGHTS, RunStorage
from hf_offload.storage.spill import SpillTier
from hf_offload.storage.stored import Store
from hf_offload.storage.tier import Tier
from hf_offload.structure.units import find_blocks

logger = logging.getLogger(__name__)

_KEPT_SHARE = 0.5
"""The part of a memory budget that weights may take."""
_WINDOW_BYTES = 64 << 20
"""On the way to the tier and back at any time, unless single weights need more."""
_BLOCKS = 2

_residencies: "weakref.WeakKeyDictionary[nn.Module, Residency]" = weakref.WeakKeyDictionary()


def residency_of(model: nn.Module) -> Residency | None:
    """The residency of a model whose weights leave memory."""
    return _residencies.get(model)


def park_weights(model: nn.Module, config: OffloadConfig, storage: RunStorage, processes: int) -> Residency | None:
    """Let the weights of ``model`` leave memory as ``config.params`` says. Idempotent; with "none", they come back.

    The residency lives as long as the model does, whichever session has made it.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for a model whose weights cannot.
    """
    on_host = next((p.device.type == "cpu" for p in model.parameters()), True)
    place = config.params
    if place == "auto":
        place = _choose(model, config, on_host)
    present = _residencies.get(model)
    if place == "none":
        if present is not None:
            present.bring_all()
            del _residencies[model]
        return None
    refuse(model, processes)
    limit_bytes = weights_at_a_time(model, config)
    if present is not None:
        present.begin_run(limit_bytes)
        return present
    directories = named_directories(config) if place == "ssd" else ()
    tier = open_tier(storage, config, on_host, WEIGHTS, directories)
    largest = max((p.nbytes for p in model.parameters()), default=0)
    store = Store(storage, tier, WEIGHTS, max(2 * largest, min(_WINDOW_BYTES, limit_bytes)))
    residency = Residency(store, limit_bytes, _files(tier))
    storage.members.add(residency)
    keep_fast_paths(model)
    ask_in_transforms()
    ask_everywhere()
    smallest = config.smallest_bytes(on_host)
    residency.park((name, p) for name, p in model.named_parameters() if p.nbytes >= smallest and _may_leave(p))
    _residencies[model] = residency
    residency.tell()
    return residency


def weights_at_a_time(model: nn.Module, config: OffloadConfig) -> int:
    """Bytes of weights that may be in memory: a share of the memory budget, and at least two blocks."""
    blocks = find_blocks(model)
    sizes = [sum(p.nbytes for p in block.parameters()) for block in blocks.values()]
    single = max((p.nbytes for p in model.parameters()), default=0)
    least = _BLOCKS * max([single, *sizes])
    return least if config.memory_budget is None else max(least, int(_KEPT_SHARE * int(config.memory_budget)))


def _choose(model: nn.Module, config: OffloadConfig, on_host: bool) -> str:
    weights = sum(p.nbytes for p in model.parameters())
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


def _may_leave(parameter: nn.Parameter) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        shared = parameter.device.type == "cpu" and parameter.is_shared()
        return residence_of(parameter) is None and is_dense(parameter) and not shared and not parameter.is_inference()


def _files(tier: Tier) -> MappedFiles | None:
    tier = tier.then if isinstance(tier, SpillTier) else tier
    return MappedFiles(Path(tier.files[0].directory)) if isinstance(tier, DiskTier) else None
