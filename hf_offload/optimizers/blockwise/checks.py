"""Checks of block-wise training: parameters, state dicts and wrappers."""

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_offload.errors import OffloadConfigError
from hf_offload.optimizers.blockwise.freezing import is_waiting
from hf_offload.settings.load import collect_errors


def inner_optimizer(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> torch.optim.Optimizer:
    """An optimizer of this class, for a parameter that does not matter.

    Raises :class:`OffloadConfigError` if it does not take ``options``, or makes state before its first step.
    """
    try:
        made = kind([nn.Parameter(torch.zeros(1))], **options)
    except (TypeError, ValueError) as error:
        raise OffloadConfigError(f"{kind.__name__} cannot be built with {options}: {error}") from error
    if made.state:
        raise OffloadConfigError(
            f"{kind.__name__} makes its state before its first step, and blocks have one for their turn only: use AdamW."
        )
    return made


def check_parameters(parameters: list[nn.Parameter], names: dict[int, str], module: nn.Module) -> None:
    """Raise :class:`OffloadConfigError` unless ``parameters`` are those of ``module`` (``names`` by id) and none of them
    waits in another optimizer.
    """
    with collect_errors("parameters of block-wise training") as check:
        strangers = [tuple(p.shape) for p in parameters if id(p) not in names]
        with check:
            if strangers:
                raise OffloadConfigError(
                    f"{len(strangers)} parameters are not of this {type(module).__name__} (shapes {strangers[:3]}): give the "
                    "optimizer parameters of the module it is given."
                )
        waiting = [name for name, p in module.named_parameters() if is_waiting(p)]
        with check:
            if waiting:
                raise OffloadConfigError(
                    f"{len(waiting)} parameters still wait for their turn in another BlockwiseOptimizer ({waiting[0]} ...): "
                    "close() that one, or call release(model), before the parameters are listed for a new one."
                )


def checked_state(own: dict[str, Any] | None, settings: dict[str, Any], blocks: list[str]) -> dict[str, Any]:
    """``own``, the optimizer's part of a state dict. Raises :class:`OffloadConfigError` unless it was saved with these
    ``settings`` and of these ``blocks``.
    """
    if own is None:
        raise OffloadConfigError(
            "This state was not saved by a BlockwiseOptimizer's own state_dict(): start without it, or load it into the "
            "optimizer that saved it."
        )
    with collect_errors("state of block-wise training") as check:
        for name, value in settings.items():
            with check:
                if own["settings"].get(name) != value:
                    raise OffloadConfigError(
                        f"The state was saved with {name}={own['settings'].get(name)!r}, and the optimizer has "
                        f"{name}={value!r}: use the same settings, or start without the state."
                    )
        with check:
            if own["blocks"] != blocks:
                raise OffloadConfigError(
                    f"The state belongs to the blocks {', '.join(own['blocks'])}, but {', '.join(blocks)} are "
                    "trained: load it into the same model, with the same parameters frozen."
                )
    return own


def check_data_parallel(wrapper: DistributedDataParallel, all_trained: bool, anything_waits: bool) -> None:
    """Refuse a ``DistributedDataParallel`` that would mix up gradients when blocks are frozen and unfrozen.

    ``all_trained``: every parameter trains in every turn. ``anything_waits``: some are frozen as the wrapper is first seen.

    Raises :class:`~hf_offload.errors.OffloadConfigError`.
    """
    if all_trained:
        return
    if anything_waits:
        raise OffloadConfigError(
            "This DistributedDataParallel was built while blocks waited for their turn, so it would never average their "
            "gradients: build it before the model's first forward, or call release(model) before it."
        )
    if wrapper.static_graph or not wrapper.find_unused_parameters:
        found = "static_graph=True" if wrapper.static_graph else "find_unused_parameters=False"
        raise OffloadConfigError(
            f"DistributedDataParallel with {found} waits for gradients of blocks that are frozen: set "
            "find_unused_parameters=True and no static_graph (the Trainer: ddp_find_unused_parameters=True; Accelerate: "
            "DistributedDataParallelKwargs(find_unused_parameters=True))."
        )
