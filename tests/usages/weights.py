"""What programs do with weights: use them in many modules, hold their memory, change, convert, copy and load them."""

import copy
import io
import itertools
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from hf_offload.state.optimizer import streaming_of
from tests.helpers.train import adamw, batch, copied, mlp, train
from tests.usages.table import usage

# -- modules and functions -----------------------------------------------------------------------------------------------


class _Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.LSTM(16, 24, num_layers=2, dropout=0.2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(48, 8)

    def forward(self, inputs):
        return self.head(self.layers(inputs.view(8, 6, 16))[0])


class _Saves(torch.autograd.Function):
    """Saves its weight for backward, as Unsloth's and Liger's functions do."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class _Holds(torch.autograd.Function):
    """Keeps its weight and views of it as attributes of the context, as bitsandbytes does."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.x, ctx.weight, ctx.half = x, weight, {"views": [weight[:3], weight.t()]}
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        weight = ctx.weight + 0 * ctx.half["views"][0].sum()
        return torch.mm(gradient, ctx.half["views"][1].t()) + 0 * weight.sum(), gradient.t() @ ctx.x


class _Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.first, self.second = (nn.Parameter(torch.randn(96, 96) / 10) for _ in range(2))

    def forward(self, inputs):
        hidden = self.function.apply(self.function.apply(inputs, self.first).relu(), self.second)
        return hidden + self.function.apply(inputs, self.first[:40]).sum()


class _Views(nn.Module):
    """Operations on views of weights, as mixtures of experts have them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.Parameter(torch.randn(4, 96, 96) / 10)
        self.gate = nn.Parameter(torch.randn(96, 4))
        self.both = nn.Parameter(torch.randn(192, 96) / 10, requires_grad=False)

    def forward(self, inputs):
        chosen = (inputs @ self.gate).argmax(-1)
        results = torch.zeros_like(inputs)
        for expert in chosen.unique().tolist():
            rows = (chosen == expert).nonzero()[:, 0]
            results = results.index_add(0, rows, nn.functional.linear(inputs[rows], self.experts[expert]))
        up, down = self.both.chunk(2)
        first, second = self.experts.unbind()[:2]
        mixed = (
            results @ up.T @ down.view(96, 96).permute(1, 0) @ first.unsqueeze(0)[0] @ second.reshape(-1).view(96, 96)
        )
        return mixed * (inputs @ self.gate).softmax(-1).sum()


def _convolutions():
    layers = [nn.Unflatten(1, (6, 4, 4)), nn.Conv2d(6, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*layers, nn.ConvTranspose2d(32, 8, 2), nn.GroupNorm(2, 8), nn.PReLU(8), nn.Flatten())


@usage("models of transformers and timm: LSTMs, convolutions, experts, and functions of autograd of their own")
def modules_of_many_kinds(run):
    makes = [_Recurrent, lambda: _Calls(_Saves), lambda: _Calls(_Holds), _Views, _convolutions]
    for make in makes:
        torch.manual_seed(0)
        model = make()
        optimizer = adamw(run, model)
        train(run, model, optimizer)
        run.log_all(model, optimizer)


@usage("PyTorch's docs, nn.Embedding: sparse uses, of rows with a largest norm")
def embeddings(run):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 32, padding_idx=0, max_norm=1.0), nn.Linear(32, 50, bias=False))
    optimizer = adamw(run, model)

    def loss(model, inputs):
        words = (inputs.abs() * 10).long() % 50
        bags = nn.functional.embedding_bag(words, model[1].weight, mode="mean")
        return model(words).logsumexp(-1).mean() + bags.square().mean()

    train(run, model, optimizer, loss=loss)
    run.log_all(model, optimizer)


@usage("TRL's PPO: two models that share modules, and train together")
def modules_of_two_models_are_shared(run):
    one = mlp()
    other = nn.Sequential(one[0], nn.Linear(128, 96))
    optimizer, others = adamw(run, one), adamw(run, other)
    train(run, one, optimizer, loss=lambda model, x: (other(model(x)) - x).square().mean())
    train(run, other, others, loss=lambda model, x: (one(x) + model(x)).square().mean())
    run.log_all(one, optimizer)
    run.log_all(other, others)


# -- memory that others hold ---------------------------------------------------------------------------------------------


@usage("scripts that plot weights through NumPy", holds=True)
def memory_of_weights_is_held(run):
    model = mlp()
    early = [p.detach().view(-1) for p in model.parameters()]
    arrays = [p.detach().numpy() for p in model.parameters()]
    optimizer = adamw(run, model)
    late = [p.data[:2] for p in model.parameters()]
    train(run, model, optimizer, after=lambda _: run.log(early, late, [array.tolist() for array in arrays]))
    arrays[0] *= 2
    late[2].zero_()
    train(run, model, optimizer)
    early.clear(), arrays.clear(), late.clear()
    train(run, model, optimizer)
    run.log_all(model, optimizer)


@usage("timm, which trains with channels_last, and converters that set .data")
def weights_get_other_memory(run):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.Flatten(), nn.Linear(1024, 8))
    optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9))

    def loss(model, _):
        dtype = model[0].weight.dtype
        return model(torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)).to(dtype)).square().mean()

    train(run, model, optimizer, loss=loss, zero=False)
    if run.place != "none" and not run.state_comes_and_goes:
        assert len(streaming_of(optimizer).spans(model[2].weight)) > 1
    model.to(memory_format=torch.channels_last)
    train(run, model, optimizer, loss=loss)
    model[2].weight.data = model[2].weight.data * 2
    train(run, model, optimizer, loss=loss)
    run.log_all(model, optimizer)


@usage("safetensors, NumPy and scripts: reads that no subclass of tensors is asked about", defers=False)
def weights_are_read_past_pytorch(run):
    model = mlp()
    optimizer = adamw(run, model)
    traced = torch.jit.trace(nn.Sequential(*model), torch.ones(1, 96))

    class Named(torch.Tensor):
        pass

    def below_classes(weight):
        with torch._C.DisableTorchFunction():
            return weight.sum()

    reads = [
        lambda weight: torch.tensor(weight),
        lambda weight: torch.Tensor(weight),
        lambda weight: torch.zeros(1).new_tensor(weight),
        lambda weight: torch.empty(0).set_(weight).clone(),
        lambda weight: weight.as_subclass(Named).sum().as_subclass(torch.Tensor),
        lambda weight: torch.from_numpy(np.asarray(weight.detach()).copy()),
        lambda weight: torch.from_dlpack(torch.utils.dlpack.to_dlpack(weight.detach())),
        lambda weight: torch.nested.nested_tensor([weight]).to_padded_tensor(0.0),
        lambda weight: torch.func.grad(lambda weight: weight.square().sum())(weight),
        lambda weight: torch.func.vmap(lambda row: row * 2)(weight),
        lambda weight: [
            repr(weight),
            nn.Parameter(weight),
            copy.deepcopy(weight[:5]),
            pickle.loads(pickle.dumps(weight)),
        ],
        lambda weight: traced(torch.ones(1, 96)),
        below_classes,
    ]

    def read(number):
        with torch.no_grad():
            run.log(reads[number](model[0].weight))

    train(run, model, optimizer, steps=len(reads), after=read)
    run.log_all(model, optimizer)


# -- weights are changed -------------------------------------------------------------------------------------------------


def _with_data(model):
    for parameter in model.parameters():
        parameter.data.mul_(0.9)
        parameter.data[:1] = 0.5


def _without_gradients(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9).clamp_(-1, 1)
            parameter[:1] += 0.1
            parameter.view(-1)[2:].neg_()


def _in_inference(model):
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.mul_(0.9)


def _initialised(model):
    torch.manual_seed(3)
    model.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)
    for fill in (nn.init.kaiming_uniform_, nn.init.trunc_normal_, nn.init.orthogonal_):
        fill(model[2].weight)


def _from_numpy(model):
    for parameter in model.parameters():
        array = np.full(tuple(parameter.shape), 0.01, dtype=np.float32)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(array))
        array += 1
        parameter.detach().numpy()[:2] += 0.5


def _with_vectors(model):
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.9, model.parameters())


def _swapped(model):
    model[0].weight.data, model[2].bias.data = model[0].weight.data.clone() * 0.9, model[2].bias.data + 1


def _with_lists(model):
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.9)


CHANGES = [
    _with_data, _without_gradients, _in_inference, _initialised, _from_numpy, _with_vectors, _swapped, _with_lists,
]  # fmt: skip


@usage("WGAN, which clips weights; torch.nn.init; loaders of other frameworks' checkpoints", defers=False)
def weights_are_changed_between_steps(run):
    model = mlp()
    optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def change(number):
        CHANGES[number](model)
        run.let_weights_leave()
        run.log(list(model.parameters()))

    train(run, model, optimizer, steps=len(CHANGES), after=change)
    run.log_all(model, optimizer)


@usage("scripts with mistakes: autograd's errors about weights that have changed", steps=False)
def weights_are_changed_before_backward(run):
    def change_all(model):
        model.load_state_dict({key: value + 1 for key, value in model.state_dict().items()})

    changes = [
        lambda model: model[2].weight.mul_(2),
        lambda model: model[2].weight[:2].zero_(),
        lambda model: model[2].bias.mul_(2),
        lambda model: model[4].weight.data.mul_(2),
        change_all,
    ]
    for change, retain in itertools.product(changes, (False, True)):
        model = run.attach(mlp())
        loss = model(batch(0).requires_grad_()).square().mean()
        if retain:
            loss.backward(retain_graph=True)
        with torch.no_grad():
            change(model)
        error = None
        try:
            loss.backward()
        except RuntimeError as raised:
            error = str(raised)
        run.log(error is not None and "modified by an inplace operation" in error)
        run.log([p.grad for p in model.parameters()], model.state_dict())
        for use in (lambda model: model[0].weight.mul_(2), lambda model: model[0].weight.numpy()):
            with pytest.raises(RuntimeError, match=r"leaf Variable|requires grad"):
                use(model)


@usage("transformers' from_pretrained(dtype=...), model.half() and model.to()", defers=False)
def models_are_converted(run):
    model = run.attach(mlp())
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32):
        model.to(dtype)
        optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        train(run, model, optimizer, loss=lambda model, x, dtype=dtype: model(x.to(dtype)).float().square().mean())
        run.log_all(model, optimizer)
    run.log(model.half().state_dict(), model[0].weight.to("meta").shape)


# -- copies and files ----------------------------------------------------------------------------------------------------


@usage("torch.save of whole models, and copies of models for averages and reference policies", defers=False)
def models_are_copied_and_pickled(run):
    model = mlp()
    optimizer = adamw(run, model)
    train(run, model, optimizer)
    buffer = io.BytesIO()
    torch.save({"model": model, "weight": model[0].weight, "view": model[2].weight[:3]}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    run.log(loaded["weight"], loaded["view"], type(loaded["weight"]).__name__)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded["model"], copy.copy(model)):
        others = torch.optim.AdamW(other.parameters(), lr=1e-2)
        train(run, other, others)
        run.log_all(other, others)
        run.log(model.state_dict())
    train(run, model, optimizer)
    run.log_all(model, optimizer)


@usage("PyTorch's docs, Saving and loading models", defers=False)
def states_are_saved_and_loaded(run):
    model = mlp()
    optimizer = adamw(run, model)
    train(run, model, optimizer)
    state = model.state_dict()
    early = copied(state)
    train(run, model, optimizer)
    run.log(early, str(model.load_state_dict(early)))
    train(run, model, optimizer)
    state["2.weight"].mul_(2)
    torch.zeros(128, 96, out=state["0.weight"])
    run.let_weights_leave()
    run.log(model(batch(0)))
    train(run, model, optimizer)
    run.log(str(model.load_state_dict(early, assign=True)))
    optimizer = adamw(run, model)
    train(run, model, optimizer)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    run.log(str(mlp().load_state_dict(torch.load(buffer))))
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({name: value[:1] for name, value in early.items()})
    run.log_all(model, optimizer)
