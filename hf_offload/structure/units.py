"""The parts of a model that a plan decides about: blocks, and the modules with matrices inside and outside of them."""

import dataclasses

import torch
from torch import nn

_MATRIX_DIMENSIONS = 2


@dataclasses.dataclass(frozen=True)
class Unit:
    """A module whose saved tensors share one placement. ``block`` is the repeated block it lies in, if it lies in one."""

    name: str
    module: nn.Module
    block: str | None = None

    @property
    def kind(self) -> str:
        """The class of the module, as a user reads it in the model's source."""
        return type(self.module).__name__


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The model's repeated blocks by name, in the order of registration, outermost only."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    blocks: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer) and not any(name.startswith(f"{outer}.") for outer in blocks):
            blocks[name] = module
    return blocks


def one_stack(model: nn.Module) -> list[nn.Module]:
    """The blocks, if they are those of one ``ModuleList``, and several; else nothing."""
    blocks = list(find_blocks(model).values())
    lists = (list(module) for module in model.modules() if isinstance(module, nn.ModuleList))
    return blocks if len(blocks) > 1 and blocks in lists else []


def find_units(model: nn.Module) -> dict[str, Unit]:
    """Units by name: the model itself (for what lies in none of the others), its blocks, and in and outside of blocks
    the outermost modules with matrices of their own: attention, MLP, embedding, head. A module in TorchScript belongs to
    what it lies in: it takes no hooks.
    """
    root = type(model).__name__
    units = {root: Unit(root, model)}
    blocks = find_blocks(model)
    for name, block in blocks.items():
        units[name] = Unit(name, block, name)
        for child, module in _parts(block, name):
            units[child] = Unit(child, module, name)
    for name, module in model.named_modules():
        inside = any(name == block or name.startswith(f"{block}.") for block in blocks)
        if name and not inside and _own_matrices(module) and not isinstance(module, torch.jit.ScriptModule):
            units[name] = Unit(name, module)
    return units


def _parts(block: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    """The block's children with matrices; lists of modules are only a way to number them."""
    parts: list[tuple[str, nn.Module]] = []
    for name, child in block.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            parts += _parts(child, f"{prefix}.{name}")
        elif not isinstance(child, torch.jit.ScriptModule) and any(
            parameter.dim() >= _MATRIX_DIMENSIONS for parameter in child.parameters()
        ):
            parts.append((f"{prefix}.{name}", child))
    return parts


def _own_matrices(module: nn.Module) -> bool:
    return any(parameter.dim() >= _MATRIX_DIMENSIONS for parameter in module.parameters(recurse=False))
