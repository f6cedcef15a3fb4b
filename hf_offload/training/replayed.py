"""A checkpoint rebuilt from the weights before training and a log of MeZO."""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_offload.errors import OffloadConfigError
from hf_offload.methods.mezo import MezoLog, replay
from hf_offload.methods.protocol import load_library
from hf_offload.pretrained.errors import loading

_ADAPTER = "adapter_config.json"
_DEFAULT = "default"
"""What peft calls an adapter that has no other name."""


def rebuild(
    log: MezoLog,
    initial: str | os.PathLike[str],
    output: str | os.PathLike[str],
    steps: int | None = None,
    *,
    on_step: Callable[[int], None] = lambda step: None,
) -> None:
    """Load the model ``initial``, a folder or a name on the hub, make the first ``steps`` of ``log`` on it (default: all),
    and save it to the folder ``output``. Adapters of peft are loaded with their base, and saved alone.

    Raises as :func:`~hf_offload.methods.mezo.replay`, and :class:`~hf_offload.errors.OffloadConfigError` for a model that
    cannot be loaded.
    """
    model = _load(initial, log)
    weights = dict(model.named_parameters())
    for one in log.setup.weights:
        if one.name in weights:  # a model can be trained in another dtype than its files have
            weights[one.name].data = weights[one.name].data.to(getattr(torch, one.dtype.removeprefix("torch.")))
    model.to(log.setup.weights[0].device)
    replay(log, dict(model.named_parameters()), steps, on_step=on_step)
    saved: Any = model
    saved.save_pretrained(output)


def _load(initial: str | os.PathLike[str], log: MezoLog) -> nn.Module:
    name = os.fspath(initial)
    adapter = Path(name) / _ADAPTER
    if not adapter.is_file():
        return _load_model(name)
    with loading("initial weights", name):
        base = json.loads(adapter.read_bytes()).get("base_model_name_or_path")
        if not base:
            raise OffloadConfigError(f"{adapter} names no base_model_name_or_path: add it.")
    peft = load_library("peft", "mezo", "'hf-offload[peft]'")

    def adapted(called: str) -> nn.Module:
        model = _load_model(base)
        with loading("initial weights", name):
            found: nn.Module = peft.PeftModel.from_pretrained(model, name, adapter_name=called)
        return found

    model = adapted(_DEFAULT)
    called = _adapter_called([one.name for one in log.setup.weights], dict(model.named_parameters()))
    return model if called == _DEFAULT else adapted(called)


def _adapter_called(names: Iterable[str], weights: Mapping[str, Any]) -> str:
    """What the adapter was called whose weights had ``names``; called ``default``, it has those of ``weights``."""
    patterns = [
        re.escape(name).replace(rf"\.{_DEFAULT}\.", r"\.([^.]+)\.") + "$" for name in weights if f".{_DEFAULT}." in name
    ]
    patterns += [
        re.escape(name.removesuffix(_DEFAULT)) + "([^.]+)$" for name in weights if name.endswith(f".{_DEFAULT}")
    ]
    found = {match[1] for name in names if name not in weights for each in patterns if (match := re.match(each, name))}
    return found.pop() if len(found) == 1 else _DEFAULT


def _load_model(name: str) -> nn.Module:
    import transformers

    with loading("initial weights", name):
        config = transformers.AutoConfig.from_pretrained(name)
        kind: Any = getattr(transformers, (config.architectures or ["none"])[0], None)
        if kind is None:
            raise OffloadConfigError(
                f"{name} names no class of transformers as its architecture ({config.architectures}): load the model in a "
                "script, and call hf_offload.methods.mezo.replay."
            )
        model: nn.Module = kind.from_pretrained(name, dtype="auto")
    return model
