"""Applying recompute of elementwise operations to a model, and removing it."""

import logging
import re
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import activations
from transformers.pytorch_utils import Conv1D

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.elementwise import ALL_EXACT, SWITCHES, RecomputeElementwiseConfig
from hf_offload.transforms.rematerialization.formulas import Formulas
from hf_offload.transforms.rematerialization.modules import (
    OfTensor,
    OneTensorModule,
    ProductsInside,
    dropout_by_bits,
    linear_of_rebuilt,
    recomputed_result,
    relu_by_bits,
    saved_result,
    with_coarse_derivative,
)
from hf_offload.transforms.transform import Transform

logger = logging.getLogger(__name__)

_Found = tuple[str, nn.Module, OfTensor]
_EXACT = RecomputeElementwiseConfig((ALL_EXACT,))
_ELEMENTWISE = (nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Hardswish)
# Their backward needs the result, so it can stay; what dropout makes of it need not.
_RESULT_KEPT = (nn.Tanh, nn.Sigmoid)
_NORMS = (nn.LayerNorm, nn.RMSNorm)
_NAME_OF_NORM = re.compile(r"(RMS|Rms|Layer)_?Norm$|^(RMS|Rms|Layer)_?Norm")
_LOOKS_FOR = {
    "activations": "activation functions that are modules; Tanh and Sigmoid, which save results, only with 'dropout'",
    "norms": "LayerNorm and RMSNorm of torch, and those of transformers",
    "dropout": "nn.Dropout with p above 0 and below 1",
    "derivative-8bit": "activation functions that are modules and save their input, which ReLU, Tanh and Sigmoid do not",
}


class Rematerialization(Transform):
    """Makes modules of a model recompute in backward what they would save.

    ``left_alone`` is an output head that stays as it is: its input is saved by whatever computes the loss in pieces.
    """

    def __init__(
        self,
        model: nn.Module,
        config: RecomputeElementwiseConfig | None,
        left_alone: nn.Module | None = None,
    ):
        super().__init__(model)
        self._config = config
        self._left_alone = (lambda: None) if left_alone is None else weakref.ref(left_alone)
        self._formulas = Formulas()
        self.rebuilds_inputs = False
        """Whether linear layers do not save inputs that can be recomputed."""

    def apply(self) -> None:
        """Apply what was asked for.

        Raises :class:`~hf_offload.errors.OffloadConfigError` if the model has nothing that a switch could change; it is
        unchanged then.
        """
        config = self._config
        if config is None or self.names:
            return
        found = self._search()
        idle = [switch for switch, modules in found.items() if not modules]
        if idle and (any(config.insists_on(switch) for switch in idle) or len(idle) == len(found)):
            raise OffloadConfigError(self._nothing_for([one for one in idle if config.insists_on(one)] or idle))
        self._install(found)
        counts = ", ".join(f"{len(modules)} for {switch}" for switch, modules in found.items() if modules)
        logger.info("Modules that save less for backward: %s.", counts)
        self.warn_if_checkpointed("recomputing elementwise operations saves")

    def switch(self, on: bool) -> None:
        """Do it or leave it from the next forward on. What has been applied stays where it is, under what others have put
        around a module since; what the model has no use for is passed over without a word.
        """
        if self._model_ref() is None:  # a block that has been taken out of its model
            return
        if not self.names and not self.is_checkpointed and any((found := self._search()).values()):
            self._install(found)
        self._formulas.in_use = on

    @property
    def finds_any(self) -> bool:
        """Whether :meth:`switch` has anything to apply, and the model is there and not checkpointed."""
        if self._model_ref() is None or self.is_checkpointed:
            return False
        return bool(self.names) or any(self._search().values())

    @property
    def is_on(self) -> bool:
        """Whether it is done at present."""
        return bool(self.names) and self._formulas.in_use

    def _search(self) -> dict[str, list[_Found]]:
        """The modules for each switch that is asked for."""
        assert self._config is not None
        return {switch: list(self._found(switch)) for switch in SWITCHES if self._config.asks_for(switch)}

    def _install(self, found: Mapping[str, list[_Found]]) -> None:
        formulas = self._formulas
        self.rebuilds_inputs = bool(found.get("activations") or found.get("norms"))
        for modules in found.values():
            for name, module, of_tensor in modules:
                self.replace(OneTensorModule(name, module, formulas, of_tensor))
        if self.rebuilds_inputs:
            for name, module in _own_forwards(self.model):
                if type(module) in (nn.Linear, Conv1D) and module is not self._left_alone():
                    self.replace(OneTensorModule(name, module, formulas, linear_of_rebuilt))
        if found.get("activations"):
            for name, module in _parents(self.model, [module for _, module, _ in found["activations"]]):
                self.replace(ProductsInside(name, module, formulas))
        self.note(self.model.register_forward_hook(_Forget(formulas), always_call=True))

    def _found(self, switch: str) -> Iterator[_Found]:
        assert self._config is not None
        packs_masks = self._config.asks_for("dropout")
        for name, module in _own_forwards(self.model):
            if switch == "norms" and _is_norm(module):
                yield name, module, recomputed_result
            elif switch == "dropout" and type(module) is nn.Dropout and 0 < module.p < 1 and not module.inplace:
                yield name, module, dropout_by_bits
            elif switch == "activations" and packs_masks and type(module) in _RESULT_KEPT and not _in_place(module):
                yield name, module, saved_result
            elif switch == "activations" and type(module) is nn.ReLU and not _in_place(module):
                yield name, module, relu_by_bits
            elif switch == "activations" and _is_activation(module):
                yield name, module, recomputed_result
            elif switch == "derivative-8bit" and _is_activation(module):
                yield name, module, with_coarse_derivative

    def _nothing_for(self, switches: Iterable[str]) -> str:
        name = type(self.model).__name__
        kinds = sorted({type(module).__name__ for module in self.model.modules() if not list(module.children())})
        wanted = "; ".join(f"{switch!r} looks for {_LOOKS_FOR[switch]}" for switch in switches)
        modules = f"Modules of {name}: {', '.join(kinds)}."
        return f"recompute_elementwise: {name} has nothing for a switch. {wanted}. {modules}"


class ElementwiseBlocks:
    """Blocks that recompute their elementwise operations in backward, all or none: a plan says so, and may say otherwise
    before the next step.

    Of other blocks a block knows no formulas: what it saves depends on itself alone, as plans expect.
    """

    def __init__(self, blocks: Mapping[str, nn.Module]):
        self._blocks = {name: Rematerialization(block, _EXACT) for name, block in blocks.items()}

    def apply(self, on: bool) -> None:
        """Let the blocks do it, or let none of them."""
        for block in self._blocks.values():
            block.switch(on)

    def remove(self) -> None:
        """Restore every block. Idempotent."""
        for block in self._blocks.values():
            block.remove()

    @property
    def possible(self) -> bool:
        """Whether any block has such operations, and is not checkpointed, which saves none of their results anyway."""
        return any(one.finds_any for one in self._blocks.values())

    @property
    def names(self) -> list[str]:
        """The modules that recompute in backward what they would save."""
        on = {block: one.names for block, one in sorted(self._blocks.items()) if one.is_on}
        return [f"{block}.{name}" if name else block for block, names in on.items() for name in names]


class _Forget:
    """A forward hook on the model: formulas are dropped when the forward ends."""

    def __init__(self, formulas: Formulas):
        self._formulas = formulas

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._formulas.clear()


def _own_forwards(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules whose forward is that of their class, not one that was assigned to the instance."""
    for name, module in model.named_modules():
        if "forward" not in vars(module):
            yield name, module


def _is_activation(module: nn.Module) -> bool:
    if type(module) in _ELEMENTWISE:
        return not _in_place(module)
    own = type(module).__module__ == activations.__name__ and type(module) is not activations.LinearActivation
    return own and not list(module.parameters())


def _is_norm(module: nn.Module) -> bool:
    """Whether ``module`` is one of torch's norms, or of transformers', whose families have copies of them in classes of their
    own: all scale vectors of one length. Another class may do more than its name says.
    """
    kind = type(module)
    if kind in _NORMS:
        return True
    if kind.__module__.partition(".")[0] != "transformers" or _NAME_OF_NORM.search(kind.__name__) is None:
        return False
    has_more = bool(list(module.children())) or bool(list(module.buffers()))
    return not has_more and all(one.dim() == 1 for one in module.parameters())


def _in_place(module: nn.Module) -> bool:
    return bool(getattr(module, "inplace", False))


def _parents(model: nn.Module, children: list[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    ids = {id(child) for child in children}
    for name, module in _own_forwards(model):
        if any(id(child) in ids for child in module.children()):
            yield name, module
