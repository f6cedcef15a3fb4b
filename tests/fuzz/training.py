"""What programs of training do: losses, backward and steps, some of which end with an error."""

import random
from typing import Any

import torch
from torch import Tensor


class Stumbled(Exception):
    """An error of the user's own."""


class Breaks(torch.autograd.Function):
    """In backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise Stumbled


class Trains:
    """Losses, backward and steps of a player with a model and an optimizer."""

    optimizer: Any
    _losses: list[Tensor]

    def _forward(self, rng: random.Random) -> Tensor:
        raise NotImplementedError

    def backward(self, rng: random.Random) -> Any:
        loss = self._forward(rng)
        if loss.requires_grad:
            loss.backward()
        return loss

    def broken_backward(self, rng: random.Random) -> Any:
        loss = Breaks.apply(self._forward(rng))
        if loss.requires_grad:
            loss.backward()
        return loss

    def keep_loss(self, rng: random.Random) -> Any:
        self._losses.append(self._forward(rng))
        return self._losses[-1]

    def backward_of_kept(self, rng: random.Random) -> Any:
        if self._losses:
            loss = self._losses.pop()
            if loss.requires_grad:
                loss.backward()

    def step(self, rng: random.Random) -> Any:
        self.optimizer.step()
        if rng.random() < 0.7:
            self.optimizer.zero_grad()

    def step_with_closure(self, rng: random.Random) -> Any:
        def closure() -> Any:
            self.optimizer.zero_grad()
            return self.backward(rng)

        return self.optimizer.step(closure)


class Unknown(torch.optim.Optimizer):
    """Of no class that is known to step each weight by itself: it gives gradients to weights that have none, writes to those
    that are there, and reads ``factor``, which users may set.
    """

    factor = 1.0

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad.add_(parameter, alpha=0.1)
                state = self.state[parameter]
                state["mean"] = state.get("mean", 0) * 0.9 + parameter.grad * parameter.norm()
                parameter.sub_(state["mean"], alpha=group["lr"] * self.factor)
        return loss
