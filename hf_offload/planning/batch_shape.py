"""What the memory of a micro-batch depends on, as far as it can be seen when it begins: what plans are made for.

A micro-batch is what one backward is for: usually one forward of the model, or several whose losses are added up.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hf_offload.state.gradients import gradient_of, has_gradient
from hf_offload.tensors import nbytes_of

Inputs = tuple[tuple[str, tuple[Any, ...]], ...]

# Inputs inside of inputs are looked for so deep.
_MAX_DEPTH = 6


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """The inputs' shapes of every forward of a micro-batch, what is trained, and the gradients that are there already.

    Attributes:
        forwards: For each forward, name, type and shape of every tensor or array in its inputs, wherever in them it is, and
            the length of every list. Switches are there as if they were shapes. Numbers and words are not: they differ from
            step to step.
        trainable: One bit for each parameter that is trained.
        gradient_bytes: Gradients that there are when the micro-batch begins, in memory or on a tier.
        weight_bytes: Weights and buffers.
        autocast: The type that autocast casts to; empty where it is off.
        training: Whether the model is in training mode.
    """

    forwards: tuple[Inputs, ...]
    trainable: int
    gradient_bytes: int
    weight_bytes: int
    autocast: str
    training: bool

    @property
    def elements(self) -> int:
        """How many numbers the inputs hold."""
        return sum(math.prod(shape) for shapes in self.forwards for _, shape in shapes if _is_shape(shape))

    @property
    def largest_input(self) -> str:
        """Name and shape of the input with the most numbers, as ``input_ids of 4 x 512``."""
        found = [one for shapes in self.forwards for one in shapes if _is_shape(one[1]) and one[1]]
        if not found:
            return "the same inputs"
        path, shape = max(found, key=lambda one: math.prod(one[1]))
        name = path.partition(":")[0].lstrip(".")
        return f"{'inputs' if name.isdigit() else name} of {' x '.join(map(str, shape))}"

    @property
    def demand(self) -> tuple[int, int]:
        """By this, one that needs more memory comes after one that needs less."""
        return self.elements, self.gradient_bytes

    def joined(self, other: "BatchShape") -> "BatchShape":
        """The micro-batch goes on with the forward of ``other``."""
        return dataclasses.replace(self, forwards=self.forwards + other.forwards)

    def begins(self, other: "BatchShape") -> bool:
        """Whether ``other`` is this micro-batch, or goes on as it began, and has no less else."""
        return self._no_less_else(other) and self.forwards == other.forwards[: len(self.forwards)]

    def fits_into(self, other: "BatchShape") -> bool:
        """Whether everything is there in ``other``, and no smaller in any dimension."""
        return (
            self._no_less_else(other)
            and len(self.forwards) <= len(other.forwards)
            and all(map(_fits_into, self.forwards, other.forwards))
        )

    def _no_less_else(self, other: "BatchShape") -> bool:
        return (
            self.training == other.training
            and self.autocast == other.autocast
            and self.weight_bytes <= other.weight_bytes
            and self.trainable & ~other.trainable == 0
            and self.gradient_bytes <= other.gradient_bytes
        )


def shape_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BatchShape:
    """The batch shape of a forward of ``model`` that begins with these inputs."""
    shapes = tuple(_shapes(({str(index): value for index, value in enumerate(args)} | dict(kwargs)), ""))
    trainable, gradients, weights = 0, 0, sum(map(nbytes_of, model.buffers()))
    device = "cpu"
    for index, parameter in enumerate(model.parameters()):
        device = parameter.device.type
        trainable |= parameter.requires_grad << index
        weights += nbytes_of(parameter)
        if parameter.is_leaf and has_gradient(parameter):
            found = gradient_of(parameter)
            gradients += nbytes_of(parameter if found is None else found)
    autocast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else ""
    return BatchShape((shapes,), trainable, gradients, weights, autocast, model.training)


def tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Every tensor in ``value``, however it is nested."""
    return (leaf for _, leaf in _leaves(value, "", depth) if isinstance(leaf, torch.Tensor))


def _shapes(value: Any, name: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for path, leaf in _leaves(value, name, 0):
        if isinstance(leaf, bool) or leaf is None:
            yield path, (repr(leaf),)
        elif isinstance(leaf, int):
            yield path, (leaf,)
        elif isinstance(leaf, torch.Tensor) and (leaf.layout is not torch.strided or leaf.is_nested or is_lazy(leaf)):
            yield f"{path}: {leaf.dtype}", (nbytes_of(leaf),)  # its shape does not say how large it is
        else:
            yield f"{path}: {leaf.dtype}", tuple(leaf.shape)


def _leaves(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Tensors, arrays, switches and the lengths of lists, with their names."""
    if isinstance(value, (torch.Tensor, bool)) or value is None:
        yield name, value
    elif type(value).__module__ == "numpy":
        if hasattr(value, "shape"):
            yield name, value
    elif depth < _MAX_DEPTH:
        parts: Iterator[tuple[Any, Any]]
        if isinstance(value, Mapping):
            parts = iter(value.items())
        elif isinstance(value, (list, tuple)):
            parts = enumerate(value)
            yield name, len(value)
        else:
            parts = _attributes(value)
        for key, part in parts:
            yield from _leaves(part, f"{name}.{key}", depth + 1)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield name, getattr(value, name)


def _is_shape(shape: tuple[Any, ...]) -> bool:
    return not any(isinstance(size, str) for size in shape)


def _fits_into(shapes: Inputs, other: Inputs) -> bool:
    return [name for name, _ in shapes] == [name for name, _ in other] and all(
        one == two or (len(one) == len(two) and _is_shape(one) and _is_shape(two) and all(map(int.__le__, one, two)))
        for (_, one), (_, two) in zip(shapes, other, strict=True)
    )
