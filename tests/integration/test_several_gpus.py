"""What a recipe says of several GPUs, with its overrides, in two processes on a CPU."""

import os
import warnings

import pytest

from hf_offload.integrations.launch import find_config, read_config
from hf_offload.settings.recipe_files import recipe_names
from hf_offload.settings.recipes import load_recipe
from hf_offload.training.run import run_recipe
from tests.helpers.gloo_processes import assert_done, run_in_processes
from tests.helpers.shrunk_recipes import save_tokenizer, shrunk

TWO = 2


def lines():
    """Recipe -> overrides of its line for DDP: one recipe for each thing that DDP could get in the way of."""
    chosen = {}
    for name in recipe_names():
        recipe = load_recipe(name)
        launch = recipe.meta.launch
        mode, loss = recipe.offload.memory_mode, recipe.offload.tiled_loss
        if (
            launch is not None and launch.config_file == "ddp" and mode != "qlora"
        ):  # which takes long to compile, and is LoRA to DDP
            kind = (mode, loss, recipe.offload.sampling is not None, recipe.training.get("gradient_checkpointing"))
            chosen.setdefault(kind, (name, list(launch.overrides)))
    return dict(chosen.values())


LINES = lines()
# One recipe of each family, with what is most DDP's business: adapters, estimates, a tiled loss, an optimizer of ours.
QUICK = ["bert/base_lora_ssd", "gpt/gpt2_wtacrs_ram", "llama/1b_long_context", "t5/large_galore_ssd"]
OTHERS = [name for name in LINES if name not in QUICK]


def train_two_steps(rank, folder):
    from accelerate.state import AcceleratorState

    warnings.simplefilter("ignore")  # of libraries, told in every other test
    # What `hf-offload launch` makes of the file, as far as arguments look at it.
    os.environ["ACCELERATE_MIXED_PRECISION"] = read_config(find_config("ddp"))["mixed_precision"]
    for name in (folder / "names").read_text().split():
        overrides = LINES[name]
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        recipe = load_recipe(name, [*overrides, *shrunk(name, place, folder / "tokenizer")])
        report = run_recipe(recipe, save=False)
        assert (report.completed, report.steps) == (True, 2), name
        (place / f"precision-{rank}").write_text(AcceleratorState().mixed_precision)


@pytest.mark.parametrize("names", [QUICK, pytest.param(OTHERS, marks=pytest.mark.full)], ids=["quick", "others"])
def test_lines_train_in_the_precision_of_their_recipe(names, tmp_path):
    save_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "names").write_text(" ".join(names))
    run_in_processes([train_two_steps], TWO, tmp_path)
    assert_done(train_two_steps, TWO, tmp_path)
    for name in names:
        training = load_recipe(name).training
        precision = (
            "bf16" if training.get("bf16") or training.get("fp16") else "no"
        )  # instead of fp16, which is of GPUs alone
        for rank in range(TWO):
            assert (tmp_path / name / f"precision-{rank}").read_text() == precision, name


def test_lines_are_of_all_kinds():
    assert {name.partition("/")[0] for name in LINES} == {"bert", "gpt", "llama", "t5"}
    assert any("memory.update_in_backward=false" in LINES[name] for name in QUICK)
