"""What programs do with graphs and functions of a model: checkpoints, several backwards, transforms, compilation, traces."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.train import adamw, batch, mlp, train
from tests.usages.table import usage

# -- graphs --------------------------------------------------------------------------------------------------------------


@usage("transformers with gradient_checkpointing, of both kinds")
def checkpoints_of_both_kinds(run):
    model = mlp()
    optimizer = adamw(run, model)

    def loss(model, inputs):
        hidden = checkpoint(model, checkpoint(model, inputs.requires_grad_(), use_reentrant=True), use_reentrant=True)
        hidden = checkpoint(model, hidden, use_reentrant=False)
        return checkpoint(nn.functional.linear, hidden, model[0].weight, model[0].bias, use_reentrant=False).sum()

    train(run, model, optimizer, loss=loss)
    run.log_all(model, optimizer)


@usage("transformers' ALBERT, whose one block is used several times, with gradient_checkpointing", in_backward=True)
def a_block_is_checkpointed_several_times(run):
    for uses, reentrant in itertools.product((1, 3), (True, False)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(96, 96), nn.Linear(96, 96))
        optimizer = adamw(run, model)

        def loss(model, inputs, uses=uses, reentrant=reentrant):
            hidden = model[0](inputs)
            for _ in range(uses):
                hidden = checkpoint(model[1], hidden, use_reentrant=reentrant)
            return hidden.square().mean()

        train(run, model, optimizer, loss=loss)
        run.log_all(model, optimizer)


class _ChecksItsProduct(nn.Linear):
    """Gives its weight to a checkpoint, and changes it in each forward, also in the one that backward calls."""

    def forward(self, x):
        hidden = checkpoint(nn.functional.linear, x, self.weight, self.bias, use_reentrant=False)
        with torch.no_grad():
            self.weight.mul_(0.9)
        return hidden + super().forward(x)


@usage("PyTorch's docs, torch.autograd.graph.save_on_cpu, around checkpoints; autograd.grad of chosen weights")
def saved_tensors_have_hooks(run):
    model = mlp()
    optimizer = adamw(run, model)
    for number in range(3):
        with torch.autograd.graph.saved_tensors_hooks(lambda value: value.detach().clone(), lambda value: value):
            hidden = checkpoint(lambda x: model[:2](x.sin()).sin(), batch(number).requires_grad_(), use_reentrant=False)
            loss = checkpoint(model[2], hidden, use_reentrant=False).square().mean()
        weights = [*model[0].parameters(), *model[2].parameters()]
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.grad = gradient
        optimizer.step()
        run.log(loss)
    run.log_all(model, optimizer)


@usage("spectral norms under checkpoints: a recompute has the weights as they are in backward", steps=False)
def weights_change_before_a_recompute(run):
    for kind, autocast in itertools.product((nn.Linear, _ChecksItsProduct), (False, True)):
        torch.manual_seed(0)
        model = run.attach(nn.Sequential(*[kind(32, 32) for _ in range(3)]))
        model[0].requires_grad_(autocast)
        x = torch.ones(4, 32, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = checkpoint(model, x, use_reentrant=False).float().square().sum()
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(2)
        loss.backward(retain_graph=True)
        loss.backward()
        run.log(x.grad, [p.grad for p in model.parameters() if p.requires_grad], list(model.parameters()))


@usage("TRL, whose losses share a graph: backward comes several times")
def graphs_are_kept(run):
    model = mlp()
    optimizer = adamw(run, model)
    for _ in range(2):
        loss = model(batch(0)).square().mean()
        for _ in range(3):
            loss.backward(retain_graph=True)
        run.log([p.grad for p in model.parameters()])
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.log_all(model, optimizer)


@usage("GANs, whose generator's backward is older than the discriminator's step: autograd's error")
def a_backward_is_older_than_the_step(run):
    torch.manual_seed(0)  # a convolution saves its weight, not a view of it
    model = nn.Sequential(nn.Unflatten(1, (6, 4, 4)), nn.Conv2d(6, 256, 3))
    optimizer = adamw(run, model)
    for _ in range(2):
        inputs = batch(0).requires_grad_()
        first, second = (model(inputs).square().mean() for _ in range(2))
        first.backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="inplace"):
            torch.autograd.grad(second, inputs)
        optimizer.zero_grad()
    run.log_all(model, optimizer)


# -- functions -----------------------------------------------------------------------------------------------------------


@usage("transformers' Trainer, which evaluates between steps")
def weights_are_used_first_in_inference(run):
    model = mlp()
    optimizer = adamw(run, model)

    def evaluate(number):
        with torch.inference_mode():
            run.log(model(batch(100)), model[0].weight.grad.sum())

    train(run, model, optimizer, after=evaluate, zero=False)
    run.log_all(model, optimizer)


@usage("PyTorch's docs, torch.compile")
def functions_are_compiled_later(run):
    torch._dynamo.reset()
    model = mlp()
    optimizer = adamw(run, model)
    train(run, model, optimizer)  # an update may wait once there is state
    compiled = torch.compile(lambda inputs: model(inputs).square().mean(), backend="aot_eager")
    train(run, model, optimizer, loss=lambda _, inputs: compiled(inputs))
    run.log_all(model, optimizer)


@usage("accelerate's compile_regions, which compiles blocks, and transformers' torch_compile, which compiles the model")
def blocks_and_models_are_compiled(run):
    for compiled, backend in (("block", "aot_eager"), ("model", "eager"), ("wrapper", "aot_eager")):
        torch._dynamo.reset()
        model = mlp()
        called = torch.compile(model, backend=backend) if compiled == "wrapper" else model
        if compiled != "wrapper":
            (model[2] if compiled == "block" else model).compile(backend=backend)
        optimizer = adamw(run, model)
        train(run, model, optimizer, loss=lambda model, inputs, called=called: called(inputs).square().mean())
        run.log_all(model, optimizer)


@usage("PyTorch's docs, Per-sample gradients, Model ensembling, and Jacobians of torch.func")
def weights_are_used_first_in_transforms(run):
    model, inputs = mlp(), batch(100)
    optimizer = adamw(run, model)

    def loss(parameters, inputs):
        return torch.func.functional_call(model, parameters, inputs).square().mean()

    def named():
        return dict(model.named_parameters())

    def pulled():
        output, pull = torch.func.vjp(lambda weights: torch.func.functional_call(model, weights, inputs), named())
        return [output, list(pull(torch.ones_like(output))[0].values())]

    uses = [
        lambda: torch.func.grad(loss)(named(), inputs),
        lambda: torch.func.grad(lambda inputs: model(inputs).sum())(inputs),
        lambda: torch.func.vmap(lambda row: row.sum())(model[0].weight),
        lambda: torch.func.vmap(model)(inputs),
        lambda: torch.func.jacrev(lambda inputs: model(inputs).sum(0))(inputs[:1]),
        lambda: torch.func.vmap(torch.func.grad(loss), (None, 0))(named(), inputs[:2]),
        lambda: torch.func.jvp(lambda x: model(x), (inputs,), (inputs,)),
        lambda: torch.autograd.functional.hvp(lambda x: model(x).square().sum(), inputs, inputs),
        lambda: torch.func.functional_call(model, {name: p * 2 for name, p in named().items()}, inputs),
        pulled,
    ]
    train(run, model, optimizer, steps=len(uses), after=lambda number: run.log(uses[number]()))
    run.log_all(model, optimizer)


def _product(inputs, weight):
    return inputs @ weight.t()


@usage("Megatron-LM, whose scripted functions are given weights of modules that are not called")
def weights_are_used_without_their_modules(run):
    model, script = mlp(), torch.jit.script(_product)
    optimizer = adamw(run, model)
    train(run, model, optimizer, loss=lambda model, inputs: script(inputs, model[0].weight).square().mean())
    run.log_all(model, optimizer)


@usage("accelerate's estimate-memory, which calls models with fake tensors")
def weights_are_used_first_with_fake_tensors(run):
    model = mlp()
    optimizer = adamw(run, model)

    def trace(number):
        with torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
            run.log(list(model(torch.zeros(2, 96)).shape))

    train(run, model, optimizer, after=trace)
    run.log_all(model, optimizer)


@usage("PyTorch's docs, nn.TransformerEncoder: its fast path in evaluation")
def attention_has_a_fast_path_in_evaluation(run):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.1)
    model = nn.TransformerEncoder(layer, 2)
    optimizer = adamw(run, model)
    inputs = torch.randn(3, 7, 64)
    mask = torch.tensor([[False] * 5 + [True] * 2] * 3)
    for _ in range(3):
        loss = model.train()(inputs).square().mean()
        run.log(loss)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            run.log(model.eval()(inputs), model(inputs, src_key_padding_mask=mask))
        optimizer.zero_grad()
    run.log_all(model, optimizer)


@usage("PyTorch's docs, torch.export, torch.fx and torch.jit.trace", defers=False)
def models_are_exported_and_traced(run):
    model = mlp()
    optimizer = adamw(run, model)
    ways = [
        lambda: torch.fx.symbolic_trace(model),
        lambda: torch.export.export(model, (batch(0),)).module(),
        lambda: torch.jit.trace(model, batch(0)),
    ]
    for number, way in enumerate(ways):
        traced = way()
        run.let_weights_leave()
        run.log(traced(batch(1)))
        train(run, model, optimizer, first=3 * number)
        run.log(traced(batch(2)))
    run.log_all(model, optimizer)
