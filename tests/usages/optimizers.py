"""Optimizers of programs: PyTorch's, those of bitsandbytes and PEFT, and classes that step all weights together."""

import functools

import bitsandbytes
import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_lorafa_optimizer
from torch import nn

from tests.helpers.train import batch, copied, mlp, train
from tests.usages.table import usage


@usage("torch.optim: fused, over lists, with Nesterov's momentum, with options that change after a step")
def classes_of_pytorch(run):
    makes = [
        lambda weights: torch.optim.AdamW(weights, lr=1e-2, fused=True),
        lambda weights: torch.optim.Adam(weights, lr=1e-2, amsgrad=True, foreach=True),
        lambda weights: torch.optim.SGD(weights, lr=1e-2, momentum=0.9, weight_decay=0.1, fused=True),
        lambda weights: torch.optim.Adagrad(weights, lr=1e-2, fused=True),
        lambda weights: torch.optim.AdamW(weights, lr=1e-2, betas=[0.9, 0.999], foreach=False),
    ]
    for make in makes:
        model = mlp()
        optimizer = run.prepare(model, make(model.parameters()))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 3)  # begins with 0

        def change(number, optimizer=optimizer, scheduler=scheduler):
            run.let_weights_leave()
            scheduler.step()
            if isinstance(optimizer.param_groups[0].get("betas"), list):
                optimizer.param_groups[0]["betas"][0] = 0.5 + 0.1 * number

        train(run, model, optimizer, steps=4, after=change)
        run.log_all(model, optimizer)


@usage("PyTorch's SGD with Nesterov's momentum, which adds to lists of gradients in place")
def a_class_writes_its_gradients(run):
    model = mlp()
    optimizer = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, nesterov=True, foreach=True)
    )
    train(run, model, optimizer, after=lambda _: run.log([p.grad for p in model.parameters()]), zero=False)
    run.log_all(model, optimizer)


@usage("GPTQ's integers among the parameters, which an optimizer is given and passes by")
def integers_are_among_the_parameters(run):
    for together in (True, False):
        model = mlp()
        model.numbers = nn.Parameter(torch.arange(256), requires_grad=False)
        weights = [p for p in model.parameters() if p.is_floating_point()]
        groups = [*weights, model.numbers] if together else [{"params": weights}, {"params": [model.numbers]}]
        optimizer = run.prepare(model, torch.optim.AdamW(groups, lr=0.1))
        train(run, model, optimizer)
        run.log_all(model, optimizer)


class _Own(torch.optim.Optimizer):
    """Calls :meth:`update` for each parameter with a gradient."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, self.state[parameter], group)


class _DividesByTheNormOfAll(_Own):
    """As LARS's and LAMB's layers do, but over all weights, as Prodigy's and D-Adaptation's estimates are."""

    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.factor = torch.linalg.vector_norm(torch.stack([each.norm() for each in gradients]))
        return super().step(closure)

    def update(self, parameter, state, group):
        mean = state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
        parameter.sub_(mean / self.factor, alpha=group["lr"])


class _CountsInItsGroups(_Own):
    """As schedule-free optimizers do, whose weights are those of the mean or not."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)

    def update(self, parameter, state, group):
        z = state.setdefault("z", parameter.clone())
        z.sub_(parameter.grad, alpha=group["lr"])
        parameter.lerp_(z, 1 / group["k"])


class _LooksAhead(torch.optim.Optimizer):
    """Lookahead: another optimizer steps, whose weights are pulled back every few steps."""

    def __init__(self, parameters):
        parameters = list(parameters)
        super().__init__(parameters, {"lr": 1e-2})
        self.inner = torch.optim.AdamW(parameters, lr=1e-2)
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.steps += 1
        for parameter in self.param_groups[0]["params"]:
            slow = self.state[parameter].setdefault("slow", parameter.clone())
            if self.steps % 2 == 0:
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)


class _Draws(_Own):
    """SGLD: adds noise, from a generator of its own and from PyTorch's."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.generator = torch.Generator().manual_seed(7)

    def update(self, parameter, state, group):
        state["noise"] = torch.randn(parameter.shape, generator=self.generator) + torch.rand_like(parameter)
        parameter.sub_(parameter.grad + 1e-3 * state["noise"], alpha=group["lr"])


class _KeepsOneBuffer(_Own):
    """Keeps the state of all weights in one tensor, as Apex's flattened optimizers do."""

    def step(self, closure=None):
        parameters = self.param_groups[0]["params"]
        if not self.state:
            flat = torch.zeros(sum(p.numel() for p in parameters))
            for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                self.state[parameter]["mean"] = part.view_as(parameter)
        return super().step(closure)

    def update(self, parameter, state, group):
        parameter.sub_(state["mean"].lerp_(parameter.grad, 0.1), alpha=group["lr"])


torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # PyTorch notes on the step of a class that it has wrapped it


class _KeepsTheNameOfItsBase(torch.optim.SGD):
    """A subclass that computes: its base is known, and it is not, though ``functools.wraps`` copies PyTorch's note."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=1e-2, momentum=0.9)

    @functools.wraps(torch.optim.SGD.step)
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.mul_(0.5)
        return super().step(closure)


class _StepsOutOfSharpMinima(_Own):
    """SAM: evaluates the loss again, at weights that are moved."""

    @torch.no_grad()
    def step(self, closure=None):
        moved = [(p, p.grad * 0.05) for p in self.param_groups[0]["params"] if p.grad is not None]
        for parameter, by in moved:
            parameter.add_(by)
            parameter.grad = None
        with torch.enable_grad():
            loss = closure()
        for parameter, by in moved:
            parameter.sub_(by)
        super().step()
        return loss

    def update(self, parameter, state, group):
        parameter.sub_(state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1))


class _LBFGS(torch.optim.LBFGS):
    """PyTorch's, which evaluates the loss several times a step, and keeps its state with one weight."""

    def __init__(self, parameters):
        super().__init__(parameters, max_iter=4)


def _step_as_a_whole(kind):
    """Steps of a class that is not known to update each weight by itself, and loads what it has saved."""

    def function(run):
        model = mlp()
        optimizer = run.prepare(model, kind(model.parameters()))

        def closure(number):
            optimizer.zero_grad()
            loss = model(batch(number)).square().mean()
            loss.backward()
            return loss

        for number in range(6):
            if kind in (_LBFGS, _StepsOutOfSharpMinima):
                closure(number)
                run.log(optimizer.step(functools.partial(closure, number)))
            else:
                closure(number)
                run.clip(model, 0.1)
                optimizer.step()
            if number == 3:
                run.log_all(model, optimizer)
                optimizer.load_state_dict(copied(optimizer.state_dict()))
        run.log_all(model, optimizer)
        run.log(torch.get_rng_state(), [p.grad for p in model.parameters()])

    function.__name__ = kind.__name__.strip("_")
    return function


WHOLE = [
    _DividesByTheNormOfAll, _CountsInItsGroups, _LooksAhead, _Draws, _StepsOutOfSharpMinima, _KeepsOneBuffer,
    _KeepsTheNameOfItsBase, _LBFGS,
]  # fmt: skip
for _kind in WHOLE:
    usage(_kind.__doc__)(_step_as_a_whole(_kind))


@usage("transformers' Trainer, which registers embeddings for 32-bit state with 8-bit optimizers of bitsandbytes")
def weights_of_8_bit_optimizers_have_options_of_their_own(run):
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    for later in (False, True):
        manager.initialize()  # it knows weights by their ids, which other weights had
        model = mlp()
        if not later:
            manager.register_module_override(model[2], "weight", {"optim_bits": 32})
        optimizer = run.prepare(model, bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-2, min_8bit_size=256))
        if later:
            manager.register_module_override(model[2], "weight", {"optim_bits": 32})
        train(run, model, optimizer)
        dtypes = {optimizer.state[model[number].weight]["state1"].dtype for number in (0, 2)}
        assert dtypes == {torch.uint8, torch.float32}
        run.log_all(model, optimizer)
        manager.initialize()


@usage("PEFT's LoRA-FA, whose optimizer steps two matrices of an adapter together")
def lora_fa(run):
    torch.manual_seed(0)
    model = get_peft_model(mlp(), LoraConfig(r=4, target_modules=["0", "2"]))
    optimizer = run.prepare(model, create_lorafa_optimizer(model, r=4, lora_alpha=8, lr=1e-2))
    train(run, model, optimizer)
    run.log_all(model, optimizer)
