"""The benchmark of memory modes: whole runs on a tiny model and a tiny text, what is kept of them, and its arithmetic."""

import json
import math
import random

import pytest
import safetensors.torch
import torch

from benchmarks.modes import search as bench
from benchmarks.modes.costs import Times, step_times
from benchmarks.modes.runs import Run, build_model, load_text, validation_loss
from benchmarks.modes.search import MODES, Findings, Setup, bench_modes, best_rate
from benchmarks.modes.table import mode_rows, texts
from hf_offload.errors import OffloadConfigError, OffloadError
from hf_offload.settings.memory_modes import memory_mode
from tests.helpers.command_line import benchmark

TINY = Setup(layers=2, hidden=32, warm_start_steps=6, search_steps=3, steps=5, rates=(1e-9, 1e-2))
OPTIONS = {
    "--layers": 2, "--hidden": 32, "--warm-start-steps": 6, "--search-steps": 3, "--steps": 5, "--rates": "1e-9,0.01",
    "--modes": "none,galore", "--seeds": "0,1",
}  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # peft uses the older name


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A text of a few words in an order that was drawn."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "tinyshakespeare").mkdir()
    words = random.Random(0).choices(["to", "be", "or", "not", "that", "is"], k=4000)
    (folder / "tinyshakespeare" / "input.txt").write_text(" ".join(words))
    return folder


def call(data, folder, *options, **changed):
    given = OPTIONS | {f"--{name.replace('_', '-')}": value for name, value in changed.items()}
    words = [str(word) for pair in given.items() for word in pair]
    arguments = ["modes", "--data-dir", str(data), "--output", str(folder), *words, *options]
    return benchmark(*arguments)


def run_of(mode, rate, loss, seed=0):
    return Run(mode, rate, seed, 10, [[0, 3.0], [10, loss]], 100, 50, 0.1)


def test_runs_are_made_once_and_shown(data, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "PERIOD", 2)  # no matter here
    first = call(data, tmp_path, "--times")
    assert first.exit_code == 0, first.output
    made = {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir() if not file.name.startswith("modes.")}
    searches = [f"{mode}_rate{rate}_seed100_3steps.json" for mode in ("none", "galore") for rate in ("1e-09", "0.01")]
    runs = [f"{mode}_rate0.01_seed{seed}_5steps.json" for mode in ("none", "galore") for seed in (0, 1)]
    others = ["warm_start.json", "warm_start.safetensors", "none_memory.json", "galore_memory.json", "times.json"]
    assert sorted(name for name in made if name != "trainer") == sorted([*searches, *runs, *others])
    again = call(data, tmp_path, "--times", "--json")
    assert {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir() if file.name in made} == made
    found = json.loads(again.stdout)
    assert found == json.loads((tmp_path / "modes.json").read_text())

    for row in found["rows"]:  # the rate is that of the lowest loss, whichever that is
        tried = {run["rate"]: run["curve"][-1][1] for run in found["searches"] if run["mode"] == row["mode"]}
        assert sorted(tried) == [1e-9, 1e-2]
        assert row["rate"] == min(tried, key=tried.get)
        assert row["at_edge"]
    warm = found["warm_start"]["curve"]
    assert warm[-1][1] < warm[0][1]
    for run in found["runs"] + found["searches"]:
        assert run["curve"][0] == [0, warm[-1][1]]
        assert [step for step, _ in run["curve"]] == [0, run["steps"]]
    ends = [run["curve"][-1][1] for run in found["runs"]]
    assert len(set(ends)) == 4
    assert all(end < warm[-1][1] for end in ends)

    usual, galore = found["rows"]
    weights = build_model(2, 32).parameters()
    assert usual["gradient_bytes"] == galore["gradient_bytes"] == sum(weight.nbytes for weight in weights)
    assert galore["state_bytes"] < usual["state_bytes"]
    for row in (usual, galore):
        assert row["peak_bytes"] > 2 * usual["gradient_bytes"] + row["state_bytes"]  # weights, gradients and more
    assert usual["time_ratio"] is None
    assert usual["against_percent"] is None
    assert galore["time_ratio"] > 0
    assert galore["against_percent"] == pytest.approx(100 * (galore["mean"] / usual["mean"] - 1))
    assert "galore" in first.output
    table = (tmp_path / "modes.md").read_text()
    assert "| galore | update_proj_gap=100, rank=8 | a quarter of the hidden size" in table
    assert f"| galore | 0.01* | {galore['mean']:.4f} |" in table
    assert (tmp_path / "modes.png").read_bytes().startswith(b"\x89PNG")


def test_what_was_interrupted_is_shown_and_goes_on(data, tmp_path):
    heard = []

    def stop(name, done, total):
        heard.append((name, done, total))
        if name == "lora, seed 0":
            raise KeyboardInterrupt

    settings = (data, ["none", "lora"], [0], tmp_path, TINY)
    found = bench_modes(*settings, on_run=stop)
    assert found.interrupted
    assert [row.mode for row in mode_rows(found, TINY.rates)] == ["none"]
    assert heard[-1] == ("lora, seed 0", 7, 9)
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.*")}
    found = bench_modes(*settings)
    assert not found.interrupted
    rows = mode_rows(found, TINY.rates)
    assert [row.mode for row in rows] == ["none", "lora"]
    assert rows[1].state_bytes < rows[0].state_bytes / 5
    assert {file: file.stat().st_mtime_ns for file in kept} == kept
    assert not list(tmp_path.glob("*.part"))


def test_an_answer_to_another_question_is_refused(data, tmp_path):
    one = (data, ["none"], [0], tmp_path)
    bench_modes(*one, TINY)
    with pytest.raises(OffloadConfigError, match=r"warm_start.json is of another benchmark \(layers 2 there and 1 now"):
        bench_modes(*one, Setup(layers=1, hidden=32, warm_start_steps=6, search_steps=3, steps=5, rates=(1e-2,)))
    with pytest.raises(OffloadConfigError, match="steps 6 there and 7 now"):
        bench_modes(*one, Setup(layers=2, hidden=32, warm_start_steps=7, search_steps=3, steps=5, rates=(1e-2,)))
    start = tmp_path / "warm_start.safetensors"
    weights = safetensors.torch.load_file(start)
    safetensors.torch.save_file({name: weight * 1.01 for name, weight in weights.items()}, start)
    with pytest.raises(OffloadConfigError, match=r"none_rate1e-09_seed100_3steps.json .*warm_start"):
        bench_modes(*one, TINY)


@pytest.mark.parametrize(
    ("changed", "options", "parts"),
    [
        ({"modes": "none,galor"}, (), ["mode='galor' is unknown", "Did you mean 'galore'?"]),
        ({"modes": ","}, (), ["there is nothing to run"]),
        ({"rates": "fast"}, (), ["--rates 'fast'"]),
        ({"rates": "0.1,0.1"}, (), ["rates=[0.1, 0.1] is not a grid"]),
        ({"rates": "nan"}, (), ["is not a grid"]),
        ({"seeds": "one"}, (), ["--seeds 'one'"]),
        ({"seeds": "0,0"}, (), ["give each once"]),
        ({"hidden": 100}, (), ["hidden=100", "multiple of 64"]),
        ({"modes": "galore"}, ("--times",), ["add 'none'"]),
        ({"modes": "lissa", "rates": "0", "seeds": "101"}, (), ["3 errors", "'lisa'", "not a grid", "neither"]),
        ({"modes": "none,lisa", "layers": 1}, (), ["blocks_active=2, but only 1 blocks take turns"]),
    ],
)
def test_wrong_questions(data, tmp_path, changed, options, parts):
    result = call(data, tmp_path / "out", *options, **changed)
    assert result.exit_code == 2, result.output
    for part in parts:
        assert part in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------------- text and costs


def test_the_validation_loss_is_a_mean_over_bytes(data):
    text = load_text(data)
    model = build_model(1, 32)
    assert len(text.validation) % 16  # the last batch is smaller
    logits = model(input_ids=text.validation).logits
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), text.validation[:, 1:].flatten())
    assert validation_loss(model, text) == pytest.approx(expected.item(), rel=1e-5)
    assert model.training


def test_the_settings_fit_the_model_and_say_why():
    for name, mode in MODES.items():
        memory_mode(mode.of or name, mode.settings_for(320, 0))
        assert mode.why
        gap = mode.settings.get("update_proj_gap", mode.settings.get("switch_every", 1))
        assert bench.PERIOD % gap == 0, name
    assert [MODES[name].settings_for(320, 0)["rank"] for name in ("galore", "apollo", "lora")] == [80, 80, 16]
    assert MODES["frugal"].settings_for(320, 7)["seed"] == 7


class Recorded:
    """Steps of known times are not made: who had a turn is written down."""

    device = torch.device("cpu")

    def __init__(self, name, turns):
        self._name, self._turns = name, turns

    def step(self):
        self._turns.append(self._name)


def test_modes_take_turns_and_another_is_first_each_time():
    turns = []
    times = step_times({name: Recorded(name, turns) for name in "abc"}, period=2, periods=2)
    assert "".join(turns) == "abc" + "abc" + "bca" + "cab" + "abc"
    assert [len(seconds) for seconds in times.seconds.values()] == [4, 4, 4]


def test_a_refresh_is_spread_over_its_period_and_the_ratio_is_the_median():
    """Each period of four has one step of 6 s; a period that somebody disturbed is no more than one of three."""
    ours = [2, 2, 2, 6] * 2 + [50, 2, 2, 6]
    assert Times(4, {"ours": ours, "none": [2] * 12}).ratio("ours", "none") == 1.5
    assert Times(4, {"ours": [*ours, 1000], "none": [2] * 13}).ratio("ours", "none") == 1.5


# ------------------------------------------------------------------------------------------------------------ arithmetic


def test_the_best_rate_has_the_lowest_loss():
    assert best_rate([run_of("a", 0.1, 2.0), run_of("a", 0.2, 1.5), run_of("a", 0.3, 1.7)]) == 0.2
    assert best_rate([run_of("a", 0.2, 1.5), run_of("a", 0.1, 1.5)]) == 0.1
    assert best_rate([run_of("a", 0.3, math.nan), run_of("a", 0.2, 1.5)]) == 0.2
    with pytest.raises(OffloadError, match=r"a diverged at every rate of 0\.2"):
        best_rate([run_of("a", 0.3, math.nan), run_of("a", 0.2, math.inf)])


def test_rows_compare_the_seeds_that_both_have():
    runs = [
        run_of("none", 0.1, 2.0),
        run_of("none", 0.1, 4.0, seed=1),
        run_of("lora", 0.2, 2.1),
        run_of("badam", 0.3, 3.0),
    ]
    times = Times(1, {"none": [1.0], "lora": [0.5], "badam": [0.7]})
    rows = mode_rows(Findings(runs=runs, peaks={"lora": 10**6}, times=times), (0.1, 0.2, 0.3))
    assert [row.against_percent for row in rows] == [None, pytest.approx(5), pytest.approx(50)]
    assert [row.at_edge for row in rows] == [True, False, True]
    assert [row.mean for row in rows] == [3.0, 2.1, 3.0]
    assert [row.time_ratio for row in rows] == [None, 0.5, 0.7]
    shown = list(texts(rows))
    assert shown[0] == ["none", "0.1*", "3.0000", "2.0000 4.0000", "-", "0.00", "0.00", "-", "-"]
    assert shown[1] == ["lora", "0.2", "2.1000", "2.1000", "+5.00 %", "0.00", "0.00", "1.0", "0.500"]
    assert [row.against_percent for row in mode_rows(Findings(runs=runs[2:]), (0.1, 0.2))] == [None, None]
    assert [row.at_edge for row in mode_rows(Findings(runs=runs[:1]), (0.1,))] == [False]
