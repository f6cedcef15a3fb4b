"""What the README, docs/ and the examples name is there, and the command lines they show are understood."""

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
import typer
from accelerate.commands.launch import launch_command_parser

from benchmarks.__main__ import app as benchmarks
from hf_offload.cli.main import app
from hf_offload.cli.plan import PlanGroup
from hf_offload.integrations.launch import find_config
from hf_offload.settings.environment import DISABLE_VARIABLE, FIELDS, variable

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted(path for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".sh"))
NAMES = [str(path.relative_to(ROOT)) for path in [*DOCUMENTS, *EXAMPLES]]
FOLDERS = ("docs", "examples", "model_cards", "recipes", "tests", "hf_offload", "benchmarks")

FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def texts(path):
    """The code of a document, in blocks and in sentences, line by line; all of another file."""
    text = path.read_text()
    if path.suffix != ".md":
        return text.splitlines()
    blocks = "".join(FENCE.findall(text)).replace("\\\n", " ").splitlines()
    return blocks + [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", FENCE.sub("", text))]


def commands(path, program):
    """What is behind ``program`` in every line that begins with it, or with variables and then it."""
    found = []
    for line in texts(path):
        line = line.strip().lstrip("#").strip()
        match = re.match(rf"(?:[A-Z_]+=\S+ )*{program}(?: (.*))?$", line)
        if match and not (path.suffix == ".sh" and "$" in line):
            found.append(shlex.split(match.group(1) or "", comments=True))
    return found


def understand(words, app=app):
    """Raises what the command line would be refused with."""
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        if not words:
            return
        name, *words = command.complete(words) if isinstance(command, PlanGroup) else words
        assert name in command.commands, f"there is no command {name}"
        command = command.commands[name]
    if command.name == "launch":
        understand_launch(words)
    elif words:  # else only its name is told
        command.make_context(command.name, list(words)).close()


def understand_launch(words):
    if not words:
        return
    chosen, _ = launch_command_parser().parse_known_args(words)
    if chosen.config_file:
        assert (
            (ROOT / chosen.config_file).is_file()
            or chosen.config_file.endswith("c.yaml")
            or find_config(chosen.config_file)
        )


@pytest.mark.parametrize("name", NAMES)
def test_command_lines_are_understood(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    mistakes = []
    for program, ours in (("hf-offload", app), ("python -m benchmarks", benchmarks)):
        for words in commands(ROOT / name, program):
            try:
                understand(words, ours)
            except (Exception, SystemExit) as error:
                mistakes.append(f"{program} {shlex.join(words)}: {error}")
    for words in commands(ROOT / name, "accelerate launch"):
        try:
            understand_launch(words)
        except (AssertionError, SystemExit) as error:
            mistakes.append(f"accelerate launch {shlex.join(words)}: {error}")
    makefile = (ROOT / "Makefile").read_text()
    mistakes += [
        f"make {words[0]}: no such target"
        for words in commands(ROOT / name, "make")
        if words and not re.search(rf"^{words[0]}:", makefile, re.MULTILINE)
    ]
    for words in commands(ROOT / name, "python"):
        file = words[1].replace(".", "/") if words[0] == "-m" else words[0]
        own = file.split("/")[0] in FOLDERS
        if own and not any((ROOT / end).is_file() for end in (file, f"{file}.py", f"{file}/__main__.py")):
            mistakes.append(f"python {shlex.join(words)}: no such file")
    assert not mistakes, "\n".join(mistakes)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith(".sh")])
def test_files_that_are_named_exist(name):
    path = ROOT / name
    text = path.read_text()
    missing = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text) if path.suffix == ".md" else ():
        if "://" in target:
            continue
        file, _, heading = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        if not found.exists():
            missing.append(target)
        elif heading and heading not in headings(found):
            missing.append(f"{target}: no such heading")
    for code in texts(path):
        missing += [
            file
            for file in re.findall(rf"(?<![\w/.-])(?:{'|'.join(FOLDERS)})/[\w./-]*\w", code)
            if not any(found.exists() for found in (ROOT / file, ROOT / f"{file}.py"))
        ]
    assert not missing


def headings(path):
    """As a link names them."""
    lines = re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("name", NAMES)
def test_variables_that_are_named_are_read(name):
    known = {variable(field) for field in FIELDS} | {DISABLE_VARIABLE, "HF_OFFLOAD_AUTOLOAD", "HF_OFFLOAD_"}
    named = set(re.findall(r"\bHF_OFFLOAD_[A-Z_]*", (ROOT / name).read_text()))
    assert named <= known


def test_api_page_is_what_docstrings_say():
    made = runpy.run_path(str(ROOT / "docs" / "make_api.py"))
    assert made["PAGE"].read_text() == made["page"](), "run `make api`"


def test_commands_are_found():
    assert len(commands(ROOT / "README.md", "hf-offload")) > 20
    with pytest.raises(Exception, match="No such option: --levrs"):
        understand(["plan", "llama-1b", "--levrs"])
    with pytest.raises(Exception, match="No such option: --plot"):
        understand(["plan", "modes", "llama-1b", "--plot", "a.png"])
    with pytest.raises(AssertionError, match="no command"):
        understand(["bench", "stesp"])
    with pytest.raises(AssertionError, match="no command"):
        understand(["limtis"], benchmarks)


def test_the_choice_between_checkpointing_and_a_drive_leaves_no_measurement_out():
    """The table holds every comparison there is with the figures of its file, and the ranges above it are the table's."""
    ways = ("recompute", "ours:ssd")
    expected, found = {}, {}
    for path in sorted((ROOT / "model_cards").glob("*/*.json")) + sorted((ROOT / "model_cards").glob("*/*/*.json")):
        content = json.loads(path.read_text())
        rows = content.get("rows", []) if isinstance(content, dict) else []
        if any(row.get("strategy") == "ours:ssd" for row in rows):
            ratios = [
                [row[f"{what}_ratio"] for row in rows if row["strategy"] == way]
                for way in ways
                for what in ("peak", "step")
            ]
            expected[f"../{path.relative_to(ROOT)}"] = [
                [f"{ratio:.3f}" for ratio in column] or ["-"] for column in ratios
            ]
    text = (ROOT / "docs" / "choosing.md").read_text()
    for link, cells in re.findall(r"^\| \[.*?\]\((\.\./model_cards/.*?\.json)\) \| (.*) \|$", text, re.MULTILINE):
        found[link] = [cell.split(", ") for cell in cells.split(" | ")]
    assert found == expected
    memory_and_time = [
        sorted(float(x) for row in found.values() for x in row[column] if x != "-") for column in range(4)
    ]
    said = [f"{values[0]:.3f} to {values[-1]:.3f}" for values in memory_and_time]
    assert f"| activation checkpointing | {said[0]} of the baseline's [2] | {said[1]} |" in text
    assert f'| `offload="ssd"` | {said[2]} [2] | {said[3]} |' in text
