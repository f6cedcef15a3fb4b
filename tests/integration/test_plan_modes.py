"""Memory modes in a plan: what is counted without data is what real optimizers hold after a step."""

import copy
import dataclasses
import json

import pytest
import torch
import transformers
from transformers import TrainingArguments

from hf_offload import OffloadConfig, attach
from hf_offload.forecast.compare_modes import compare_modes
from hf_offload.forecast.forecast import make_forecast
from hf_offload.forecast.workload import Workload, count_workload
from hf_offload.methods.blockwise import deepest_turn
from hf_offload.methods.blockwise.mode import Blockwise
from hf_offload.plan.hardware import describe_hardware
from hf_offload.plan.state_placement import StatePlacement, least_weights, moved_bytes
from hf_offload.plan.state_transfers import place_state
from hf_offload.planning.state_bytes import unit_weights
from hf_offload.settings.memory_modes import memory_mode, mode_names
from hf_offload.storage.buffers import PAGE
from hf_offload.tensors import parameter_count
from tests.helpers.blockwise import badam, lisa
from tests.helpers.command_line import command
from tests.helpers.tables import rows
from tests.helpers.tiny_models import _ARCHITECTURES, tiny_batch, tiny_model
from tests.helpers.torchao_optimizers import optimizer_of

RANK = {"rank": 4}
SETTINGS = {
    "lora": [{}, RANK],
    "lora_fa": [RANK],
    "dora": [RANK],
    "qlora": [RANK, {"rank": 4, "double_quant": False}],
    "adamw_8bit": [{}],
    "adamw_4bit": [{}],
    "galore": [RANK, {"rank": 4, "proj_type": "full", "on_refresh": "reset"}, {"rank": 4, "targets": "all"}],
    "galore_8bit": [RANK],
    "apollo": [RANK],
    "apollo_mini": [{}],
    "frugal": [{"density": 0.5, "update_proj_gap": 1}, {"density": 0.25, "projection": "svd"}],
    "lisa": [{"blocks_active": 1}, {}],
    "badam": [{}, {"master_weights": False}, {"order": "descending"}],
}
# Each mode with each of its settings once, in bfloat16, whose state may have other dtypes than its weights; and another
# model and dtype with what depends on them.
QUICK = {("gpt2", "galore", torch.float32), ("gpt2", "lora", torch.float32), ("llama", "badam", torch.float32)}


def marks_of(architecture, mode, dtype):
    quick = (architecture, dtype) == ("llama", torch.bfloat16) or (architecture, mode, dtype) in QUICK
    return () if quick else pytest.mark.full


CASES = [
    pytest.param(
        architecture,
        mode,
        settings,
        dtype,
        id=f"{architecture}-{mode}-{index}-{str(dtype)[6:]}",
        marks=marks_of(architecture, mode, dtype),
    )
    for architecture, dtype in (("llama", torch.float32), ("llama", torch.bfloat16), ("gpt2", torch.float32))
    for mode, all_settings in SETTINGS.items()
    for index, settings in enumerate(all_settings)
    if (architecture, mode) != ("gpt2", "qlora")
]
CARD = describe_hardware("24GB", tflops=80, pcie="25GB/s", ssd="5GB/s", ram="64GB")


def workload_of(architecture, dtype=torch.float32):
    config = _ARCHITECTURES[architecture].config(0.0)
    config.use_cache = False
    return Workload(
        name="tiny", config=config, task="causal-lm", batch=2, sequence=24, dtype=dtype, attention="sdpa",
        settings=OffloadConfig(min_bytes=1),
    )  # fmt: skip


def tensors_of(state):
    """All tensors that a state holds, with those inside of tensors that are made of others."""
    for value in state.values():
        if isinstance(value, dict):
            yield from tensors_of(value)
        elif hasattr(value, "__tensor_flatten__"):
            yield from (getattr(value, name) for name in value.__tensor_flatten__()[0])
        elif isinstance(value, torch.Tensor):
            yield value


def stored_bytes(tensors):
    return sum({id(s): s.nbytes() for s in (one.untyped_storage() for one in tensors)}.values())


class Trained:
    """A real step, or a few where not all of them hold as much: the most that model and optimizer held."""

    def __init__(self, architecture, dtype, mode_name, settings, model=None):
        mode = memory_mode(mode_name, settings)
        self.model = mode.prepare(tiny_model(architecture, dropout=0.0).to(dtype) if model is None else model)
        steps = 12 if mode_name in ("lisa", "badam", "frugal") else 1
        if isinstance(mode, Blockwise):
            # One step a turn, so that every turn is seen.
            mode = dataclasses.replace(mode, switch_every=1)
        optimizer = mode.optimizer(self.model, weight_decay=0.0, lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
        if isinstance(mode, Blockwise):
            # A turn's state is gone after its last step: it is looked at just before.
            end_turn = optimizer._end_turn
            optimizer._end_turn = lambda: (states.append(optimizer.state_bytes()), end_turn())
        gradients, states = [], []
        for _ in range(steps):
            self.model(**tiny_batch(architecture)).loss.backward()
            gradients.append(stored_bytes([p.grad for p in self.model.parameters() if p.grad is not None]))
            optimizer.step()
            if not isinstance(mode, Blockwise):
                states.append(stored_bytes(tensors_of(optimizer.state)))
            self.model.zero_grad(set_to_none=True)
        self.gradient_bytes, self.state_bytes = max(gradients), max(states)


@pytest.mark.parametrize(("architecture", "mode", "settings", "dtype"), CASES)
def test_state_and_gradients_are_those_of_real_optimizers(architecture, mode, settings, dtype):
    with optimizer_of(mode):
        real = Trained(architecture, dtype, mode, settings)
    counted = count_workload(workload_of(architecture, dtype).in_mode(mode, settings), CARD)
    assert counted.state_bytes == real.state_bytes
    assert counted.gradient_bytes == real.gradient_bytes


@pytest.mark.parametrize("mode", rows(["adamw_8bit", "adamw_4bit", "badam", "lisa"], quick=["adamw_4bit", "badam"]))
def test_large_weights_and_embeddings_that_are_larger_than_a_block(mode):
    shape = workload_of("llama").in_mode(mode)
    # Both low-bit packages leave tensors below 4096 numbers alone; 80 x 130 is no multiple of their blocks.
    changes = {"hidden_size": 80, "intermediate_size": 130, "vocab_size": 1024, "head_dim": 10}
    for name, value in changes.items():
        setattr(shape.config, name, value)
    model = transformers.LlamaForCausalLM(shape.config).train()
    with optimizer_of(mode):
        real = Trained("llama", torch.float32, mode, {}, model)
    counted = count_workload(shape, CARD)
    assert counted.state_bytes == real.state_bytes
    assert counted.gradient_bytes == real.gradient_bytes


@pytest.mark.parametrize("mode", rows(["none", "lora", "badam"], quick=["badam"]))
def test_a_fused_kernel_needs_no_copies(mode):
    assert Workload.optimizer == TrainingArguments("unused").optim
    shape = workload_of("llama").in_mode(mode)
    fused = count_workload(shape, CARD)
    copied = count_workload(dataclasses.replace(shape, optimizer="adamw_torch"), CARD)
    assert fused.optimizer_step_bytes == 0
    assert copied.optimizer_step_bytes > 0
    assert fused.state_bytes == copied.state_bytes


@pytest.mark.parametrize("mode", rows(["galore", "galore_8bit", "apollo", "frugal"], quick=["galore", "frugal"]))
def test_updated_in_backward_gradients_are_those_of_the_largest_weight(mode):
    settings = {"update_in_backward": True} | ({} if mode == "frugal" else RANK)
    counted = count_workload(workload_of("llama").in_mode(mode, settings), CARD)
    assert counted.gradient_bytes == max(p.nbytes for p in tiny_model("llama").parameters())
    step = count_workload(workload_of("llama").in_mode(mode, settings | {"update_in_backward": False}), CARD)
    assert counted.state_bytes == step.state_bytes
    assert counted.segments[-1].gradient_bytes < step.segments[-1].gradient_bytes == step.gradient_bytes


def test_a_step_without_backward_is_two_forwards_with_one_direction():
    shape = workload_of("llama")
    model = tiny_model("llama", dropout=0.0)
    sizes = [one.nbytes for one in model.parameters()]
    plain, mezo = (count_workload(shape.in_mode(name), CARD) for name in ("none", "mezo"))
    weights = plain.base_bytes - plain.state_bytes
    assert (mezo.gradient_bytes, mezo.state_bytes, mezo.optimizer_step_bytes) == (0, 0, 0)
    assert not mezo.saved
    assert not mezo.blocks
    assert not any(segment.backward or segment.gradient_bytes for segment in mezo.segments)
    drawn = 3 * max(sizes)  # with results of two operations, of pieces that are larger than these weights
    assert mezo.base_bytes == weights + drawn
    forward = sum(segment.seconds for segment in plain.segments if not segment.backward)
    assert sum(segment.seconds for segment in mezo.segments) == pytest.approx(2 * forward, rel=0.05)
    table = compare_modes(shape, CARD, ["none", "mezo"])
    adamw, row = table.rows
    assert row.weights_bytes == adamw.weights_bytes == weights
    assert (row.gradient_bytes, row.state_bytes) == (0, 0)
    assert row.peak_bytes == row.weights_bytes + row.activation_bytes < adamw.peak_bytes / 2
    assert row.largest_batch == row.largest_batch_recomputed > 0


def test_weights_of_a_step_without_backward_pass_as_in_a_run():
    """Both passes visit each block of one stack once; two passes bring what leaves twice. A block is read ahead while another
    computes.
    """
    shape = workload_of("llama").in_mode("mezo")
    config = copy.deepcopy(shape.config)
    config.num_hidden_layers = 8
    counted = count_workload(dataclasses.replace(shape, config=config), CARD)
    assert counted.is_one_stack
    total = sum(one.weight_bytes for one in counted.weights.values())
    seconds = sum(segment.seconds for segment in counted.segments)
    few = least_weights(counted)
    budget = 1 << 30
    turns = place_state(counted, StatePlacement(None, "ssd", total // 2), budget, on_host=False)
    several = dataclasses.replace(counted, is_one_stack=False)
    passes = place_state(several, StatePlacement(None, "ssd", total // 2), budget, on_host=False)
    least = place_state(counted, StatePlacement(None, "ssd", 0), budget, on_host=False)
    (written, read), (written_twice, read_twice) = moved_bytes(turns), moved_bytes(passes)
    assert few < total // 2
    assert written["ssd"] == pytest.approx(total / 2 + few, rel=0.01)
    assert read["ssd"] == pytest.approx(total / 2 + few, rel=0.01)
    assert written_twice["ssd"] == pytest.approx(total + 2 * few, rel=0.01)
    assert read_twice["ssd"] == pytest.approx(total + 2 * few, rel=0.01)
    assert least.base_bytes == counted.base_bytes - total + few
    assert sum(segment.seconds for segment in turns.segments) == pytest.approx(seconds, rel=0.05)
    most, alone = (max(one.live_bytes for one in each.segments) for each in (turns, passes))
    assert most > alone + few  # the copy of a block, and what waits


@pytest.mark.parametrize("part", [0, 1.5])
def test_a_plan_counts_what_a_run_without_backward_reads_and_writes(part):
    """With few weights in memory, and with most of them. What is in memory when a pass begins is not all that it uses
    first: a block or two, and the embeddings, are read more.
    """
    shape = workload_of("gpt2").in_mode("mezo")
    config = copy.deepcopy(shape.config)
    config.num_hidden_layers = 12
    counted = count_workload(dataclasses.replace(shape, config=config), CARD)
    torch.manual_seed(0)
    model = type(tiny_model("gpt2"))(config)
    weights = unit_weights(model, counted.units, counted.state_bytes, PAGE)  # what is smaller moves as a whole page
    total = sum(one.weight_bytes for one in weights.values())
    counted = dataclasses.replace(counted, weights=weights)
    config = {"tier": "none", "memory_mode": "mezo", "params": "ram", "min_bytes": PAGE}
    if part:
        config["memory_budget"] = round(part * total)
    session = attach(model, OffloadConfig(**config))
    residency = session.residency
    optimizer = session.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    moved = []
    for step in range(5):
        optimizer.step(lambda step=step: model(**tiny_batch("gpt2", seed=step)).loss)
        residency.store.settle()
        moved.append(residency.moved_bytes)
    (written, read), (written_later, read_later) = moved[2], moved[4]
    held = StatePlacement(None, "ram", residency.limit_bytes)
    found = place_state(counted, held, 1 << 30, on_host=True)
    predicted_written, predicted_read = (each["ram"] for each in moved_bytes(found))
    assert residency.total_bytes == total
    block = least_weights(counted)
    more = block + model.transformer.wte.weight.nbytes + model.transformer.wpe.weight.nbytes
    if part:  # what leaves in the second pass alone is written, too
        assert predicted_written <= (written_later - written) / 2 <= predicted_written + more + block
    else:
        assert (written_later - written) / 2 == pytest.approx(predicted_written, rel=0.02)
    assert 0.98 * predicted_read <= (read_later - read) / 2 <= predicted_read + more
    session.detach()


def test_a_plan_lets_weights_leave_in_a_mode_without_gradients():
    shape = dataclasses.replace(workload_of("llama").in_mode("mezo"), weights_place="ssd")
    assert (shape.allowed.state, shape.allowed.weights) == ("none", "ssd")
    inside = make_forecast(dataclasses.replace(shape, weights_place="none"), CARD)
    outside = make_forecast(shape, CARD)
    assert outside.state_placement.weights == "ssd"
    assert inside.state_placement.weights is None
    assert outside.solution.timeline.step_s > inside.solution.timeline.step_s


@pytest.mark.parametrize("dtype", rows([torch.float32, torch.bfloat16], quick=[torch.bfloat16]))
def test_state_that_waits_is_counted_where_it_lies(dtype):
    base = {"switch_every": 1, "order": "ascending"}
    shape, computer = workload_of("llama", dtype), dataclasses.replace(CARD, device="cpu")
    counted = {
        (waiting, machine.device): count_workload(
            shape.in_mode("badam", base | {"inactive_state": waiting}), machine
        ).state_bytes
        for waiting in ("drop", "keep")
        for machine in (CARD, computer)
    }
    mode = memory_mode("badam", base | {"inactive_state": "keep"})
    model = tiny_model("llama", dropout=0.0).to(dtype)
    optimizer = mode.optimizer(model, weight_decay=0.0, lr=1e-3)
    held, end_turn = [], optimizer._end_turn

    def look_and_end_turn():
        held.append(stored_bytes([*tensors_of(optimizer.state), *optimizer._masters.values()]))
        end_turn()

    optimizer._end_turn = look_and_end_turn
    for _ in range(2 * optimizer.cycle):
        model(**tiny_batch("llama")).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert counted.pop(("keep", "cpu")) == max(held)
    assert len(set(counted.values())) == 1
    assert max(held) > counted["drop", "cpu"]


def quantised_bytes(model):
    """Of parameters and buffers, with the scales that bitsandbytes keeps beside its weights."""
    total = stored_bytes([*model.parameters(), *model.buffers()])
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            total += state.absmax.nbytes + state.code.nbytes
            if state.nested:
                total += state.offset.nbytes + state.state2.absmax.nbytes
    return total


@pytest.mark.parametrize("mode", ["none", "lora", "lora_fa", "dora", "qlora", "galore"])
@pytest.mark.parametrize("dtype", rows([torch.float32, torch.bfloat16], quick=[torch.bfloat16]))
def test_weights_are_those_of_the_prepared_model(mode, dtype):
    settings = [{}] if mode == "none" else SETTINGS[mode]
    for one in settings:
        model = tiny_model("llama", dropout=0.0).to(dtype)
        # Rotary frequencies stay in float32 where a model is loaded in 16 bits.
        model.model.rotary_emb.float()
        prepared = model if mode == "none" else memory_mode(mode, one).prepare(model)
        counted = count_workload(workload_of("llama", dtype).in_mode(mode, one), CARD)
        # Rotary embeddings keep a second name for their frequencies.
        assert counted.base_bytes - counted.state_bytes == pytest.approx(quantised_bytes(prepared), abs=64)


def test_weights_in_4_bits_save_what_lora_saves_and_count_as_the_parameters_that_they_are():
    shape = workload_of("llama", torch.bfloat16)
    plain = count_workload(shape, CARD)
    lora, quantised = (count_workload(shape.in_mode(mode, RANK), CARD) for mode in ("lora", "qlora"))
    saved = [sum(tensor.nbytes for tensor in one.saved) for one in (quantised, lora, plain)]
    assert saved[0] == saved[1] != saved[2]
    prepared = memory_mode("qlora", RANK).prepare(tiny_model("llama", dropout=0.0).bfloat16())
    assert quantised.parameters == parameter_count(prepared) == lora.parameters


BLOCKS = ["model.layers.0", "model.layers.1"]


@pytest.mark.parametrize(
    ("config", "units"),
    [
        (lisa(blocks_active=1), ["model.embed_tokens", BLOCKS[0], "model.norm", "lm_head"]),
        (lisa(blocks_active=2), ["model.embed_tokens", *BLOCKS, "model.norm", "lm_head"]),
        (badam(), [BLOCKS[0]]),
        (badam(order="descending"), [BLOCKS[0]]),
        (badam(order=["lm_head", BLOCKS[1]]), [BLOCKS[1]]),
        (badam(order=[BLOCKS[1]], outside="never"), [BLOCKS[1]]),
    ],
)
def test_activations_are_those_of_the_turn_with_the_first_block(config, units):
    model = tiny_model("llama")
    names = {name for name, _ in model.named_parameters() if any(name == u or name.startswith(f"{u}.") for u in units)}
    assert deepest_turn(model, config) == names


def test_waiting_blocks_save_no_inputs_of_their_weights():
    saved = {}
    for order in (["model.layers.0"], ["model.layers.1"]):
        settings = {"order": order, "outside": "never"}
        counted = count_workload(workload_of("llama").in_mode("badam", settings), CARD)
        saved[order[0]] = sum(one.nbytes for one in counted.saved)
    plain = sum(one.nbytes for one in count_workload(workload_of("llama"), CARD).saved)
    assert saved["model.layers.1"] < saved["model.layers.0"] < plain


# -- the table ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "modes", rows([["none", "badam"], ["none", "adamw_8bit", "galore", "badam", "lora_fa"]], quick=[["none", "badam"]])
)
def test_seven_billion_weights_on_24_gb(modes):
    found = command("plan", "llama-7b", "--modes", "--memory-mode", ",".join(modes), "--gpu", "rtx4090", "--json")
    assert found.exit_code == 0, found.stderr
    content = json.loads(found.stdout)
    rows = {row["mode"]: row for row in content["rows"]}
    assert list(rows) == modes
    weights = 6_738_415_616
    assert rows["none"]["gradient_bytes"] == 2 * weights
    assert rows["none"]["state_bytes"] == 4 * weights
    assert content["budget_bytes"] == int(0.9 * (24_564 << 20))
    for name, row in rows.items():
        if name in ("badam", "lora_fa"):
            assert row["weights_bytes"] + row["gradient_bytes"] + row["state_bytes"] < content["budget_bytes"]
            assert row["largest_batch_recomputed"] >= 1
            continue
        # Weights and gradients in bfloat16 alone are too much, whatever is done to activations.
        assert row["weights_bytes"] + row["gradient_bytes"] > content["budget_bytes"]
        assert (row["fits"], row["largest_batch"], row["largest_batch_recomputed"]) == (False, 0, 0)
    # A block of 4 matrices of 4096 x 4096, 3 of 4096 x 11008 and 2 norms; with it two moments and a copy in float32.
    block = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    assert rows["badam"]["gradient_bytes"] == 2 * block
    assert rows["badam"]["state_bytes"] == 12 * block + 4 * 9
    for row in rows.values():
        parts = ("weights_bytes", "gradient_bytes", "state_bytes", "activation_bytes")
        assert sum(row[part] for part in parts) == row["peak_bytes"]
        assert row["fits"] == (row["peak_bytes"] <= content["budget_bytes"]) == (row["largest_batch"] >= 1)


@pytest.mark.full
def test_seven_billion_weights_fit_where_they_are_updated_in_backward():
    settings = '{"update_in_backward": true}'
    found = command(
        "plan", "llama-7b", "--modes", "--memory-mode", "galore,galore_8bit", "--memory-mode-kwargs", settings, "--gpu",
        "rtx4090", "--json",
    )  # fmt: skip
    rows = {row["mode"]: row for row in json.loads(found.stdout)["rows"]}
    for row in rows.values():
        assert row["gradient_bytes"] == 2 * 32000 * 4096  # of embeddings, or the head
        assert row["largest_batch_recomputed"] >= 1
    assert rows["galore_8bit"]["state_bytes"] < rows["galore"]["state_bytes"]


GPT2 = [
    "gpt2-small", "model.config.n_layer=2", "model.config.n_embd=64", "model.config.n_head=2",
    "model.config.vocab_size=512", "--gpu", "rtx4090", "--sequence", "128",
]  # fmt: skip


def test_a_mode_that_the_model_cannot_have_is_refused_beside_the_others():
    found = command("plan", "--modes", *GPT2, "--json")
    content = json.loads(found.stdout)
    assert [row["mode"] for row in content["rows"]] == [mode for mode in mode_names() if mode not in content["refused"]]
    assert list(content["refused"]) == ["qlora", "galore", "galore_8bit", "apollo"]  # their rank is above 64
    assert "cannot quantise" in content["refused"]["qlora"]
    assert all(row["fits"] and row["largest_batch"] > 1 for row in content["rows"])
    shown = command("plan", "--modes", *GPT2, "--memory-mode", "none,qlora")
    assert "recomputed" in shown.stdout
    assert "cannot quantise" in shown.stderr


def test_a_row_is_what_the_mode_alone_is_planned_with():
    table = json.loads(command("plan", "--modes", *GPT2, "--memory-mode", "frugal,lisa", "--json").stdout)
    for row in table["rows"]:
        alone = json.loads(command("plan", *GPT2, "--memory-mode", row["mode"], "--json").stdout)
        baseline = {one["name"]: one for one in alone["predicted"]}["baseline"]
        assert (row["peak_bytes"], row["largest_batch"]) == (baseline["peak_bytes"], baseline["largest_batch"])
        assert row["state_bytes"] == alone["optimizer_state_bytes"]
        assert row["weights_bytes"] + row["state_bytes"] == alone["weights_and_optimizer_bytes"]


def test_a_smaller_budget_leaves_less_room():
    shape = ["--modes", *GPT2, "--memory-mode", "none", "--json"]
    roomy, tight = (
        json.loads(command("plan", *shape, "--memory-budget", budget).stdout)["rows"][0] for budget in ("2GiB", "1GiB")
    )
    assert roomy["largest_batch"] > 1.5 * tight["largest_batch"] > 0
