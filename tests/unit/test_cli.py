"""The command itself, whatever it is asked to do."""

from importlib import metadata

from typer.testing import CliRunner

from hf_offload.cli.main import app


def test_it_says_the_version_that_is_installed():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"hf-offload {metadata.version('hf-offload')}\n")


def test_help_says_what_it_is_for():
    shown = " ".join(CliRunner().invoke(app, ["--help"]).stdout.split())
    assert "gradients that are exact to the last bit" in shown
