"""What documents and examples name is there, the command lines they show are understood, and their Python works."""

import ast
import importlib.util
import inspect
import json
import re
import runpy
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
import typer
import yaml
from accelerate.commands.launch import launch_command_parser

import hf_offload
from benchmarks.__main__ import app as benchmarks
from benchmarks.budgets.table import letters
from benchmarks.large.command import rows_of
from hf_offload.cli.main import app
from hf_offload.integrations.launch import find_config
from hf_offload.settings.environment import DISABLE_VARIABLE, variable
from hf_offload.settings.recipes import read_recipe
from hf_offload.settings.schema import FIELDS
from tests.helpers.loaded_processes import run_python

ROOT = Path(__file__).parents[2]
TOP = [ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")]
DOCUMENTS = [*TOP, *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted(path for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".sh"))
NAMES = [str(path.relative_to(ROOT)) for path in [*DOCUMENTS, *EXAMPLES]]
FOLDERS = ("docs", "examples", "model_cards", "recipes", "tests", "hf_offload", "benchmarks")

FENCE = re.compile(r"^ *```\w*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


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
        name, *words = words
        if any(name in option.opts for option in command.params):
            return
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


def trained(words):
    """The recipe and the changes of a command that trains, or nothing."""
    if words[:1] == ["launch"] and "hf_offload" in words:
        words = words[words.index("hf_offload") + 1 :]
    if words[:1] != ["train"] or len(words) == 1 or words[1].isupper():
        return None
    copied = "llama/8b_lora_ssd"  # the file that docs/recipes.md makes
    return copied if words[1] == "mine.yaml" else words[1], [word for word in words[2:] if re.match(r"[a-z_.]+=", word)]


def test_recipes_that_are_trained_are_good_with_their_changes():
    found = [trained(words) for name in NAMES for words in commands(ROOT / name, "hf-offload")]
    found = [one for one in found if one is not None]
    assert len(found) > 5
    assert any(changes for _, changes in found)
    for recipe, changes in found:
        read_recipe(recipe, changes)


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


@pytest.mark.parametrize("generator", ["make_api", "make_command_line"])
def test_generated_pages_are_what_the_code_says(generator):
    made = runpy.run_path(str(ROOT / "docs" / f"{generator}.py"))
    pages = {made["PAGE"]: made["page"]}
    if "SETTINGS_PAGE" in made:
        pages[made["SETTINGS_PAGE"]] = made["settings_page"]
    for path, page in pages.items():
        assert path.read_text() == page(), f"{path.name}: run `make api`"


PYTHON_BLOCKS = [
    pytest.param(code, id=f"{path.name}-{number}")
    for path in DOCUMENTS
    for number, code in enumerate(PYTHON.findall(path.read_text()), start=1)
]


@pytest.mark.parametrize("code", PYTHON_BLOCKS)
def test_python_compiles_and_calls_the_package_as_it_is(code):
    """A block may leave out what is the reader's, but not what is the package's: names and arguments exist."""
    assert not wrong_uses(ast.parse(code))


def wrong_uses(tree):
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "hf_offload":
            found += [alias.name for alias in node.names if alias.name not in hf_offload.__all__]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in hf_offload.__all__:
            known = inspect.signature(getattr(hf_offload, node.func.id)).parameters
            if not any(one.kind is one.VAR_KEYWORD for one in known.values()) or hasattr(
                getattr(hf_offload, node.func.id), "__dataclass_fields__"
            ):
                known = getattr(getattr(hf_offload, node.func.id), "__dataclass_fields__", known)
                found += [f"{node.func.id}({one.arg}=)" for one in node.keywords if one.arg and one.arg not in known]
    return found


def is_complete(code):
    """Whether the block imports what it uses and leaves nothing out."""
    return code.startswith("import ") and "..." not in code


@pytest.mark.parametrize("code", [block for block in PYTHON_BLOCKS if is_complete(block.values[0])])
def test_complete_python_runs(code, tmp_path):
    done = run_python([sys.executable, "-c", code], cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr
    assert not re.search(r"^0 bytes were offloaded", done.stdout, re.MULTILINE)


def test_checks_of_python_find_errors():
    assert any(is_complete(block.values[0]) for block in PYTHON_BLOCKS)
    assert wrong_uses(ast.parse("OffloadConfig(tire='ssd')")) == ["OffloadConfig(tire=)"]
    assert wrong_uses(ast.parse("OffloadTrainingArguments(..., offload_direktory='a')"))
    assert wrong_uses(ast.parse("attach(model, config, runid=1)")) == ["attach(runid=)"]
    assert wrong_uses(ast.parse("from hf_offload import OffloadPlugins")) == ["OffloadPlugins"]


def test_every_page_says_first_what_it_is_for():
    silent = [
        path.name
        for path in DOCUMENTS[1:]
        if path.name != "SECURITY.md"
        and not re.search(r"\bthis page\b", path.read_text().split("\n\n")[1], re.IGNORECASE)
    ]
    assert not silent


def test_the_navigation_of_the_site_has_every_page_once():
    pages = []

    def collect(entry):
        if isinstance(entry, str):
            pages.append(entry)
        else:
            for one in entry.values() if isinstance(entry, dict) else entry:
                collect(one)

    collect(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(pages) == sorted(path.relative_to(ROOT).as_posix() for path in DOCUMENTS)


@pytest.mark.skipif(importlib.util.find_spec("zensical") is None, reason="the extra docs is not installed")
def test_the_site_builds_without_a_warning_and_notices_one(tmp_path, monkeypatch):
    site = runpy.run_path(str(ROOT / "docs" / "make_site.py"))
    config = (ROOT / "mkdocs.yml").read_text().replace("runs/site", "site")
    (tmp_path / "mkdocs.yml").write_text(config)
    names = {"SOURCE": tmp_path / "site_source", "CONFIG": tmp_path / "mkdocs.yml"}
    for name, value in names.items():
        monkeypatch.setitem(site["build"].__globals__, name, value)
    assert site["build"]() == 0
    for page in ("index.html", "docs/quickstart/index.html", "CONTRIBUTING/index.html", "examples/plain_loop.py"):
        assert (tmp_path / "site" / page).is_file()
    monkeypatch.setitem(site["build"].__globals__, "stage", lambda: None)
    with (names["SOURCE"] / "docs" / "quickstart.md").open("a") as file:
        file.write("\n[nothing](there_is_no_such_page.md)\n")
    assert site["build"]() != 0


def test_pages_about_the_tree_name_all_of_it():
    architecture = (ROOT / "docs" / "architecture.md").read_text()
    folders = {path.parent.name for path in (ROOT / "hf_offload").glob("*/*.*") if path.parent.name != "__pycache__"}
    assert set(re.findall(r"^\| `(\w+)/` \|", architecture, re.MULTILINE)) == folders
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [layer for layer in contracts[0]["layers"] if layer != "__main__"]
    assert re.search(r"```text\n(.*?)```", contributing, re.DOTALL)[1].splitlines() == layers
    named = set(re.findall(r"`(tests/\w+)/`", contributing))
    there = {f"tests/{path.name}" for path in (ROOT / "tests").iterdir() if path.is_dir()}
    assert named == {name for name in there if not name.endswith(("__pycache__", "/helpers"))}


def test_the_page_of_the_installation_names_every_extra_for_users():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = (ROOT / "docs" / "installation.md").read_text().split("| extra |")[1]
    assert set(re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)) == {*extras} - {
        "accuracy",
        "oracles",
        "test",
        "dev",
    }


def test_commands_are_found():
    assert sum(len(commands(path, "hf-offload")) for path in DOCUMENTS) > 60
    with pytest.raises(Exception, match="No such option: --levrs"):
        understand(["plan", "llama-1b", "--levrs"])
    with pytest.raises(AssertionError, match="no command"):
        understand(["bench", "stesp"])
    with pytest.raises(AssertionError, match="no command"):
        understand(["limtis"], benchmarks)


STATE_WAYS = {"memory": "in memory", "ssd": "on the drive", "ssd-in-backward": "on the drive, in backward"}


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def test_the_table_of_the_demo_is_of_its_file():
    rows = json.loads((ROOT / "model_cards" / "bench" / "cpu_demo.json").read_text())["rows"]
    expected = {
        row["strategy"]: (
            f"{row['peak_bytes'] / 1e6:.0f} | {row['peak_ratio']:.3f} | {row['step_s']:.2f} | {row['step_ratio']:.3f}"
        )
        for row in rows
    }
    assert all(row["losses_identical"] and row["parameters_identical"] for row in rows)
    section = (ROOT / "README.md").read_text().split("| strategy |")[1].split("\n\n")[0]
    assert dict(re.findall(r"^\| `(\S+)` \| (.*) \| (?:-|identical) \|$", section, re.MULTILINE)) == expected


def test_the_table_of_streamed_state_is_of_its_file():
    runs = json.loads((ROOT / "model_cards" / "bench" / "cpu_state_gpt2_12_layers.json").read_text())
    rows = [row for run in runs for row in run["rows"]]
    assert all(row["same_bits"] is not False for row in rows)
    expected = [
        f"{row['tokens']} | {STATE_WAYS[row['way']]} | {row['peak_mb']:.0f} | {row['left_ratio']:.3f} | "
        f"{row['step_s']:.2f} | {row['step_ratio']:.3f} | {row['moved_mb']:.0f}"
        for row in rows
    ]
    text = (ROOT / "docs" / "optimizer_state.md").read_text()
    section = text.split("## What it costs\n")[1].split("\n## ")[0]
    assert re.findall(r"^\| (\d+ \| .*) \|$", section, re.MULTILINE) == expected


@pytest.mark.parametrize(
    ("heading", "name"), [("## A model larger than the machine", "xl"), ("### By its budget alone", "xl_auto")]
)
def test_the_tables_of_the_large_model_are_of_their_files(heading, name):
    found = json.loads((ROOT / "model_cards" / "bench" / f"cpu_large_gpt2_{name}.json").read_text())
    text = (ROOT / "docs" / "weights.md").read_text()
    section = re.split(r"\n##+ ", text.split(heading + "\n")[1])[0]
    lines = re.findall(r"^\| (?!\||---)(.*) \|$", section, re.MULTILINE)
    assert [line.split(" | ") for line in lines if not line.startswith("| predicted")] == [
        list(row) for row in rows_of(found)
    ]
    assert f"{found['weights'] / 1e9:.2f} billion weights" in section
    assert f"{found['steps']} steps of {found['tokens']:,} tokens" in section


def test_the_table_of_budgets_is_of_its_file():
    rows = json.loads((ROOT / "model_cards" / "bench" / "cpu_budgets.json").read_text())["rows"]
    expected = [
        [
            f"{row['share']:.0%}".replace("%", " %"),
            f"{row['peak_bytes'] / row['budget_bytes']:.3f}",
            in_percent(row["peak_error"]),
            f"{row['step_s']:.2f}",
            in_percent(row["step_error"]),
            "none fits" if row["best"] is None else letters(row["best"]),
            "-" if row["best"] is None else f"{row['step_ratio']:.3f}",
        ]
        for row in rows
    ]
    text = (ROOT / "docs" / "measured_plans.md").read_text()
    section = text.split("## Budgets\n")[1].split("\n### ")[0]
    found = [line.split(" | ") for line in re.findall(r"^\| (?!model|---)(.*) \|$", section, re.MULTILINE)]
    assert [cells[1:] for cells in found] == expected
    assert all(row["same_bits"] for row in rows)
    near = [sum(abs(row[f"{what}_error"]) <= most for row in rows) for what, most in (("peak", 0.1), ("step", 0.15))]
    ratios = [row["step_ratio"] for row in rows if row["step_ratio"]]
    said = " ".join(section.split())
    assert f"10 % in {near[0]} of {len(rows)} rows, and steps within 15 % in {near[1]}" in said
    assert f"In {sum(ratio <= 1.05 for ratio in ratios)} of {len(ratios)} rows" in said
    assert f"it is up to {max(ratios):.2f} times as slow" in said


def in_percent(share):
    return re.sub(r"^[+-](?=0\.0$)", "", f"{100 * share:+.1f}")


def test_the_table_of_the_longest_rows_is_of_its_file():
    levers = json.loads((ROOT / "model_cards" / "bench" / "levers_llama_8b.json").read_text())["levers"]
    expected = [[f"{tokens:,}" if tokens else "-" for tokens in row["tokens"].values()] for row in levers]
    text = (ROOT / "docs" / "measured_plans.md").read_text()
    section = text.split("## How long a row fits a GPU\n")[1].split("\n## ")[0]
    assert [row.split(" | ")[1:] for row in re.findall(r"^\| (.*) \|$", section, re.MULTILINE)[1:]] == expected


def test_the_number_of_deliberate_breakages_is_that_of_their_page():
    rows = re.findall(r"^\| `\w+` \|.*$", (ROOT / "docs" / "mutations.md").read_text(), re.MULTILINE)
    noticed = sum("**nobody**" not in row for row in rows)
    said = f"| deliberate breakages, one rule each | {noticed} of {len(rows)} noticed |"
    assert said in (ROOT / "docs" / "reliability.md").read_text()


def test_the_choice_between_checkpointing_and_a_drive_leaves_no_measurement_out():
    """The table holds every comparison there is with the figures of its file; the README and the ranges repeat the table."""
    ways = ("recompute", "ours:ssd")
    expected, found, labels = {}, {}, {}
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
    text = (ROOT / "docs" / "measured.md").read_text()
    for label, link, cells in re.findall(
        r"^\| \[(.*?)\]\((\.\./model_cards/.*?\.json)\) \| (.*) \|$", text, re.MULTILINE
    ):
        found[link] = [cell.split(", ") for cell in cells.split(" | ")]
        labels[label] = cells
    assert found == expected
    section = (ROOT / "README.md").read_text().split("## Measured\n")[1].split("\n## ")[0]
    repeated = dict(re.findall(r"^\| (\w[^|]*) \| ((?:[\d.-]+ \| ){3}[\d.-]+) \|$", section, re.MULTILINE))
    assert repeated
    assert repeated.items() <= labels.items()
    memory_and_time = [
        sorted(float(x) for row in found.values() for x in row[column] if x != "-") for column in range(4)
    ]
    said = [f"{values[0]:.3f} to {values[-1]:.3f}" for values in memory_and_time]
    choosing = (ROOT / "docs" / "choosing.md").read_text()
    assert f"| activation checkpointing | {said[0]} of the baseline's | {said[1]} |" in choosing
    assert f'| `offload="ssd"` | {said[2]} | {said[3]} |' in choosing
