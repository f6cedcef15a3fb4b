"""``hf-offload bench steps`` from the command line to the files they leave."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hf_offload
from hf_offload.allocator import best_allocator
from hf_offload.bench import steps
from hf_offload.bench.cell import CRASHED, DONE, OUT_OF_MEMORY, CellResult
from hf_offload.bench.strategies import find_strategy, strategy_names
from hf_offload.settings.models import known_model, measured_recipe
from hf_offload.settings.sizes import parse_bytes
from hf_offload.storage.host_memory import ram_bytes
from hf_offload.training.run import run_recipe
from tests.helpers.bench_recipes import RANDOM_RECIPE, TINY_MODEL, fake_report
from tests.helpers.command_line import benchmark, command, said

REPOSITORY = Path(hf_offload.__file__).parent.parent
ON_CPU = not torch.accelerator.is_available()


# ------------------------------------------------------------------------------------------------------- a real matrix


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """One real run of three strategies. What it printed, and the folder it wrote."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("bench")
    path = folder / "tiny.yaml"
    path.write_text(RANDOM_RECIPE)
    result = command(
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
    result = command("bench", "steps", recipe, *arguments)
    assert result.exit_code == 2
    assert part in said(result)


def test_a_preset_is_a_shipped_recipe_of_that_name_and_all_mistakes_come_at_once(recipe):
    assert measured_recipe("gpt2-small") == ("bench/gpt2-small", ())
    assert measured_recipe("gpt/demo") == ("gpt/demo", ())
    Path("gpt2-small").write_text("a file of that name wins")
    assert measured_recipe("gpt2-small") == ("gpt2-small", ())
    result = command("bench", "steps", "gpt2-smal", "--allocator", "malloc")
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
    assert "t5-small 4 x 512, baseline" in command("bench", "steps", "t5-small", "--dry-run").stdout
    Path("qwen3-0.6b").write_text("no recipe")
    assert "qwen3-0.6b is not a recipe" in said(command("bench", "steps", "qwen3-0.6b", "--dry-run"))


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
    return command("bench", "steps", recipe, "--strategies", ways, "--output", "o", *arguments)


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


def test_the_page_names_every_strategy():
    page = (REPOSITORY / "docs" / "benchmarks.md").read_text()
    assert all(f"`{name}`" in page for name in strategy_names())


@pytest.mark.skipif(sys.platform != "linux", reason="a shell script that reads /proc")
def test_the_script_for_a_gpu_checks_itself(recipe):
    """Every command in it is understood, and nothing is written: not the folder either that only a real run makes."""
    directory, there = recipe.parent / "not" / "yet", recipe.parent
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
    for line in noted:
        module, *arguments = line.removeprefix("-m ").split()
        result = {"hf_offload": command, "benchmarks": benchmark}[module](*arguments)
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
