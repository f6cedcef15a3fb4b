"""Which optimizers step each weight by itself: a table, and what follows from it.

Note: any other class
    The step of a class that is not in the table may look at all weights together, count, or draw random numbers. It runs as
    it is, as a whole. On an accelerator, gradients and state are in memory for the step, and leave after it; on a CPU, it
    reads and writes them where they are mapped. That is exact for any class.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from hf_offload.state.shadow import Shadow, attributes_of, options_of

_BY_ELEMENT = {
    "torch.optim.adadelta.Adadelta",
    "torch.optim.adagrad.Adagrad",
    "torch.optim.adam.Adam",
    "torch.optim.adamax.Adamax",
    "torch.optim.adamw.AdamW",
    "torch.optim.asgd.ASGD",
    "torch.optim.nadam.NAdam",
    "torch.optim.radam.RAdam",
    "torch.optim.rmsprop.RMSprop",
    "torch.optim.rprop.Rprop",
    "torch.optim.sgd.SGD",
}
"""The update of an element depends on that element alone, so that a weight may step in parts."""
_BY_WEIGHT = {
    "torch.optim.Adafactor",
    "torch.optim.Muon",
    "transformers.optimization.Adafactor",
}
_BITSANDBYTES = "bitsandbytes.optim."
_OVERRIDES = ("module_weight_config_triple", "pid2config", "index2config")
_LARGE = (264, 260)
"""A matrix that is large enough for classes that factor their state, or quantise it, from 128 or 256 elements on."""
_USUAL_STATE = 2.0
"""AdamW's, of a class that is not in the table."""


def steps_in_parts(kind: type[Optimizer]) -> bool:
    """Whether a weight may step in parts."""
    return _name(kind) in _BY_ELEMENT


def steps_by_weight(optimizer: Optimizer, kind: type[Optimizer]) -> bool:
    """Whether ``kind``, the class of ``optimizer``, steps each weight by its gradient, its state and its group's options.
    Shards of FSDP2 step as a whole.
    """
    if any(isinstance(parameter, DTensor) for group in optimizer.param_groups for parameter in group["params"]):
        return False
    if _name(kind).startswith(_BITSANDBYTES):
        # Options for single weights are found by the place of a weight in the groups.
        manager = vars(optimizer).get("mng")
        return not any(getattr(manager, name, None) for name in _OVERRIDES)
    return _name(kind) in _BY_ELEMENT | _BY_WEIGHT


def state_per_weight(optimizer: Optimizer, kind: type[Optimizer]) -> float:
    """Bytes of state that ``optimizer`` keeps for each byte of a large weight: the most of its groups."""
    if not steps_by_weight(optimizer, kind):
        return _USUAL_STATE
    shadow, most = Shadow(optimizer, kind), 0.0
    attributes = attributes_of(optimizer)
    for group in optimizer.param_groups:
        examples = [p for p in group["params"] if p.requires_grad]
        if not examples:
            continue
        weight = torch.zeros(_LARGE, dtype=examples[0].dtype, device=examples[0].device)
        weight.grad = torch.ones_like(weight)
        with torch.no_grad():
            state = shadow.step([{**options_of(group), "params": [weight]}], {}, attributes).get(weight) or {}
        tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor) and leaf.dim()]
        most = max(most, sum(tensor.nbytes for tensor in tensors) / weight.nbytes)
    return most


def _name(kind: type[Optimizer]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
