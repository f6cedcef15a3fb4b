"""The command lines of the package and of the benchmarks, run in this process."""

from typer.testing import CliRunner, Result

from benchmarks.__main__ import app as benchmarks
from hf_offload.cli.main import app

_ENVIRONMENT = {"COLUMNS": "300"}


def command(*words: object) -> Result:
    """What ``hf-offload`` does with these words, on a wide terminal."""
    return CliRunner().invoke(app, [str(word) for word in words], env=_ENVIRONMENT)


def benchmark(*words: object) -> Result:
    """The same of ``python -m benchmarks``."""
    return CliRunner().invoke(benchmarks, [str(word) for word in words], env=_ENVIRONMENT)


def said(result: Result) -> str:
    """Standard error of a command, however its lines are broken."""
    return " ".join(result.stderr.split())
