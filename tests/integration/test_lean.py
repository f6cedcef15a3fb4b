"""Models that save less for backward: the same bits, fewer bytes, and what they live with."""

import copy
import pickle
import weakref

import peft
import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_offload import OffloadConfig, OffloadConfigError, RecomputeElementwiseConfig, attach, offload_activations
from hf_offload.transforms.rematerialization.apply import Rematerialization
from tests.helpers import live_bytes
from tests.helpers.tiny_models import HIDDEN, SEQUENCE, gradients, switch_on_checkpointing, tiny_batch, tiny_model
from tests.helpers.train import assert_same

SIZE = 4
TOKENS = SIZE * SEQUENCE
NAMES = ["gpt2", "gpt_neox", "bert", "t5", "llama", "vit", "mixtral"]


def lean(model, *switches):
    done = Rematerialization(model, RecomputeElementwiseConfig(switches))
    done.apply()
    return done


# Dropout of llama is inside of attention.
CASES = [
    *((name, "exact", False) for name in NAMES),
    *(("gpt2", switch, False) for switch in ("activations", "norms", "dropout")),
    *(("llama", switch, False) for switch in ("activations", "norms")),
    *((name, "exact", True) for name in ("gpt2", "t5", "llama")),
]


def run(model, name, *, autocast=False, steps=2):
    """Losses, gradients added up over some batches, and where the random numbers are afterwards."""
    torch.manual_seed(5)
    losses = []
    for step in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**tiny_batch(name, seed=step)).loss
        loss.backward()
        losses.append(loss.detach())
    return {f"loss {step}": loss for step, loss in enumerate(losses)} | gradients(model), torch.get_rng_state()


def saved_bytes(model, name, *, autocast=False):
    def forward():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model(**tiny_batch(name, size=SIZE))

    return live_bytes.saved_bytes(forward, model)


# ------------------------------------------------------------------------------------------------------ bits, and bytes saved


@pytest.mark.parametrize(("name", "switch", "autocast"), CASES)
def test_no_bit_changes_and_fewer_bytes_are_saved(name, switch, autocast):
    usual, changed = tiny_model(name), tiny_model(name)
    done = lean(changed, switch)
    assert_same(run(changed, name, autocast=autocast), run(usual, name, autocast=autocast))
    before, after = (saved_bytes(model, name, autocast=autocast) for model in (usual, changed))
    assert after < before
    assert changed.state_dict().keys() == usual.state_dict().keys()
    done.remove()
    done.remove()
    assert done.names == ()
    assert not any("forward" in vars(module) or module._forward_hooks for module in changed.modules())
    assert saved_bytes(changed, name, autocast=autocast) == before


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_no_bit_changes_in_16_bit_weights(name):
    usual, changed = (tiny_model(name).bfloat16() for _ in range(2))
    lean(changed, "exact")
    assert_same(run(changed, name), run(usual, name))
    assert saved_bytes(changed, name) < saved_bytes(usual, name)


FLOATS = 4


@pytest.mark.parametrize("trained", [True, False])
def test_relu_keeps_bits_and_its_result_only_where_it_is_needed(trained):
    models = tiny_model("t5"), tiny_model("t5")
    for model in models:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained or ".wo." not in name)
    lean(models[0], "dropout")
    lean(models[1], "dropout", "activations")
    sizes = [saved_bytes(model, "t5") for model in models]
    wide = SIZE * (SEQUENCE + SEQUENCE // 2) * 2 * HIDDEN  # of encoder and decoder, two layers each
    # With weights that are trained, what dropout makes of the result is saved as the next layer's input before and after.
    assert sizes[0] - sizes[1] == 2 * (wide * FLOATS - wide // 8)
    assert_same(run(models[1], "t5"), run(models[0], "t5"))


WIDE = TOKENS * 2 * HIDDEN * FLOATS


@pytest.mark.parametrize(
    ("name", "switch", "saved"),
    [
        # In each of two blocks: act(gate), and its product with up.
        ("llama", "activations", 2 * 2 * WIDE),
        # Of five norms, what is scaled and the result, and what is not a multiple of either.
        ("llama", "norms", None),
        # In each of two blocks, the activation function's tensors but for its input: half of it, its hyperbolic tangent, one
        # more than that, and the result.
        ("gpt2", "activations", 2 * 4 * 2 * WIDE),
        ("gpt2", "norms", 5 * TOKENS * HIDDEN * FLOATS),
        # One mask of the embeddings and two a block, 32 bits an element before, 1 now.
        ("gpt2", "dropout", 5 * (TOKENS * HIDDEN * FLOATS - TOKENS * HIDDEN // 8)),
    ],
)
def test_what_a_block_no_longer_saves(name, switch, saved):
    usual, changed = tiny_model(name), tiny_model(name)
    lean(changed, switch)
    found = saved_bytes(usual, name) - saved_bytes(changed, name)
    assert found == saved or (saved is None and found >= 5 * 2 * TOKENS * HIDDEN * FLOATS)


def test_derivatives_take_a_quarter_of_the_input():
    usual, coarse = tiny_model("bert"), tiny_model("bert")
    lean(coarse, "derivative-8bit")
    assert saved_bytes(usual, "bert") - saved_bytes(coarse, "bert") == sum(
        TOKENS * width * (FLOATS - 1) - 2 * FLOATS for width in (2 * HIDDEN, 2 * HIDDEN, HIDDEN)
    )


# ----------------------------------------------------------------------------------------------------- norms of other classes


class NoisyRMSNorm(nn.RMSNorm):
    def forward(self, x):
        return super().forward(x) + 0.1 * torch.randn_like(x)


class CountingLayerNorm(nn.LayerNorm):
    calls = 0

    def forward(self, input):
        self.calls += 1
        return super().forward(input) * (1 + 0.1 * self.calls)


class CenteringLayerNorm(nn.LayerNorm):
    def forward(self, input):
        return super().forward(input.sub_(input.mean(-1, keepdim=True)))


@pytest.mark.parametrize("kind", [NoisyRMSNorm, CountingLayerNorm, CenteringLayerNorm])
def test_no_bit_changes_whatever_a_norm_of_another_class_does(kind):
    def run(is_lean):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24), nn.Linear(24, 24), kind(24), nn.Linear(24, 24))
        if is_lean:
            assert "3" not in lean(model, "norms").names
        for _ in range(2):
            model(torch.linspace(-1, 1, 8 * 24).view(8, 24).sin()).square().sum().backward()
        return gradients(model)

    expected, found = run(False), run(True)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_where_only_such_norms_are_the_error_says_what_is_looked_for():
    with pytest.raises(OffloadConfigError, match=r"RMSNorm of torch, and those of transformers.*NoisyRMSNorm"):
        lean(nn.Sequential(NoisyRMSNorm(24)), "norms")


@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16])
def test_norms_of_transformers_are_recomputed(dtype):
    model = nn.Sequential(LlamaRMSNorm(24)).to(dtype)
    assert lean(model, "norms").names == ("0",)
    assert model(torch.ones(4, 24, dtype=dtype).requires_grad_()).grad_fn.name() == "_RecomputedBackward"


# --------------------------------------------------------------------------------------------- changes, hooks, views, the end


class Changing(nn.Module):
    """An activation function whose input or result somebody changes before, or after, the next layer."""

    def __init__(self, what=None, when=None, kind=nn.GELU):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.act = kind()
        self.what, self.when = what, when

    def forward(self, rows):
        hidden = self.first(rows)
        result = self.act(hidden)
        tensor = {"input": hidden, "result": result}.get(self.what)
        if self.when == "before":
            tensor.add_(1)
        out = self.second(result)
        if self.when == "after":
            tensor.add_(1)
        return out


def rows():
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(1))


def assert_the_same_gradients(usual, changed):
    lean(changed, "activations")
    for model in (usual, changed):
        model(rows()).square().sum().backward()
    assert_same(gradients(changed), gradients(usual))


def test_a_result_that_changed_is_not_made_again():
    assert_the_same_gradients(Changing("result", "before"), Changing("result", "before"))


def test_a_result_may_change_when_it_is_not_needed_any_more():
    """The usual layer has saved it, and raises."""
    assert_the_same_gradients(Changing(), Changing("result", "after"))


def test_a_hook_that_replaces_a_result_is_heard():
    models = Changing(), Changing()
    for model in models:
        model.act.register_forward_hook(lambda module, args, result: result * 2)
    assert_the_same_gradients(*models)


def formulas_of(model):
    return next(module.forward.__self__.formulas for module in model.modules() if "forward" in vars(module))


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_nothing_is_held_when_forward_and_backward_are_over(name):
    model = tiny_model(name)
    lean(model, "exact")
    held = []

    def note(module, args):
        held.append(weakref.ref(args[0].untyped_storage()))

    for module in model.modules():
        if type(module).__name__ in ("NewGELUActivation", "SiLUActivation", "LlamaRMSNorm", "T5LayerNorm", "LayerNorm"):
            module.register_forward_pre_hook(note)
    output = model(**tiny_batch(name), output_hidden_states=True)
    assert not formulas_of(model)._known
    output.loss.backward()
    kept = {id(state.untyped_storage()) for state in (output.get("hidden_states") or ())}
    del output
    assert held
    assert all(storage() is None or id(storage()) in kept for storage in held)


def test_an_exception_leaves_nothing_behind():
    model = tiny_model("llama")
    lean(model, "exact")
    expected = run(model, "llama")
    model.zero_grad()

    def fail(module, args):
        raise ValueError("no")

    handle = model.model.layers[1].mlp.down_proj.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="no") as raised:
        model(**tiny_batch("llama"))
    handle.remove()
    assert raised.tb is not None  # holds the tensors of all frames
    assert not formulas_of(model)._known
    assert_same(run(model, "llama"), expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_lean_by_themselves(copied):
    model = tiny_model("llama")
    done = lean(model, "exact")
    twin = copied(model)
    done.remove()
    assert_same(run(twin, "llama"), run(model, "llama"))
    assert saved_bytes(twin, "llama") < saved_bytes(model, "llama")
    own = {id(module) for module in twin.modules()}
    assert all(id(one.forward.__self__.module) in own for one in twin.modules() if "forward" in vars(one))


# ------------------------------------------------------------------------------------------------------------ with the others


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_offloading_what_is_left_changes_no_bit(name, tmp_path):
    def go(**settings):
        model = tiny_model(name)
        with offload_activations(model, OffloadConfig(**settings)) as session:
            found = run(model, name)
        return found, session.stats.total.offloaded_bytes

    disk = {"tier": "ssd", "directory": tmp_path, "min_bytes": 0}
    expected, _ = go(tier="none")
    usual, moved_usually = go(**disk)
    found, moved = go(**disk, recompute_elementwise="exact")
    assert_same(found, expected)
    assert_same(usual, expected)
    assert 0 < moved < moved_usually


def test_sampled_layers_keep_their_rows_and_the_others_are_lean(caplog):
    sampling = {"tier": "none", "sampled_linear": {"ratio": 0.25, "min_rows": 1}}
    sizes, found = [], []
    for settings in (sampling, {**sampling, "recompute_elementwise": "exact"}):
        model = tiny_model("gpt2")
        session = attach(model, OffloadConfig(**settings))
        found.append(run(model, "gpt2"))
        sizes.append(saved_bytes(model, "gpt2"))
        assert session.sampled
        assert not set(session.sampled) & set(session.rematerialized)
        session.detach()
    assert_same(found[1], found[0])
    assert sizes[1] < sizes[0]
    assert caplog.text.count("sampled_linear saves time but no memory") == 1


@pytest.mark.parametrize(("name", "reentrant"), [("gpt2", True), ("t5", False)])
def test_activation_checkpointing(name, reentrant, caplog):
    usual, changed = tiny_model(name), tiny_model(name)
    for model in (usual, changed):
        switch_on_checkpointing(model, {"use_reentrant": reentrant})
    lean(changed, "exact")
    assert "recomputing elementwise operations saves no memory" in caplog.text
    assert_same(run(changed, name), run(usual, name))


@pytest.mark.parametrize("settings", [{"tiled_loss": "on"}, {"tiled_mlp": "on"}])
def test_tiles(settings):
    found = []
    for more in ({}, {"recompute_elementwise": "exact"}):
        model = tiny_model("llama")
        session = attach(model, OffloadConfig(tier="none", tile_bytes=4096, **settings, **more))
        found.append(run(model, "llama"))
        session.detach()
        assert not any("forward" in vars(module) for module in model.modules())
    assert_same(found[1], found[0])


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # peft still uses the older name
@pytest.mark.parametrize(("first", "dropout"), [("lora", 0.1), ("lean", 0.0)])
def test_lora_before_and_after(first, dropout):
    settings = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM", lora_dropout=dropout
    )

    def made(switches):
        model = tiny_model("llama")
        if first == "lean" and switches:
            lean(model, *switches)
        torch.manual_seed(1)
        model = peft.get_peft_model(model, settings)
        if first == "lora" and switches:
            lean(model, *switches)
        return model

    usual, changed = made(()), made(("activations", "norms", *(["dropout"] if dropout and first == "lora" else [])))
    assert_same(run(changed, "llama"), run(usual, "llama"))
    assert saved_bytes(changed, "llama") < saved_bytes(usual, "llama")
    assert usual.merge_and_unload().state_dict().keys() == changed.merge_and_unload().state_dict().keys()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch.compile's own
@pytest.mark.parametrize("wrapped", [True, False])
def test_compiled(wrapped):
    usual, model = tiny_model("llama", dropout=0.0), tiny_model("llama", dropout=0.0)
    lean(model, "exact")
    compiled = model
    if wrapped:
        compiled = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
    for one in (usual, compiled):
        one(**tiny_batch("llama")).loss.backward()
    expected = gradients(usual)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], msg=name)


# ------------------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("value", "part"),
    [
        (["norms", "drop-out"], "Did you mean 'dropout'"),
        (True, "not a list of switches, which are activations, norms, dropout, derivative-8bit"),
        (["activations", "derivative-8bit"], "'activations' recomputes results from the inputs"),
        ("exact,derivative-8bit", "'exact' recomputes results"),
    ],
)
def test_wrong_settings(value, part):
    with pytest.raises(OffloadConfigError, match=part):
        OffloadConfig(recompute_elementwise=value)


@pytest.mark.parametrize(
    ("make", "switches", "part"),
    [
        (lambda: tiny_model("llama"), ["dropout"], "nothing for a switch. 'dropout' looks for nn.Dropout.*LlamaRMSNorm"),
        (lambda: tiny_model("gpt2", dropout=0.0), ["norms", "dropout"], "'dropout' looks for.*Modules of GPT2LMHeadModel: "),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh()), ["activations"], "Tanh and Sigmoid, .* Linear, Tanh"),
        (lambda: tiny_model("t5"), ["derivative-8bit"], "which ReLU, Tanh and Sigmoid do not"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.SiLU(inplace=True)), ["exact"], "Modules of Sequential: Linear, SiLU"),
    ],
)  # fmt: skip
def test_a_switch_that_finds_nothing(make, switches, part):
    model = make()
    with pytest.raises(OffloadConfigError, match=part):
        attach(model, OffloadConfig(tier="none", recompute_elementwise=switches))
    assert not any("forward" in vars(module) for module in model.modules())
