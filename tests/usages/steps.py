"""What programs do in a step: precision, clipping, gradients, hooks."""

import collections
import itertools

import torch
from torch import nn

from hf_offload.state.gradients import parked_gradient
from tests.helpers.train import adamw, batch, mlp, train
from tests.usages.table import usage

# -- precision -----------------------------------------------------------------------------------------------------------


def _half_precision(model, inputs):
    with torch.autocast("cpu", torch.bfloat16):
        return model(inputs).float().square().mean()


@usage("PyTorch's docs, Automatic Mixed Precision")
def weights_are_used_first_under_autocast(run):
    model = mlp()
    optimizer = run.prepare(model, torch.optim.Adafactor(model.parameters(), lr=0.1))
    train(run, model, optimizer, loss=_half_precision)
    run.log_all(model, optimizer)


@usage("loops whose autocast is around the whole epoch")
def steps_under_autocast(run):
    model = mlp()
    optimizer = run.prepare(model, torch.optim.Adafactor(model.parameters(), lr=0.1))
    with torch.autocast("cpu", torch.bfloat16):
        train(run, model, optimizer, loss=lambda model, inputs: model(inputs).float().square().mean())
    run.log_all(model, optimizer)


@usage("transformers, which sets the default dtype while it makes a model")
def steps_with_another_default_dtype(run):
    model = mlp()
    optimizer = run.prepare(model, torch.optim.ASGD(model.parameters(), lr=1e-2))  # which makes numbers in each step
    train(
        run,
        model,
        optimizer,
        before=lambda _: torch.set_default_dtype(torch.float64),
        after=lambda _: torch.set_default_dtype(torch.float32),
    )
    run.log_all(model, optimizer)


@usage("transformers: tied embeddings under autocast, with a frozen layer and a forward for metrics")
def tied_weights_under_autocast(run):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 96), nn.Linear(96, 96), nn.Linear(96, 96))
    model[2].weight = model[0].weight
    model[3].weight = nn.Parameter(model[3].weight.detach(), requires_grad=False)

    def loss(model, inputs):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=model[4].weight.requires_grad):
            value = model(model(inputs)).float().square().mean()
            with torch.no_grad():
                run.log(model(inputs))
        return value

    optimizer = adamw(run, model)
    train(run, model, optimizer, loss=loss)
    model[4].weight.requires_grad_(False)
    train(run, model, optimizer, loss=loss)
    run.log_all(model, optimizer)


@usage("PyTorch's docs, torch.amp.GradScaler; accelerate with mixed_precision='fp16'")
def gradients_are_scaled(run):
    for fused, unscaled in itertools.product((False, True), (False, True)):
        model = mlp()
        optimizer = adamw(run, model, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for number in range(5):
            loss = model(batch(number)).square().mean() * (float("inf") if number == 3 else 1)
            scaler.scale(loss).backward()
            for parameter in model.parameters():
                if (parked := parked_gradient(parameter.grad)) is not None:
                    parked.leave()  # where backward has ended before it was written
                    parked.wait_until_written()
                    assert parked.is_away
            if unscaled:
                scaler.unscale_(optimizer)
                run.log(run.clip(model, 0.1))
            scaler.step(optimizer)
            scaler.update()
            if number % 2:
                run.log(model[0].weight.grad)
            optimizer.zero_grad()
            run.log(scaler.get_scale())
        run.log_all(model, optimizer)


# -- gradients -----------------------------------------------------------------------------------------------------------


@usage("accelerate's docs, gradient accumulation")
def gradients_accumulate(run):
    model = mlp()
    optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(3):
        for part in range(3):
            (model(batch(3 * step + part)).square().mean() / 3).backward()
        run.log(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    run.log_all(model, optimizer)


@usage("PyTorch's docs, torch.nn.utils; TRL, which logs the norm that a step has had")
def gradients_are_clipped_in_all_ways(run):
    model = mlp()
    optimizer, weights = adamw(run, model), list(model.parameters())
    clips = [
        lambda: run.log(run.clip(model, 0.5), run.clip(model, 0.1)),
        lambda: run.log(nn.utils.clip_grad_norm_(model.parameters(), 0.1)),
        lambda: nn.utils.clip_grad_value_(model.parameters(), 0.01),
        lambda: run.log(run.clip(model, 0.1, norm_type=float("inf")), run.clip(model, 0.01, norm_type=1.0)),
        lambda: run.log(run.clip(model, float("inf"))),
        lambda: run.log(nn.utils.get_total_norm([p.grad for p in weights]), nn.utils.get_total_norm(weights)),
        lambda: nn.utils.clip_grads_with_norm_(weights, 1e-3, torch.tensor(2.0)),
    ]
    train(
        run, model, optimizer, len(clips), before=lambda number: clips[number](), after=lambda _: run.clip(model, 0.1)
    )
    run.log_all(model, optimizer)


@usage("loops of before PyTorch 2.0, whose zero_grad kept gradients")
def gradients_are_set_to_zeros(run):
    model = mlp()
    optimizer = adamw(run, model)
    for number in range(4):
        train(run, model, optimizer, steps=1, first=number, zero=False)
        (optimizer if number % 2 else model).zero_grad(set_to_none=False)
        optimizer.step()
        run.log([p.grad for p in model.parameters()])
    run.log_all(model, optimizer)


@usage("Opacus, which puts gradients with noise in the place of backward's")
def gradients_are_set_and_changed(run):
    model = mlp()
    optimizer = adamw(run, model)

    def change(number):
        model[0].weight.grad = None
        model[2].weight.grad = torch.full_like(model[2].weight, 0.1)
        model[4].weight.grad *= 2
        run.log(run.clip(model, 0.5))

    train(run, model, optimizer, before=change, after=lambda _: model[2].weight.grad.mul_(100), zero=False)
    run.log_all(model, optimizer)


@usage("DeepSpeed and Megatron, whose gradients lie in buffers")
def memory_of_gradients_is_held(run):
    model = mlp()
    optimizer = adamw(run, model)
    buffers = [torch.zeros_like(p) for p in model.parameters()]
    for parameter, buffer in zip(model.parameters(), buffers, strict=True):
        parameter.grad = buffer

    def zero(number):
        for buffer in buffers:
            buffer.zero_()

    train(run, model, optimizer, before=lambda _: run.log(buffers), after=zero, zero=False)
    model(batch(9)).mean().backward()
    gradients = [p.grad for p in model.parameters()]
    model(batch(9)).mean().backward()
    run.log(gradients)
    run.log_all(model, optimizer)


@usage("PyTorch's docs, Automatic Mixed Precision examples: gradient penalty")
def gradients_are_penalised(run):
    model = mlp()
    optimizer = adamw(run, model)

    def loss(model, inputs):
        value = model(inputs).square().mean()
        gradients = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
        (slope,) = torch.autograd.grad(model(inputs.requires_grad_()).sum(), inputs, create_graph=True)
        return value + sum(gradient.square().sum() for gradient in gradients) + slope.square().mean()

    train(run, model, optimizer, loss=loss)
    model(batch(0)).square().mean().backward()
    model(batch(0)).square().mean().backward(create_graph=True)
    run.log([p.grad for p in model.parameters()])
    sum(p.grad.square().sum() for p in model.parameters()).backward()
    optimizer.step()
    run.log_all(model, optimizer)


@usage("TRL and PEFT: layers are frozen and thawed between phases")
def weights_are_frozen_before_and_between(run):
    model = mlp()
    model[0].weight.requires_grad_(False)
    optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    train(run, model, optimizer)
    model[0].weight.requires_grad_(True)
    train(run, model, optimizer)
    model[2].weight.requires_grad_(False)
    train(run, model, optimizer, zero=False)
    if run.place != "none" and not run.state_comes_and_goes:
        assert parked_gradient(model[0].weight.grad) is not None
    run.log_all(model, optimizer)


@usage("PyTorch's docs, Multiprocessing best practices: Hogwild")
def weights_and_gradients_are_shared_with_other_processes(run):
    model = mlp()
    optimizer = adamw(run, model)

    def share_and_add(number):
        for parameter in model.parameters():
            if (parked := parked_gradient(parameter.grad)) is not None:
                parked.leave()
                parked.wait_until_written()
        model.share_memory()
        run.log([p.is_shared() for p in model.parameters()])
        model(batch(100 + number)).square().mean().backward()

    train(run, model, optimizer, before=share_and_add)
    run.log_all(model, optimizer)


# -- hooks ---------------------------------------------------------------------------------------------------------------


@usage("PEFT and Captum: hooks of modules that read weights")
def hooks_of_modules_read_weights(run):
    model, seen = mlp(), []
    optimizer = adamw(run, model)
    model[0].register_full_backward_hook(lambda module, given, got: seen.append(module.weight.sum()))
    model[0].register_full_backward_pre_hook(lambda module, got: seen.append(module.bias.sum()))
    model[2].register_forward_pre_hook(lambda module, args: seen.append(module.weight.norm()))
    model.register_state_dict_pre_hook(lambda module, prefix, keep: seen.append(module[0].weight.max()))
    train(run, model, optimizer)
    run.log_all(model, optimizer)
    run.log(seen)


@usage("GaLore and LOMO: hooks that see the sum of all gradients so far, and change it")
def hooks_of_the_user_come_before(run):
    model = mlp()
    for number, weight in enumerate(model.parameters()):
        weight.register_post_accumulate_grad_hook(
            [
                lambda weight: setattr(weight, "grad", weight.grad * 0.5),
                lambda weight: run.log(weight.grad.mul_(0.5)),
                lambda weight: run.log(weight.grad),
                lambda weight: setattr(weight, "grad", None),
            ][number % 4]
        )
    optimizer = adamw(run, model)
    for number in range(3):
        for part in range(3):
            model(batch(3 * number + part)).square().mean().backward()
        run.log([weight.grad for weight in model.parameters() if weight.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
    run.log_all(model, optimizer)


@usage("PyTorch's docs, How to save memory by fusing the optimizer step into the backward pass")
def hooks_of_the_user_come_before_and_step(run):
    """Every other time, each with an optimizer of its own."""
    model = mlp()
    optimizers, calls = {}, collections.Counter()

    def step(weight):
        calls[weight] += 1
        if calls[weight] % 2 == 0:
            optimizers[weight].step()
            if calls[weight] % 4 == 0:
                optimizers[weight].zero_grad()

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(step)
    for weight in model.parameters():
        optimizers[weight] = run.prepare(model, torch.optim.AdamW([weight], lr=1e-2))
    for number in range(8):
        loss = model(batch(number)).square().mean()
        run.log(loss)
        loss.backward()
    run.log([weight.grad for weight in model.parameters() if weight.grad is not None])
    for optimizer in optimizers.values():
        run.log_all(model, optimizer)


@usage("AdaLomo, which clips in hooks of gradients")
def hooks_of_the_user_come_before_and_clip(run):
    model = mlp()
    for weight in (model[0].weight, model[2].weight, model[4].weight):
        weight.register_post_accumulate_grad_hook(lambda _: run.log(run.clip(model, 0.001)))
    optimizer = adamw(run, model)
    for number in range(3):
        for part in range(3):
            model(batch(3 * number + part)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    run.log_all(model, optimizer)
