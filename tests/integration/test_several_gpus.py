"""The line for several GPUs that a recipe opens with, with its overrides, in two processes on a CPU."""

import os
import re
import shlex
import warnings

import pytest

from hf_offload.integrations.launch import find_config, read_config
from hf_offload.settings.recipe_files import find_recipe, recipe_names
from hf_offload.settings.recipes import load_recipe
from hf_offload.training.run import run_recipe
from tests.helpers.gloo_processes import assert_done, run_in_processes
from tests.helpers.shrunk_recipes import save_tokenizer, shrunk

TWO = 2
LINE = re.compile(r"^# hf-offload launch --config_file ddp -m hf_offload train (.*)$", re.MULTILINE)


def lines():
    """Recipe -> overrides of its line for DDP: one recipe for each thing that DDP could get in the way of."""
    chosen = {}
    for name in recipe_names():
        line = LINE.search(find_recipe(name).read_text())
        recipe = load_recipe(name)
        mode, loss = recipe.memory.get("mode"), recipe.offload.tiled_loss
        if line and mode != "qlora":  # which takes long to compile, and is LoRA to DDP
            kind = (mode, loss, recipe.offload.sampling is not None, recipe.training.get("gradient_checkpointing"))
            chosen.setdefault(kind, (name, shlex.split(line[1])[1:]))
    return dict(chosen.values())


LINES = lines()


def train_two_steps(rank, folder):
    from accelerate.state import AcceleratorState

    warnings.simplefilter("ignore")  # of libraries, told in every other test
    # What `hf-offload launch` makes of the file, as far as arguments look at it.
    os.environ["ACCELERATE_MIXED_PRECISION"] = read_config(find_config("ddp"))["mixed_precision"]
    for name, overrides in LINES.items():
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        recipe = load_recipe(name, [*overrides, *shrunk(name, place, folder / "tokenizer")])
        report = run_recipe(recipe, save=False)
        assert (report.completed, report.steps) == (True, 2), name
        (place / f"precision-{rank}").write_text(AcceleratorState().mixed_precision)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("several")
    save_tokenizer(folder / "tokenizer")
    run_in_processes([train_two_steps], TWO, folder)
    assert_done(train_two_steps, TWO, folder)
    return folder


def test_lines_of_all_kinds_train(folder):
    assert {name.partition("/")[0] for name in LINES} == {"bert", "gpt", "llama", "t5"}
    assert any("memory.update_in_backward=false" in overrides for overrides in LINES.values())
    for name in LINES:
        assert len(list((folder / name).glob("precision-*"))) == TWO


@pytest.mark.parametrize("name", LINES)
def test_the_precision_is_that_of_the_recipe(name, folder):
    training = load_recipe(name).training
    expected = (
        "bf16" if training.get("bf16") or training.get("fp16") else "no"
    )  # instead of fp16, which is of GPUs alone
    for rank in range(TWO):
        assert (folder / name / f"precision-{rank}").read_text() == expected
