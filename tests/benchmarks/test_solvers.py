"""``python -m benchmarks solvers``: a table of all searches."""

from benchmarks.solvers import SEARCHES
from tests.helpers.command_line import benchmark


def test_every_search_is_a_row_of_the_table():
    result = benchmark("solvers", "gpt/demo")
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if line.startswith("|")]
    assert lines[0] == "| search | problems | mean | worst |"
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[2:]] == list(SEARCHES)
