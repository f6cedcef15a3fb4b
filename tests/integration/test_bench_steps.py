"""``hf-offload bench steps`` from the command line to the files they leave."""

import contextlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import Trainer
from typer.testing import CliRunner

import hf_offload
from benchmarks.__main__ import app as benchmarks
from hf_offload.allocator import best_allocator
from hf_offload.bench import cell, steps
from hf_offload.bench.cell import CRASHED, DONE, NOT_INSTALLED, OUT_OF_MEMORY, CellResult, CellSpec, execute, run_cell
from hf_offload.bench.strategies import find_strategy, strategy_names
from hf_offload.cli.main import app
from hf_offload.forecast.workload_sources import find_workload
from hf_offload.parents import bound
from hf_offload.reports.plots import plot_memory
from hf_offload.settings.models import known_model, measured_recipe, model_names
from hf_offload.settings.recipes import load_recipe
from hf_offload.settings.sizes import parse_bytes
from hf_offload.storage.host_memory import ram_bytes
from hf_offload.training.run import run_recipe
from tests.helpers.bench_recipes import RANDOM_RECIPE, TINY_MODEL, fake_report
from tests.helpers.tiny_models import tiny_model

REPOSITORY = Path(hf_offload.__file__).parent.parent
ON_CPU = not torch.accelerator.is_available()


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def said(result):
    return " ".join(result.stderr.split())


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.yaml"
    path.write_text(RANDOM_RECIPE)
    return path


# ------------------------------------------------------------------------------------------------------- a real matrix


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """One real run of three strategies. What it printed, and the folder it wrote."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("bench")
    path = folder / "tiny.yaml"
    path.write_text(RANDOM_RECIPE)
    result = run(
        "bench", "steps", path, "--strategies", "baseline,trl,ours:ssd", "--batch", "1", "--sequence", "16", "--steps", "4",
        "--json", "--output", folder / "o",
    )  # fmt: skip
    assert result.exit_code == 0, result.stdout + result.stderr
    return result, folder / "o"


def test_a_real_run_compares_and_says_what_was_measured(real):
    result, folder = real
    table = json.loads(result.stdout)  # JSON and nothing else
    assert table == json.loads((folder / "table.json").read_text())
    rows = {row["strategy"]: row for row in table["rows"]}
    assert list(rows) == ["baseline", "trl", "ours:ssd"]
    assert rows["baseline"]["peak_ratio"] == rows["baseline"]["step_ratio"] == 1
    assert rows["baseline"]["losses_identical"] is None, "nothing to compare the baseline with"
    assert rows["ours:ssd"]["losses_identical"] is rows["ours:ssd"]["parameters_identical"] is True
    assert rows["ours:ssd"]["written_bytes_per_run"] > 0 == rows["baseline"]["written_bytes_per_run"]
    assert table["problems"] == []
    named = {"shape": "tiny", "batch": 1, "sequence": 16, "model": TINY_MODEL}
    for row in rows.values():
        assert row.items() >= named.items()
    if ON_CPU and sys.platform == "linux":
        assert rows["baseline"]["allocator"] == rows["ours:ssd"]["allocator"] == best_allocator()
    spec = json.loads(next((folder / "cells/tiny_1x16").glob("1_baseline_*.spec.json")).read_text())
    assert "training.max_steps=4" in spec["overrides"]


@pytest.mark.skipif(not ON_CPU, reason="TRL needs an accelerator, and has one here")
def test_a_real_crash_of_a_peer_is_a_row_with_its_error(real):
    pytest.importorskip("trl")
    result, folder = real
    row = next(row for row in json.loads(result.stdout)["rows"] if row["strategy"] == "trl")
    assert (row["outcome"], row["rounds"], row["step_s"]) == (CRASHED, 0, None)
    assert row["error"].startswith("AttributeError: ")
    assert row["model"] == TINY_MODEL, "the model was built before it crashed"
    text = (folder / "table.md").read_text()
    assert "| crashed (AttributeError: " in text
    assert "trl: crashed (AttributeError: " in text
    assert "activation_offloading.get_act_offloading_ctx_manager" in text, "its source"


def test_tables_and_pictures_are_written(real):
    _, folder = real
    found = {path.name for path in folder.iterdir() if path.is_file()}
    assert found == {"table.md", "table.json", "memory.png"}
    assert (folder / "memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("ways", "rounds"), [(2, 1), (4, 1), (4, 2)])
def test_a_picture_says_what_its_lines_are_and_that_it_is_of_one_round(tmp_path, monkeypatch, ways, rounds):
    figure = pytest.importorskip("matplotlib.figure").Figure
    drawn, save = [], figure.savefig
    monkeypatch.setattr(
        figure, "savefig", lambda self, *given, **named: [drawn.append(self), save(self, *given, **named)]
    )
    plot_memory({f"way {number}": fake_report() for number in range(ways)}, tmp_path / "memory.png", rounds)
    (axes,) = drawn[0].axes
    assert axes.get_title(loc="left").endswith("steps of one of 2 rounds" if rounds > 1 else "steps")
    named = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert len(named) == ways + 1
    assert named[-1] == "peak residency, the MB named here"
    assert all("s per step, +10 MB" in text for text in named[:-1])


# -------------------------------------------------------------------------------------------------- cells, one by one


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


def test_the_context_is_entered_for_every_micro_batch(recipe, monkeypatch):
    from hf_offload.bench import strategies

    entered = []

    class Counting(torch.autograd.graph.save_on_cpu):
        def __enter__(self):
            entered.append(True)
            super().__enter__()

    monkeypatch.setattr(strategies.torch.autograd.graph, "save_on_cpu", Counting)
    spec = spec_for(recipe, "save_on_cpu", overrides=("training.gradient_accumulation_steps=2",))
    assert execute(spec).outcome == DONE
    assert len(entered) == 3 * 2


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


# ------------------------------------------------------------------------------------- the matrix, without its processes


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--strategies", "baseline,recompte"], "Did you mean 'recompute'?"),
        (["--strategies", "recompute"], "leaves out 'baseline'"),
        (["--strategies", "baseline,baseline"], "given twice"),
        (["--strategies", "baseline,ours:floppy"], "'ours:floppy' is unknown"),
        (["--strategies", "baseline,ours:ssd@much"], "read_ahead_bytes='much' is not a size"),
        (["--allocator", "malloc"], "allocator='malloc' is unknown"),
        (["--batch", "4,x"], "Invalid value for '--batch'"),
        (["--sequence", "0"], "Invalid value for '--sequence'"),
        (["training.max_step=1"], "no field 'max_step'"),
    ],
)
def test_bench_refuses_before_it_runs_anything(recipe, monkeypatch, arguments, part):
    monkeypatch.setattr(steps, "run_cell", lambda *_: pytest.fail("a cell ran"))
    result = run("bench", "steps", recipe, *arguments)
    assert result.exit_code == 2
    assert part in said(result)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux allocators")
def test_a_missing_tcmalloc_says_what_to_install(recipe, monkeypatch):
    monkeypatch.setattr("hf_offload.allocator.find_tcmalloc", lambda: None)
    result = run("bench", "steps", recipe, "--allocator", "tcmalloc")
    assert result.exit_code == 2
    assert "libtcmalloc-minimal4" in said(result)


def test_a_preset_is_a_shipped_recipe_of_that_name_and_all_mistakes_come_at_once(recipe):
    assert measured_recipe("gpt2-small") == ("bench/gpt2-small", ())
    assert measured_recipe("gpt/demo") == ("gpt/demo", ())
    Path("gpt2-small").write_text("a file of that name wins")
    assert measured_recipe("gpt2-small") == ("gpt2-small", ())
    result = run("bench", "steps", "gpt2-smal", "--allocator", "malloc")
    assert "2 errors" in said(result)
    assert "'bench/gpt2-small'" in said(result)


TINY_QWEN = [
    "model.config.num_hidden_layers=2", "model.config.hidden_size=32", "model.config.num_attention_heads=2",
    "model.config.num_key_value_heads=1", "model.config.head_dim=16", "model.config.intermediate_size=64",
    "model.config.vocab_size=128", "model.dtype=float32",
]  # fmt: skip


def test_a_model_is_measured_by_its_short_name(recipe):
    """The names that plans take, with random weights on random tokens; a file of that name is a recipe all the same."""
    plan = steps.plan_steps("qwen3-0.6b", TINY_QWEN, [find_strategy("baseline")], batch=2, sequence=16, steps=2)
    case = plan.case
    assert (case.label, case.file_name) == ("qwen3-0.6b 2 x 16", "qwen3-0.6b_2x16")
    loaded = find_strategy("baseline").load(case.recipe, plan.overrides_for(case))
    published = known_model("qwen3-0.6b").shape.config
    assert loaded.model.config["max_position_embeddings"] == published["max_position_embeddings"]
    report = run_recipe(loaded, save=False)
    assert (report.steps, report.settings["model"]["architecture"]) == (2, "qwen3")
    assert "t5-small 4 x 512, baseline" in run("bench", "steps", "t5-small", "--dry-run").stdout
    Path("qwen3-0.6b").write_text("no recipe")
    assert "qwen3-0.6b is not a recipe" in said(run("bench", "steps", "qwen3-0.6b", "--dry-run"))


@pytest.mark.parametrize("name", model_names())
def test_every_short_name_is_one_of_a_recipe_to_measure(name):
    recipe, overrides = measured_recipe(name)
    known, model = known_model(name), load_recipe(recipe, overrides).model
    assert (model.architecture, model.config, model.dtype) == (
        known.shape.architecture,
        known.shape.config,
        known.dtype,
    )
    assert model.task == find_workload(name).task


def fake_runner(monkeypatch, outcomes):
    """Stand in for the processes. ``outcomes`` maps parts of a cell's name (``2_ours:ssd``) to a report, a result or
    Ctrl-C; returns the names in the order of running.
    """
    order = []

    def fake(spec, environment):
        case, name = Path(spec.base).parts[-2:]
        number, allocator = name.split("_")[0], name.split("_")[-1]
        order.append(f"{case} {number}_{spec.strategy}_{allocator}")
        result = next((result for part, result in outcomes.items() if part in order[-1]), fake_report())
        if result is KeyboardInterrupt:
            raise KeyboardInterrupt
        return result if isinstance(result, CellResult) else CellResult(DONE, report=result)

    monkeypatch.setattr(steps, "run_cell", fake)
    return order


def bench(recipe, *arguments):
    ways = "baseline,recompute,ours:ssd"
    return run("bench", "steps", recipe, "--strategies", ways, "--output", "o", *arguments)


def table():
    return json.loads(Path("o/table.json").read_text())


def test_strategies_take_turns(recipe, monkeypatch):
    order = fake_runner(monkeypatch, {})
    assert bench(recipe, "--rounds", 2, "--batch", 1, "--sequence", 8).exit_code == 0
    turns = [f"{number}_{name}_auto" for number in (1, 2) for name in ("baseline", "recompute", "ours:ssd")]
    assert order == [f"tiny_1x8 {turn}" for turn in turns]
    assert [(row["batch"], row["sequence"]) for row in table()["rows"]] == [(1, 8)] * 3


def test_windows_of_different_sizes_are_strategies_of_their_own(recipe, monkeypatch):
    order = fake_runner(monkeypatch, {})
    assert bench(recipe, "--strategies", "baseline,ours:ssd@64MiB,ours:ssd@1GiB").exit_code == 0
    assert [name.split("_")[2] for name in order] == ["baseline", "ours:ssd@64MiB", "ours:ssd@1GiB"]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (
            {"losses_hex": [value.hex() for value in (2.0, 1.5, 1.0000000000000002, 0.5)]},
            "losses differ from baseline from step 3",
        ),
        ({"parameters_sha256": "other"}, "final parameters differ"),
        ({"losses_hex": [(2.0).hex()], "steps": 1}, "1 steps instead of 4"),
    ],
)
def test_a_mismatch_is_loud_in_every_output(recipe, monkeypatch, changes, part):
    fake_runner(monkeypatch, {"2_ours:ssd": fake_report(**changes)})
    result = bench(recipe, "--rounds", 2)
    assert result.exit_code == 1
    assert "DIFFER" in result.stdout
    assert part in said(result)
    assert part in Path("o/table.md").read_text()
    assert "DIFFER" in Path("o/table.md").read_text()
    assert table()["problems"]


def test_baseline_that_differs_from_itself_is_a_problem_on_a_cpu(recipe, monkeypatch):
    fake_runner(monkeypatch, {"2_baseline": fake_report(parameters_sha256="other")})
    result = bench(recipe, "--rounds", 2)
    assert result.exit_code == 1
    assert "baseline, round 2" in said(result)


ON_GPU = {"machine": {"cores": 2, "threads": 2, "device": "H200"}}


def test_on_an_accelerator_a_mismatch_is_ours_only_if_baseline_repeats_itself(recipe, monkeypatch):
    outcomes = {"ours:ssd": fake_report(parameters_sha256="other", **ON_GPU), "": fake_report(**ON_GPU)}
    order = fake_runner(monkeypatch, outcomes)
    assert bench(recipe).exit_code == 1
    assert order[-1] == "tiny_2x32 1_baseline_control"
    varying = {"baseline_control": fake_report(parameters_sha256="a third", **ON_GPU)} | outcomes
    fake_runner(monkeypatch, varying)
    result = bench(recipe)
    assert result.exit_code == 0
    assert [row["losses_identical"] for row in table()["rows"]] == [None] * 3
    assert "training.full_determinism=true" in Path("o/table.md").read_text()


def test_recompute_that_differs_is_reported_but_no_failure(recipe, monkeypatch):
    fake_runner(monkeypatch, {"recompute": fake_report(parameters_sha256="other")})
    assert bench(recipe).exit_code == 0
    assert "DIFFER" in Path("o/table.md").read_text()


CRASH = CellResult(CRASHED, "RuntimeError: no such luck")


def test_a_peer_that_crashes_is_a_row_and_no_failure_and_is_not_tried_again(recipe, monkeypatch):
    order = fake_runner(monkeypatch, {"recompute": CRASH})
    result = bench(recipe, "--rounds", 2)
    assert result.exit_code == 0
    assert [name.split("_")[2] for name in order] == ["baseline", "recompute", "ours:ssd", "baseline", "ours:ssd"]
    assert "crashed (RuntimeError: no such luck)" in Path("o/table.md").read_text()
    assert "no such luck" in " ".join(result.stdout.split())
    row = table()["rows"][1]
    assert (row["strategy"], row["outcome"], row["error"]) == ("recompute", CRASHED, "RuntimeError: no such luck")


@pytest.mark.parametrize("name", ["baseline", "ours:ssd"])
def test_our_own_crash_is_a_failure_and_the_others_go_on(recipe, monkeypatch, name):
    order = fake_runner(monkeypatch, {f"1_{name}": CRASH})
    result = bench(recipe)
    assert result.exit_code == 1
    assert len(order) == 3
    assert f"{name}, round 1: RuntimeError: no such luck" in said(result)


def test_without_baseline_there_are_no_ratios(recipe, monkeypatch):
    fake_runner(monkeypatch, {"baseline": CellResult(OUT_OF_MEMORY, "OutOfMemoryError: CUDA out of memory")})
    assert bench(recipe).exit_code == 0
    baseline, recompute, ours = table()["rows"]
    assert baseline["outcome"] == OUT_OF_MEMORY
    assert recompute["step_ratio"] is ours["peak_ratio"] is ours["losses_identical"] is None
    assert ours["step_s"] == 1.0
    text = Path("o/table.md").read_text()
    assert "| out of memory (OutOfMemoryError: CUDA out of memory) |" in text
    assert "| ours:ssd | +10 MB | - | 1.00 s | - |" in text


def test_ctrl_c_keeps_the_finished_cells(recipe, monkeypatch):
    fake_runner(monkeypatch, {"ours:ssd": KeyboardInterrupt})
    assert bench(recipe).exit_code == 130
    assert table()["interrupted"]
    assert [row["strategy"] for row in table()["rows"]] == ["baseline", "recompute"]
    assert "Interrupted" in Path("o/table.md").read_text()


def test_ctrl_c_before_anything_finished(recipe, monkeypatch):
    fake_runner(monkeypatch, {"baseline": KeyboardInterrupt})
    assert bench(recipe).exit_code == 130


def test_nothing_that_finished_is_an_error(recipe, monkeypatch):
    fake_runner(monkeypatch, {"": CRASH})
    result = bench(recipe)
    assert result.exit_code == 1
    assert "No run finished" in said(result)


def test_a_dry_run_lists_the_cells_and_runs_none(recipe, monkeypatch):
    order = fake_runner(monkeypatch, {})
    result = bench(recipe, "--batch", 2, "--rounds", 3, "--dry-run")
    assert result.exit_code == 0
    assert "tiny 2 x 32, ours:ssd\n" in result.stdout
    assert "9 runs at most, 3 rounds" in result.stdout
    assert order == []
    assert not Path("o").exists()


def test_the_page_names_every_strategy_and_help_loads_nothing():
    page = (REPOSITORY / "docs" / "benchmarks.md").read_text()
    assert all(f"`{name}`" in page for name in strategy_names())
    code = "import sys, hf_offload.cli.main; print({'torch', 'transformers', 'datasets'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.skipif(sys.platform != "linux", reason="a shell script that reads /proc")
@pytest.mark.parametrize("exists", [True, False])
def test_the_script_for_a_gpu_checks_itself(recipe, exists):
    """Every command in it is understood, and nothing is written: not the folder either that only a real run makes."""
    directory, there = recipe.parent / "not" / "yet", recipe.parent
    if exists:
        directory = there = recipe.parent / "tier"
        directory.mkdir()
    # Starting Python for each command takes longer than checking it: a stand-in notes them.
    python = recipe.parent / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$*" >> "$COMMANDS"\n[ "$*" != "$FAIL" ]\n')
    python.chmod(0o755)
    commands = recipe.parent / "commands"
    environment = os.environ | {"PYTHON": str(python), "COMMANDS": str(commands), "RESULTS": str(recipe.parent / "r")}
    environment |= {"OFFLOAD_DIR": str(directory), "RAM_BUDGET": "24GiB"}
    script_file = REPOSITORY / "examples" / "bench_gpu.sh"
    script = ["bash", script_file, "--dry-run"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    shares = re.findall(r"^\+ (\S+ \S+).*\(at most (\d+) s\)$", done.stdout, re.MULTILINE)
    assert [name for name, _ in shares][:4] == ["pytest tests/gpu", *["hf-offload doctor"] * 2, "hf-offload bench"]
    deadline = int(re.search(r"^DEADLINE_S=(\d+)$", script_file.read_text(), re.MULTILINE)[1])
    # What is stopped has half a minute to write what it has, and all of it nine minutes.
    assert sum(int(share) for _, share in shares) <= deadline <= 9 * 60 - 30
    assert f"offload.directory={directory}   (" in done.stdout
    noted = commands.read_text().splitlines()
    assert len(noted) == len(shares) - 1, "a command that is not checked"
    said = ""
    for command in noted:
        module, *arguments = command.removeprefix("-m ").split()
        result = CliRunner().invoke({"hf_offload": app, "benchmarks": benchmarks}[module], arguments)
        assert result.exit_code == 0, result.stderr
        if arguments[-1] == "--help":
            continue
        assert arguments[-3:] == ["offload.ram_budget=24GiB", f"offload.directory={there}", "--dry-run"]
        said += result.stdout
        # Nothing of ours pins memory without a limit.
        overrides = [argument for argument in arguments if "=" in argument]
        assert find_strategy("ours:ram").load("bench/llama-1b", overrides).offload.ram_budget == 24 << 30
    assert "--check" in noted[1]
    assert f"> {recipe.parent / 'r'}/check.json" in done.stdout
    assert "overhead" in noted[2]
    # 24 and 48 GB, as cards are sold.
    for part in ("llama-1b 1 x 32768, ours:ssd", "llama-1b 1 x 2048, trl", "22.35 GiB", "44.70 GiB"):
        assert part in said
    assert not (recipe.parent / "r").exists()
    assert not (recipe.parent / "not").exists()
    # One command that is refused fails the whole.
    for refused in (noted[1], noted[4]):
        done = subprocess.run(script, env=environment | {"FAIL": refused}, capture_output=True)
        assert done.returncode == 1
    # What is pinned is limited by what is there, where nobody says.
    del environment["RAM_BUDGET"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    limit = parse_bytes(re.search(r"offload.ram_budget=(\S+)", done.stdout)[1], "RAM_BUDGET")
    assert 0 < limit <= min(64 << 30, ram_bytes()[0] // 2)


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
