"""``hf-offload train`` and ``hf-offload bench steps`` from the command line to the files they leave."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hf_offload.allocator import current_allocator, environment_with, find_tcmalloc
from hf_offload.cli.main import app
from hf_offload.reports import compare
from hf_offload.reports.compare import Cell, Comparison, footnotes, markdown, parse_strategies, write_results
from hf_offload.training.report import TrainingReport


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def trained(recipe, *overrides):
    path = Path("report.json")
    path.unlink(missing_ok=True)
    result = run("train", recipe, *overrides, "--report", path)
    assert result.exit_code == 0, result.output + result.stderr
    return TrainingReport.read(path)


RECOMPUTE = parse_strategies("keep,recompute")[1].overrides[-1]
OFFLOAD = ("offload.tier=ssd", "offload.min_offload_bytes=1KiB", "offload.directory=tier")


def test_a_recipe_trains_from_end_to_end(tiny_recipe):
    result = run("train", tiny_recipe)
    assert result.exit_code == 0, result.output + result.stderr
    assert "tiny: done" in result.output
    assert "4.0" in result.output or "loss" in result.output
    report = trained(tiny_recipe)
    assert report.completed
    assert report.steps == len(report.losses) == len(report.step_times_s) == 4
    assert report.losses[-1] < report.losses[0]
    assert [float.fromhex(loss) for loss in report.losses_hex] == report.losses
    assert report.offload is None
    assert report.memory["peak_bytes"] >= report.memory["baseline_bytes"] > 0
    assert len(report.memory["timeline_s"]) == len(report.memory["timeline_bytes"])
    assert report.machine["threads"] >= 1
    assert set(report.versions) >= {"python", "torch", "transformers", "accelerate", "datasets"}


def test_a_run_can_be_repeated_and_another_seed_differs(tiny_recipe):
    first, second = trained(tiny_recipe), trained(tiny_recipe)
    assert (first.losses_hex, first.parameters_sha256) == (second.losses_hex, second.parameters_sha256)
    other = trained(tiny_recipe, "training.seed=8")
    assert other.losses_hex != first.losses_hex
    assert other.parameters_sha256 != first.parameters_sha256


@pytest.mark.parametrize(
    "overrides",
    [(), ("training.gradient_accumulation_steps=2",), ("data.streaming=true",), (RECOMPUTE,)],
    ids=["plain", "accumulation", "streaming", "recompute"],
)
def test_offloading_changes_no_bit_of_losses_and_weights(tiny_recipe, overrides):
    keep = trained(tiny_recipe, *overrides)
    offloaded = trained(tiny_recipe, *overrides, *OFFLOAD)
    assert offloaded.losses_hex == keep.losses_hex
    assert offloaded.parameters_sha256 == keep.parameters_sha256
    assert offloaded.offload["written_bytes"] > 0
    assert offloaded.offload["read_bytes"] > 0


def test_every_setting_of_a_recipe_reaches_the_session(tiny_recipe):
    from hf_offload.settings.recipes import load_recipe
    from hf_offload.training.run import build_arguments

    recipe = load_recipe(
        tiny_recipe,
        [
            "offload={tier: ssd, directory: [a, b], ram_budget: 1MiB, disk_budget: 1GiB, min_offload_bytes: 3KiB, "
            "keep_last_count: 1, read_ahead_bytes: 5MiB, verify: checksum, max_disk_write_bytes: 7GiB}",
            "training.max_steps=3",
        ],
    )
    arguments = build_arguments(recipe)
    assert arguments.offload_config() == recipe.offload
    assert arguments.max_steps == 3


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["nothing/here"], "There is no recipe 'nothing/here'"),
        (["gpt/dmeo"], "Did you mean 'gpt/demo'?"),
        (["tiny.yaml", "training.max_step=3", "offload.teir=ssd"], "2 mistakes"),
        (["tiny.yaml", "nonsense"], "'nonsense' is no override"),
        (["tiny.yaml", "data.sequence_length=65"], "longer than the 64 positions"),
        (["tiny.yaml", "model.config.vocab_size=100"], "embeddings for 100"),
        (["tiny.yaml", "data.files=none.txt"], "there is no file 'none.txt'"),
        (["tiny.yaml", "model.attention=telepathy"], "telepathy"),
        (["tiny.yaml", "training.optim=adamm"], "adamm"),
        (["tiny.yaml", "training.fp16=true", "training.bf16=true"], "section training"),
    ],
)
def test_bad_input_gives_one_message_and_code_2(tiny_recipe, arguments, part):
    result = run("train", *arguments)
    assert result.exit_code == 2
    assert part in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_a_defect_keeps_its_traceback(tiny_recipe, monkeypatch):
    monkeypatch.setattr("hf_offload.training.run.run_recipe", lambda *_, **__: 1 / 0)
    assert isinstance(run("train", tiny_recipe).exception, ZeroDivisionError)


def test_ctrl_c_gives_a_summary_of_what_was_done(tiny_recipe, monkeypatch):
    from transformers import Trainer

    steps = 0
    original = Trainer.training_step

    def interrupted(self, *args, **kwargs):
        nonlocal steps
        steps += 1
        if steps == 3:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "training_step", interrupted)
    result = run("train", tiny_recipe, *OFFLOAD, "--report", "report.json")
    assert result.exit_code == 130
    assert "tiny: stopped" in result.output
    report = TrainingReport.read(Path("report.json"))
    assert not report.completed
    assert report.steps == 2
    assert report.memory["peak_bytes"] > 0
    assert report.offload["written_bytes"] > 0


# --------------------------------------------------------------------------------------------------------------- bench


@pytest.mark.skipif(sys.platform != "linux", reason="chooses a Linux allocator")
def test_bench_compares_three_ways(tiny_recipe):
    pytest.importorskip("matplotlib")
    result = run(
        "bench", "steps", tiny_recipe, "offload.min_offload_bytes=1KiB", "training.max_steps=3",
        "--strategies", "keep,recompute,ours:ssd", "--output", "results",
    )  # fmt: skip
    assert result.exit_code == 0, result.output + result.stderr
    table = json.loads(Path("results/table.json").read_text())
    rows = {row["strategy"]: row for row in table["rows"]}
    assert list(rows) == ["keep", "recompute", "ours:ssd"]
    assert rows["keep"]["peak_ratio"] == rows["keep"]["step_ratio"] == 1
    assert rows["keep"]["losses_identical"] is None, "nothing to compare keep with"
    assert rows["ours:ssd"]["losses_identical"] is rows["ours:ssd"]["parameters_identical"] is True
    assert rows["ours:ssd"]["written_bytes_per_run"] > 0 == rows["keep"]["written_bytes_per_run"]
    assert table["problems"] == []
    text = Path("results/table.md").read_text()
    assert "| ours:ssd |" in text
    assert "identical" in text
    assert ("tcmalloc" if find_tcmalloc() else "glibc-tuned") in text
    assert Path("results/memory.png").read_bytes().startswith(b"\x89PNG")
    reports = sorted(path.name for path in Path("results/cells").glob("*.json"))
    assert reports == ["1_keep.json", "1_ours_ssd.json", "1_recompute.json"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--strategies", "keep,recompte"], "Did you mean 'recompute'?"),
        (["--strategies", "recompute"], "leaves out 'keep'"),
        (["--strategies", "keep,keep"], "given twice"),
        (["--strategies", "keep,ours:floppy"], "'ours:floppy' is unknown"),
        (["--allocator", "malloc"], "allocator='malloc' is unknown"),
        (["training.max_step=1"], "no field 'max_step'"),
    ],
)
def test_bench_refuses_before_it_runs_anything(tiny_recipe, monkeypatch, arguments, part):
    monkeypatch.setattr(compare, "_run_cell", lambda *_: pytest.fail("a cell ran"))
    result = run("bench", "steps", tiny_recipe, *arguments)
    assert result.exit_code == 2
    assert part in " ".join(result.stderr.split())


def fake_report(**changes):
    values = {
        "recipe": "r",
        "settings": {},
        "completed": True,
        "steps": 4,
        "losses": [2.0, 1.5, 1.0, 0.5],
        "losses_hex": [value.hex() for value in (2.0, 1.5, 1.0, 0.5)],
        "parameters_sha256": "same",
        "parameter_count": 10,
        "step_times_s": [9.0, 9.0, 1.0, 1.0],
        "memory": {
            "device": "cpu",
            "baseline_bytes": 1_000_000,
            "peak_bytes": 11_000_000,
            "peak_source": "test",
            "step_start_s": [0.0, 9.0, 18.0, 19.0],
            "step_end_s": [9.0, 18.0, 19.0, 20.0],
            "timeline_s": [18.0, 18.5, 19.0, 19.5],
            "timeline_bytes": [1_000_000, 11_000_000, 1_000_000, 11_000_000],
        },
        "offload": None,
        "allocator": "glibc-tuned",
        "machine": {"cores": 2, "threads": 2, "device": "cpu"},
        "versions": {"torch": "1", "transformers": "2"},
    }
    return TrainingReport(**(values | changes))


def fake_runner(monkeypatch, reports):
    """Stand in for the processes: ``reports`` maps a strategy and a round to a report, an error text or Ctrl-C."""
    order = []

    def run_cell(cell, recipe, overrides, base, environment):
        order.append((cell.round, cell.strategy.name))
        result = reports.get((cell.strategy.name, cell.round), fake_report())
        if result is KeyboardInterrupt:
            raise KeyboardInterrupt
        if isinstance(result, str):
            cell.failure = result
        else:
            cell.report = result

    monkeypatch.setattr(compare, "_run_cell", run_cell)
    return order


def bench(recipe, rounds=1):
    return run("bench", "steps", recipe, "--strategies", "keep,recompute,ours:ssd", "--rounds", rounds, "--output", "o")


def test_strategies_take_turns(tiny_recipe, monkeypatch):
    order = fake_runner(monkeypatch, {})
    assert bench(tiny_recipe, rounds=2).exit_code == 0
    assert order == [(n, name) for n in (1, 2) for name in ("keep", "recompute", "ours:ssd")]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (
            {"losses_hex": [value.hex() for value in (2.0, 1.5, 1.0000000000000002, 0.5)]},
            "losses differ from keep from step 3",
        ),
        ({"parameters_sha256": "other"}, "final parameters differ"),
        ({"losses_hex": [(2.0).hex()], "steps": 1}, "1 steps instead of 4"),
    ],
)
def test_a_mismatch_is_loud_in_every_output(tiny_recipe, monkeypatch, changes, part):
    fake_runner(monkeypatch, {("ours:ssd", 2): fake_report(**changes)})
    result = bench(tiny_recipe, rounds=2)
    assert result.exit_code == 1
    assert "DIFFER" in result.output
    assert part in " ".join(result.stderr.split())
    assert part in Path("o/table.md").read_text()
    assert "DIFFER" in Path("o/table.md").read_text()
    assert json.loads(Path("o/table.json").read_text())["problems"]


def test_keep_that_differs_from_itself_is_a_problem(tiny_recipe, monkeypatch):
    fake_runner(monkeypatch, {("keep", 2): fake_report(parameters_sha256="other")})
    result = bench(tiny_recipe, rounds=2)
    assert result.exit_code == 1
    assert "keep, round 2" in " ".join(result.stderr.split())


def test_recompute_that_differs_is_reported_but_no_failure(tiny_recipe, monkeypatch):
    fake_runner(monkeypatch, {("recompute", 1): fake_report(parameters_sha256="other")})
    result = bench(tiny_recipe)
    assert result.exit_code == 0
    assert "DIFFER" in Path("o/table.md").read_text()


def test_a_cell_that_fails_does_not_stop_the_others(tiny_recipe, monkeypatch):
    order = fake_runner(monkeypatch, {("recompute", 1): "ended with code 1"})
    result = bench(tiny_recipe)
    assert result.exit_code == 1
    assert len(order) == 3
    assert "recompute, round 1: ended with code 1" in " ".join(result.stderr.split())
    assert "failed" in Path("o/table.md").read_text()


def test_ctrl_c_keeps_the_finished_cells(tiny_recipe, monkeypatch):
    fake_runner(monkeypatch, {("ours:ssd", 1): KeyboardInterrupt})
    result = bench(tiny_recipe)
    assert result.exit_code == 130
    table = json.loads(Path("o/table.json").read_text())
    assert table["interrupted"]
    assert [row["strategy"] for row in table["rows"]] == ["keep", "recompute"]


def test_ctrl_c_before_anything_finished(tiny_recipe, monkeypatch):
    fake_runner(monkeypatch, {("keep", 1): KeyboardInterrupt})
    assert bench(tiny_recipe).exit_code == 130


def test_ratios_are_medians_of_each_rounds_ratio(tmp_path):
    keep, ours = parse_strategies("keep,ours:nvme")
    assert ours.name == "ours:ssd"
    # The machine gets slower from round to round; ours always takes twice as long as keep.
    cells = []
    for number, speed in enumerate((1.0, 2.0, 5.0), start=1):
        cells.append(Cell(keep, number, fake_report(step_times_s=[0, 0, speed, speed])))
        cells.append(
            Cell(ours, number, fake_report(step_times_s=[0, 0, 2 * speed, 2 * speed], offload={"stall_s": 1.0}))
        )
    comparison = Comparison("r", [], "glibc", cells)
    _, row = comparison.rows()
    assert row.step_ratio == 2
    assert row.step_s == 4.0
    assert row.peak_bytes == 10_000_000
    assert row.stall_s_per_run == 1.0
    assert "glibc-tuned" in " ".join(footnotes(comparison))
    assert "| ours:ssd | +10 MB | 1.000 | 4.00 s | 2.000 | - | 0.50000 | identical |" in markdown(comparison)
    assert [path.name for path in write_results(comparison, tmp_path)] == ["table.md", "table.json", "memory.png"]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux allocators")
@pytest.mark.parametrize("name", ["glibc-tuned", "glibc", "tcmalloc"])
def test_a_child_runs_with_the_allocator_that_was_asked_for(name, monkeypatch):
    if name == "tcmalloc" and find_tcmalloc() is None:
        pytest.skip("tcmalloc is not installed")
    # What the parent runs with must not leak into the child.
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "7")
    program = "from hf_offload.allocator import current_allocator; import sys; sys.stdout.write(current_allocator())"
    child = subprocess.run(
        [sys.executable, "-c", program], env=environment_with(name), capture_output=True, text=True, check=True
    )
    assert child.stdout == name
    assert current_allocator() in ("glibc", "tcmalloc", "jemalloc", "mimalloc")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux allocators")
def test_a_missing_tcmalloc_says_what_to_install(tiny_recipe, monkeypatch):
    monkeypatch.setattr("hf_offload.allocator.find_tcmalloc", lambda: None)
    result = run("bench", "steps", tiny_recipe, "--allocator", "tcmalloc")
    assert result.exit_code == 2
    assert "libtcmalloc-minimal4" in " ".join(result.stderr.split())


@pytest.mark.skipif(sys.platform != "linux", reason="Linux allocators")
@pytest.mark.skipif(
    torch.accelerator.is_available(), reason="a GPU does the work, so the CPU's allocator does not matter"
)
def test_train_starts_itself_again_with_the_best_allocator_once(tiny_recipe):
    """`auto` on a machine with tcmalloc is tcmalloc, and a choice that was made is left alone."""
    import os

    command = [sys.executable, "-m", "hf_offload", "train", str(tiny_recipe), "--report", "report.json"]
    plain = {key: value for key, value in os.environ.items() if key not in ("HF_OFFLOAD_ALLOCATOR", "LD_PRELOAD")}
    for environment, expected in (
        (plain, "tcmalloc" if find_tcmalloc() else "glibc-tuned"),
        (environment_with("glibc"), "glibc"),
    ):
        subprocess.run(command, env=environment, check=True, capture_output=True)
        assert TrainingReport.read(Path("report.json")).allocator == expected


def test_ctrl_c_reaches_a_running_cell(tiny_recipe):
    """A signal to the parent alone, as a supervisor sends it, ends the child too and keeps what it can."""
    command = [sys.executable, "-m", "hf_offload", "bench", "steps", str(tiny_recipe), "training.max_steps=100000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    log = Path("runs/bench/cells/1_keep.log")
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline and not (log.is_file() and "loss" in log.read_text()):
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output.decode()
    report = TrainingReport.read(Path("runs/bench/cells/1_keep.json"))
    assert not report.completed
    assert 0 < report.steps < 100000
