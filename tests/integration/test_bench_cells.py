"""Cells of ``hf-offload bench steps``, one by one: each strategy, and each way that a run ends."""

import contextlib
import inspect
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import Trainer

from hf_offload.bench import cell
from hf_offload.bench.cell import CRASHED, DONE, NOT_INSTALLED, OUT_OF_MEMORY, CellResult, CellSpec, execute, run_cell
from hf_offload.bench.strategies import find_strategy, strategy_names
from hf_offload.parents import bound
from hf_offload.settings.recipes import load_recipe
from hf_offload.training.run import run_recipe
from tests.helpers.bench_recipes import RANDOM_RECIPE
from tests.helpers.tiny_models import tiny_model

ON_CPU = not torch.accelerator.is_available()


def spec_for(recipe, strategy, **changes):
    values = {"recipe": str(recipe), "overrides": (), "strategy": strategy, "base": str(recipe.parent / "cell")}
    return CellSpec(**(values | changes))


def test_a_cell_trains_the_recipes_rows_and_neither_evaluates_nor_saves(tmp_path, monkeypatch):
    """Rows that are held back stay so, for they change the rows that are trained on and a tokenizer trained on these."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("".join(f"line {n} of a text, {n * n} in all\n" for n in range(400)))
    path = tmp_path / "tiny.yaml"
    path.write_text(RANDOM_RECIPE)
    changes = (
        "data={files: text.txt, sequence_length: 32, validation: 0.3, tokenizer: {train_bpe: 300}}",
        "model.config={n_layer: 1, n_embd: 64, n_head: 2, n_positions: 64, vocab_size: 300, attn_pdrop: 0.0, "
        "resid_pdrop: 0.0, embd_pdrop: 0.0}",  # without dropout, which draws other numbers after an evaluation
        "training.eval_strategy=steps", "training.eval_steps=1", "training.eval_on_start=true",
        "training.save_strategy=steps", "training.save_steps=1", "training.load_best_model_at_end=true",
        "training.greater_is_better=false", "training.metric_for_best_model=loss",
        "evaluation={metrics: [token_accuracy], early_stopping_patience: 3}",
    )  # fmt: skip
    trained = run_recipe(load_recipe(path, [*changes, "training.output_dir=trained"]))
    assert trained.metrics is not None
    assert list((tmp_path / "trained").glob("checkpoint-*"))

    def evaluated(*_arguments, **_settings):
        raise AssertionError("a benchmark evaluated")

    monkeypatch.setattr(Trainer, "evaluate", evaluated)
    result = execute(spec_for(path, "baseline", overrides=changes))
    assert result.outcome == DONE, result.error
    assert result.report.losses_hex == trained.losses_hex
    assert result.report.metrics is None
    assert not [found for found in (tmp_path / "out").iterdir() if found.name != "data"]


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    """The result that all strategies are compared with."""
    folder = tmp_path_factory.mktemp("baseline")
    (folder / "tiny.yaml").write_text(RANDOM_RECIPE)
    with contextlib.chdir(folder):
        return execute(spec_for(folder / "tiny.yaml", "baseline"))


# On a CPU: what asks for pinned memory or a stream fails, and save_on_cpu has nothing to do.
CRASHES_ON_CPU = {"recompute+offload": "RuntimeError: ", "trl": "AttributeError: ", "trl+recompute": "AttributeError: "}


@pytest.mark.parametrize("name", [*strategy_names()[1:], "ours:ssd@64KiB"])
def test_every_strategy_runs_with_the_bits_of_baseline_or_says_why_not(recipe, baseline, name):
    if name.startswith("trl"):
        pytest.importorskip("trl")
    result = execute(spec_for(recipe, name))
    if ON_CPU and name in CRASHES_ON_CPU:
        assert (result.outcome, result.report) == (CRASHED, None)
        assert result.error.startswith(CRASHES_ON_CPU[name])
        assert "\n" not in result.error
        return
    assert result.outcome == baseline.outcome == DONE, result.error
    # The same sums in another order, or estimates of them, which draw random numbers that dropout then does not get.
    near = {"ours:ssd+tiled": 1e-5, "ours:sampled": 0.05, "ours:ssd+sampled": 0.05}
    if name in near:
        losses = [[float.fromhex(loss) for loss in one.report.losses_hex] for one in (result, baseline)]
        assert losses[0] == pytest.approx(losses[1], rel=near[name])
        assert losses[0] != losses[1]
    else:
        assert result.report.losses_hex == baseline.report.losses_hex
        assert result.report.parameters_sha256 == baseline.report.parameters_sha256
    assert (result.report.offload is not None) == name.startswith("ours")
    if name.startswith("ours"):
        offloads = name not in ("ours:elementwise", "ours:sampled")
        moved = result.report.offload
        # On a busy machine backward may catch all of so small a model on its way out: nothing is loaded then.
        assert (moved["offloaded_bytes"] > 0) == (moved["loaded_bytes"] + moved["forwarded_bytes"] > 0) == offloads
    # Results survive the way through a file.
    result.write(recipe.parent / "r.json")
    assert CellResult.read(recipe.parent / "r.json") == result


@pytest.mark.parametrize("name", strategy_names())
def test_every_strategy_takes_a_recipe_with_a_memory_budget(name):
    loaded = find_strategy(name).load("gpt/small_full_auto", ())
    assert (loaded.offload.memory_budget is not None) == (name == "ours:auto")


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), OUT_OF_MEMORY),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"), OUT_OF_MEMORY),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), OUT_OF_MEMORY),
        (RuntimeError("something else"), CRASHED),
    ],
)
def test_running_out_of_memory_is_an_outcome_of_its_own(recipe, monkeypatch, error, outcome):
    def fail(*_, **__):
        raise ValueError("wrapped") from error

    monkeypatch.setattr(cell, "run_recipe", fail)
    result = execute(spec_for(recipe, "baseline"))
    assert (result.outcome, result.error) == (outcome, "ValueError: wrapped")


@pytest.mark.parametrize(
    ("ending", "outcome", "part"),
    [("kill -9 $$", OUT_OF_MEMORY, "SIGKILL"), ("kill -11 $$", CRASHED, "code -11"), ("exit 3", CRASHED, "code 3")],
)
@pytest.mark.skipif(os.name != "posix", reason="ends a shell with signals")
def test_a_child_that_leaves_no_result_has_an_outcome_all_the_same(recipe, monkeypatch, ending, outcome, part):
    child = recipe.parent / "python"
    child.write_text(f"#!/bin/sh\n{ending}\n")
    child.chmod(0o755)
    monkeypatch.setattr(cell.sys, "executable", str(child))
    spec = spec_for(recipe, "baseline")
    CellResult(DONE).write(spec.result_path)  # of an earlier run
    result = run_cell(spec, os.environ)
    assert result.outcome == outcome
    assert part in result.error


def test_a_peer_that_is_not_installed_is_said_to_be(recipe, monkeypatch):
    monkeypatch.setattr("hf_offload.bench.strategies.importlib.util.find_spec", lambda name: None)
    assert run_cell(spec_for(recipe, "trl"), {}) == CellResult(NOT_INSTALLED, "trl is not installed")


def test_ctrl_c_reaches_a_running_cell(recipe):
    """A signal to the parent alone, as a supervisor sends it, ends the child too and keeps what it can."""
    command = [sys.executable, "-m", "hf_offload", "bench", "steps", str(recipe), "--steps", "100000"]
    command.append("training.logging_steps=5")
    # In a session of its own, which a Ctrl-C of this terminal does not reach; it ends with this process all the same.
    process = subprocess.Popen(bound(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    base = Path("runs/bench/cells/tiny_2x32/1_baseline_auto")
    log = base.with_suffix(".log")
    deadline = time.monotonic() + 120
    while (
        process.poll() is None and time.monotonic() < deadline and not (log.is_file() and "'loss': " in log.read_text())
    ):
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output.decode()
    result = CellResult.read(base.with_suffix(".json"))
    assert not result.report.completed
    assert 0 < result.report.steps < 100000


def test_peers_run_with_the_defaults_that_are_said():
    offloading = pytest.importorskip("trl.models.activation_offloading")
    defaults = inspect.signature(offloading.get_act_offloading_ctx_manager).parameters
    for name in ("use_pin_memory", "use_streams", "min_offload_size", "max_fwd_stash_size"):
        assert f"{name}={defaults[name].default}" in find_strategy("trl").source
    model = tiny_model("llama")
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    (said,) = {str(layer._gradient_checkpointing_func.keywords) for layer in model.model.layers}
    assert said == "{'use_reentrant': False}"
    assert "use_reentrant=False, every layer" in find_strategy("recompute").source
