"""``python -m benchmarks choices``: a row for every budget."""

from benchmarks.choices import SHARES
from tests.helpers.command_line import benchmark


def test_every_budget_is_a_row_of_the_table():
    result = benchmark("choices", "gpt/demo")
    assert result.exit_code == 0, result.output
    lines = [line.split(" | ") for line in result.stdout.splitlines() if line.startswith("|")]
    assert lines[0] == ["| model", "budget", "choice", "step |"]
    assert [line[1] for line in lines[2:]] == [f"{share:.0%}" for share in SHARES]
    assert "-" not in lines[2][3]
