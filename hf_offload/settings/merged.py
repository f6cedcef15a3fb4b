"""Recipes as text that stands alone, and how they are summed up in a line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_offload.settings.layers import Layers
from hf_offload.settings.recipe_files import shipped_name
from hf_offload.settings.yaml_text import dump_yaml


def merged_text(layers: Layers) -> str:
    """All layers as one recipe in YAML, with comments that say which layer a setting comes from."""
    several = len(layers.files) > 1
    parts = []
    for section, content in layers.tree.items():
        if not isinstance(content, dict):
            parts.append(dump_yaml({section: content}))
            continue
        lines = [f"{section}:{'' if content else ' {}'}\n"]
        said: Path | None = None
        for key, value in content.items():
            file = layers.origins.get((section, key))
            if several and file is not None and file != said:
                lines.append(f"  # {layer_name(file)}\n")
                said = file
            lines.extend(f"  {line}\n" for line in dump_yaml({key: value}).splitlines())
        parts.append("".join(lines))
    return "\n".join(parts)


def layer_name(file: Path) -> str:
    """A layer's name among the shipped ones, or its path."""
    return shipped_name(file) or str(file)


def method_of(tree: Mapping[str, Any]) -> str:
    """How a recipe trains and where activations go, in words: ``lora + ssd, tiled``."""
    offload = tree.get("offload") or {}
    words = [str((tree.get("memory") or {}).get("mode", "full"))]
    tier = str(offload.get("tier", "auto")) if "offload" in tree else "none"
    if tier != "none":
        words.append(tier)
    extras = []
    training = tree.get("training") or {}
    if training.get("gradient_checkpointing") or training.get("activation_checkpointing"):
        extras.append("recompute")
    if "sampling" in tree or offload.get("sampled_linear") is not None:
        extras.append("sampled")
    if offload.get("recompute_elementwise", "off") not in ("off", "", False, None, []):
        extras.append("elementwise")
    if any(offload.get(name, "off") not in ("off", False) for name in ("tiled_loss", "tiled_mlp")):
        extras.append("tiled")
    return ", ".join([" + ".join(words), *extras])


def model_of(tree: Mapping[str, Any]) -> str:
    """The model of a recipe in a word."""
    model = tree.get("model") or {}
    shape = model.get("shape") or {}
    architecture = model.get("architecture") or shape.get("architecture") or "-"
    return str(model.get("name") or f"{architecture}, random weights")
