"""Random autograd graphs whose kernels run late on a simulated device.

All arithmetic is multiplying, adding and taking the fraction, which is exact whatever the order of memory: a value is
either the one that plain autograd has, or some byte of it was wrong. What stands for a derivative need not be one.
"""

import dataclasses
import random

import torch

from tests.helpers.simulated_device import SimulatedDevice

SIZES = ((8, 8), (16, 16), (24, 24), (32, 32), (40, 40))  # the last in two chunks where the ring is small


def _mix(output, one, other):
    torch.mul(one, other, out=output)
    output.mul_(3).add_(0.37).frac_()


class _Op(torch.autograd.Function):
    """One operation on the stream that is current in forward; backward computes on the same, as autograd sees to."""

    @classmethod
    def compute(cls, ctx, device, *inputs):
        ctx.device, ctx.stream = device, device.current_stream()
        for tensor in inputs:
            device.receive(tensor)

    @staticmethod
    def gradient_arrives(ctx, *gradients):
        for gradient in gradients:
            if gradient is not None:
                ctx.device.receive(gradient)


class Multiply(_Op):
    """Saves both inputs."""

    @staticmethod
    def forward(ctx, device, one, other):
        _Op.compute(ctx, device, one, other)
        ctx.save_for_backward(one, other)
        return device.launch(_mix, one.size(), one, other)

    @staticmethod
    def backward(ctx, gradient):
        device = ctx.device
        with device.on(ctx.stream):
            _Op.gradient_arrives(ctx, gradient)
            one, other = ctx.saved_tensors
            size = gradient.size()
            return None, device.launch(_mix, size, gradient, other), device.launch(_mix, size, gradient, one)


class _Saves(_Op):
    """Saves one tensor of the size of its gradient."""

    @staticmethod
    def backward(ctx, gradient):
        with ctx.device.on(ctx.stream):
            _Op.gradient_arrives(ctx, gradient)
            (saved,) = ctx.saved_tensors
            return None, ctx.device.launch(_mix, gradient.size(), gradient, saved)


class Keep(_Saves):
    """Saves its output, as tanh does."""

    @staticmethod
    def forward(ctx, device, value):
        _Op.compute(ctx, device, value)
        output = device.launch(_mix, value.size(), value, value)
        ctx.save_for_backward(output)
        return output


class Turn(_Saves):
    """Saves a transposed view."""

    @staticmethod
    def forward(ctx, device, value):
        _Op.compute(ctx, device, value)
        ctx.save_for_backward(value.t())
        return device.launch(lambda output, value: _mix(output, value, value.t()), value.size(), value)


class Rows(_Op):
    """Saves a few rows: a part of a storage, at an offset."""

    @staticmethod
    def forward(ctx, device, value, begin, end):
        _Op.compute(ctx, device, value)
        ctx.save_for_backward(value[begin:end])
        ctx.rows = begin, end
        return device.launch(_mix, value.size(), value, value)

    @staticmethod
    def backward(ctx, gradient):
        begin, end = ctx.rows

        def kernel(output, gradient, rows):
            output.copy_(gradient)
            _mix(output[begin:end], gradient[begin:end], rows)

        with ctx.device.on(ctx.stream):
            _Op.gradient_arrives(ctx, gradient)
            (rows,) = ctx.saved_tensors
            return None, ctx.device.launch(kernel, gradient.size(), gradient, rows), None, None


class Free(_Op):
    """Saves nothing."""

    @staticmethod
    def forward(ctx, device, value):
        _Op.compute(ctx, device, value)
        return device.launch(_mix, value.size(), value, value)

    @staticmethod
    def backward(ctx, gradient):
        with ctx.device.on(ctx.stream):
            _Op.gradient_arrives(ctx, gradient)
            return None, ctx.device.launch(_mix, gradient.size(), gradient, gradient)


class Overwrite(_Saves):
    """Changes its input in place, and saves what comes out: a later version of a storage."""

    @staticmethod
    def forward(ctx, device, value):
        _Op.compute(ctx, device, value)
        device.write(lambda value: _mix(value, value.clone(), value.clone()), value)
        ctx.mark_dirty(value)
        ctx.save_for_backward(value)
        return value


class Fork(_Op):
    """Hands one value to several operations; adds up what comes back, late."""

    @staticmethod
    def forward(ctx, device, value, count):
        _Op.compute(ctx, device, value)
        return tuple(value.view_as(value) for _ in range(count))

    @staticmethod
    def backward(ctx, *gradients):
        def kernel(output, *gradients):
            output.zero_()
            for gradient in gradients:
                output.add_(gradient)
            output.frac_()

        with ctx.device.on(ctx.stream):
            _Op.gradient_arrives(ctx, *gradients)
            there = [gradient for gradient in gradients if gradient is not None]
            return None, ctx.device.launch(kernel, there[0].size(), *there), None


class Stumble(_Op):
    """Raises in backward."""

    @staticmethod
    def forward(ctx, device, value):
        _Op.compute(ctx, device, value)
        ctx.set_materialize_grads(False)
        return device.launch(lambda output, value: output.copy_(value), value.size(), value)

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError


@dataclasses.dataclass(frozen=True)
class Step:
    """What one operation does: to which of the values that are left, on which stream."""

    kind: str
    first: int
    second: int
    stream: int
    rows: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Graph:
    size: tuple[int, int]
    steps: tuple[Step, ...]

    @classmethod
    def random(cls, rng: random.Random, streams: int, *, stumbles: bool = False) -> "Graph":
        """Any graph at all."""
        kinds = ("multiply", "multiply", "keep", "keep", "turn", "rows", "fork", "overwrite")
        size = rng.choice(SIZES)
        steps = []
        for _ in range(rng.randint(3, 14)):
            begin = rng.randrange(size[0] - 1)
            rows = begin, rng.randint(begin + 1, size[0])
            kind, stream = rng.choice(kinds), rng.randrange(streams) if rng.random() < 0.3 else 0
            steps.append(Step(kind, rng.randrange(1 << 16), rng.randrange(1 << 16), stream, rows))
        if stumbles:
            steps.insert(rng.randrange(len(steps)), Step("stumble", rng.randrange(1 << 16), 0, 0, (0, 1)))
        return cls(size, tuple(steps))

    def forward(self, device: SimulatedDevice, leaves: list[torch.Tensor]) -> torch.Tensor:
        """One value that depends on all."""
        values = list(leaves)
        for step in self.steps:
            with device.on(device.compute_streams[step.stream]):
                value = values.pop(step.first % len(values))
                if step.kind == "multiply" and values:
                    values.append(Multiply.apply(device, value, values.pop(step.second % len(values))))
                elif step.kind == "turn":
                    values.append(Turn.apply(device, value))
                elif step.kind == "rows":
                    values.append(Rows.apply(device, value, *step.rows))
                elif step.kind == "fork":
                    values.extend(Fork.apply(device, value, 2 + step.second % 2))
                elif step.kind == "overwrite":
                    values.append(Overwrite.apply(device, Free.apply(device, value)))  # what nobody saved
                elif step.kind == "stumble":
                    values.append(Stumble.apply(device, value))
                else:
                    values.append(Keep.apply(device, value))
                del value
        while len(values) > 1:
            values.append(Multiply.apply(device, values.pop(0), values.pop(0)))
        return values[0]
