"""The modules of a model, saving less: each stands in the place of a module's forward."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers.pytorch_utils import Conv1D

from hf_offload.interrupts import signals_deferred
from hf_offload.transforms.rematerialization.functions import (
    Products,
    coarse_activation,
    dropout_again,
    packed_dropout,
    packed_relu,
    recomputed,
)
from hf_offload.transforms.rematerialization.recipes import Recipe, Recipes, autocast_as_now
from hf_offload.transforms.sampling.linear import LinearOfPart, Part
from hf_offload.transforms.tiling.replaced import ReplacedForward

# Tensors that are what they look like; fake ones are those that plans are counted on.
_PLAIN = (Tensor, nn.Parameter, FakeTensor)


class LeanModule(ReplacedForward):
    """Does what the module did, and saves less; not without gradients, and not in compiled code, which decides for itself."""

    def __init__(self, name: str, module: nn.Module, recipes: Recipes):
        super().__init__(name, module)
        self.recipes = recipes

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, or :meth:`leanly`."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self.own_forward(*args, **kwargs)
        return self.leanly(*args, **kwargs)

    @abstractmethod
    def leanly(self, *args: Any, **kwargs: Any) -> Any:
        """The same result, with less saved."""


class Gate(LeanModule):
    """The module around an activation function: products inside are made again where they would be saved."""

    def leanly(self, *args: Any, **kwargs: Any) -> Any:
        with signals_deferred, Products(self.recipes):
            return self.own_forward(*args, **kwargs)


class Elementary(LeanModule):
    """A module that is given one tensor; called in another way, it does what it did."""

    def leanly(self, *args: Any, **kwargs: Any) -> Any:
        plain = len(args) == 1 and not kwargs and type(args[0]) in _PLAIN and args[0].is_floating_point()
        return self.of_tensor(args[0]) if plain else self.own_forward(*args, **kwargs)

    @abstractmethod
    def of_tensor(self, inputs: Tensor) -> Tensor:
        """The result for ``inputs``."""


class LeanFunction(Elementary):
    """An activation function or a norm, whose result is made from its input again wherever it would be saved."""

    def of_tensor(self, inputs: Tensor) -> Tensor:
        parameters = tuple(self.module.parameters())
        needed = inputs.requires_grad or any(one.requires_grad for one in parameters)
        if not needed:
            return self.own_forward(inputs)
        if self._saves_only_its_input(inputs):
            result = self.own_forward(inputs)
        else:
            result = recomputed(self.operations(inputs), inputs, parameters)
        # Parameters are not used to make it again, but must not change until then.
        self.recipes.remember(result, Recipe((inputs, *parameters), Again(self.own_forward, inputs)))
        return result

    def operations(self, inputs: Tensor) -> Callable[[Tensor], Tensor]:
        """The forward, with every use of its input to be seen."""
        return self.own_forward

    def _saves_only_its_input(self, inputs: Tensor) -> bool:
        """Whether the usual operation is one whose backward needs its input, and hardly more."""
        if type(self.module) is nn.LayerNorm:
            return not torch.is_autocast_enabled(
                inputs.device.type
            )  # which casts the input on some devices, and saves that
        return saves_only_its_input(self.module)


class LeanRMSNorm(LeanFunction):
    """torch's RMSNorm, which on a CPU uses its input twice behind one name (in 16 bits only to cast it)."""

    def operations(self, inputs: Tensor) -> Callable[[Tensor], Tensor]:
        """The same operations one by one, where there are several."""
        if inputs.device.type == "cpu" and inputs.dtype in (torch.float, torch.double):
            return self._one_by_one
        return self.own_forward

    def _one_by_one(self, inputs: Tensor) -> Tensor:
        module: Any = self.module
        eps = torch.finfo(inputs.dtype).eps if module.eps is None else module.eps
        last = tuple(range(-len(module.normalized_shape), 0))
        result = inputs * torch.rsqrt(inputs.pow(2).mean(last, keepdim=True) + eps)
        return result if module.weight is None else result * module.weight


class Again:
    """The forward of a module once more, with autocast as it was."""

    def __init__(self, forward: Any, inputs: Tensor):
        self._forward = forward
        self._autocast = autocast_as_now(inputs.device)

    def __call__(self, inputs: Tensor, *_: Tensor) -> Tensor:
        with signals_deferred, self._autocast():
            return self._forward(inputs)


class KeptActivation(Elementary):
    """An activation function whose result is what its backward needs, such as Tanh."""

    def of_tensor(self, inputs: Tensor) -> Tensor:
        result = self.own_forward(inputs)
        self.recipes.remember(result, None)
        return result


class PackedReLU(Elementary):
    """ReLU whose backward needs a bit an element. What comes next may need the result, or only a part of it, or nothing."""

    def of_tensor(self, inputs: Tensor) -> Tensor:
        return packed_relu(inputs) if inputs.requires_grad and inputs.is_contiguous() else self.own_forward(inputs)


class CoarseActivation(Elementary):
    """An activation function that saves its derivative in 8 bits."""

    def of_tensor(self, inputs: Tensor) -> Tensor:
        return coarse_activation(self.own_forward, inputs) if inputs.requires_grad else self.own_forward(inputs)


class LeanDropout(Elementary):
    """Dropout that saves its mask as bits."""

    def of_tensor(self, inputs: Tensor) -> Tensor:
        probability = self.module.p
        assert isinstance(probability, float)
        if not (self.module.training and 0 < probability < 1 and inputs.requires_grad and inputs.is_contiguous()):
            return self.own_forward(inputs)
        result, bits = packed_dropout(inputs, probability)
        recipe = self.recipes.of(inputs)
        again = None if recipe is None else dropout_again(inputs, probability)
        if recipe is not None and again is not None:
            self.recipes.remember(result, Recipe((bits, *recipe.tensors), _Dropped(recipe, again)))
        return result


class _Dropped:
    """A result of dropout, from bits and what its input is made from."""

    def __init__(self, recipe: Recipe, again: Callable[[Tensor, Tensor], Tensor]):
        self._build = recipe.build
        self._again = again

    def __call__(self, bits: Tensor, *tensors: Tensor) -> Tensor:
        return self._again(self._build(*tensors), bits)


class LeanLinear(Elementary):
    """A linear layer that saves what its input can be made from instead of the input, where that is known."""

    def of_tensor(self, inputs: Tensor) -> Tensor:
        layer: Any = self.module
        transposed = isinstance(layer, Conv1D)
        recipe = None
        # Plain weights only: sharded ones (DTensor) have operations of their own.
        if layer.weight.requires_grad and type(layer.weight) in _PLAIN and inputs.dim() > 1:
            recipe = self.recipes.of(inputs) if inputs.is_contiguous() else None
        if recipe is None:
            return self.own_forward(inputs)
        kind = inputs.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else inputs.dtype
        part = Part(recipe.tensors, _Rebuilt(recipe, dtype))
        return LinearOfPart.apply(inputs, layer.weight, layer.bias, part, transposed)


class _Rebuilt:
    """All of an input, made again (:class:`~hf_offload.transforms.sampling.linear.Product`)."""

    def __init__(self, recipe: Recipe, dtype: torch.dtype):
        self._build = recipe.build
        self._dtype = dtype

    def __call__(self, gradient: Tensor, kept: tuple[Tensor, ...], transposed: bool = False) -> Tensor:
        inputs = self._build(*kept)
        rows = inputs.reshape(-1, inputs.shape[-1]).to(self._dtype)
        return rows.t() @ gradient if transposed else gradient.t() @ rows


def saves_only_its_input(module: nn.Module) -> bool:
    """Whether an activation module is one operation of torch whose backward needs its input."""
    if type(module) in (nn.GELU, nn.SiLU, nn.Mish):
        return True
    inner = getattr(module, "act", None)  # transformers' choice between torch's function and one in Python
    inner = getattr(inner, "func", inner)
    return type(module).__name__ == "SiLUActivation" or inner in (nn.functional.gelu, nn.functional.mish)
