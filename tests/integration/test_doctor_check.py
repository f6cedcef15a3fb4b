"""``hf-offload doctor --check``: it passes where everything works, and says what does not where it does not."""

import json

import pytest

from hf_offload.bench import steps
from hf_offload.bench.cell import CRASHED, DONE, CellResult
from tests.helpers.bench_recipes import fake_report
from tests.helpers.command_line import command, said


def test_everything_works_here(tmp_path):
    result = command("doctor", "--check", "-d", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["passed"]
    assert [one["name"] for one in found["checks"]] == ["baseline", "ours:ram", "ours:ssd"]
    for one in found["checks"][1:]:
        assert one["detail"].startswith("losses and weights are identical; ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("ssd", "part"),
    [
        (CellResult(DONE, report=fake_report(parameters_sha256="other")), "losses or weights differ"),
        (CellResult(DONE, report=fake_report()), "nothing was moved"),
        (CellResult(CRASHED, "RuntimeError: no kernel image"), "crashed (RuntimeError: no kernel image)"),
    ],
)
def test_what_does_not_work_is_named(tmp_path, monkeypatch, ssd, part):
    asked = []

    def run(spec, environment):
        asked.append(spec)
        good = CellResult(DONE, report=fake_report(offload={"offloaded_bytes": 1}))
        return ssd if spec.strategy == "ours:ssd" else good

    monkeypatch.setattr(steps, "run_cell", run)
    result = command("doctor", "--check", "-d", tmp_path, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert not found["passed"]
    assert [one["passed"] for one in found["checks"]] == [True, True, False]
    assert part in found["checks"][2]["detail"]
    assert f'offload.directory=["{tmp_path}"]' in asked[-1].overrides
    shown = command("doctor", "--check", "-d", tmp_path)
    assert (shown.exit_code, shown.stdout.count("passed"), shown.stdout.count("failed")) == (1, 2, 1)
    assert "Do not train with it here." in shown.stdout


def test_a_folder_that_is_none_is_refused(tmp_path):
    result = command("doctor", "--check", "-d", tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "does not exist" in said(result)
