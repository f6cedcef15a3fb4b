"""``hf-offload plan``, from the shell's point of view."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from hf_offload.forecast.options import PLANNED
from hf_offload.settings.classes import help_of
from hf_offload.settings.schema import OffloadConfig
from tests.helpers.activation_heavy_models import CONFIGS, build
from tests.helpers.command_line import command, said

SMALL = [
    "model.config.n_layer=2", "model.config.n_embd=64", "model.config.n_head=2", "model.config.vocab_size=512",
    "offload.min_bytes=256KiB",  # on a card, nothing of so small a model is worth moving
]  # fmt: skip
pytestmark = pytest.mark.usefixtures("few_budgets")

CARD = ["--gpu", "24GB", "--tflops", "80", "--pcie", "25GB/s", "--ssd", "5GB/s", "--ram", "64GB"]


def run_json(*arguments):
    result = command("plan", *arguments, "--json")
    return json.loads(result.stdout), result


def test_a_recipe_on_a_described_machine():
    found, result = run_json("gpt2-small", *SMALL, *CARD, "--batch", "2", "--sequence", "128")
    assert result.exit_code == 0
    assert (found["batch"], found["sequence"], found["task"]) == (2, 128, "causal-lm")
    assert set(found["placements"].values()) == {"keep"}
    assert [row["name"] for row in found["predicted"]] == [
        "baseline", "ram", "ssd", "recompute", "recompute+ram", "recompute+ssd",
        "elementwise", "elementwise+ram", "elementwise+ssd", "auto",
    ]  # fmt: skip
    baseline, auto = found["predicted"][0], found["predicted"][-1]
    assert baseline["peak_bytes"] == auto["peak_bytes"]
    assert baseline["fits"]
    assert baseline["largest_batch"] >= 2
    assert baseline["longest_sequence"] == 1024  # all the positions there are
    assert all(line["reason"] for line in found["units"])


def test_the_table_says_why():
    result = command("plan", "gpt2-small", *SMALL, *CARD, "--sequence", "128")
    assert result.exit_code == 0
    assert "transformer.h.0-1.mlp" in result.stdout
    assert "the whole step fits" in " ".join(result.stdout.split())
    assert "given" in result.stdout


def test_a_budget_decides():
    shape = ["gpt2-small", *SMALL, *CARD, "--batch", "8", "--sequence", "512"]
    roomy, _ = run_json(*shape)
    peaks = {row["name"]: row["peak_bytes"] for row in roomy["predicted"]}
    budget = (peaks["baseline"] + peaks["recompute"]) // 2
    tight, result = run_json(*shape, "--memory-budget", str(budget))
    assert result.exit_code == 0
    assert tight["recomputes_elementwise"]
    assert set(tight["placements"].values()) == {"keep"}
    assert tight["predicted"][-1]["peak_bytes"] <= budget
    over = {row["name"]: row["over_bytes"] for row in tight["predicted"]}
    assert [row["name"] for row in tight["predicted"] if not row["fits"]] == [name for name in over if over[name]]
    more = budget + over["baseline"]["memory"]
    found, _ = run_json(*shape, "--memory-budget", str(more))
    assert found["predicted"][0]["fits"]

    tighter, result = run_json(*shape, "--memory-budget", str(peaks["recompute"]))
    assert result.exit_code == 0
    assert set(tighter["placements"].values()) != {"keep"}
    assert tighter["predicted"][-1]["peak_bytes"] <= peaks["recompute"]

    # Without recompute of whole blocks, that of elementwise operations is the fastest that fits.
    budget = (peaks["baseline"] + peaks["elementwise"]) // 2
    reduced, result = run_json(*shape, "--memory-budget", str(budget), "--no-recompute")
    assert result.exit_code == 0
    assert reduced["recomputes_elementwise"]
    assert reduced["predicted"][-1]["peak_bytes"] <= budget
    shown = command("plan", *shape, "--memory-budget", str(budget), "--no-recompute")
    assert "All blocks recompute their elementwise operations" in " ".join(shown.stdout.split())


def test_a_plan_for_two_gpus_is_one_for_each_and_says_how_they_are_started():
    one, _ = run_json("gpt2-small", *SMALL, *CARD)
    two, result = run_json("gpt2-small", *SMALL, *CARD, "--gpus", "2", "--sharding", "fsdp2", "--link", "10GB/s")
    assert result.exit_code == 0
    assert (two["sharding"], one["sharding"]) == ("fsdp2", None)
    assert two["hardware"]["peer_bytes_per_s"] == {"value": 10e9, "source": "given"}
    assert two["hardware"]["room_bytes"]["ram"]["value"] == 32e9
    # Weights of the counted step have 32 bits, in which they are updated.
    assert two["optimizer_state_bytes"] == one["optimizer_state_bytes"] / 2
    assert two["gradient_bytes"] == one["gradient_bytes"] / 2
    assert two["saved_bytes"] == one["saved_bytes"]
    shown = command("plan", "gpt2-small", *SMALL, *CARD, "--gpus", "2", "--sharding", "fsdp2")
    line = "hf-offload launch --config_file fsdp2 --num_processes 2 train.py"
    assert line in " ".join(shown.stdout.split())
    assert "2 x a card with" in shown.stdout


def test_what_is_in_shards_does_not_leave_memory_by_itself_and_with_ddp_state_does():
    tight = ["gpt2-small", *SMALL, *CARD, "--gpus", "2", "--memory-budget", "1MiB", "--batch", "1", "--sequence", "8"]
    for sharding, state in (("ddp", "ram"), ("fsdp2", None)):
        found, _ = run_json(*tight, "--sharding", sharding)
        assert found["state_placement"]["state"] == state
        assert found["state_placement"]["weights"] is None
        assert found["state_placement"]["keeps_gradients"] == (sharding == "ddp")
        assert ("fsdp_offload_params: true" in (found["refusal"] or "")) == (sharding == "fsdp2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sharding", "fsdp2"], "--sharding says how several GPUs share a model: add --gpus."),
        (["--gpus", "2", "--sharding", "fsdp"], "fsdp2"),
        (["--gpus", "0"], "--gpus=0"),
        (["--gpus", "2", "--modes"], "--modes compares on one GPU"),
        (["--gpus", "2", "--sharding", "zero3", "--memory-mode", "galore"], "needs whole weights"),
    ],
)
def test_what_several_gpus_cannot_do_is_refused(options, message):
    result = command("plan", "gpt2-small", *SMALL, *CARD, *options)
    assert result.exit_code == 2
    assert message in said(result)


def test_memory_modes_are_compared_for_a_size_of_memory_alone():
    found, result = run_json("gpt2-small", *SMALL, "--gpu", "24GiB", "--modes", "--memory-mode", "none,lora")
    assert result.exit_code == 0
    assert [row["mode"] for row in found["rows"]] == ["none", "lora"]
    assert command("plan", "gpt2-small", *SMALL, "--gpu", "24GiB").exit_code == 2


def test_plans_for_other_budgets_are_shown(monkeypatch):
    monkeypatch.undo()  # all of them
    answer, result = run_json("gpt2-small", *SMALL, *CARD)
    assert result.exit_code == 0
    budgets, steps = ([one[name] for one in answer["frontier"]] for name in ("budget_bytes", "step_s"))
    assert len(budgets) == 8
    assert budgets == sorted(budgets)
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] == answer["unlimited_step_s"]


def test_an_impossible_budget_is_refused_with_the_smallest_possible():
    result = command("plan", "gpt2-small", *SMALL, *CARD, "--memory-budget", "1MiB")
    assert result.exit_code == 2
    message = said(result)
    assert "the least this run can do with is" in message
    assert re.search(r"is \d+ MiB, [\d.]+ [KMG]iB more \(the peak is in", message)
    assert "What would lower it" in message


def test_a_checkpoint_folder_is_read_by_its_headers(tmp_path):
    model = build("llama", 0.0).to(torch.bfloat16)
    model.config.save_pretrained(tmp_path)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    found, result = run_json(str(tmp_path), *CARD, "--sequence", "64")
    assert result.exit_code == 0, result.stderr
    assert found["dtype"] == "bfloat16"
    assert found["parameters"] == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_other_tasks_are_found_in_the_configuration(name, tmp_path):
    config = CONFIGS[name](0.1)
    config.architectures = [{"bert": "BertForMaskedLM", "t5": "T5ForConditionalGeneration"}[name]]
    config.save_pretrained(tmp_path)
    found, result = run_json(str(tmp_path), *CARD, "--sequence", "64", "--dtype", "float32")
    assert result.exit_code == 0, result.stderr
    assert found["task"] == {"bert": "masked-lm", "t5": "seq2seq-lm"}[name]


def test_adapters_on_infeasible():
    full, _ = run_json("gpt2-small", *SMALL, *CARD, "--sequence", "128")
    lora, result = run_json(
        "gpt2-small", *SMALL, *CARD, "--sequence", "128", "--memory-mode", "lora", "--memory-mode-kwargs", '{"rank": 4}'
    )
    assert result.exit_code == 0, result.stderr
    # GPT-2's four linear layers per block, each with matrices of 4 rows and 4 columns
    adapters = 2 * 4 * ((64 + 192) + (64 + 64) + (64 + 256) + (256 + 64))
    assert lora["parameters"] - full["parameters"] == adapters
    assert lora["gradient_bytes"] == 4 * adapters
    assert lora["weights_and_optimizer_bytes"] == 4 * lora["parameters"] + lora["optimizer_state_bytes"]
    assert lora["optimizer_state_bytes"] == 8 * adapters + 4 * 2 * 4 * 2  # and a counter for each matrix


def test_state_is_smaller_in_fewer_bits():
    base = {}
    for name in ("adamw_torch", "paged_adamw_8bit", "sgd"):
        found, _ = run_json("gpt2-small", *SMALL, *CARD, "--sequence", "128", "--optimizer", name)
        base[name] = found["weights_and_optimizer_bytes"] / found["parameters"]
    assert base == pytest.approx({"adamw_torch": 12, "paged_adamw_8bit": 6, "sgd": 4})


def test_the_picture_of_a_plan_shows_the_peak_that_it_names(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure
    drawn, save = [], figure.savefig
    monkeypatch.setattr(
        figure, "savefig", lambda self, *given, **named: [drawn.append(self), save(self, *given, **named)]
    )
    picture = tmp_path / "plan.png"
    result = command("plan", "gpt2-small", *SMALL, *CARD, "--sequence", "512", "--batch", "8", "--plot", str(picture))
    assert result.exit_code == 0, result.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    memory, channels = drawn[0].axes
    named = float(re.search(r"peak ([\d.]+) GiB", memory.get_title(loc="left"))[1])
    top = max(area.get_datalim(memory.transData).y1 for area in memory.collections)
    assert top == pytest.approx(named, abs=0.005)
    named = [text.get_text() for text in memory.get_legend().get_texts()]
    assert named[:3] == ["weights", "optimizer state", "gradients"]
    assert len(channels.collections) == 5


LLAMA = [
    "llama-1b", "model.config.num_hidden_layers=2", "model.config.hidden_size=256", "model.config.num_attention_heads=4",
    "model.config.num_key_value_heads=2", "model.config.intermediate_size=1024", "model.config.head_dim=64",
]  # fmt: skip


def test_a_plan_shows_what_is_tiled_and_needs_less():
    shape = [*LLAMA, *CARD, "--sequence", "2048"]
    plain, _ = run_json(*shape)
    tiled, _ = run_json(*shape, "--tiled-loss", "on", "--tiled-mlp", "on")
    keep, kept = (found["predicted"][0]["peak_bytes"] for found in (plain, tiled))
    logits = 4 * 2048 * 128256
    assert keep - kept > 1.5 * logits
    table = " ".join(command("plan", *shape, "--tiled-loss", "on", "--tiled-mlp", "on").stdout.split())
    assert "lm_head, tiled" in table
    assert ".mlp (2 x), tiled" in table


def test_a_setting_is_an_option_by_its_declaration():
    """Its help, how it is read, and what is refused are those of the declaration."""
    shown = " ".join(command("plan", "--help").stdout.replace("│", " ").split())
    for field in PLANNED:
        assert f"--{field.replace('_', '-')} " in shown
        words = help_of(OffloadConfig, field).removeprefix('With tier="auto": ').split()[1:4]
        assert " ".join(words) in shown
    result = command(
        "plan", "gpt2-small", *CARD, "--tile-bytes", "0", "--tiled-loss", "om", "--tiled-mlp", "", "--memory-budget",
        "1 Gib b", "--batch", "none", "--ram", "much",
    )  # fmt: skip
    assert result.exit_code == 2
    stderr = said(result)
    for part in (
        "6 errors in the options", "--tile-bytes='0' is too small", "--tiled-loss='om' is unknown", "Did you mean 'on'?",
        "--tiled-mlp='' is not a list", "--memory-budget='1 Gib b' is not a size", "--batch='none' is not a whole number",
        "ram='much' is not a size",
    ):  # fmt: skip
        assert part in stderr


def test_settings_given_as_options_replace_those_of_a_recipe():
    shape = [*LLAMA, "offload.tier=ssd", "offload.tiled_loss=auto", *CARD, "--sequence", "512"]
    recipe, on, off = (run_json(*shape, *more)[0] for more in ([], ["--tiled-loss", "on"], ["--tiled-loss", "off"]))
    assert recipe["saved_bytes"] == on["saved_bytes"] < off["saved_bytes"]
    tight, result = run_json(*shape, "--memory-budget", "14GiB", "--tiled-mlp", "auto")  # which tier ssd refuses
    assert result.exit_code == 0, result.stderr
    assert tight["budget_bytes"] == 14 << 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-model", *CARD], "is not a shipped recipe, a folder with a config.json or a model of the hub"),
        (["gpt2-small", "--gpu", "rtx9999"], "gpu='rtx9999' is unknown"),
        (["gpt2-small", "--tflops", "80"], "describe another machine: add --gpu"),
        (["gpt2-small", *CARD, "--batch", str(10**20)], "--batch=100000000000000000000 is too large"),
        (["gpt2-small", *CARD, "--gpu", "foo", "--batch", "0", "--plot", "/proc/x"], "3 errors in the options"),
        (["gpt2-small", *CARD, "--sequence", "5000"], "has 1024 positions"),
        (["gpt2-small", *CARD, "--dtype", "int8"], "--dtype='int8' is unknown"),
        (["gpt2-small", *CARD, "--optimizer", "galore_adamw"], "optimizer 'galore_adamw' is not known"),
        (["gpt2-small", *CARD, "--modes", "--memory-mode", "none,galor"], "Did you mean 'galore'?"),
        (["gpt2-small", *CARD, "--memory-mode-kwargs", '{"rank": 8}'], "memory_mode is 'none'"),
        (
            ["gpt2-small", *CARD, "--memory-mode", "lora", "--memory-mode-kwargs", '{"density": 1}'],
            "no setting 'density'",
        ),
        (
            ["gpt2-small", *CARD, "--memory-mode", "lora", "--optimizer", "paged_adamw_8bit"],
            "optimizer='paged_adamw_8bit' and memory_mode='lora' both choose the optimizer",
        ),
        (["gpt2-small", *CARD, "--memory-budget", "a lot"], "--memory-budget='a lot' is not a size"),
        (["gpt2-small", *CARD, "-d", "."], "--directory and --measure are for this machine"),
    ],
)
def test_bad_input_is_explained(arguments, message):
    result = command("plan", *arguments)
    assert result.exit_code == 2
    assert message in said(result)


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    result = command("plan", str(tmp_path), *CARD)
    assert result.exit_code == 2
    assert "has no config.json" in said(result)


@pytest.mark.parametrize(
    "content", ["{", "null", '{"model_type": 3}', '{"model_type": "gpt2", "n_layer": "many"}', "\\udcff"]
)
def test_a_damaged_configuration_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    result = command("plan", str(tmp_path), *CARD)
    assert result.exit_code == 2, result.output
    assert "a folder with a config.json" in said(result)


def test_half_a_checkpoint_is_refused(tmp_path):
    CONFIGS["llama"](0.0).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\x00\x00")
    result = command("plan", str(tmp_path), *CARD)
    assert result.exit_code == 2
    assert "is not a whole safetensors file" in said(result)


def test_sampled_and_lean_layers_save_less():
    shape = ("--batch", "4", "--sequence", "128", *CARD)
    ways = {
        "usual": ((), ()),
        "sampled": ((), ("--sampled-linear", "0.1")),
        "lean": ((), ("--recompute-elementwise", "exact")),
        "recipe": (("sampling={ratio: 0.1}",), ()),
    }
    saved = {}
    for name, (changes, options) in ways.items():
        found, result = run_json("gpt2-small", *SMALL, *changes, *shape, *options)
        assert result.exit_code == 0, result.output
        saved[name] = found["saved_bytes"]
    assert saved["sampled"] < saved["usual"]
    assert saved["lean"] < saved["usual"]
    assert saved["recipe"] == saved["sampled"]
    text = command("plan", "gpt2-small", *SMALL, *shape, "--sampled-linear", "0.1").output
    assert text.count(", sampled") == 2  # attention and MLP
    assert command("plan", "gpt2-small", *SMALL, *shape, "--recompute-elementwise", "norm").exit_code == 2


def test_a_recipes_memory_mode_is_planned():
    shape = (*SMALL, *CARD, "--batch", "1", "--sequence", "128")
    galore = "memory={mode: galore, rank: 8}"
    usual, small, other = (
        run_json("gpt2-small", *shape, *changes)[0] for changes in ((), (galore,), (galore, "--memory-mode", "lisa"))
    )
    assert usual["memory_mode"] == "none"
    assert (small["memory_mode"], small["memory_mode_kwargs"]) == ("galore", {"rank": 8})
    assert small["optimizer_state_bytes"] < usual["optimizer_state_bytes"]
    assert (other["memory_mode"], other["memory_mode_kwargs"]) == ("lisa", {})
