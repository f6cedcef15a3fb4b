"""Random autograd programs: views, in-place operations, functions of one's own, checkpoints, errors, in any mixture.

A program is a list of instructions over a pool of values. Whoever draws it (a seed, or hypothesis) only picks numbers, so
every list of instructions is a program; many of them are wrong, and then plain autograd says how.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """``name`` is a key of :data:`OPERATIONS`; the numbers pick values and sizes, each modulo what there is."""

    name: str
    first: int = 0
    second: int = 0
    number: int = 0


class Stumbled(Exception):
    """An error of the user's own."""


class SavesInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, one, other):
        ctx.save_for_backward(one, other)
        return one * other

    @staticmethod
    def backward(ctx, gradient):
        one, other = ctx.saved_tensors
        return gradient * other, gradient * one


class SavesOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        output = value.sigmoid()
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx, gradient):
        (output,) = ctx.saved_tensors
        return gradient * output * (1 - output)


class SavesViews(torch.autograd.Function):
    """Of its input, and of what it made on the way, some of it twice."""

    @staticmethod
    def forward(ctx, value):
        doubled = value.detach() * 2
        ctx.save_for_backward(value.transpose(0, -1), doubled[..., ::2], doubled[..., 1:], value.view_as(value))
        return value * 1.5

    @staticmethod
    def backward(ctx, gradient):
        turned, even, rest, value = ctx.saved_tensors
        return gradient * turned.transpose(0, -1) * (even.sum() + rest.sum()) + value


class AsksTwice(torch.autograd.Function):
    """Asks for its saved tensors twice."""

    @staticmethod
    def forward(ctx, value):
        ctx.save_for_backward(value)
        return value.cos()

    @staticmethod
    def backward(ctx, gradient):
        (first,) = ctx.saved_tensors
        (second,) = ctx.saved_tensors
        return gradient * (first - 2 * second)


class Scribbles(torch.autograd.Function):
    """Changes what it saved in its backward."""

    @staticmethod
    def forward(ctx, value):
        ctx.save_for_backward(value)
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        (value,) = ctx.saved_tensors
        with torch.no_grad():
            return value.mul_(2) * gradient


class Stumbles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        ctx.save_for_backward(value)
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise Stumbled


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        value.mul_(1.25)
        ctx.mark_dirty(value)
        ctx.save_for_backward(value)
        return value

    @staticmethod
    def backward(ctx, gradient):
        (value,) = ctx.saved_tensors
        return gradient * 1.25 + 0 * value


def _fitting(one, other):
    """``other`` in the shape of ``one``: itself, or a number of it, spread out."""
    return other if one.shape == other.shape else other.reshape(-1)[:1].expand(one.numel()).reshape(one.shape)


def _block(value):
    return (value.sin() * value).tanh()


def _nested(value):
    return checkpoint(_block, value.cos() * 2, use_reentrant=False) * value


def _stumbling_block(value):
    value = value.sin()
    raise Stumbled


def _no_grad_add(value):
    with torch.no_grad():
        value.add_(1)


def _conjugate(one, other):
    value = torch.complex(one.float(), other.float())
    return (value.conj() * (value * 3)).imag + (value.conj().imag * other).real


def _expand(value):
    return value.sum(-1, keepdim=True).expand(value.shape)


def _cut(value, number):
    begin = number % value.shape[0]
    return value[begin : begin + 1 + number % 3]


def _chunks(split, value, number):
    parts = split(value, 2, -1)
    return parts[number % len(parts)]


_Unary = Callable[[torch.Tensor], torch.Tensor]
_UNARY: dict[str, _Unary] = {
    "sin": torch.sin,
    "exp": lambda value: value.clamp(-2, 2).exp(),
    "tanh": torch.tanh,
    "relu": torch.relu,
    "cube": lambda value: value.pow(3),
    "softmax": lambda value: value.softmax(-1),
    "norm": lambda value: torch.nn.functional.layer_norm(value, value.shape[-1:]),
    "gelu": torch.nn.functional.gelu,
    "variance": lambda value: value * value.var(unbiased=False),
    "largest": lambda value: value.amax(-1, keepdim=True) * value,
    "cumulate": lambda value: value.cumsum(0) * value,
    "detached": lambda value: value.detach() * value,
    "small": lambda value: value.reshape(-1)[:1] * 2,
    "empty": lambda value: value[:0],
    "turn": lambda value: value.transpose(0, -1),
    "flat": lambda value: value.reshape(1, -1),
    "step": lambda value: value[..., ::2],
    "expand": _expand,
    "windows": lambda value: value.unfold(-1, min(2, value.shape[-1]), 1).sum(-1),
    "diagonal": lambda value: value.diagonal().unsqueeze(0),
    "narrow": lambda value: value.narrow(-1, 0, max(1, value.shape[-1] // 2)),
    "strided": lambda value: value.as_strided((2, 2), (1, 2)) if value.numel() > 3 else value,
    "matrix": lambda value: value @ value.transpose(0, -1) * 0.1,
    "checkpoint": lambda value: checkpoint(_block, value, use_reentrant=False),
    "old checkpoint": lambda value: checkpoint(_block, value, use_reentrant=True),
    "nested checkpoint": lambda value: checkpoint(_nested, value, use_reentrant=False),
    "old nested checkpoint": lambda value: checkpoint(_nested, value, use_reentrant=True),
    "saves output": SavesOutput.apply,
    "saves views": SavesViews.apply,
    "asks twice": AsksTwice.apply,
    "scribbles": Scribbles.apply,
    "in place of one's own": InPlace.apply,
    "stumbles in backward": Stumbles.apply,
    "stumbles in a checkpoint": lambda value: checkpoint(_stumbling_block, value, use_reentrant=False),
}
_BINARY = {
    "multiply": lambda one, other: one * _fitting(one, other),
    "divide": lambda one, other: one / (_fitting(one, other).abs() + 1),
    "where": lambda one, other: torch.where(one > 0, one * 2, _fitting(one, other)),
    "join": lambda one, other: torch.cat([one, _fitting(one, other)], 0),
    "conjugate": lambda one, other: _conjugate(one, _fitting(one, other)).to(one.dtype),
    "saves inputs": lambda one, other: SavesInputs.apply(one, _fitting(one, other)),
    "lerp": lambda one, other: torch.lerp(one, _fitting(one, other), _fitting(one, other)),
}
_CUTS = {
    "rows": _cut,
    "chunk": lambda value, number: _chunks(torch.chunk, value, number),
    # Of a tensor that nobody else has: what is unsafe is to change the whole after its parts were saved.
    "unsafe chunk": lambda value, number: _chunks(torch.unsafe_chunk, value * 1, number),
}
_IN_PLACE = {
    "add_": lambda value: value.add_(1),
    "mul_": lambda value: value.mul_(1.5),
    "sin_": lambda value: value.sin_(),
    "sigmoid_": lambda value: value.sigmoid_(),
    "relu_": lambda value: value.relu_(),
    "rows_": lambda value: value[:1].mul_(2),
    "no grad add_": _no_grad_add,
}
STUMBLING = {"stumbles in backward", "stumbles in a checkpoint", "raise"}
_RARE = {"scribbles", *STUMBLING}
OPERATIONS = (*_UNARY, *_BINARY, *_CUTS, *_IN_PLACE, "raise", "copy")
# Most programs should reach the end of their backward.
WEIGHTS = tuple(1 if name in _RARE else 2 if name in _IN_PLACE else 6 for name in OPERATIONS)


def play(instructions: tuple[Instruction, ...], leaves: list[torch.Tensor]) -> torch.Tensor:
    """A number that depends on all values that are left at the end."""
    values = list(leaves)
    for instruction in instructions:
        name = instruction.name
        value = values[instruction.first % len(values)]
        if name == "raise":
            raise Stumbled
        if name in _IN_PLACE:
            _IN_PLACE[name](value)
            continue
        if name == "copy":
            result = value.clone()
        elif name in _UNARY:
            result = _UNARY[name](value)
        elif name in _BINARY:
            result = _BINARY[name](value, values[instruction.second % len(values)])
        else:
            result = _CUTS[name](value, instruction.number)
        if len(values) > 3 and instruction.number % 2:
            values[instruction.second % len(values)] = result  # what was there goes, if nobody saved it
        else:
            values.append(result)
        del value, result
    return sum(value.sum(dtype=torch.float64) for value in values)
