"""``python -m benchmarks budgets``: real runs, in a process whose live bytes are counted; and the lines made of runs."""

import contextlib
import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks.budgets import command
from benchmarks.budgets.meter import metered
from benchmarks.budgets.runs import AUTO, IN_MEMORY, SIMPLE, Family, Job
from benchmarks.budgets.table import fastest, row_of, texts
from tests.helpers.command_line import benchmark, said

BUDGET = 500


def needs_the_meter(test):
    compiles = pytest.mark.skipif(
        shutil.which("cc") is None, reason="the meter is compiled, and there is no C compiler"
    )
    preloads = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the meter is preloaded as on Linux")
    return compiles(preloads(test))


@pytest.mark.full
@needs_the_meter
def test_a_budget_is_kept_next_to_all_simple_ways_and_no_run_is_repeated(tmp_path):
    out = tmp_path / "out"
    file = out / "budgets.json"
    asked = (
        "--families", "gpt", "--shares", "80,1", "--layers", "4", "--width", "128", "--tokens", "64", "--rows", "8",
        "--directory", str(tmp_path), "--output", str(out), "--json",
    )  # fmt: skip
    result = benchmark("budgets", *asked)
    assert result.exit_code == 0, result.output
    kept, refused = json.loads(result.stdout)
    assert kept["same_bits"]
    assert 0 < kept["peak_bytes"] <= kept["budget_bytes"]
    assert refused["least_bytes"] > refused["budget_bytes"]
    before = json.loads(file.read_text())["runs"]
    named = [one["way"] for one in before]
    assert named[: len(SIMPLE)] == list(SIMPLE)
    first, *beside, last = named[len(SIMPLE) :]
    assert first == last == AUTO  # nothing fits beside the second
    assert beside == fastest(before, kept["budget_bytes"])
    assert kept["step_ratio"] > 0
    assert benchmark("budgets", *asked).exit_code == 0
    assert json.loads(file.read_text())["runs"] == before
    assert "name another folder" in said(benchmark("budgets", *asked, "--rows", "4"))


@needs_the_meter
def test_peaks_are_those_of_a_process_that_has_trained_nothing_before(tmp_path):
    """The first of a process is alone in it: what is second in one process is first in the other."""
    family = {"name": "gpt", "layers": 2, "width": 64, "rows": 2, "tokens": 16}
    environment = metered(os.environ | {"HF_HUB_OFFLINE": "1"}, tmp_path)

    def peaks(*ways):
        jobs = [dataclasses.asdict(Job(way)) for way in ways]
        asked = json.dumps({"family": family, "directory": str(tmp_path), "jobs": jobs, "in_turns": False})
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.budgets.runs", asked]
        lines = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        ).stdout.splitlines()
        return {one["way"]: one["peaks"] for one in map(json.loads, lines)}

    ways = IN_MEMORY, "activations recompute"
    found = peaks(*ways)
    assert set(found) == set(ways)
    assert found == peaks(*reversed(ways))


def made(way, step_s, peak, budget_bytes=BUDGET, number=0, **more):
    planned = [9.0] * (12 if way == AUTO else 3)
    seconds = [*planned, *(slower * step_s for slower in (1, 7, 1, 1, 5, 9, 1, 4))]  # other work disturbs all alike
    return {
        "way": way, "budget_bytes": budget_bytes, "round": number, "step_s": step_s, "seconds": seconds, "peaks": [peak] * 5,
        "losses": [1.0, 2.0], "weights_sha256": "a", "refused": None, "predicted_peak_bytes": int(1.1 * peak),
        "predicted_step_s": 0.9 * step_s, "placed": "all", **more,
    }  # fmt: skip


FAST, OTHER, *REST = list(SIMPLE)[1:]
ONCE = [
    made(IN_MEMORY, 1.0, 1000, None),
    made(FAST, 1.9, BUDGET, None),
    made(OTHER, 2.1, BUDGET, None),
    *(made(way, 0.1, BUDGET + 1, None) for way in REST),
]


def rounds(*seconds):
    """Runs of a budget, in each round that and the two simple ways that fit."""
    found = [*ONCE]
    for number, (ours, fast, other) in enumerate(seconds):
        found += [made(AUTO, ours, 400 + 50 * number, number=number)]
        found += [made(FAST, fast, 500, number=number), made(OTHER, other, 500, number=number)]
    return found


def test_the_fastest_ways_that_fit_take_turns():
    assert fastest(ONCE, BUDGET) == [FAST, OTHER]
    assert fastest(ONCE, BUDGET - 1) == []


def test_no_training_begins_while_another_process_starts(monkeypatch):
    steps = []

    @contextlib.contextmanager
    def process(family, jobs, in_turns):
        yield SimpleNamespace(stdin=io.StringIO(), way=jobs[0].way)

    monkeypatch.setattr(command, "_process", process)
    monkeypatch.setattr(command, "_train", lambda process, count: steps.append((process.way, count)))
    monkeypatch.setattr(command, "_results", lambda *_: [])
    command._in_turns(Family("gpt", 1, 8, 1, 8, ""), 0, [Job(AUTO, BUDGET), Job(FAST, BUDGET)])
    assert steps[:2] == [(AUTO, 0), (FAST, 0)]
    assert all(count > 0 for _, count in steps[2:])


def test_a_line_compares_with_the_fastest_way_in_the_same_round():
    row = row_of("gpt", 0.5, BUDGET, rounds((2.2, 2.0, 4.0), (3.0, 3.0, 4.0)))
    assert row.best == FAST
    assert row.step_ratio == pytest.approx(1.05)
    assert row.rounds == 2
    assert row.peak_bytes == 450
    assert row.peak_error == pytest.approx(0.1)
    assert row.step_error == pytest.approx(-0.1)
    assert row.same_bits
    assert "0.900" in texts(row)


@pytest.mark.parametrize("number", [0, 1])
def test_a_way_that_exceeds_the_budget_in_any_of_its_turns_does_not_fit(number):
    runs = rounds((2.2, 2.0, 4.0), (3.0, 3.0, 4.0))
    next(one for one in runs if (one["way"], one["budget_bytes"], one["round"]) == (FAST, BUDGET, number))["peaks"][
        3
    ] += 1
    row = row_of("gpt", 0.5, BUDGET, runs)
    assert row.best == OTHER
    assert row.step_ratio == pytest.approx(0.65)
    for one in runs:
        one["peaks"] = [peak + 1 for peak in one["peaks"]] if one["way"] == OTHER else one["peaks"]
    row = row_of("gpt", 0.5, BUDGET, runs)
    assert (row.best, row.step_ratio) == (None, None)


def test_other_bits_in_any_round_show():
    runs = rounds((2.2, 2.0, 4.0), (3.0, 3.0, 4.0))
    runs[-3]["weights_sha256"] = "b"
    row = row_of("gpt", 0.5, BUDGET, runs)
    assert not row.same_bits
    assert texts(row)[-1] == "NO"


def test_a_refusal_is_a_result_that_says_what_would_do():
    row = row_of("gpt", 0.5, BUDGET, [*ONCE, made(AUTO, 0, 0, refused="too small", least_bytes=600_000_000)])
    assert row.least_bytes == 600_000_000
    assert "refused: 600 MB would do" in texts(row)


@pytest.mark.parametrize("shares", ["much", "80,-5"])
def test_shares_that_are_none_are_refused(shares, tmp_path):
    result = benchmark("budgets", "--shares", shares, "--output", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert "such as 80,50,30" in said(result)
    assert not (tmp_path / "out").exists()
