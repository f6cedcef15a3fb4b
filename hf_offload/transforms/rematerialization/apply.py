"""What the settings ask to have saved in fewer bytes, applied to a model and taken off again."""

import logging
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import activations
from transformers.pytorch_utils import Conv1D

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.elementwise import SWITCHES, RecomputeElementwiseConfig
from hf_offload.transforms.rematerialization.modules import (
    CoarseActivation,
    Gate,
    KeptActivation,
    LeanDropout,
    LeanFunction,
    LeanLinear,
    LeanModule,
    LeanRMSNorm,
    PackedReLU,
)
from hf_offload.transforms.rematerialization.norms import looks_like_norm, why_not_again
from hf_offload.transforms.rematerialization.recipes import Recipes
from hf_offload.transforms.sampling.linear import SampledConv1D, SampledLinear

logger = logging.getLogger(__name__)

_ELEMENTWISE = (nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Hardswish)
# Their backward needs the result, so it can stay; what dropout makes of it need not.
_RESULT_KEPT = (nn.Tanh, nn.Sigmoid)
_LOOKS_FOR = {
    "activations": "activation functions that are modules; Tanh and Sigmoid, which save results, only with 'dropout'",
    "norms": "LayerNorm and RMSNorm, torch's, and others of such names that give the same result twice",
    "dropout": "nn.Dropout with p above 0 and below 1",
    "derivative-8bit": "activation functions that are modules and save their input, which ReLU, Tanh and Sigmoid do not",
}


class Lean:
    """The modules of one model that save less: made by :meth:`apply`, taken off by :meth:`remove`. It keeps none of them.

    ``head`` is an output head that is left as it is: its input is saved by whatever computes the loss in pieces.
    """

    def __init__(self, model: nn.Module, config: RecomputeElementwiseConfig | None, head: nn.Module | None = None):
        self._model_ref = weakref.ref(model)
        self._config = config
        self._head = (lambda: None) if head is None else weakref.ref(head)
        self._done: list[tuple[str, weakref.ref[LeanModule]]] = []
        self._handle: RemovableHandle | None = None
        self._left_out: dict[str, list[str]] = {}  # why -> which modules

    @property
    def names(self) -> tuple[str, ...]:
        """The modules that save less."""
        return tuple(name for name, _ in self._done)

    @property
    def _model(self) -> nn.Module:
        model = self._model_ref()
        assert model is not None, "whoever asks for lean modules has the model"
        return model

    def apply(self) -> None:
        """Do what was asked for.

        Raises :class:`~hf_offload.errors.OffloadConfigError` if the model has nothing that a switch could change; it is
        unchanged then.
        """
        config = self._config
        if config is None or self._done:
            return
        self._left_out.clear()
        found = {switch: list(self._found(switch)) for switch in SWITCHES if config.asks_for(switch)}
        idle = [switch for switch, modules in found.items() if not modules]
        if idle and (any(config.insists_on(switch) for switch in idle) or len(idle) == len(found)):
            raise OffloadConfigError(self._nothing_for([one for one in idle if config.insists_on(one)] or idle))
        recipes = Recipes()
        rebuilds = bool(found.get("activations") or found.get("norms"))
        for modules in found.values():
            for name, module, kind in modules:
                self._install(kind(name, module, recipes))
        if rebuilds:
            for name, module in _own_forwards(self._model):
                if type(module) in (nn.Linear, Conv1D) and module is not self._head():
                    self._install(LeanLinear(name, module, recipes))
        if found.get("activations"):
            for name, module in _parents(self._model, [module for _, module, _ in found["activations"]]):
                self._install(Gate(name, module, recipes))
        self._handle = self._model.register_forward_hook(_Forget(recipes), always_call=True)
        counts = ", ".join(f"{len(modules)} for {switch}" for switch, modules in found.items() if modules)
        logger.info("Modules that save less for backward: %s.", counts)
        self._warn(rebuilds)

    def _warn(self, rebuilds: bool) -> None:
        for why, names in self._left_out.items():
            logger.warning("recompute_elementwise leaves out %d norms, such as %s. %s.", len(names), names[0], why)
        modules = list(self._model.modules())
        if any(getattr(module, "gradient_checkpointing", False) for module in modules):
            logger.warning(
                "Activation checkpointing keeps nothing of a block but its input, so lean activations save no memory: drop "
                "one of them."
            )
        if rebuilds and any(isinstance(module, (SampledLinear, SampledConv1D)) for module in modules):
            logger.warning(
                "Sampled linear layers keep rows of their inputs. 'activations' and 'norms' make most of those inputs again, "
                "exactly and without keeping anything: beside them, sampled_linear saves time and no memory."
            )

    def remove(self) -> None:
        """Give every module its forward back. Idempotent."""
        while self._done:
            one = self._done.pop()[1]()
            if one is not None:
                one.remove()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _install(self, one: LeanModule) -> None:
        one.install()
        self._done.append((one.name, weakref.ref(one)))

    def _found(self, switch: str) -> Iterator[tuple[str, nn.Module, type[LeanModule]]]:
        assert self._config is not None
        packs_masks = self._config.asks_for("dropout")
        for name, module in _own_forwards(self._model):
            if switch == "norms" and looks_like_norm(module):
                reason = why_not_again(module)
                if reason is None:
                    yield name, module, LeanRMSNorm if type(module) is nn.RMSNorm else LeanFunction
                else:
                    self._left_out.setdefault(f"{type(module).__name__}: {reason}", []).append(name)
            elif switch == "dropout" and type(module) is nn.Dropout and 0 < module.p < 1 and not module.inplace:
                yield name, module, LeanDropout
            elif switch == "activations" and packs_masks and type(module) in _RESULT_KEPT and not _in_place(module):
                yield name, module, KeptActivation
            elif switch == "activations" and type(module) is nn.ReLU and not _in_place(module):
                yield name, module, PackedReLU
            elif switch == "activations" and _is_activation(module):
                yield name, module, LeanFunction
            elif switch == "derivative-8bit" and _is_activation(module):
                yield name, module, CoarseActivation

    def _nothing_for(self, switches: Iterable[str]) -> str:
        name = type(self._model).__name__
        kinds = sorted({type(module).__name__ for module in self._model.modules() if not list(module.children())})
        wanted = "; ".join(f"{switch!r} looks for {_LOOKS_FOR[switch]}" for switch in switches)
        left_out = "".join(f" Left out: {why}." for why in self._left_out)
        modules = f"Modules of {name}: {', '.join(kinds)}."
        return f"recompute_elementwise: {name} has nothing for a switch. {wanted}.{left_out} {modules}"


class _Forget:
    """A forward hook on the model: what was noted is of no use when the forward is over."""

    def __init__(self, recipes: Recipes):
        self._recipes = recipes

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._recipes.clear()


def _own_forwards(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules whose forward is that of their class, not one that somebody has put there."""
    for name, module in model.named_modules():
        if "forward" not in vars(module):
            yield name, module


def _is_activation(module: nn.Module) -> bool:
    if type(module) in _ELEMENTWISE:
        return not _in_place(module)
    own = type(module).__module__ == activations.__name__ and type(module) is not activations.LinearActivation
    return own and not list(module.parameters())


def _in_place(module: nn.Module) -> bool:
    return bool(getattr(module, "inplace", False))


def _parents(model: nn.Module, children: list[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    ids = {id(child) for child in children}
    for name, module in _own_forwards(model):
        if any(id(child) in ids for child in module.children()):
            yield name, module
