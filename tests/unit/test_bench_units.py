"""Parts of the benchmark that need no run: strategies and rows."""

import pytest

from hf_offload import OffloadConfigError
from hf_offload.bench.cell import CRASHED, DONE, CellResult
from hf_offload.bench.results import Case, Cell, Results
from hf_offload.bench.strategies import find_strategy, parse_strategies, strategy_names
from hf_offload.bench.tables import footnotes, identity, markdown
from tests.helpers.bench_recipes import RANDOM_RECIPE, TINY_MODEL, fake_report

# ----------------------------------------------------------------------------------------------------------- strategies


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(RANDOM_RECIPE)
    return str(path)


def recomputes(recipe):
    names = ("activation_checkpointing", "gradient_checkpointing")
    return next(recipe.training[name] for name in names if name in recipe.training)


@pytest.mark.parametrize("name", strategy_names())
def test_a_strategy_sets_everything_it_is_about_whatever_the_recipe_says(path, name):
    theirs = ["offload={tier: ssd, directory: d, ram_budget: 1GiB, read_ahead_bytes: 7MiB, disk_budget: 2GiB}"]
    recipe = find_strategy(name).load(path, theirs)
    tier = {"ours:ram": "ram", "ours:auto": "auto", "ours:sampled": "none", "ours:elementwise": "none"}.get(
        name, "ssd" if name.startswith("ours") else "none"
    )
    assert recipe.offload.tier == tier
    assert recomputes(recipe) is ("recompute" in name)
    assert bool(recipe.offload.directories) == (tier in ("ssd", "auto"))
    budgets = {"ours:ram": 1 << 30, "ours:auto": 1 << 30, "ours:spill": 512 << 20}
    assert recipe.offload.ram_budget == budgets.get(name)
    kwargs = [value for key, value in recipe.training.items() if key.endswith("checkpointing_kwargs")]
    assert kwargs == ([{"offload": True}] if name == "recompute+offload" else [])
    assert find_strategy(name).source


def test_spill_takes_its_ram_after_an_at_sign(path):
    assert find_strategy("ours:spill@1MiB").load(path, ["offload.ram_budget=1GiB"]).offload.ram_budget == 1 << 20


def test_a_window_fixes_the_read_ahead(path):
    strategy = find_strategy("ours:nvme@64MiB")
    assert strategy.name == "ours:ssd@64MiB"
    assert strategy.must_match == "baseline"
    assert strategy.load(path, ["offload.read_ahead_bytes=1"]).offload.read_ahead_bytes == 64 << 20
    with pytest.raises(OffloadConfigError, match="unknown"):
        find_strategy("ours:ram@64MiB")


def test_who_has_to_match_whom():
    wanted = {strategy.name: strategy.must_match for strategy in parse_strategies("all")}
    ours = {"baseline", "ours:ram", "ours:ssd", "ours:spill", "ours:auto", "ours:elementwise", "ours:ssd+elementwise"}
    assert wanted == {name: "baseline" if name in ours else None for name in wanted} | {"ours+recompute": "recompute"}


def test_names_are_kept_in_order_and_aliases_resolved():
    chosen = parse_strategies("ours:disk, baseline, ours:nvme@1MiB")
    assert [strategy.name for strategy in chosen] == ["ours:ssd", "baseline", "ours:ssd@1MiB"]
    assert [strategy.name for strategy in parse_strategies("ours:ram", reference=False)] == ["ours:ram"]


# ----------------------------------------------------------------------------------------------------------------- rows

CASE = Case("r", "r.yaml", 2, 32)


def results(*runs, rounds=1):
    """``runs`` are (strategy, round, report or result)."""
    cells = [
        Cell(
            find_strategy(name),
            number,
            run if isinstance(run, CellResult) else CellResult(DONE, report=run),
        )
        for name, number, run in runs
    ]
    return Results(CASE, [], "auto", rounds, cells=cells)


def test_ratios_are_medians_of_each_rounds_ratio_with_their_spread():
    # The machine gets slower from round to round; ours takes twice as long as the baseline, once three times.
    runs = []
    for number, (speed, factor) in enumerate(((1.0, 2), (2.0, 3), (5.0, 2)), start=1):
        runs.append(("baseline", number, fake_report(step_times_s=[0, 0, speed, speed])))
        ours = fake_report(step_times_s=[0, 0, factor * speed, factor * speed], offload={"stall_s": 1.0})
        runs.append(("ours:ssd", number, ours))
    compared = results(*runs, rounds=3)
    _, row = compared.rows()
    assert (row.step_ratio, row.step_ratio_min, row.step_ratio_max) == (2, 2, 3)
    assert (row.step_s, row.step_s_min, row.step_s_max) == (6.0, 2.0, 10.0)
    assert (row.peak_bytes, row.peak_ratio, row.peak_ratio_min) == (10_000_000, 1, 1)
    assert row.stall_s_per_run == 1.0
    line = "| ours:ssd | +10 MB | 1.000 | 6.00 s | 2.000 | 2.000..3.000 | - | 0.50000 | glibc-tuned | identical |"
    assert line in markdown(compared)
    assert "3 rounds" in " ".join(footnotes(compared))


def test_of_one_round_the_spread_is_that_of_its_steps():
    compared = results(("baseline", 1, fake_report(step_times_s=[9, 9, 1.0, 2.0, 4.0])))
    assert "| 2.00 s | 1.000 | 1.00..4.00 s |" in markdown(compared)


def test_a_round_that_crashed_is_named_beside_the_others():
    compared = results(
        ("baseline", 1, fake_report()),
        ("ours:ssd", 1, fake_report()),
        ("ours:ssd", 2, CellResult(CRASHED, "E: x")),
        rounds=2,
    )
    assert "| identical; one round crashed (E: x) |" in markdown(compared)
    assert compared.problems() == ["ours:ssd, round 2: E: x"]


@pytest.mark.parametrize(("name", "why"), [("ours:ssd+tiled", "other rounding"), ("ours:sampled", "estimates")])
def test_a_way_that_is_meant_to_differ_is_ours_but_no_mismatch(name, why):
    other = fake_report(losses_hex=[(9.0).hex()] * 4, parameters_sha256="other")
    compared = results(("baseline", 1, fake_report()), (name, 1, other))
    assert find_strategy(name).is_ours
    assert compared.problems() == []
    row = compared.rows()[1]
    assert not row.differs
    assert identity(row) == why


def test_ours_with_recompute_has_to_match_recompute():
    other = fake_report(parameters_sha256="other")
    runs = [("baseline", 1, fake_report()), ("recompute", 1, other), ("ours+recompute", 1, other)]
    assert results(*runs).problems() == []
    assert "final parameters differ" in results(*runs[:2], ("ours+recompute", 1, fake_report())).problems()[0]


def test_a_row_names_its_model_also_where_the_run_crashed():
    compared = results(("baseline", 1, CellResult(CRASHED, "E: x", model=TINY_MODEL)))
    assert [row["model"] for row in compared.as_dict()["rows"]] == [TINY_MODEL]
