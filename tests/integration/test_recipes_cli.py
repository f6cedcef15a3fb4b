import re
import shlex

import pytest
import yaml

from hf_offload.settings.layers import read_layers
from hf_offload.settings.recipe_files import find_recipe, layer_names, recipe_names, shipped_name
from hf_offload.settings.recipe_meta import MetaRecipe, read_meta
from hf_offload.settings.recipes import load_recipe
from tests.helpers.command_line import benchmark, command

# The name that every supported version of transformers has; newer ones have another beside it.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

UNCARDED = {
    *(name for name in recipe_names() if name.startswith("bench/")),
    "gpt/demo",
    "gpt/small_full_auto",
    "bert/minilm_full_auto",
    "llama/small_full_auto",
    "t5/small_full_auto",
    "llama/8b_context_parallel",
}
"""For measuring, for CPUs, or for several cards at once: no prediction for one card."""
CARDED = [name for name in recipe_names() if name not in UNCARDED]
QUICK = ("gpt/gpt2_full_ssd", "bert/base_wtacrs_ram")
TINY = """# hf-offload train tiny.yaml
# hf-offload plan tiny.yaml --gpu 1GiB --tflops 1
#
# Tiny.
meta:  # about it
  summary: Tiny.
  machine: {gpu: 1GiB, tflops: 1}
base: _layer
data: {source: random-tokens, sequence_length: 16}
training: {max_steps: 1, per_device_train_batch_size: 2}
offload: {tier: ram}
"""
LAYER = """
model:
  architecture: gpt2
  config: {n_layer: 2, n_embd: 32, n_head: 2, n_positions: 32, vocab_size: 64}
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "_layer.yaml").write_text(LAYER)
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


# ---- what is shipped


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_begins_with_the_command_lines_of_its_meta(name):
    text, meta = find_recipe(name).read_text(), read_meta(name)
    assert text.startswith((f"{meta.header(name)}#\n", f"{meta.header(name)}\n"))
    rest = text.removeprefix(meta.header(name)).partition("\n\n")[0]
    assert not re.search(r"^# hf-offload (train|launch|plan)", rest, flags=re.MULTILINE), (
        "a command line that meta does not have"
    )
    assert meta.summary
    recipe = load_recipe(name)
    assert (recipe.name, recipe.meta) == (name, meta)


@pytest.mark.parametrize("name", CARDED)
def test_a_recipe_says_how_it_is_launched_planned_and_what_is_predicted(name):
    meta = read_meta(name)
    train, *launch, plan = meta.command_lines(name)
    assert train == f"hf-offload train {name}"
    alone = load_recipe(name).offload.memory_mode == "mezo" or meta.prediction.million_tokens is not None
    assert len(launch) == (not alone), "weights and state leave memory, and mezo trains, in one process only"
    for line in launch:
        assert re.fullmatch(
            rf"hf-offload launch --config_file (fsdp2|ddp) -m hf_offload train {name}( \w[\w.]*=\S+)*", line
        )
    assert shlex.split(plan)[:5] == ["hf-offload", "plan", name, "--gpu", meta.machine.gpu]
    assert meta.machine.given.keys() <= {"gpu", "tflops", "ssd", "pcie", "ram"}
    assert {"peak", "budget", "micro_batch", "baseline_peak"} <= meta.predicted.given.keys()


@pytest.mark.parametrize("name", [name for name in CARDED if read_meta(name).launch is not None])
def test_the_line_for_several_cards_asks_for_nothing_that_is_refused_there(name):
    launch = read_meta(name).launch
    assert load_recipe(name, launch.overrides) != load_recipe(name) or not launch.overrides
    offload = load_recipe(name, launch.overrides).offload
    assert not (offload.memory_mode_kwargs or {}).get("update_in_backward")
    if launch.config_file == "fsdp2":  # optimizers of memory modes do not know shards
        assert offload.memory_mode == "none"


def test_other_recipes_are_for_no_card():
    for name in UNCARDED:
        meta = read_meta(name)
        assert (meta.machine, meta.predicted) == (None, None)


def test_meta_is_not_passed_on_to_recipes_that_are_built_on_it(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("base: llama/8b_lora_ssd\n")
    assert load_recipe("llama/8b_lora_ssd").meta.predicted is not None
    assert load_recipe(path).meta == MetaRecipe()


def test_errors_in_meta_come_at_once_with_the_nearest_names(tiny):
    tiny.write_text(
        TINY.replace("{gpu: 1GiB, tflops: 1}", "{gpuu: 1GiB, tflops: much}").replace("summary", "sumary")
        + "meta: {}\n".replace("meta: {}", "evaluation: {metric: [perplexity]}")
    )
    result = command("recipes", "validate", tiny)
    assert result.exit_code == 1
    for part in ("Did you mean 'gpu'?", "meta.machine.tflops", "Did you mean 'summary'?", "Did you mean 'metrics'?"):
        assert part in result.stderr
    tiny.write_text(TINY.replace("machine: {gpu: 1GiB, tflops: 1}", "launch: {overrides: memory=null}"))
    stderr = command("recipes", "validate", tiny).stderr
    assert "meta.launch.config_file is missing" in stderr
    assert "meta.launch.overrides='memory=null' is not a list of overrides" in stderr


@pytest.mark.parametrize("name", CARDED)
def test_every_memory_knob_of_a_recipe_stands_in_it_with_its_reason(name):
    text = find_recipe(name).read_text()
    layers = read_layers(find_recipe(name))
    recipes = [file for file in layers.files if not shipped_name(file).partition("/")[2].startswith("_")]
    knobs = [
        (section, key)
        for section in ("memory", "offload", "sampling")
        for key in layers.tree.get(section, {})
        if layers.origins[section, key] in recipes
    ]
    assert len(knobs) == sum(len(layers.tree.get(section, {})) for section in ("memory", "offload", "sampling"))
    own = [(section, key) for section, key in knobs if layers.origins[section, key] == find_recipe(name)]
    for _, key in own:
        line = re.search(rf"^  {key}:.*$", text, flags=re.MULTILINE)[0]
        assert " # " in line or (key in ("rank",) and "mode:" in text), line


def test_every_shipped_layer_is_used_and_named_in_full():
    used = set()
    for name in recipe_names():
        path = find_recipe(name)
        used |= {shipped_name(file) for file in read_layers(path).files}
        base = yaml.safe_load(path.read_text()).get("base", [])
        assert set(base) <= {*layer_names(), *recipe_names()}, "a copy elsewhere would not find it"
    assert set(layer_names()) <= used


# ---- list


def test_list_shows_model_method_card_and_peak():
    result = command("recipes", "list", "--family", "llama")
    assert result.exit_code == 0, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if line.split()[:1] == ["llama/8b_lora_ssd"]]
    meta = read_meta("llama/8b_lora_ssd")
    for part in (meta.summary, "rtx4090", meta.predicted.peak):
        assert part in line
    assert "gpt/" not in result.stdout
    everything = command("recipes", "list").stdout
    assert all(name in everything for name in recipe_names())
    assert not any(name in everything for name in layer_names())


def test_an_unknown_family_is_refused_with_the_nearest():
    result = command("recipes", "list", "--family", "lama")
    assert result.exit_code == 2
    assert "Did you mean 'llama'?" in result.stderr


# ---- show


@pytest.mark.parametrize("name", ["llama/qwen3_8b_lora_ssd", "t5/large_galore_ssd", "gpt/demo"])
def test_what_show_prints_is_the_same_recipe_as_a_file(name, tmp_path):
    result = command("recipes", "show", name, "training.max_steps=7")
    assert result.exit_code == 0, result.stderr
    path = tmp_path / "saved.yaml"
    path.write_text(result.stdout)
    saved, shipped = load_recipe(path), load_recipe(name, ["training.max_steps=7"])
    for part in ("model", "data", "training", "offload", "evaluation"):
        assert getattr(saved, part) == getattr(shipped, part)
    # any reader of YAML takes it for the same
    assert yaml.safe_load(result.stdout)["training"] == dict(shipped.training)


def test_show_names_the_layers():
    text = command("recipes", "show", "llama/qwen3_8b_lora_ssd").stdout
    layers = ["llama/_family", "llama/_8b", "_methods/lora", "llama/8b_lora_ssd", "llama/_qwen3_8b"]
    assert re.findall(r"^#   (\S+)$", text, flags=re.MULTILINE) == [*layers, "llama/qwen3_8b_lora_ssd"]
    assert "meta-llama" not in text
    assert "predicted:" in text
    assert "predicted:" not in command("recipes", "show", "llama/qwen3_8b_lora_ssd", "training.max_steps=7").stdout


# ---- validate


def test_validate_reports_all_errors_of_all_files(tiny):
    bad = tiny.with_name("bad.yaml")
    bad.write_text(TINY.replace("tier: ram", "teir: ram").replace("max_steps: 1", "max_steps: 1, do_eval: true"))
    worse = tiny.with_name("worse.yaml")
    worse.write_text(TINY.replace("max_steps: 1", "max_steps: 1, max_grd_norm: 0"))
    result = command("recipes", "validate", tiny, bad, worse, "gpt/dmeo")
    assert result.exit_code == 1
    assert f"{tiny}: good" in result.stdout
    for part in (
        "Did you mean 'tier'?",
        "training.do_eval",
        "Did you mean 'max_grad_norm'?",
        "Did you mean 'gpt/demo'",
    ):
        assert part in result.stderr


def test_validate_finds_what_only_training_arguments_refuse(tiny):
    tiny.write_text(TINY + "memory: {mode: galore, rank: 4, update_in_backward: true}\n")
    result = command("recipes", "validate", tiny)
    assert result.exit_code == 1
    assert "max_grad_norm" in result.stderr


# ---- predict


def test_a_prediction_is_written_once_and_found_again(tiny):
    block = "  machine:  # mine\n    gpu: 1GiB  # a small one\n    tflops: 1  # and slow"
    text = TINY.replace("  machine: {gpu: 1GiB, tflops: 1}", block)
    tiny.write_text(text)
    result = benchmark("predictions", tiny)
    assert (result.exit_code, "differs from the recipe's" in result.stdout) == (1, True), result.stderr
    assert tiny.read_text() == text
    result = benchmark("predictions", tiny, "--write")
    assert (result.exit_code, "(written)" in result.stdout) == (0, True), result.stderr
    written = tiny.read_text()
    found = read_meta(tiny).predicted
    assert (found.peak, found.budget) == ("0.00 GiB", "0.90 GiB")
    block = re.search(r"  predicted:\n(    \w+: .*\n)+", written)[0]
    assert written.replace(block, "", 1) == text
    assert benchmark("predictions", tiny).exit_code == 0
    tiny.write_text(written.replace("per_device_train_batch_size: 2", "per_device_train_batch_size: 400"))
    changed = benchmark("predictions", tiny)
    assert changed.exit_code == 1
    assert benchmark("predictions", tiny, "--write").exit_code == 0
    assert tiny.read_text().count("predicted:") == 1
    assert read_meta(tiny).predicted.peak != found.peak


def test_a_prediction_says_that_a_step_is_several_micro_batches(tiny):
    alone = benchmark("predictions", tiny).stdout
    time = re.search(r", step (.*?);", alone)[1]
    tiny.write_text(TINY.replace("max_steps: 1", "max_steps: 1, gradient_accumulation_steps: 3"))
    assert benchmark("predictions", tiny).stdout == alone.replace(f"step {time}", f"{time} a micro-batch, 3 a step")


@pytest.mark.parametrize(
    ("machine", "part"),
    [
        ("machine: {gpu: rtx9090}", "gpu='rtx9090' is unknown"),
        ("machine: {ssd: 5GB/s}", "meta.machine.ssd describe another machine: add meta.machine.gpu"),
        ("machine: {gpu: t4, batch: 4}", "unknown key 'batch'"),
        ("", "does not name the machine"),
    ],
)
def test_a_recipe_that_names_no_machine(tiny, machine, part):
    tiny.write_text(TINY.replace("machine: {gpu: 1GiB, tflops: 1}", machine))
    result = benchmark("predictions", tiny)
    assert result.exit_code == 1
    assert part in result.stderr


def test_a_recipe_that_does_not_fit_its_card_has_no_prediction(tiny):
    tiny.write_text(TINY.replace("vocab_size: 64", "").replace("sequence_length: 16", "sequence_length: 32"))
    (tiny.with_name("_layer.yaml")).write_text(LAYER.replace("vocab_size: 64", "vocab_size: 4000000"))
    result = benchmark("predictions", tiny)
    assert result.exit_code == 1
    assert "does not fit a card with 1.00 GiB" in result.stderr


def assert_true(name):
    """What is written is what is predicted now. Times and sizes are rounded, and a plan may change in its last digits."""
    from benchmarks.recipe_prediction import predict_recipe

    written, now = read_meta(name).predicted.given, predict_recipe(name).written.given
    assert written.keys() == now.keys()
    for key in written:
        (old, unit), (new, same) = written[key].split(), now[key].split()
        assert unit == same
        assert float(new) == pytest.approx(float(old), rel=0.02)


@pytest.mark.parametrize("name", QUICK)
def test_written_predictions_are_true(name):
    assert_true(name)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in CARDED if name not in QUICK])
def test_all_written_predictions_are_true(name):
    assert_true(name)
