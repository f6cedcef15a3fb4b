"""Uses of a model that few programs have: the same results with its weights in memory and on a tier, or the same error.

Each is a function of a model and of ``away``, which lets its weights leave memory: the one that is called first, or in the
midst of it.
"""

import copy
import io

import peft
import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from transformers import GPT2Config, GPT2LMHeadModel

from hf_offload import OffloadConfig
from hf_offload.session import attach
from tests.helpers.streamed import batch, copied, mlp, same

USAGES = {}


def usage(function):
    USAGES[function.__name__] = function
    return function


class Away:
    """Lets weights leave memory, where ``folder`` is given."""

    def __init__(self, folder=None):
        self.folder = folder
        self.sessions = []

    def __call__(self, model):
        """The weights of ``model`` leave memory, also those that have come since."""
        if self.folder is None:
            return model
        if not any(session.model is model for session in self.sessions):
            config = OffloadConfig(tier="none", params="ssd", min_bytes=1, directory=self.folder)
            self.sessions.append(attach(model, config))
            self.sessions[-1].residency.limit_bytes = 1
        self.again()
        return model

    def again(self):
        for session in self.sessions:
            if session.residency is not None:
                session.residency.let_all_leave()


def values(model):
    """Outputs, gradients and weights."""
    model.zero_grad()
    output = model(batch(0))
    output.square().mean().backward()
    return copied([output, [p.grad for p in model.parameters() if p.grad is not None], list(model.parameters())])


def trained(model, away, steps=2, between=lambda step: None, **options):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)
    losses = []
    for step in range(steps):
        weight = next(model.parameters())
        loss = model(batch(step).to(weight.dtype)).float().square().mean()
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        between(step)
        away.again()
    return [losses, copied(list(model.state_dict().values()))]


# -- tracing -----------------------------------------------------------------------------------------------------------


@usage
def symbolic_trace(away):
    model = away(mlp())
    graph = torch.fx.symbolic_trace(model)
    away.again()
    return [graph(batch(0)), values(model), values(graph)]


@usage
def vjp_and_jvp_over_weights(away):
    model = away(mlp())
    named = {name: p.detach() for name, p in model.named_parameters()}
    output, pull = torch.func.vjp(lambda w: torch.func.functional_call(model, w, batch(0)), named)
    away.again()
    return [output, pytree.tree_leaves(pull(torch.ones_like(output))), values(model)]


@usage
def export(away):
    model = away(mlp())
    program = torch.export.export(model, (batch(0),))
    away.again()
    return [program.module()(batch(1)), list(program.state_dict.values()), values(model)]


@usage
def trace(away):
    model = away(mlp())
    script = torch.jit.trace(model, batch(0))
    away.again()
    return [script(batch(1)), values(model)]


# -- memory ------------------------------------------------------------------------------------------------------------


@usage
def a_weight_is_shared(away):
    model = away(mlp())
    model[0].weight.share_memory_()
    away.again()
    result = [model[0].weight.is_shared(), model[2].weight.is_shared()]
    model.share_memory()
    away.again()
    return [result, [p.is_shared() for p in model.parameters()], trained(model, away)]


@usage
def weights_are_pinned_or_moved(away):
    model = away(mlp())
    moved = model[0].weight.to("meta")
    return [moved.shape, model[0].weight.cpu() is model[0].weight, model[0].weight.to(torch.float64), values(model)]


@usage
def a_view_has_the_memory(away):
    model = away(mlp())
    flat = model[0].weight.data.view(-1)
    away.again()
    flat.zero_()
    del flat
    away.again()
    return values(model)


# -- hooks and errors --------------------------------------------------------------------------------------------------


@usage
def hooks_of_modules(away):
    model, seen = away(mlp()), []
    model[0].register_full_backward_hook(lambda module, given, got: seen.append(module.weight.sum()))
    model[0].register_full_backward_pre_hook(lambda module, got: seen.append(module.bias.sum()))
    model[2].register_forward_pre_hook(lambda module, args: seen.append(module.weight.norm()))
    model.register_state_dict_pre_hook(lambda module, prefix, keep: seen.append(module[0].weight.max()))
    result = values(model)
    return [result, list(model.state_dict().values()), copied(seen)]


@usage
def gradients_are_clipped(away):
    found = []
    model = away(mlp())
    weights = list(model.parameters())
    for clip in (
        lambda: nn.utils.clip_grad_norm_(weights, 1e-3),
        lambda: nn.utils.clip_grad_norm_(weights, 1e-3, norm_type=float("inf"), foreach=True),
        lambda: nn.utils.clip_grad_value_(weights, 1e-6),
        lambda: nn.utils.get_total_norm([p.grad for p in weights]),
        lambda: nn.utils.clip_grads_with_norm_(weights, 1e-3, torch.tensor(2.0)),
        lambda: nn.utils.get_total_norm(weights),
    ):
        model.zero_grad()
        model(batch(0)).square().sum().backward()
        found += [clip(), copied([p.grad for p in weights])]
        away.again()
    return found


@usage
def gradients_are_set_by_hand(away):
    model = away(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 2
    away.again()
    optimizer.step()
    away.again()
    return values(model)


# -- modules that change -----------------------------------------------------------------------------------------------


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2

    def right_inverse(self, weight):
        return weight / 2


WRAPPERS = {
    "parametrization": lambda layer: parametrize.register_parametrization(layer, "weight", Doubled()),
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "former_weight_norm": nn.utils.weight_norm,
    "former_spectral_norm": nn.utils.spectral_norm,
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}
UNWRAPPERS = {
    "former_weight_norm": nn.utils.remove_weight_norm,
    "former_spectral_norm": nn.utils.remove_spectral_norm,
    "pruned": lambda layer: prune.remove(layer, "weight"),
}


def _wrapped(name, before):
    def function(away):
        model = mlp()
        if not before:
            away(model)
        WRAPPERS[name](model[2])
        torch.manual_seed(1)
        away(model)
        found = trained(model, away)
        unwrap = UNWRAPPERS.get(name, lambda layer: parametrize.remove_parametrizations(layer, "weight"))
        unwrap(model[2])
        away.again()
        return [found, trained(model, away), values(model)]

    return function


for _name in WRAPPERS:
    USAGES[f"{_name}_before"] = _wrapped(_name, before=True)
    USAGES[f"{_name}_after"] = _wrapped(_name, before=False)


@usage
def gradients_are_toggled(away):
    model = away(mlp())

    def toggle(step):
        model[0].requires_grad_(step % 2 == 1)
        model[2].weight.requires_grad = step % 2 == 0

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
        toggle(step)
        away.again()
    return [losses, list(model.parameters())]


@usage
def averages(away):
    model = away(mlp())
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    swa = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    found = trained(model, away, between=lambda step: (average.update_parameters(model), swa.update_parameters(model)))
    torch.optim.swa_utils.update_bn([batch(5)], swa)
    return [found, copied(list(average.parameters())), copied(list(swa.parameters())), swa(batch(0))]


@usage
def averages_that_are_away(away):
    model = mlp()
    average = away(torch.optim.swa_utils.AveragedModel(model))
    found = trained(model, away, between=lambda step: average.update_parameters(model))
    return [found, copied(list(average.parameters())), average(batch(0))]


@usage
def initialised_again(away):
    model = away(mlp())
    torch.manual_seed(3)
    model.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)
    away.again()
    for fill in (nn.init.kaiming_uniform_, nn.init.xavier_normal_, nn.init.trunc_normal_, nn.init.orthogonal_, nn.init.eye_,
                 nn.init.dirac_, lambda weight: nn.init.sparse_(weight, 0.2)):  # fmt: skip
        try:
            fill(model[2].weight)
        except ValueError:
            continue  # of other shapes
        away.again()
    return values(model)


@usage
def assigned(away):
    model = away(mlp())
    state = {name: value.clone() * 2 for name, value in mlp().state_dict().items()}
    found = [trained(model, away), str(model.load_state_dict(state, assign=True))]
    away.again()
    return [found, trained(model, away), model.state_dict(keep_vars=True)["0.weight"] is model[0].weight]


@usage
def a_shallow_copy(away):
    model = away(mlp())
    other = copy.copy(model)
    found = trained(other, away)
    shallow = copy.copy(model[0].weight)
    away.again()
    return [found, shallow, values(model), shallow is model[0].weight]


@usage
def saved_as_a_whole(away):
    model = away(mlp())
    file = io.BytesIO()
    torch.save({"model": model, "weight": model[0].weight, "view": model[2].weight[:3]}, file)
    file.seek(0)
    away.again()
    loaded = torch.load(file, weights_only=False)
    return [values(loaded["model"]), loaded["weight"], loaded["view"], type(loaded["weight"]) is nn.Parameter]


@usage
def layers_come_and_go(away):
    model = away(mlp())
    layer = model[2]
    model[2] = nn.Linear(128, 160)
    nn.init.constant_(model[2].weight, 0.01)
    nn.init.zeros_(model[2].bias)
    away.again()
    found = trained(model, away)
    model.insert(0, nn.LayerNorm(96))
    away(model)
    return [found, trained(model, away), layer.weight, values(model)]


def _gpt2():
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0,
                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    return GPT2LMHeadModel(config)


def _trained_gpt2(model, away, steps=2):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(steps):
        tokens = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        away.again()
    return [losses, copied(list(model.state_dict().values()))]


@usage
def embeddings_are_resized(away):
    model = away(_gpt2())
    found = _trained_gpt2(model, away)
    torch.manual_seed(2)
    model.resize_token_embeddings(70)
    away.again()
    tied = model.lm_head.weight is model.transformer.wte.weight
    found += [tied, _trained_gpt2(model, away)]
    away(model)
    return [found, _trained_gpt2(model, away)]


@usage
def weights_are_tied_later(away):
    model = _gpt2()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone() * 2)
    away(model)
    found = _trained_gpt2(model, away)
    model.tie_weights()
    away.again()
    return [found, model.lm_head.weight is model.transformer.wte.weight, _trained_gpt2(model, away)]


@usage
def adapters_come_and_go(away):
    model = away(_gpt2())
    found = [_trained_gpt2(model, away)]
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    torch.manual_seed(2)
    model = peft.get_peft_model(model, config)
    away.again()
    found.append(_trained_gpt2(model, away))
    model.add_adapter("second", config)
    model.set_adapter("second")
    away.again()
    found.append(_trained_gpt2(model, away))
    with model.disable_adapter():
        found.append(model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits)
    model.merge_adapter()
    away.again()
    found.append(model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits)
    model.unmerge_adapter()
    model.delete_adapter("default")
    away.again()
    found.append(_trained_gpt2(model, away))
    return [found, _trained_gpt2(model.merge_and_unload().requires_grad_(True), away)]


def outcome(function, away):
    try:
        return copied(function(away))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", USAGES)
def test_it_is_as_in_memory(name, tmp_path):
    torch.manual_seed(5)
    expected = outcome(USAGES[name], Away())
    torch.manual_seed(5)
    away = Away(tmp_path)
    found = outcome(USAGES[name], away)
    assert not isinstance(expected, str), expected
    assert same(expected, found), found if isinstance(found, str) else _first_difference(expected, found)
    assert any(session.residency.store.tier.stats.written_bytes for session in away.sessions)


def _first_difference(expected, found, place=""):
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for number, (one, other) in enumerate(zip(expected, found, strict=True)):
            if not same(one, other):
                return _first_difference(one, other, f"{place}[{number}]")
    return f"{place}: {str(expected)[:300]} in memory, {str(found)[:300]} on a tier"
