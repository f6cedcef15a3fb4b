"""Every shipped recipe trains two steps: as it is, but with a tiny model of its architecture and rows made up here."""

import dataclasses
import logging
import math

import pytest

from hf_offload.errors import OffloadPlanError
from hf_offload.forecast.workload import count_workload
from hf_offload.forecast.workload_sources import find_workload
from hf_offload.plan.hardware import describe_hardware
from hf_offload.plan.plan import Placement
from hf_offload.plan.problem import make_problem
from hf_offload.plan.search import smallest, solve, uniform
from hf_offload.settings.recipe_files import recipe_names
from hf_offload.settings.recipes import load_recipe
from hf_offload.training.run import run_recipe
from tests.helpers.command_line import command
from tests.helpers.shrunk_recipes import VOCABULARY, one_of_each, save_tokenizer, shrunk
from tests.helpers.tables import rows

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # peft uses the older name

PASSES = "hf_offload.methods.mezo.blocks"
WORDS = 2 * math.log(VOCABULARY)
MOST = {"causal-lm": WORDS, "masked-lm": WORDS, "sequence-classification": 2 * math.log(2), "seq2seq-lm": 50}
"""Loss of a new model: twice that of one that knows nothing; but T5's new output head has large logits."""


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def about(recipe):
    """What a recipe is about: everything that says how memory is spent, and the task."""
    memory = {key: value for key, value in (recipe.offload.memory_mode_kwargs or {}).items() if key != "rank"}
    offload = dataclasses.replace(recipe.offload, directory=None, min_bytes=0, memory_mode_kwargs=memory or None)
    again = recipe.training.get("gradient_checkpointing")
    data = [name for name, value in dataclasses.asdict(recipe.data).items() if name.endswith("_column") and value]
    return recipe.model.task, offload, again, data, recipe.data.packing, recipe.evaluation.metrics


@pytest.mark.parametrize("name", rows(recipe_names(), quick=one_of_each(recipe_names())))
def test_a_shipped_recipe_trains_two_steps(name, tmp_path, tokenizer):
    changes = shrunk(name, tmp_path, tokenizer)
    recipe = load_recipe(name, changes)
    assert about(recipe) == about(load_recipe(name))
    report = run_recipe(recipe, save=False)
    assert report.completed
    assert report.steps == 2
    assert all(0 < loss < MOST[recipe.model.task] for loss in report.losses)
    if recipe.offload.tier in ("ssd", "ram"):
        assert report.offload["offloaded_bytes"] > 0
    if recipe.data.validation is not None:
        assert {f"eval_{metric}" for metric in recipe.evaluation.metrics_for(recipe.model.task)} <= set(report.metrics)


WITHOUT_BACKWARD = [name for name in recipe_names() if load_recipe(name).offload.memory_mode == "mezo"]


@pytest.mark.parametrize("name", rows(WITHOUT_BACKWARD, quick=["llama/8b_mezo", "opt/13b_mezo"]))
def test_a_recipe_without_backward_trains_weights_on_a_drive(name, tmp_path, tokenizer, caplog):
    """Six layers, of which two may be in memory: the losses are those of a run in memory."""
    caplog.set_level(logging.INFO, PASSES)
    changes = [*shrunk(name, tmp_path, tokenizer), "model.config.num_hidden_layers=6", "training.learning_rate=0.01"]
    changes.append("training.logging_steps=1")
    expected = run_recipe(load_recipe(name, changes), save=False)
    changes += ["offload.params=ssd", f"offload.directory={tmp_path}"]
    found = run_recipe(load_recipe(name, changes), save=False)
    assert len(found.losses) == 2
    assert found.losses == expected.losses
    said = [record.getMessage() for record in caplog.records if record.name == PASSES]
    assert said == ["MeZO computes both losses of a step with one visit to each block from the next step on."]


def test_all_shipped_recipes_are_good():
    result = command("recipes", "validate", *recipe_names())
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines() == [f"{name}: good" for name in recipe_names()]


# Of each task and family one, with what changes what is counted: adapters, 4 bits, projected state, sampling.
PLANNED = [
    "bench/t5-base", "bert/base_lora_ssd", "bert/base_wtacrs_ram", "gpt/gpt2_xl_galore_ssd", "gpt/pythia_6_9b_qlora_auto",
    "llama/8b_full_ssd",
]  # fmt: skip


@pytest.mark.parametrize("name", rows(recipe_names(), quick=PLANNED))
def test_a_shipped_recipe_is_planned(name, tmp_path, tokenizer):
    """For half of what a plan can save."""
    workload, hardware = find_workload(name, shrunk(name, tmp_path, tokenizer)), describe_hardware("t4", ssd="5GB/s")
    footprint = count_workload(workload, hardware)
    problem = make_problem(footprint, hardware, 1 << 40)
    most, least = uniform(problem, Placement.KEEP).timeline.peak_bytes, smallest(problem).timeline.peak_bytes
    if not footprint.saved:  # without backward
        assert least == most
        return
    assert least < most
    tight = make_problem(footprint, hardware, (most + least) // 2)
    assert tight.fits(solve(tight))


AUTO = [name for name in recipe_names() if load_recipe(name).offload.tier == "auto"]


@pytest.mark.parametrize(
    "name",
    rows(
        [name for name in AUTO if load_recipe(name).offload.memory_mode != "qlora"],
        quick=["gpt/small_full_auto", "t5/small_full_auto"],
    ),
)
def test_a_recipe_with_a_plan_follows_one(name, tmp_path, tokenizer, monkeypatch):
    # Measuring the machine takes longer than the run.
    machine = dataclasses.replace(describe_hardware("t4", ssd="1GB/s"), device="cpu")
    monkeypatch.setattr("hf_offload.planning.ranks.measure_hardware", lambda directories, device, **options: machine)
    # Whenever weights or state are moved, no plan stands until a step has been measured again: on a busy machine, often.
    changes = [*shrunk(name, tmp_path, tokenizer), "training.max_steps=20"]
    with pytest.raises(OffloadPlanError) as refused:
        run_recipe(load_recipe(name, [*changes, "offload.memory_budget=1KiB"]), save=False)
    budget = int(1.1 * refused.value.smallest_bytes)
    report = run_recipe(load_recipe(name, [*changes, f"offload.memory_budget={budget}"]), save=False)
    assert 0 < report.forecast["peak_bytes"] <= budget
    assert report.offload["offloaded_bytes"] > 0
