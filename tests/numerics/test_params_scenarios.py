"""What users of PyTorch do with a model, with its weights in memory and on a tier: the same bits, or the same error."""

import copy
import io
import pickle

import bitsandbytes
import numpy as np
import peft
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM

from hf_offload import OffloadConfig
from hf_offload.session import attach
from tests.helpers.architectures import make_batch, make_model
from tests.helpers.streamed import batch, copied, mlp, same

SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


class Use:
    """Models in memory, or on a tier with no room for any weight that is not used just now, and a log."""

    def __init__(self, folder=None):
        self.folder = folder
        self.models = []
        self.sessions = []
        self.logged = []

    def park(self, model, **settings):
        self.models.append(model)
        if self.folder is not None:
            config = OffloadConfig(tier="none", params="ssd", min_bytes=64, directory=self.folder, **settings)
            session = attach(model, config)
            session.residency.limit_bytes = 1
            self.sessions.append(session)
        return model

    def log(self, *values):
        self.logged += [copied(value) for value in values]

    def log_error(self, call):
        """That the call raises, and which error; the loss of a run that goes on otherwise."""
        try:
            self.log(call())
        except RuntimeError as error:
            self.log("inplace" if "modified by an inplace operation" in str(error) else str(error))

    def train(self, model, steps=3, loss=None, between=lambda step: None, lr=1e-2, first=0):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
        for step in range(first, first + steps):
            inputs = batch(step)
            value = model(inputs).square().mean() if loss is None else loss(model, inputs)
            value.backward()
            self.log(value)
            if step % 2 == 0:
                self.log([p.grad for p in model.parameters()])
            del value  # and the graph
            optimizer.step()
            optimizer.zero_grad()
            between(step)
        self.log(model.state_dict())


# -- modules and functions ---------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.layers = kind(16, 24, num_layers=2, dropout=0.2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(48, 8)

    def forward(self, inputs):
        return self.head(self.layers(inputs.view(8, 6, 16))[0])


@scenario
def lstm(use):
    use.train(use.park(Recurrent(nn.LSTM)))


@scenario
def gru(use):
    use.train(use.park(Recurrent(nn.GRU)))


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class Holds(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.x, ctx.weight, ctx.half = x, weight, weight[:3]
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        weight = ctx.weight + 0 * ctx.half.sum()
        return gradient @ weight, gradient.t() @ ctx.x


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.first, self.second = (nn.Parameter(torch.randn(96, 96) / 10) for _ in range(2))

    def forward(self, inputs):
        return self.function.apply(self.function.apply(inputs, self.first).relu(), self.second)


@scenario
def a_function_saves_the_weight_for_backward(use):
    use.train(use.park(Calls(Saves)))


@scenario
def a_function_holds_the_weight_as_an_attribute(use):
    use.train(use.park(Calls(Holds)))


@scenario
def a_function_is_given_a_view(use):
    model = use.park(Calls(Saves))
    use.train(model, loss=lambda model, x: Saves.apply(x, model.first[:40]).square().mean() + model(x).sum())


class Views(nn.Module):
    """Operations on views of weights, made in Python."""

    def __init__(self, frozen=False):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.Parameter(torch.randn(4, 96, 96) / 10, requires_grad=not frozen)
        self.gate = nn.Parameter(torch.randn(96, 4))
        self.both = nn.Parameter(torch.randn(192, 96) / 10)

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


class TransposesItsWeight(nn.Linear):
    def forward(self, inputs):
        return inputs @ self.weight.T + self.bias


@scenario
def views_of_weights(use):
    use.train(use.park(Views()))


@scenario
def views_of_frozen_weights(use):
    use.train(use.park(Views(frozen=True)))


@scenario
def views_are_kept_over_steps(use):
    model = mlp()
    early = [p.detach().view(-1) for p in model.parameters()]
    use.park(model)
    graph = [p.t() for p in model.parameters() if p.dim() > 1]
    late = [p.data[:2] for p in model.parameters()]
    array = model[2].weight.detach().numpy()
    held = [early, late, graph, array]
    use.train(model, between=lambda step: use.log(early, late, [v.detach() for v in held[2]], held[3].tolist()))
    array *= 2
    late[0].zero_()
    use.train(model)
    early.clear(), graph.clear(), late.clear(), held.clear()
    del array
    use.train(model)


@scenario
def views_are_copied_and_pickled(use):
    model = use.park(mlp().requires_grad_(False))
    view = model[0].weight[:5]
    use.log(copy.deepcopy(view), pickle.loads(pickle.dumps(view)), repr(view), view.numpy().tolist())
    use.log(type(copy.deepcopy(view)).__name__, type(view.clone()).__name__)
    view.mul_(2)
    del view
    use.log(model(batch(0)), model.state_dict())


@scenario
def tied_weights_under_autocast(use):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 96), nn.Linear(96, 96), nn.Linear(96, 96))
    model[2].weight = model[0].weight
    model[3].weight = nn.Parameter(model[3].weight.detach(), requires_grad=False)

    def loss(model, inputs):
        with torch.autocast("cpu", torch.bfloat16):
            value = model(model(inputs)).float().square().mean()
            with torch.no_grad():
                use.log(model(inputs))
        return value

    use.train(use.park(model), loss=loss)


@scenario
def autocast_without_a_cache(use):
    def loss(model, inputs):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return model(model(inputs)).float().square().mean()

    use.train(use.park(mlp()), loss=loss)


@scenario
def gradients_accumulate(use):
    model = use.park(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        for part in range(3):
            model(batch(3 * step + part)).square().mean().backward()
        use.log(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    use.log(model.state_dict())


@scenario
def two_models_train_together(use):
    one, other = mlp(), mlp(bias=False)
    use.park(one), use.park(other)
    use.train(one, loss=lambda model, x: (other(model(x)) - x).square().mean())
    use.train(other, loss=lambda model, x: one(model(x)).square().mean())
    use.log([p.grad for p in other.parameters()])


@scenario
def modules_of_two_models_are_shared(use):
    one = mlp()
    other = nn.Sequential(one[0], nn.Linear(128, 96))
    use.park(one), use.park(other)
    use.train(one, loss=lambda model, x: (model(x) + other(x)).square().mean())
    use.train(other)


@scenario
def checkpoints_of_both_kinds(use):
    def loss(model, inputs):
        first = checkpoint(model, inputs.requires_grad_(), use_reentrant=True)
        return checkpoint(model, first, use_reentrant=False).square().mean()

    use.train(use.park(mlp()), loss=loss)


@scenario
def weights_are_normalised(use):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(96, 96)), nn.GELU(),
        nn.utils.parametrizations.spectral_norm(nn.Linear(96, 96)),
    )  # fmt: skip
    use.train(use.park(model))


@scenario
def convolutions_and_norms(use):
    torch.manual_seed(0)
    layers = [nn.Unflatten(1, (6, 4, 4)), nn.Conv2d(6, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    model = nn.Sequential(*layers, nn.ConvTranspose2d(32, 8, 2), nn.GroupNorm(2, 8), nn.PReLU(8), nn.Flatten())
    use.train(use.park(model))


@scenario
def embeddings(use):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 32, padding_idx=0, max_norm=1.0), nn.Linear(32, 50, bias=False))
    model[1].weight = nn.Parameter(model[1].weight.detach())

    def loss(model, inputs):
        words = (inputs.abs() * 10).long() % 50
        bags = nn.functional.embedding_bag(words, model[1].weight, mode="mean")
        return model(words).logsumexp(-1).mean() + bags.square().mean()

    use.train(use.park(model), loss=loss)


# -- adapters and quantisation -----------------------------------------------------------------------------------------


def _train_llama(use, model, steps=3):
    use.train(model, steps, loss=lambda model, inputs: model(**make_batch("llama", int(inputs[0, 0] * 100) % 50)).loss)
    model.eval()
    with torch.no_grad():
        use.log(model(**make_batch("llama", 100)).logits)


@scenario
def dora(use):
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules="all-linear", use_dora=True, init_lora_weights=False)
    _train_llama(use, use.park(peft.get_peft_model(make_model("llama"), config)))


def _quantised(use, kind):
    """A llama whose layers are quantised in place, with adapters."""
    model = make_model("llama")
    if kind != "int8":  # some processors have kernels for 4 bits, which take no narrower layers
        model.config.hidden_size, model.config.intermediate_size, model.config.head_dim = 64, 128, 16
        torch.manual_seed(0)
        model = LlamaForCausalLM(model.config)
    for name, module in list(model.model.named_modules()):
        if isinstance(module, nn.Linear):
            sizes, weight = (module.in_features, module.out_features, False), module.weight.detach()
            if kind == "int8":
                layer = bitsandbytes.nn.Linear8bitLt(*sizes, has_fp16_weights=False)
                layer.weight = bitsandbytes.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
            else:
                options = {"quant_type": kind, "compress_statistics": kind == "nf4"}
                layer = bitsandbytes.nn.Linear4bit(*sizes, compute_dtype=torch.float32, **options)
                layer.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, **options)
            model.model.set_submodule(name, layer.to("cpu"))
    model.is_loaded_in_8bit, model.is_loaded_in_4bit = kind == "int8", kind != "int8"
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    return use.park(model.train())


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_quantised_bases_have_the_bits_of_the_run_in_memory(kind, tmp_path):
    use = compare(lambda use: _train_llama(use, _quantised(use, kind)), tmp_path)
    residency = use.sessions[0].residency
    quantised = [weight for weight in residency.weights() if "base_layer" in weight.name]
    assert len(quantised) == (14 if kind == "int8" else 0)  # 4-bit layers gave theirs other memory when they evaluated
    assert [weight.name for weight in quantised if weight.stays] == []
    assert residency.most_bytes < residency.total_bytes


# -- torch.func, copies and saving -------------------------------------------------------------------------------------


@scenario
def transforms(use):
    model = use.park(mlp())

    def loss(parameters, inputs):
        return torch.func.functional_call(model, parameters, inputs).square().mean()

    def use_transforms(step):
        inputs = batch(100 + step)
        named = dict(model.named_parameters())
        use.log(torch.func.grad(loss)(named, inputs))
        use.log(torch.func.vmap(torch.func.grad(loss), (None, 0))(named, inputs[:2]))
        use.log(torch.func.vmap(model)(inputs), torch.func.vmap(lambda row: row.sum())(model[0].weight))
        use.log(torch.func.jacrev(lambda x: model(x).sum(0))(inputs[:1]))
        use.log(torch.func.jvp(lambda x: model(x), (inputs,), (inputs,)))
        use.log(torch.autograd.functional.hvp(lambda x: model(x).square().sum(), inputs, inputs))

    use.train(model, between=use_transforms)


@scenario
def calls_with_other_parameters(use):
    model = use.park(mlp())
    doubled = {name: p * 2 for name, p in model.named_parameters()}
    use.log(torch.func.functional_call(model, doubled, batch(0)))
    use.train(model, loss=lambda model, x: torch.func.functional_call(
        model, {name: p * 2 for name, p in model.named_parameters()}, x).square().mean())  # fmt: skip


@scenario
def copies_and_pickles(use):
    model = use.park(mlp())
    use.train(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    for other in others:
        use.log([type(p).__name__ for p in other.parameters()] if use.folder is None else ["Parameter"] * 6)
        use.train(other)
        use.log(model.state_dict())
    use.train(model)


@scenario
def models_are_converted(use):
    model = use.park(mlp())
    use.train(model)
    use.train(model.to(torch.float64), loss=lambda model, x: model(x.double()).square().mean())
    use.train(model.to(torch.bfloat16), loss=lambda model, x: model(x.bfloat16()).square().mean())
    use.train(model.float().cpu())
    use.log(model.half().state_dict())


@scenario
def states_are_saved_and_loaded(use):
    model = use.park(mlp())
    use.train(model)
    state = model.state_dict()
    early = copied(state)
    use.train(model)
    use.log(early)
    use.log(str(model.load_state_dict(early)))
    use.train(model)
    use.log(str(model.load_state_dict(early, assign=True)))
    use.train(model)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    use.log(str(mlp().load_state_dict(torch.load(buffer))))


@scenario
def a_state_of_other_shapes_is_refused(use):
    model = use.park(mlp())
    wrong = {name: value[:1] for name, value in model.state_dict().items()}
    use.log_error(lambda: model.load_state_dict(wrong))
    use.train(model)


# -- weights are changed between steps ---------------------------------------------------------------------------------


def _with_data(model, step):
    for parameter in model.parameters():
        parameter.data.mul_(0.9)
        parameter.data[:1] = step


def _without_gradients(model, step):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9).clamp_(-1, 1)
            parameter[:1] += step
            parameter.view(-1)[2:].neg_()


def _in_inference(model, step):
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.mul_(0.9)


def _initialised(model, step):
    torch.manual_seed(step)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1) if step % 2 else nn.init.constant_(parameter, 0.01)
    nn.init.orthogonal_(model[0].weight)


def _from_numpy(model, step):
    for parameter in model.parameters():
        array = np.full(tuple(parameter.shape), 0.01 * step, dtype=np.float32)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(array))
        array += 1
        parameter.detach().numpy()[:2] += 0.5


def _with_vectors(model, step):
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.9, model.parameters())


def _replaced(model, step):
    model[0].weight.data = model[0].weight.data * 0.9
    model[2].weight = nn.Parameter(model[2].weight.detach() * 0.9)


def _swapped(model, step):
    model[0].weight.data, model[2].bias.data = model[0].weight.data.clone() * 0.9, model[2].bias.data + 1


def _averaged(model, step):
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.9)


def _frozen(model, step):
    model[0].requires_grad_(step % 2 == 0)
    model[2].weight.requires_grad_(step % 2 == 1)
    with torch.no_grad():
        model[2].weight.mul_(0.9)


CHANGES = [
    _with_data, _without_gradients, _in_inference, _initialised, _from_numpy, _with_vectors, _replaced, _swapped, _averaged,
    _frozen,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_changes_of_weights_between_steps_are_kept(change, tmp_path):
    def run(use):
        model = use.park(mlp())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            loss = model(batch(step)).square().mean()
            loss.backward()
            use.log(loss)
            optimizer.step()
            optimizer.zero_grad()
            change(model, step)
        use.log(model(batch(0)), model.state_dict())

    compare(run, tmp_path)


# -- graphs ------------------------------------------------------------------------------------------------------------


@scenario
def graphs_are_kept(use):
    model = use.park(mlp())
    loss = model(batch(0)).square().mean()
    for _ in range(3):
        loss.backward(retain_graph=True)
    use.log([p.grad for p in model.parameters()])
    use.log_error(lambda: [loss.backward(), loss.backward()])


@scenario
def graphs_of_gradients(use):
    model = use.park(mlp())

    def loss(model, inputs):
        value = model(inputs).square().mean()
        gradients = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
        (slope,) = torch.autograd.grad(model(inputs.requires_grad_()).sum(), inputs, create_graph=True)
        return value + sum(gradient.square().sum() for gradient in gradients) + slope.square().mean()

    use.train(model, loss=loss)


def _stale(use, change, model=None, retain=False):
    model = use.park(mlp() if model is None else model)
    for _ in range(2):
        loss = model(batch(0).requires_grad_()).square().mean()
        if retain:
            loss.backward(retain_graph=True)
        with torch.no_grad():
            change(model)
        use.log_error(loss.backward)
        use.log([p.grad for p in model.parameters()], model.state_dict())
        model.zero_grad()


def _convolution():
    torch.manual_seed(0)
    return nn.Sequential(nn.Unflatten(1, (6, 4, 4)), nn.Conv2d(6, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 2))


@scenario
def a_weight_changes_before_backward(use):
    _stale(use, lambda model: model[2].weight.mul_(2))


@scenario
def a_view_changes_before_backward(use):
    _stale(use, lambda model: model[2].weight[:2].zero_())


@scenario
def a_bias_changes_before_backward(use):
    _stale(use, lambda model: model[2].bias.mul_(2))


@scenario
def data_changes_before_backward(use):
    _stale(use, lambda model: model[4].weight.data.mul_(2))


@scenario
def a_convolution_changes_before_backward(use):
    _stale(use, lambda model: model[3].weight.mul_(2), _convolution())


@scenario
def a_weight_changes_between_two_backwards(use):
    _stale(use, lambda model: model[2].weight.mul_(2), retain=True)


@scenario
def a_state_is_loaded_before_backward(use):
    _stale(use, lambda model: model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}))


@scenario
def a_weight_changes_in_a_view_made_in_forward(use):
    torch.manual_seed(0)
    _stale(use, lambda model: model[0].weight.mul_(2), nn.Sequential(TransposesItsWeight(96, 96), nn.ReLU()))


@scenario
def a_trained_weight_is_changed_with_a_graph(use):
    model = use.park(mlp())
    use.log_error(lambda: model[0].weight.mul_(2))
    use.log_error(lambda: model[0].weight[:2].mul_(2))
    use.log_error(lambda: model[0].weight.numpy())
    use.train(model)


@scenario
def a_state_is_changed_in_place(use):
    model = use.park(mlp())
    state = model.state_dict()
    torch.zeros(128, 96, out=state["0.weight"])
    use.log(model(batch(0)))
    state["2.weight"].mul_(2)
    use.log(model(batch(0)))
    use.train(model)


def compare(function, tmp_path):
    """Runs ``function`` with weights in memory and on a tier, and returns the latter."""
    expected, found = Use(), Use(tmp_path)
    torch.manual_seed(5)
    function(expected)
    torch.manual_seed(5)
    function(found)
    assert len(expected.logged) == len(found.logged) > 1
    pairs = zip(expected.logged, found.logged, strict=True)
    assert [number for number, pair in enumerate(pairs) if not same(*pair)] == []
    for session in found.sessions:
        moved = session.residency.store.tier.stats
        assert moved.written_bytes > session.residency.total_bytes / 2 or function is views_are_kept_over_steps
    return found


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", SCENARIOS)
def test_it_has_the_bits_of_the_run_in_memory(name, tmp_path):
    compare(SCENARIOS[name], tmp_path)
