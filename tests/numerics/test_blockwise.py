"""Block-wise training: which blocks train when, the updates they get, and what is kept of the others."""

import collections
import copy
import itertools
import weakref

import peft
import pytest
import torch

from hf_offload import OffloadConfigError
from hf_offload.methods.blockwise import BlockwiseConfig, BlockwiseOptimizer, peak_bytes, release
from tests.helpers.activation_heavy_models import VOCABULARY, build
from tests.helpers.blockwise import badam, lisa
from tests.helpers.tiny_models import switch_on_checkpointing, tiny_model, weights
from tests.helpers.train import assert_same, saved_and_loaded, take_steps

LAYERS = [f"model.layers.{number}" for number in range(4)]
SIDES = ["model.embed_tokens", "model.norm", "lm_head"]


def model_of_four(dtype=torch.float32):
    torch.manual_seed(0)
    return build("llama", dropout=0.0, layers=4).to(dtype)


def batch(step):
    tokens = torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens, "labels": tokens}


def train(model, optimizer, steps, scheduler=None, first=0):
    take_steps(model, optimizer, map(batch, range(first, first + steps)), scheduler)


def step_on_noise(model, optimizer):
    """A step without a forward: every parameter that requires a gradient has one."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def decaying(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


# -- the updates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.AdamW, {"lr": 1e-2, "betas": (0.8, 0.9), "weight_decay": 0.1}),
        (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9}),
        (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.9}),
    ],
)
def test_a_block_that_always_trains_gets_the_usual_updates(optimizer, options):
    model = model_of_four()
    usual = copy.deepcopy(model)
    config = BlockwiseConfig(order=[LAYERS[1]], outside="never", switch_every=2)
    blockwise = BlockwiseOptimizer(model.parameters(), model, config, optimizer, **options)
    train(model, blockwise, 7, decaying(blockwise))
    for name, parameter in usual.named_parameters():
        parameter.requires_grad_(name.startswith(f"{LAYERS[1]}."))
    plain = optimizer([p for p in usual.parameters() if p.requires_grad], **options)
    train(usual, plain, 7, decaying(plain))
    assert_same(weights(model), weights(usual))


@pytest.mark.parametrize("inactive", ["drop", "keep"])
def test_a_block_begins_a_turn_anew_or_with_the_state_that_is_kept(inactive):
    """Its updates are those of an optimizer that begins when its turn does, or that has waited."""
    model = model_of_four()
    usual = copy.deepcopy(model)
    config = BlockwiseConfig(order=[LAYERS[2], LAYERS[0]], outside="never", switch_every=2, inactive_state=inactive)
    train(model, BlockwiseOptimizer(model.parameters(), model, config, lr=1e-2), 8)
    layers = [usual.model.layers[2], usual.model.layers[0]]
    plain = [torch.optim.AdamW(layer.parameters(), lr=1e-2) for layer in layers]
    for turn in range(4):
        layer = layers[turn % 2]
        usual.requires_grad_(False)
        layer.requires_grad_(True)
        anew = torch.optim.AdamW(layer.parameters(), lr=1e-2)
        train(usual, plain[turn % 2] if inactive == "keep" else anew, 2, first=2 * turn)
    assert_same(weights(model), weights(usual))


def test_parameters_in_16_bits_are_updated_in_32():
    model = model_of_four(torch.bfloat16)
    usual = copy.deepcopy(model)
    config = BlockwiseConfig(order=[LAYERS[1], LAYERS[3]], outside="never", switch_every=6)
    blockwise = BlockwiseOptimizer(model.parameters(), model, config, lr=5e-4)
    usual.requires_grad_(False)
    mine = list(usual.model.layers[1].requires_grad_(True).parameters())
    masters = [p.detach().float().requires_grad_() for p in mine]
    plain = torch.optim.AdamW(masters, lr=5e-4)
    for step in range(6):
        train(model, blockwise, 1, first=step)
        usual(**batch(step)).loss.backward()
        for parameter, master in zip(mine, masters, strict=True):
            master.grad = parameter.grad.float()
        plain.step()
        with torch.no_grad():
            for parameter, master in zip(mine, masters, strict=True):
                parameter.copy_(master)
                parameter.grad = None
    assert_same(weights(model), weights(usual))
    assert blockwise.active == (LAYERS[3],)
    assert blockwise.state_bytes() == 0  # the copies went with their block
    rounded = model_of_four(torch.bfloat16)
    bare = BlockwiseConfig(order=[LAYERS[1]], outside="never", switch_every=6, master_weights=False)
    train(rounded, BlockwiseOptimizer(rounded.parameters(), rounded, bare, lr=5e-4), 6)
    norm = f"{LAYERS[1]}.input_layernorm.weight"
    assert (weights(rounded)[norm] == 1).all()  # updates too small for 16 bits are lost, step by step
    assert (weights(model)[norm] != 1).any()


# -- the turns --------------------------------------------------------------------------------------------------------


def turns(config, count, model=None, steps=1):
    model = model_of_four() if model is None else model
    optimizer = BlockwiseOptimizer(model.parameters(), model, config, torch.optim.SGD, lr=0.0)
    found = []
    for _ in range(count):
        found.append(optimizer.active)
        for _ in range(steps):
            assert optimizer.active == found[-1]
            step_on_noise(model, optimizer)
    return found


@pytest.mark.parametrize(
    ("order", "outside", "expected"),
    [
        ("ascending", "never", LAYERS),
        ("descending", "never", LAYERS[::-1]),
        ("ascending", "turns", [SIDES[0], *LAYERS, *SIDES[1:]]),
        ([LAYERS[3], LAYERS[1]], "never", [LAYERS[3], LAYERS[1]]),
        ([SIDES[2], LAYERS[1]], "turns", [SIDES[2], LAYERS[1]]),
    ],
)
def test_orders(order, outside, expected):
    config = BlockwiseConfig(order=order, outside=outside, switch_every=3)
    assert turns(config, 2 * len(expected), steps=3) == [(name,) for name in 2 * expected]


def test_a_random_order_visits_every_block_once_each_time_round():
    found = turns(badam(switch_every=1), 5 * 7)
    rounds = [found[start : start + 7] for start in range(0, 35, 7)]
    assert all(sorted(one) == sorted((name,) for name in LAYERS + SIDES) for one in rounds)
    assert len({tuple(one) for one in rounds}) == 5


def test_lisa_draws_each_block_as_often_as_the_others():
    found = turns(lisa(blocks_active=2, switch_every=1), 400)
    assert all(set(SIDES) < set(one) and len(set(one)) == 5 for one in found)
    counts = collections.Counter(name for one in found for name in one if name not in SIDES)
    # 400 draws of 2 among 4: 200 visits each, with a standard deviation of 10
    assert all(abs(counts[name] - 200) < 40 for name in LAYERS), counts
    pairs = collections.Counter(tuple(sorted(set(one) - set(SIDES))) for one in found)
    assert len(pairs) == 6


def test_draws_depend_on_the_seed_and_on_nothing_else():
    first = turns(lisa(blocks_active=2, switch_every=1, seed=3), 12)
    torch.manual_seed(99)
    assert turns(lisa(blocks_active=2, switch_every=1, seed=3), 12) == first
    assert turns(lisa(blocks_active=2, switch_every=1, seed=4), 12) != first


@pytest.mark.parametrize("name", ["gpt2", "t5", "vit"])
def test_every_parameter_trains_in_some_turn(name):
    model = tiny_model(name)
    optimizer = BlockwiseOptimizer(model.parameters(), model, badam(switch_every=1), lr=1e-2)
    before = weights(model)
    visited = collections.Counter()
    for _ in range(optimizer.cycle):
        step_on_noise(model, optimizer)
    for key, tensor in weights(model).items():
        visited[key] += not torch.equal(tensor, before[key])
    assert set(visited.values()) == {1}


# -- what is frozen ---------------------------------------------------------------------------------------------------


def trained(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


def under(model, *units):
    return {name for name, _ in model.named_parameters() if name.startswith(tuple(f"{unit}." for unit in units))}


def test_what_waits_requires_no_gradient_and_has_none():
    model = model_of_four()
    config = BlockwiseConfig(order="ascending", outside="never", switch_every=2)
    optimizer = BlockwiseOptimizer(model.named_parameters(), model, config, lr=1e-2)
    assert trained(model) == under(model, "model", "lm_head")  # whoever wraps the model now sees all of it
    for step in range(6):
        model(**batch(step)).loss.backward()
        assert trained(model) == under(model, LAYERS[step // 2])
        assert {name for name, p in model.named_parameters() if p.grad is not None} == trained(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert trained(model) == under(model, LAYERS[(step + 1) // 2])
        assert {name for name, p in model.named_parameters() if p.grad is not None} <= trained(model)
    optimizer.close()
    optimizer.close()
    assert trained(model) == under(model, "model", "lm_head")
    assert not any(vars(p) for p in model.parameters())
    assert not model._forward_pre_hooks


def test_what_the_user_froze_stays_frozen():
    model = model_of_four()
    model.model.layers[1].requires_grad_(False)
    model.lm_head.requires_grad_(False)
    model.model.layers[2].mlp.requires_grad_(False)
    mine = trained(model)
    before = weights(model)
    optimizer = BlockwiseOptimizer(model.parameters(), model, badam(switch_every=1), lr=1e-2)
    visited = set()
    for _ in range(12):
        model(**batch(0)).loss.backward()
        assert trained(model) <= mine
        visited |= trained(model)
        optimizer.step()
        optimizer.zero_grad()
    assert visited == mine
    optimizer.close()
    assert trained(model) == mine
    assert {name for name, tensor in weights(model).items() if not torch.equal(tensor, before[name])} == mine


def test_what_the_user_freezes_later_stays_frozen():
    model = model_of_four()
    config = BlockwiseConfig(order="ascending", outside="never", switch_every=2)
    optimizer = BlockwiseOptimizer(model.parameters(), model, config, lr=1e-2)
    train(model, optimizer, 1)
    model.model.layers[0].mlp.requires_grad_(False)
    kept = copy.deepcopy(model.model.layers[0].mlp.state_dict())
    train(model, optimizer, 8)
    assert optimizer.active == (LAYERS[0],)
    assert trained(model) == under(model, LAYERS[0]) - under(model, f"{LAYERS[0]}.mlp")
    assert_same(dict(model.model.layers[0].mlp.state_dict()), dict(kept))
    model.model.layers[0].self_attn.requires_grad_(False)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model(**batch(0))
    assert trained(model) == {f"{LAYERS[0]}.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")}


class Handle:
    """What autograd holds for as long as it needs the tensor."""

    def __init__(self, tensor):
        self.tensor = tensor


def saved_bytes(model):
    """Bytes of the storages that are saved when a forward is over, each once; weights left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    handles = []

    def pack(tensor):
        handle = Handle(tensor)
        handles.append(weakref.ref(handle))
        return handle

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda handle: handle.tensor):
        loss = model(**batch(0)).loss
    storages = [handle().tensor.untyped_storage() for handle in handles if handle() is not None]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    assert loss.requires_grad  # and so its graph lives until here
    return sum(nbytes for pointer, nbytes in sizes.items() if pointer not in own)


def test_blocks_below_the_lowest_active_one_save_nothing():
    model = model_of_four()
    whole = saved_bytes(model)
    optimizer = BlockwiseOptimizer(
        model.parameters(), model, BlockwiseConfig(order="ascending", outside="never", switch_every=1), lr=1e-2
    )
    sizes = []
    for _ in range(4):
        sizes.append(saved_bytes(model))
        train(model, optimizer, 1)
    # each turn one block more lies below; the first also saves the inputs of the linear layers of its own block
    above = {low - high for low, high in itertools.pairwise(sizes)}
    assert len(above) == 1
    assert above.pop() > 0
    assert sizes[0] < whole
    optimizer.close()
    highest = BlockwiseConfig(order=[LAYERS[3]], outside="always")
    optimizer = BlockwiseOptimizer(model.parameters(), model, highest, lr=1e-2)
    assert sizes[3] < saved_bytes(model) < whole  # the embedding lies below all blocks


def test_checkpointed_blocks_keep_their_inputs_only_where_embeddings_are_made_to_require_gradients():
    model = model_of_four()
    optimizer = BlockwiseOptimizer(
        model.parameters(), model, BlockwiseConfig(order=[LAYERS[3]], outside="never"), lr=1e-2
    )
    switch_on_checkpointing(model, {"use_reentrant": False})
    kept = saved_bytes(model)
    model.disable_input_require_grads()
    assert kept - saved_bytes(model) == 3 * (2 * 16 * 128 * 4)  # three blocks lie below; one input each
    assert optimizer.active == (LAYERS[3],)


# -- bytes ------------------------------------------------------------------------------------------------------------


def counted_state(optimizer):
    tensors = [t for state in optimizer.state.values() for t in state.values()]
    return sum(t.nbytes for t in tensors)


def test_state_that_waits_is_not_that_of_the_turn():
    model = model_of_four()
    config = BlockwiseConfig(order="ascending", outside="never", switch_every=2, inactive_state="keep")
    optimizer = BlockwiseOptimizer(model.parameters(), model, config, lr=1e-4)
    sizes = set()
    for step in range(16):
        step_on_noise(model, optimizer)
        if step % 2 == 0:
            sizes.add(optimizer.state_bytes())
    assert len(sizes) == 1
    assert counted_state(optimizer) == 4 * sizes.pop()


class Watched(torch.optim.AdamW):
    """Counts what there is when its step is over: gradients, state, and the parameters it was given."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self.counts.append((
            sum(t.nbytes for state in self.state.values() for t in state.values()),
            sum(p.nbytes for group in self.param_groups for p in group["params"]),
            sum(p.grad.nbytes for group in self.param_groups for p in group["params"]),
        ))  # fmt: skip


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (lisa(blocks_active=2, switch_every=1), torch.bfloat16),
        (badam(switch_every=1), torch.float32),
        (BlockwiseConfig(blocks_active=2, order="descending", outside="never", switch_every=1), torch.bfloat16),
        (BlockwiseConfig(order=[LAYERS[1]], outside="never", switch_every=1, master_weights=False), torch.bfloat16),
    ],
    ids=["lisa", "badam", "descending", "bare"],
)
def test_the_closed_form_is_the_largest_of_what_there_is(config, dtype, monkeypatch):
    model = model_of_four(dtype)
    expected = peak_bytes(model, config)
    monkeypatch.setattr(Watched, "counts", counts := [], raising=False)
    optimizer = BlockwiseOptimizer(model.parameters(), model, config, Watched, lr=1e-4)
    counts.clear()
    gradients = []
    for step in range(3 * 7):
        model(**batch(step)).loss.backward()
        gradients.append(sum(p.grad.nbytes for p in model.parameters() if p.grad is not None))
        optimizer.step()
        optimizer.zero_grad()
    assert peak_bytes(model, config) == expected  # now that blocks wait for their turn
    state, masters, step_gradients = (max(column) for column in zip(*counts, strict=True))
    copies = dtype != torch.float32 and config.master_weights
    assert expected.gradients == max(gradients)
    assert expected.state == state
    assert expected.masters == (masters if copies else 0)
    assert expected.step_gradients == (step_gradients if copies else 0)


# -- saving -----------------------------------------------------------------------------------------------------------


LISA = lisa(blocks_active=2, switch_every=3)
BADAM = badam(switch_every=3)
KEPT = BlockwiseConfig(order="ascending", switch_every=1, inactive_state="keep", outside="turns")


@pytest.mark.parametrize(
    ("config", "dtype", "schedule"),
    [
        (LISA, torch.bfloat16, decaying),
        (BADAM, torch.float32, None),
        (KEPT, torch.float32, decaying),
        (KEPT, torch.bfloat16, None),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(config, dtype, schedule):
    whole = model_of_four(dtype)
    optimizer = BlockwiseOptimizer(whole.parameters(), whole, config, lr=1e-2)
    scheduler = schedule and schedule(optimizer)
    for stop in (8, 9):  # the middle of a turn, and between two of them
        first = model_of_four(dtype)
        beginning = BlockwiseOptimizer(first.parameters(), first, config, lr=1e-2)
        beginning_scheduler = schedule and schedule(beginning)
        train(first, beginning, stop, beginning_scheduler)
        second = model_of_four(dtype)
        second.load_state_dict(saved_and_loaded(first.state_dict()))
        rest = BlockwiseOptimizer(second.parameters(), second, config, lr=1e-2)
        train(second, rest, 1)  # the optimizer need not be a new one
        second.load_state_dict(saved_and_loaded(first.state_dict()))
        rest_scheduler = schedule and schedule(rest)
        rest.load_state_dict(saved_and_loaded(beginning.state_dict()))
        if schedule:
            rest_scheduler.load_state_dict(saved_and_loaded(beginning_scheduler.state_dict()))
        assert rest.active == beginning.active
        assert rest.state_bytes() == beginning.state_bytes()
        train(second, rest, 14 - stop, rest_scheduler, first=stop)
        if stop == 8:
            train(whole, optimizer, 14, scheduler)
        assert trained(second) == trained(whole)
        assert_same(weights(second), weights(whole))
        assert rest.state_dict()["blockwise"].keys() == optimizer.state_dict()["blockwise"].keys()
        assert rest.turn == optimizer.turn


def test_a_state_that_does_not_fit_is_refused_with_all_differences():
    model = model_of_four()
    optimizer = BlockwiseOptimizer(model.parameters(), model, lisa(switch_every=3), lr=1e-2)
    train(model, optimizer, 4)
    before = copy.deepcopy(optimizer.state_dict())
    other = model_of_four()
    other.model.layers[0].requires_grad_(False)
    saved = BlockwiseOptimizer(other.parameters(), other, badam(switch_every=5), torch.optim.SGD, lr=1)
    with pytest.raises(OffloadConfigError) as error:
        optimizer.load_state_dict(saved.state_dict())
    for word in (
        "switch_every=5",
        "order='random'",
        "outside='turns'",
        "blocks_active=1",
        "'SGD'",
        "blocks=[",
    ):
        assert word in str(error.value), word
    headless = model_of_four()
    headless.lm_head.requires_grad_(False)
    other = BlockwiseOptimizer(headless.parameters(), headless, lisa(switch_every=3), lr=1)
    with pytest.raises(OffloadConfigError, match=r"blocks=.*lm_head.* the same model, with the same parameters frozen"):
        other.load_state_dict(before)
    with pytest.raises(OffloadConfigError, match="not saved by a BlockwiseOptimizer"):
        optimizer.load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())
    after = optimizer.state_dict()
    assert after["blockwise"]["turn"] == before["blockwise"]["turn"] == 1
    assert after["state"].keys() == before["state"].keys()


# -- steps that are none, and other ways to step ----------------------------------------------------------------------


def test_a_step_that_the_scaler_skips_does_not_count():
    model = model_of_four()
    config = BlockwiseConfig(order="ascending", outside="never", switch_every=2)
    optimizer = BlockwiseOptimizer(model.parameters(), model, config, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for overflows, active in [(True, 0), (False, 0), (True, 0), (False, 0), (True, 1), (False, 1)]:
        assert optimizer.active == (LAYERS[active],)
        before = weights(model)
        scaler.scale(model(**batch(0)).loss).backward()
        if overflows:
            next(model.model.layers[active].parameters()).grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed = {name for name, tensor in weights(model).items() if not torch.equal(tensor, before[name])}
        assert changed == (set() if overflows else under(model, LAYERS[active]))


def test_a_copy_of_the_model_freezes_nothing():
    model = model_of_four()
    optimizer = BlockwiseOptimizer(model.parameters(), model, badam(switch_every=1), lr=1e-2)
    twin = copy.deepcopy(model)
    everything = trained(model)
    twin(**batch(0))
    assert trained(twin) == trained(model) == everything
    del optimizer
    model(**batch(0))  # nobody is left to freeze anything


# -- adapters ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # peft still uses the older name
def test_adapters_take_turns_and_the_base_stays_frozen():
    model = peft.get_peft_model(
        model_of_four(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    adapters = trained(model)
    assert all(".lora_" in name for name in adapters)
    optimizer = BlockwiseOptimizer(model.parameters(), model, badam(switch_every=1), lr=1e-2)
    visited = []
    for step in range(4):
        model(**batch(step)).loss.backward()
        visited.append(frozenset(trained(model)))
        optimizer.step()
        optimizer.zero_grad()
    assert frozenset().union(*visited) == adapters
    assert [len(one) for one in visited] == [4, 4, 4, 4]
    optimizer.close()
    assert trained(model) == adapters


# -- mistakes ---------------------------------------------------------------------------------------------------------


def test_all_mistakes_of_the_settings_are_told_at_once():
    with pytest.raises(OffloadConfigError) as error:
        BlockwiseConfig(
            blocks_active=0, switch_every=0, order="ascendin", outside="alway", inactive_state="disk", seed=0.5,
            master_weights="yes",
        )  # fmt: skip
    found = str(error.value)
    assert found.startswith("7 errors")
    for word in ("blocks_active=0", "switch_every=0", "'ascending'?", "'always'?", "drop, keep", "seed=0.5", "'yes'"):
        assert word in found, word
    with pytest.raises(OffloadConfigError, match="each once"):
        BlockwiseConfig(order=["a", "a"])


def test_what_does_not_fit_the_model_is_told_at_once():
    model = model_of_four()
    config = BlockwiseConfig(blocks_active=5, order=["model.layers.0", "model.layer.1"])
    with pytest.raises(OffloadConfigError) as error:
        BlockwiseOptimizer([*model.parameters(), torch.nn.Parameter(torch.ones(3))], model, config, momentum=0.9)
    for word in ("blocks_active=5", "'model.layers.1'?", "'momentum'", "1 parameters are not of this LlamaForCausalLM"):
        assert word in str(error.value), word
    assert trained(model) == under(model, "model", "lm_head")
    assert not model._forward_pre_hooks


def test_an_optimizer_that_begins_with_a_state_is_refused():
    model = model_of_four()
    with pytest.raises(OffloadConfigError, match="Adagrad makes its state before its first step"):
        BlockwiseOptimizer(model.parameters(), model, BlockwiseConfig(), torch.optim.Adagrad, lr=1)
    assert not model._forward_pre_hooks


def test_a_model_without_blocks_is_refused():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(OffloadConfigError, match="Sequential has no repeated blocks"):
        BlockwiseOptimizer(model.parameters(), model, BlockwiseConfig(), lr=1)
    model = model_of_four()
    model.model.layers.requires_grad_(False)
    with pytest.raises(OffloadConfigError, match="No parameter in the 4 repeated blocks"):
        BlockwiseOptimizer(model.parameters(), model, BlockwiseConfig(), lr=1)


def test_a_second_optimizer_does_not_take_waiting_blocks_for_frozen_ones():
    model = model_of_four()
    train(model, BlockwiseOptimizer(model.parameters(), model, badam(), lr=1), 1)
    with pytest.raises(OffloadConfigError, match="still wait for their turn in another"):
        BlockwiseOptimizer(model.parameters(), model, badam(), lr=1)
    release(model)
    assert trained(model) == under(model, "model", "lm_head")
    optimizer = BlockwiseOptimizer(model.parameters(), model, badam(), lr=1)
    with pytest.raises(OffloadConfigError, match="give it all parameters at once"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
