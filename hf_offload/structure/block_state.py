"""What a forward of a block may read and change, in a form that can be compared. Reading it changes nothing."""

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.attention import _cur_sdpa_kernel_backends
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from hf_offload.interrupts import signals_deferred
from hf_offload.structure.reach import Look, Read, Same, may_be_sharded, read_parameter
from hf_offload.tensors import bytes_of, can_be_read


def state_of(block: nn.Module, inputs: object = (), *, values: bool = False) -> dict[str, Any]:
    """All that a forward of ``block`` could change and that can be found, by name, to be compared with ``==``.

    Buffers, parameters, attributes of modules and their classes, hooks on inner modules, whatever the code of these reaches
    (:mod:`~hf_offload.structure.reach`), the generators of Python and NumPy, and ``inputs``. With ``values``, small tensors
    are compared by what is in them, and not only by their version, and modules outside of the block with all that they hold.
    """
    with signals_deferred, _disable_current_modes(), torch.no_grad():
        return Look(block, values).at(inputs)


def changed_name(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The first name whose state differs; empty if none does."""
    for name in (*before, *after):
        if name not in before or name not in after or before[name] != after[name]:
            return name
    return ""


def inputs_read_again(args: Iterable[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Mapping[str, Any]]:
    """What a recompute takes as it is then. Tensors by position are not among it: checkpointing saves them as autograd does,
    with their versions.
    """
    return [value for value in args if not isinstance(value, torch.Tensor)], kwargs


def read_by(block: nn.Module, inputs: object) -> dict[str, Any]:
    """What a forward of ``block`` with ``inputs`` may read. No random numbers of Python or NumPy, which others draw before
    its backward.
    """
    parameters = dict(block.named_parameters())
    state = {
        name: value
        for name, value in state_of(block, inputs).items()
        if name not in parameters and not name.endswith("random numbers")
    }
    for name, parameter in parameters.items():
        state |= read_parameter(name, parameter)
    for name, module in block.named_modules():
        state[f"{name}.training".lstrip(".")] = module.training
    state["the contents of an input"] = [zlib.crc32(bytes_of(one)) for one in tree_leaves(inputs) if _is_anyones(one)]
    state["the default dtype"] = torch.get_default_dtype()
    state["the choice of attention kernels"] = _cur_sdpa_kernel_backends()
    state["the stack of function modes"] = [
        Same(mode) for mode in _get_current_function_mode_stack() if not is_entered_again(mode)
    ]
    return state


def is_entered_again(mode: Any) -> bool:
    """Whether a recompute enters this function mode again, where a module outside of the block has entered it."""
    return bool(getattr(mode, "is_entered_again", False))


def _is_anyones(value: Any) -> bool:
    """Whether ``value`` is a tensor that others may write to without a new version: NumPy, or another process."""
    return isinstance(value, torch.Tensor) and can_be_read(value) and value.is_cpu and not value.requires_grad


def rewritten_name(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first name that both have and whose state differs; empty if none does.

    Sharding puts another parameter in the place of one between forward and backward: its values are the same. What else does
    (``torch.func.functional_call``) means other values, or other leaves for the gradients.
    """
    for name in before.keys() & now.keys():
        one, other = before[name], now[name]
        if one != other and not (isinstance(one, Read) and one.key != other.key and may_be_sharded()):
            return name
    return ""
