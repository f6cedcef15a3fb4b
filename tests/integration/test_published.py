"""docs/published.md, docs/choosing.md and docs/measured_plans.md: the commands there give the figures there."""

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app as benchmarks
from hf_offload.cli.main import app

PAGE = (Path(__file__).parents[2] / "docs" / "published.md").read_text()
TARGETS = '["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]'
MACHINE = "--gpu a100-80gb --ram 512GB --ssd 5GB/s --dtype bfloat16 --json"


def test_the_page_names_what_the_test_runs():
    assert f"`{TARGETS}`" in " ".join(PAGE.split())
    assert f"`{MACHINE}`" in " ".join(PAGE.split())


@pytest.mark.full
@pytest.mark.parametrize(("model", "training"), [("8B", "QLoRA")])
def test_a_command_gives_the_figure_of_its_row(model, training):
    placement, command = re.search(rf"\| {model}, {training} \| `([^`]+)` \| `hf-offload ([^`]+)` \|", PAGE).groups()
    figure = re.search(rf"\| {model} \| {training}[^|]*\| [\d.]+ \| ([\d.]+) \|", PAGE)[1]
    result = CliRunner().invoke(app, shlex.split(f"{command.replace('TARGETS', TARGETS)} {MACHINE}"))
    rows = {row["name"]: row["peak_bytes"] for row in json.loads(result.stdout)["predicted"]}
    assert rows[placement] / 2**30 == pytest.approx(float(figure), abs=0.051)


@pytest.mark.full
def test_the_table_by_drive_is_what_the_command_predicts():
    page = (Path(__file__).parents[2] / "docs" / "choosing.md").read_text()
    command, table = re.search(
        r"that `hf-offload (plan \S+ --gpu \S+ --batch 4)` predicts.*?---\|\n(.*?)\n\n", page, re.S
    ).groups()
    content = json.loads(CliRunner().invoke(app, [*shlex.split(command), "--json"]).stdout)
    steps = {row["name"]: f"{row['step_s']:.3g}" for row in content["predicted"]}
    names = {
        "activation checkpointing": "recompute",
        f"`auto`, budget of {content['budget_bytes'] / 2**30:.2f} GiB": "auto",
    }
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()]
    assert len(rows) == 4
    assert rows == [[name, steps[names.get(name, name.strip("`"))]] for name, _ in rows]


@pytest.mark.full
def test_the_table_of_orders_is_what_the_command_prints():
    page = (Path(__file__).parents[2] / "docs" / "measured_plans.md").read_text()
    command, table = re.search(r"`python -m benchmarks (orders [^`]+)`:\n\n(.*?)\n\n", page, re.DOTALL).groups()
    orders = json.loads(CliRunner().invoke(benchmarks, [*shlex.split(command), "--json"]).stdout)["orders"]
    expected = []
    for one in orders:
        sizes = [f"{one[name] / 2**30:.2f}" for name in ("bound_bytes", "peak_bytes")]
        expected.append([one["order"], *sizes, f"{one['peak_bytes'] / orders[0]['peak_bytes']:.3f}"])
    assert [row.strip("| ").split(" | ") for row in table.splitlines()[2:]] == expected


@pytest.mark.full
def test_the_table_of_memory_modes_is_what_the_command_prints(monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "choosing.md").read_text()
    command, table = re.search(
        r"`hf-offload (plan \S+ --gpu \S+ --modes)` shows.*?```\n(.*?)```", page, re.DOTALL
    ).groups()
    monkeypatch.setenv("COLUMNS", "140")
    printed = CliRunner().invoke(app, shlex.split(command)).stdout.splitlines()
    rows = [line.split() for line in table.splitlines()[2:]]
    assert len(rows) > 10
    assert rows == [line.split() for line in printed if line.split()[:1] in [row[:1] for row in rows]]
