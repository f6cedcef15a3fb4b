"""What stands in the place of a module's forward, so that it saves less."""

import functools
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from transformers.pytorch_utils import Conv1D

from hf_offload.interrupts import signals_deferred
from hf_offload.state.guard import own_class
from hf_offload.surgery import ReplacedForward
from hf_offload.tensors import are_transformed, is_ordinary
from hf_offload.transforms.backward import autocast_as_now, autocast_dtype
from hf_offload.transforms.linear_of_part import Part, linear_of_part
from hf_offload.transforms.rematerialization.formulas import Formula, Formulas
from hf_offload.transforms.rematerialization.functions import (
    Products,
    coarse_activation,
    dropout_again,
    packed_dropout,
    packed_relu,
    recomputed,
)


class RematerializedModule(ReplacedForward):
    """The same result with less saved for backward. Without gradients, in compiled code, and while it is
    switched off, the module's own forward; and inside of a mode that may change operations, which backward need not be in,
    and of transforms (``torch.func``, forward-mode differentiation), of which functions with a backward alone know nothing.
    """

    def __init__(self, name: str, module: nn.Module, formulas: Formulas):
        super().__init__(name, module)
        self.formulas = formulas

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, or :meth:`saving_less`."""
        ordinary = not (torch.compiler.is_compiling() or _in_a_mode() or are_transformed())
        if ordinary and self.formulas.in_use and torch.is_grad_enabled():
            return _run(self.saving_less, *args, **kwargs)
        return self.own_forward(*args, **kwargs)

    @abstractmethod
    def saving_less(self, *args: Any, **kwargs: Any) -> Any:
        """The same result, with less saved."""


@signals_deferred
def _run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What replaces a module's forward switches modes of PyTorch's."""
    return forward(*args, **kwargs)


def _in_a_mode() -> bool:
    """Whether operations go through a function mode that is not the package's."""
    if torch._C._len_torch_function_stack() == 0:
        return False
    return any(
        not type(mode).__module__.startswith("hf_offload.") and type(mode) is not DeviceContext
        for mode in _get_current_function_mode_stack()
    )


class ProductsInside(RematerializedModule):
    """The module around an activation function: products inside are recomputed where they would be saved."""

    def saving_less(self, *args: Any, **kwargs: Any) -> Any:
        with Products(self.formulas):
            return self.own_forward(*args, **kwargs)


class OneTensorModule(RematerializedModule):
    """A module that takes one tensor, of which ``of_tensor`` makes the result. Called in another way, it is what it was."""

    def __init__(self, name: str, module: nn.Module, formulas: Formulas, of_tensor: "OfTensor"):
        super().__init__(name, module, formulas)
        self._of_tensor = of_tensor

    def saving_less(self, *args: Any, **kwargs: Any) -> Any:
        return self._of_tensor(self, args[0]) if _is_plain(args, kwargs) else self.own_forward(*args, **kwargs)


OfTensor = Callable[[OneTensorModule, Tensor], Tensor]


def _is_plain(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return len(args) == 1 and not kwargs and is_ordinary(type(args[0])) and args[0].is_floating_point()


# -- activation functions and norms ----------------------------------------------------------------------------------------


def recomputed_result(one: OneTensorModule, inputs: Tensor) -> Tensor:
    """Of an activation function or a norm: it is recomputed from its input wherever it would be saved."""
    parameters = tuple(one.module.parameters())
    if not (inputs.requires_grad or any(parameter.requires_grad for parameter in parameters)):
        return one.own_forward(inputs)  # type: ignore[no-any-return]
    module = _as_it_is_now(one.module)
    if _saves_only_its_input(one.module, inputs):
        result = module.forward(inputs)
    else:
        result = recomputed(_operations(module, inputs), inputs, parameters)
    # Parameters are not used to rebuild it, but must not change until then.
    one.formulas.remember(result, Formula((inputs, *parameters), rerun(module.forward, inputs.device)))
    return result


def _as_it_is_now(module: nn.Module) -> nn.Module:
    """The module with the attributes that it has now, a slope for example, and the forward of its class: those that it has
    in backward may be others.
    """
    copied: nn.Module = object.__new__(type(module))
    vars(copied).update(vars(module), _parameters=dict(module._parameters))
    del vars(copied)["forward"]
    return copied


def _saves_only_its_input(module: nn.Module, inputs: Tensor) -> bool:
    """Whether the usual operation is one whose backward needs its input, and hardly more."""
    if type(module) is nn.LayerNorm:
        # autocast casts the input on some devices, and saves that
        return autocast_dtype(inputs.device) is None
    if type(module) in (nn.GELU, nn.SiLU, nn.Mish):
        return True
    inner = getattr(module, "act", None)  # transformers' choice between torch's function and one in Python
    inner = getattr(inner, "func", inner)
    return type(module).__name__ == "SiLUActivation" or inner in (nn.functional.gelu, nn.functional.mish)


def _operations(module: nn.Module, inputs: Tensor) -> Callable[[Tensor], Tensor]:
    """The forward of ``module``, with every use of its input to be seen: torch's RMSNorm uses it twice behind one name on a
    CPU (in 16 bits only to cast it).
    """
    is_several = inputs.device.type == "cpu" and inputs.dtype in (torch.float, torch.double)
    return functools.partial(_rms_norm, module) if type(module) is nn.RMSNorm and is_several else module.forward


def _rms_norm(module: Any, inputs: Tensor) -> Tensor:
    eps = torch.finfo(inputs.dtype).eps if module.eps is None else module.eps
    last = tuple(range(-len(module.normalized_shape), 0))
    result = inputs * torch.rsqrt(inputs.pow(2).mean(last, keepdim=True) + eps)
    return result if module.weight is None else result * module.weight


def rerun(forward: Callable[[Tensor], Tensor], device: torch.device) -> Callable[..., Tensor]:
    """``forward`` for later: with autocast as it is now, and of the first tensor that it is called with."""
    autocast = autocast_as_now(device)

    @signals_deferred
    def build(inputs: Tensor, *_: Tensor) -> Tensor:
        with autocast():
            return forward(inputs)

    return build


def saved_result(one: OneTensorModule, inputs: Tensor) -> Tensor:
    """Of an activation function whose backward needs its result, such as Tanh."""
    result: Tensor = one.own_forward(inputs)
    one.formulas.remember(result, None)
    return result


def relu_by_bits(one: OneTensorModule, inputs: Tensor) -> Tensor:
    """Of ReLU, whose backward needs one bit per element."""
    is_packed = inputs.requires_grad and inputs.is_contiguous()
    return packed_relu(inputs) if is_packed else one.own_forward(inputs)


def with_coarse_derivative(one: OneTensorModule, inputs: Tensor) -> Tensor:
    """Of an activation function that saves its derivative in 8 bits."""
    return coarse_activation(one.own_forward, inputs) if inputs.requires_grad else one.own_forward(inputs)


# -- dropout ---------------------------------------------------------------------------------------------------------------


def dropout_by_bits(one: OneTensorModule, inputs: Tensor) -> Tensor:
    """Of dropout that saves its mask as bits."""
    probability: Any = one.module.p
    if not (one.module.training and 0 < probability < 1 and inputs.requires_grad and inputs.is_contiguous()):
        return one.own_forward(inputs)  # type: ignore[no-any-return]
    result, bits = packed_dropout(inputs, probability)
    formula = one.formulas.of(inputs)
    again = None if formula is None else dropout_again(inputs, probability)
    if formula is not None and again is not None:
        build = functools.partial(_rebuild_dropped, formula.build, again)
        one.formulas.remember(result, Formula((bits, *formula.tensors), build))
    return result


def _rebuild_dropped(build: Callable[..., Tensor], again: Any, bits: Tensor, *tensors: Tensor) -> Tensor:
    return again(build(*tensors), bits)  # type: ignore[no-any-return]


# -- linear layers ---------------------------------------------------------------------------------------------------------


def linear_of_rebuilt(one: OneTensorModule, inputs: Tensor) -> Tensor:
    """Of a linear layer that saves what its input can be made from instead of the input, where that is known."""
    layer: Any = one.module
    # Plain weights only: sharded ones (DTensor) have operations of their own.
    fits = layer.weight.requires_grad and is_ordinary(own_class(layer.weight)) and inputs.is_contiguous()
    formula = one.formulas.of(inputs) if fits and inputs.dim() > 1 else None
    if formula is None:
        return one.own_forward(inputs)  # type: ignore[no-any-return]
    dtype = autocast_dtype(inputs.device) or inputs.dtype
    part = Part(formula.tensors, functools.partial(_rebuilt_product, formula.build, dtype))
    return linear_of_part(inputs, layer.weight, layer.bias, part, isinstance(layer, Conv1D))


def _rebuilt_product(
    build: Callable[..., Tensor],
    dtype: torch.dtype,
    gradient: Tensor,
    kept: tuple[Tensor, ...],
    transposed: bool,
) -> Tensor:
    inputs = build(*kept)
    rows = inputs.reshape(-1, inputs.shape[-1]).to(dtype)
    return rows.t() @ gradient if transposed else gradient.t() @ rows
