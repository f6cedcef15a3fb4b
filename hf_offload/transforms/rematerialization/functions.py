"""Operations that save less than the usual ones with bit-identical results.

Note: gradients that are added up
    Where a tensor is used several times, autograd adds up the gradients of its uses one after the other, the last use first,
    together with those of its other users. Floating-point sums depend on that order. So an operation made of several gets
    its input once per use, and returns one gradient for each.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from hf_offload.engine.device import open_device
from hf_offload.transforms.backward import autocast_as_now, differentiable_once
from hf_offload.transforms.rematerialization.formulas import Formula, Formulas, as_it_is, same

logger = logging.getLogger(__name__)

# ---------------------------------------------------------------------------------- modules made of several operations


def recomputed(forward: Callable[[Tensor], Tensor], inputs: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
    """``forward(inputs)``, saving nothing but inputs and parameters; backward runs it once more. Exact, to the last bit.

    ``forward`` must give the same each time, draw no random numbers and change nothing.
    """
    originals = (inputs, *parameters)
    uses = _Uses(originals)
    with torch.no_grad(), uses:
        result = forward(inputs)
    run = _Run(forward, tuple(parameters), autocast_as_now(inputs.device), uses.order[::-1])
    return _Recomputed.apply([result], run, *(originals[which] for which in run.uses))


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    forward: Callable[[Tensor], Tensor]
    parameters: tuple[nn.Parameter, ...]
    autocast: Callable[[], Any]
    uses: list[int]  # the last one first: 0 is the input, the others are parameters


class _Uses(TorchFunctionMode):
    """Counts the uses of some tensors; with ``values``, gives each use a leaf of its own with those values instead."""

    def __init__(self, originals: Sequence[Tensor], values: Sequence[Tensor] | None = None):
        super().__init__()
        self._places = {id(tensor): place for place, tensor in enumerate(originals)}
        self._originals = originals
        self._values = values
        self._of_leaf: dict[int, Tensor] = {}
        self.order: list[int] = []
        self.leaves: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__":  # a property, such as its dtype
            return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(Tensor, self._one_use, (args, kwargs or {}))
        result = func(*args, **kwargs)
        # What changes nothing gives its input back, for instance to() the same dtype: that is the original again.
        return self._of_leaf.get(id(result), result)

    def _one_use(self, tensor: Tensor) -> Tensor:
        place = self._places.get(id(tensor))
        if place is None:
            return tensor
        self.order.append(place)
        if self._values is None:
            return tensor
        leaf = self._values[place].detach().requires_grad_()
        self.leaves.append(leaf)
        self._of_leaf[id(leaf)] = self._originals[place]
        return leaf


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: list[Tensor], run: _Run, *uses: Tensor) -> Tensor:
        ctx.run = run
        inputs = uses[run.uses.index(0)]
        ctx.save_for_backward(inputs, *run.parameters)
        return result.pop()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, *parameters = ctx.saved_tensors
        uses = _Uses((inputs, *ctx.run.parameters), (inputs, *parameters))
        with torch.enable_grad(), ctx.run.autocast(), uses:
            result = ctx.run.forward(inputs)
        needed = [leaf for leaf, needs in zip(reversed(uses.leaves), ctx.needs_input_grad[2:], strict=True) if needs]
        found = iter(torch.autograd.grad(result, needed, gradient, allow_unused=True))
        return None, None, *(next(found) if needs else None for needs in ctx.needs_input_grad[2:])


# ------------------------------------------------------------------------------------------------------------ products


class Products(TorchFunctionMode):
    """Inside, products of tensors with formulas save what the formulas need, and have formulas themselves; so do casts."""

    is_entered_again = True
    """In the recompute of a block whose forward ran inside."""

    def __init__(self, formulas: Formulas):
        super().__init__()
        self._formulas = formulas

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "mul" and len(args) == 2 and not kwargs and torch.is_grad_enabled():
            product = self._product(*args)
            if product is not None:
                return product
        result = func(*args, **(kwargs or {}))
        if name == "to":
            self._note_cast(args[0], result)
        return result

    def _note_cast(self, tensor: Tensor, result: Tensor) -> None:
        formula = None if result is tensor or result.device != tensor.device else self._formulas.of(tensor)
        if formula is not None and result.stride() == tensor.stride():
            build = functools.partial(_cast, formula.build, result.dtype)
            self._formulas.remember(result, Formula(formula.tensors, build))

    def _product(self, left: Any, right: Any) -> Tensor | None:
        if not (isinstance(left, Tensor) and isinstance(right, Tensor)) or left is right:
            return None
        if left.shape != right.shape or left.dtype != right.dtype or not (left.requires_grad or right.requires_grad):
            return None
        formulas = self._formulas.of(left), self._formulas.of(right)
        if formulas == (None, None):
            return None
        of_left, of_right = formulas[0] or as_it_is(left), formulas[1] or as_it_is(right)
        product: Tensor = _Product.apply(left, right, of_left, of_right)
        tensors = (*of_left.tensors, *of_right.tensors)
        build = functools.partial(_times, of_left.build, of_right.build, len(of_left.tensors))
        self._formulas.remember(product, Formula(tensors, build))
        return product


def _cast(build: Callable[..., Tensor], dtype: torch.dtype, *tensors: Tensor) -> Tensor:
    return build(*tensors).to(dtype)


def _times(left: Callable[..., Tensor], right: Callable[..., Tensor], count: int, *tensors: Tensor) -> Tensor:
    return left(*tensors[:count]) * right(*tensors[count:])


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, of_left: Formula, of_right: Formula) -> Tensor:
        # The gradient of one needs the other.
        for_right = of_left.tensors if ctx.needs_input_grad[1] else ()
        for_left = of_right.tensors if ctx.needs_input_grad[0] else ()
        ctx.left, ctx.right, ctx.count = of_left.build, of_right.build, len(for_right)
        ctx.save_for_backward(*for_right, *for_left)
        return left * right

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        of_left = gradient * ctx.right(*kept[ctx.count :]) if ctx.needs_input_grad[0] else None
        of_right = gradient * ctx.left(*kept[: ctx.count]) if ctx.needs_input_grad[1] else None
        return of_left, of_right, None, None


# ------------------------------------------------------------------------------------------------------------- dropout


def packed_dropout(inputs: Tensor, probability: float) -> tuple[Tensor, Tensor]:
    """Dropout with ``0 < probability < 1``, and its mask as bits ``[ceil(elements / 8)]``, uint8, which is all that is saved.

    Draws the random numbers that :func:`torch.nn.functional.dropout` draws, and gives its bits.
    """
    return _PackedDropout.apply(inputs, probability)


def dropped(inputs: Tensor, bits: Tensor, probability: float, scale: float | None = None) -> Tensor:
    """``inputs`` with the mask that :func:`packed_dropout` has drawn, scaled; on accelerators by ``scale``.

    Without a scale, as backward does it with a gradient; on a CPU that is what forward does, too.
    """
    mask = unpack_bits(bits, inputs.shape)
    if inputs.device.type == "cpu":
        return inputs * mask.to(inputs.dtype).div_(1 - probability)
    return torch.ops.aten.native_dropout_backward(inputs, mask, 1 / (1 - probability) if scale is None else scale)


def dropout_again(inputs: Tensor, probability: float) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Rebuilds a result of :func:`packed_dropout` from its input and its bits, to the last bit; None if that is impossible.

    Backward scales by ``1 / (1 - probability)`` on every accelerator, forward depends on the kernel: CUDA's rounds
    ``1 - probability`` to 32 bits first, which is another scale for p = 0.15, for example. What a kernel does is tried.
    """
    again = functools.partial(dropped, probability=probability)
    if inputs.device.type == "cpu" or isinstance(inputs, FakeTensor):  # a fake one has a size, and no bits
        return again
    if open_device(inputs.device).is_capturing():  # the generator's state can neither be read nor put back
        return None
    try:
        scale = _kernels_scale(inputs.device, inputs.dtype, probability)
    except Exception as error:  # a backend may lack what trying takes
        logger.debug("dropout on %s cannot be tried, its results are saved: %s", inputs.device, error)
        return None
    return None if scale is None else functools.partial(again, scale=scale)


@functools.lru_cache(maxsize=1024)
def _kernels_scale(device: torch.device, dtype: torch.dtype, probability: float) -> float | None:
    """By what the device's dropout multiplies; None if it does something else. Random numbers go on as before."""
    forked = torch.random.fork_rng(devices=[device.index], device_type=device.type)
    with _disable_current_modes(), torch.no_grad(), forked:
        values = _telling_values(dtype).to(device)
        result, mask = torch.native_dropout(values, probability, True)
        expected = result.cpu().view(torch.uint8)
        kept = 1 - probability
        # As backward does it; the reciprocal of 32 bits; in the tensor's own precision.
        for scale in (1 / kept, 1 / _rounded(kept, torch.float32), _rounded(1 / kept, dtype)):
            found = torch.ops.aten.native_dropout_backward(values, mask, scale)
            if torch.equal(found.cpu().view(torch.uint8), expected):
                return scale
    return None


def _rounded(number: float, dtype: torch.dtype) -> float:
    return torch.tensor(number, dtype=dtype, device="cpu").item()


def _telling_values(dtype: torch.dtype) -> Tensor:
    """Numbers that tell one scale from another: all that 16 bits can hold, as few differ by rounding; 65536 of wider ones."""
    if dtype.itemsize > 2:
        return torch.linspace(-2, 2, 1 << 16, dtype=dtype, device="cpu")
    values = torch.arange(1 << 16, device="cpu").to(torch.int16).view(dtype)
    return values[values.isfinite()]


def pack_bits(mask: Tensor) -> Tensor:
    """A bool mask of any shape as bits ``[ceil(elements / 8)]``, uint8, the first element lowest."""
    flat = mask.reshape(-1).view(torch.uint8)
    flat = nn.functional.pad(flat, (0, -len(flat) % 8)).view(-1, 8)
    packed = flat[:, 0].clone()
    for place in range(1, 8):
        packed |= flat[:, place] << place
    return packed


def unpack_bits(bits: Tensor, shape: torch.Size) -> Tensor:
    """The mask of that shape that :func:`pack_bits` has packed."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    flat = (bits.unsqueeze(1) >> places).bitwise_and_(1).view(-1)
    return flat[: shape.numel()].view(torch.bool).view(shape)


class _PackedDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, probability: float) -> tuple[Tensor, Tensor]:
        if inputs.device.type == "cpu":  # what torch does there, step by step
            noise = torch.empty_like(inputs).bernoulli_(1 - probability)
            bits = pack_bits(noise != 0)
            result = inputs * noise.div_(1 - probability)
        else:
            result, mask = torch.native_dropout(inputs, probability, True)
            bits = pack_bits(mask)
        ctx.probability = probability
        ctx.mark_non_differentiable(bits)
        ctx.save_for_backward(bits)
        return result, bits

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        (bits,) = ctx.saved_tensors
        return dropped(gradient, bits, ctx.probability), None


# ---------------------------------------------------------------------------------------------------------------- ReLU


def packed_relu(inputs: Tensor) -> Tensor:
    """ReLU that saves which elements passed, one bit each, and gives the bits of :func:`torch.relu`."""
    return _PackedReLU.apply(inputs)


class _PackedReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        result = inputs.relu()
        ctx.save_for_backward(pack_bits(~(result <= 0)))  # NaN passes, as in torch
        return result

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (bits,) = ctx.saved_tensors
        return torch.where(unpack_bits(bits, gradient.shape), gradient, 0)


# ----------------------------------------------------------------------------------------------- derivatives in 8 bits


def coarse_activation(forward: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """``forward(inputs)`` of an elementwise function, saving its derivative in 8 bits instead of its input. Not exact.

    An element's derivative is off by at most ``(highest - lowest) / 510``, highest and lowest of the derivatives of this
    tensor (and by rounding in 32 bits); so is its gradient, times the gradient that comes in. Codes for what activation
    functions save are an idea of SlimFit (Ardakani et al. 2023, arXiv 2305.18513); that their derivatives decide is S2A's
    (Jin et al. 2025, arXiv 2503.08154), in 4 bits.
    """
    return _CoarseActivation.apply(inputs, forward)


def to_codes(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values as whole numbers ``0..255``, uint8, and the lowest and the highest of the values, ``[2]``, float32."""
    values = values.float()
    ends = torch.stack(values.aminmax())
    step = (ends[1] - ends[0]).clamp_min(torch.finfo(torch.float).tiny) / 255
    return ((values - ends[0]) / step).round_().to(torch.uint8), ends


def from_codes(codes: Tensor, ends: Tensor) -> Tensor:
    """The values of :func:`to_codes` again, float32, each off by at most ``(ends[1] - ends[0]) / 510``."""
    return torch.lerp(ends[0], ends[1], codes.float() / 255)


class _CoarseActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, forward: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = inputs.detach().requires_grad_()
        # This graph ends here: outer hooks must not see what it saves.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(same, same):
            result = forward(leaf)
            (derivative,) = torch.autograd.grad(result, leaf, torch.ones_like(result))
        ctx.save_for_backward(*to_codes(derivative))
        return result.detach()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (gradient * from_codes(*ctx.saved_tensors)).to(gradient.dtype), None
