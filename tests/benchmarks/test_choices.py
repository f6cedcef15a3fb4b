"""``python -m benchmarks choices``: a row for every budget."""

from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.choices import SHARES


def test_every_budget_is_a_row_of_the_table():
    result = CliRunner().invoke(app, ["choices", "gpt/demo"])
    assert result.exit_code == 0, result.output
    lines = [line.split(" | ") for line in result.stdout.splitlines() if line.startswith("|")]
    assert lines[0] == ["| model", "budget", "choice", "step |"]
    assert [line[1] for line in lines[2:]] == [f"{share:.0%}" for share in SHARES]
    assert "-" not in lines[2][3]
