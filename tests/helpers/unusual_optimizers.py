"""Optimizers that do what those of torch.optim do not, and users' do."""

import torch


class Unusual(torch.optim.Optimizer):
    """Calls :meth:`update` for each parameter with a gradient; ``factor`` is an attribute that users may set."""

    def __init__(self, params, lr=1e-2, **defaults):
        super().__init__(params, {"lr": lr, **defaults})
        self.factor = 1.0

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.visit(parameter, group)
        return loss

    def visit(self, parameter, group):
        if parameter.grad is not None:
            self.update(parameter, self.state[parameter], group)

    def update(self, parameter, state, group):
        raise NotImplementedError


class HasFactor(Unusual):
    """Reads an attribute."""

    def update(self, parameter, state, group):
        parameter.sub_(parameter.grad, alpha=group["lr"] * float(self.factor + 0.0))


class TrustRatio(Unusual):
    """Its steps are as long as the parameter."""

    def update(self, parameter, state, group):
        length = parameter.norm() / (parameter.grad.norm() + 1e-8)
        parameter.sub_(parameter.grad * length, alpha=group["lr"])


class Factored(Unusual):
    """Keeps rows and columns of matrices that have 128 of each."""

    def update(self, parameter, state, group):
        square = parameter.grad.square()
        if parameter.dim() == 2 and min(parameter.shape) >= 128:
            state["rows"] = state.get("rows", 0) * 0.9 + square.mean(1)
            state["columns"] = state.get("columns", 0) * 0.9 + square.mean(0)
            square = torch.outer(state["rows"], state["columns"])
        else:
            square = state["all"] = state.get("all", 0) * 0.9 + square
        parameter.sub_(parameter.grad / (square.sqrt() + 1e-3), alpha=group["lr"])


class WritesGradients(Unusual):
    """Adds weight decay to ``.grad``."""

    def update(self, parameter, state, group):
        parameter.grad.add_(parameter, alpha=0.1)
        parameter.sub_(parameter.grad, alpha=group["lr"])


class FillsGradients(Unusual):
    """Steps without a gradient, too."""

    def visit(self, parameter, group):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        super().visit(parameter, group)

    def update(self, parameter, state, group):
        state["mean"] = state.get("mean", 0) * 0.9 + parameter.grad
        parameter.mul_(1 - 0.1 * group["lr"])
        parameter.sub_(state["mean"], alpha=group["lr"])
