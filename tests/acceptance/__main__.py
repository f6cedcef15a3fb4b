"""``make acceptance``: tests of accelerate, PEFT and TRL, and torch's own tables, without and with offloading.

Source distributions of accelerate and PEFT are downloaded with pip into a temporary folder, where DeepSpeed is installed,
too, for the tests of ours that need it. TRL's source distribution has no tests: ``--trl`` names a checkout, whose TRL is
then the one that is tested.
"""

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.acceptance.torch_tables import report, tables

ROOT = Path(__file__).resolve().parents[2]
ACCELERATE = (
    "accelerator", "grad_sync", "hooks", "kwargs_handlers", "optimizer", "scheduler", "state_checkpointing", "cpu",
    "compile", "dataclasses", "memory_utils", "modeling_utils", "utils", "data_loader", "cli", "launch",
)  # fmt: skip
# What those tests import besides what is installed; by name, so that nothing that is installed changes.
NEEDED = (
    "parameterized", "diffusers", "importlib_metadata", "zipp", "requests", "charset-normalizer", "urllib3", "idna",
    "certifi", "scikit-learn", "joblib", "threadpoolctl", "cloudpickle", "narwhals",
)  # fmt: skip
TRL = ("sft", "dpo", "reward", "kto", "grpo", "rloo")
PEFT = "test_only_params_are_updated or test_training_custom_models or test_parameters_after_loading_model"


@dataclasses.dataclass
class Suite:
    """Some tests of another project, and how they went without and with offloading."""

    project: str
    name: str
    tests: list[str]
    chosen: str = ""
    plain: dict[str, str] = dataclasses.field(default_factory=dict)
    offloaded: dict[str, str] = dataclasses.field(default_factory=dict)
    packed: int = 0

    @property
    def differences(self) -> list[str]:
        """Tests that went differently."""
        names = sorted(self.plain.keys() | self.offloaded.keys())
        return [
            f"{name}: {self.plain.get(name, 'missing')} without, {self.offloaded.get(name, 'missing')} with offloading"
            for name in names
            if self.plain.get(name) != self.offloaded.get(name)
        ]

    def count(self, outcome: str) -> int:
        """How many tests had that outcome without offloading."""
        return sum(one == outcome for one in self.plain.values())


def main(
    output: Annotated[Path, typer.Option(help="Where to write every test's outcome.")] = Path("runs/acceptance"),
    only: Annotated[str | None, typer.Option(help="Run the suites whose names have this in them.")] = None,
    deepspeed: Annotated[bool, typer.Option(help="Install DeepSpeed for the tests of ours that need it.")] = True,
    trl: Annotated[Path | None, typer.Option(help="A checkout of TRL, whose trainers' tests are run, too.")] = None,
) -> None:
    """Run other projects' own tests without and with offloading, and compare the outcome of each."""
    console = Console()
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hf_offload-acceptance-") as folder:
        work = Path(folder)
        _pip("install", "--target", str(work / "extra"), "--no-deps", *NEEDED)
        suites = [Suite("accelerate", name, [f"tests/test_{name}.py"]) for name in ACCELERATE] + [
            Suite("peft", "custom_models", ["tests/test_custom_models.py"], PEFT)
        ]
        if trl is not None:
            suites += [Suite("trl", name, [f"tests/test_{name}_trainer.py"]) for name in TRL]
        suites = [suite for suite in suites if only is None or only in f"{suite.project} {suite.name}"]
        projects = sorted({suite.project for suite in suites})
        sources = {project: _source(project, work) for project in projects if project != "trl"}
        if trl is not None and "trl" in projects:
            sources["trl"] = trl.resolve()
            script = str(ROOT / "tests/acceptance/trl_hub.py")
            subprocess.run([sys.executable, script, str(trl), str(work / "trl")], check=True)
        for suite in suites:
            for kind in ("plain", "offloaded"):
                with console.status(f"{suite.project} {suite.name}, {kind}"):
                    _run(suite, kind, sources[suite.project], work)
            console.print(_line(suite), highlight=False)
        ours = _deepspeed(work, console) if deepspeed and only is None else True
    found = tables(only)
    (output / "acceptance.json").write_text(json.dumps([dataclasses.asdict(suite) for suite in suites], indent=1))
    (output / "torch_tables.json").write_text(json.dumps(found, indent=1))
    console.print(_table(suites), report(found))
    differences = [each for suite in suites for each in suite.differences]
    counts = (one for arms in found.values() for one in arms.values())
    differences += [text for one in counts for text in one if text.startswith("differs")]
    for difference in differences:
        console.print(f"[red]{escape(difference)}[/]", soft_wrap=True)
    console.print(f"wrote {output / 'acceptance.json'} and {output / 'torch_tables.json'}")
    silent = [project for project in sources if not sum(suite.packed for suite in suites if suite.project == project)]
    silent += [f"trl {suite.name}" for suite in suites if suite.project == "trl" and not suite.packed]
    if silent:
        console.print(f"[red]Nothing was packed in the tests of {', '.join(silent)}: offloading was not on.[/]")
    if silent or not ours or differences:
        raise typer.Exit(1)


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)


def _source(project: str, work: Path) -> Path:
    """The unpacked source distribution of the installed version."""
    version = importlib.metadata.version(project)
    _pip("download", "--no-deps", "--no-binary", ":all:", "--dest", str(work), f"{project}=={version}")
    with tarfile.open(work / f"{project}-{version}.tar.gz") as archive:
        archive.extractall(work, filter="data")
    (work / f"{project}-{version}" / "tests" / "__init__.py").touch()  # PEFT's import each other as a package
    return work / f"{project}-{version}"


def _run(suite: Suite, kind: str, source: Path, work: Path) -> None:
    report, count = work / "report.xml", work / "count"
    for path in (report, count):
        path.unlink(missing_ok=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/acceptance"), str(work / "extra")]),
        "HF_HUB_OFFLINE": "1",
        "OFFLOAD_ACCEPTANCE_COUNT": str(count),
    }
    if kind == "offloaded":
        tier = work / "tier"
        tier.mkdir(exist_ok=True)
        environment |= {
            "HF_OFFLOAD_AUTOLOAD": "1",
            "HF_OFFLOAD_TIER": "ssd",
            "HF_OFFLOAD_DIRECTORY": str(tier),
            "HF_OFFLOAD_MIN_BYTES": "0",
            "OFFLOAD_ACCEPTANCE_PEFT": "1" if suite.project == "peft" else "",
        }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        *suite.tests,
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
        f"--junitxml={report}",
    ]
    command += ["-k", suite.chosen] if suite.chosen else []
    command += ["-p", "offloaded"] if kind == "offloaded" else []
    if suite.project == "trl":
        environment["HF_HOME"] = str(work / "trl")
        command += ["-p", "trl_hub"]
    log = work / f"{suite.project}-{suite.name}-{kind}.log"
    with log.open("w") as file:
        subprocess.run(command, cwd=source, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False)
    outcomes = _outcomes(report) if report.is_file() else {"collection": log.read_text()[-500:]}
    setattr(suite, kind, outcomes)
    if kind == "offloaded" and count.is_file():
        suite.packed = count.stat().st_size


def _outcomes(report: Path) -> dict[str, str]:
    """Test -> passed, skipped, or the kind of its failure."""
    outcomes = {}
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        ends = [child for child in case if child.tag in ("failure", "error", "skipped")]
        message = (ends[0].get("message") or "").splitlines() if ends else []
        outcome = ends[0].tag if ends else "passed"
        if outcome in ("failure", "error"):
            outcome += f": {message[0].partition(':')[0] if message else ''}"
        outcomes[f"{case.get('classname')}::{case.get('name')}"] = outcome
    return outcomes


def _deepspeed(work: Path, console: Console) -> bool:
    """Run the tests of ours that need DeepSpeed, with one that is installed for them."""
    target = work / "deepspeed"
    with console.status("installing DeepSpeed"):
        _pip("install", "--target", str(target), "setuptools", "ninja", "py-cpuinfo")
        environment = os.environ | {"DS_BUILD_OPS": "0", "PYTHONPATH": str(target)}
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target), "--no-build-isolation"]
        subprocess.run([*command, "--no-deps", "deepspeed"], env=environment, check=True)
        _pip("install", "--target", str(target), "--no-deps", "hjson", "msgpack", "einops", "pydantic", "pydantic-core",
             "typing-inspection", "annotated-types", "tqdm", "nvidia-ml-py")  # fmt: skip
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(target)])
    with console.status("DeepSpeed"):
        tests = [sys.executable, "-m", "pytest", "-q", "-rs", str(ROOT / "tests/integration/test_deepspeed.py")]
        done = subprocess.run(tests, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    console.print(f"DeepSpeed, ours: {done.stdout.strip().splitlines()[-1]}", highlight=False)
    return done.returncode == 0


def _line(suite: Suite) -> str:
    failed = len(suite.plain) - suite.count("passed") - suite.count("skipped")
    return (
        f"{suite.project} {suite.name}: {suite.count('passed')} passed, {suite.count('skipped')} skipped, {failed} failed; "
        f"{len(suite.differences)} differ with offloading; {suite.packed} tensors packed"
    )


def _table(suites: list[Suite]) -> Table:
    table = Table(title="Other projects' own tests, without and with offloading")
    for name in ("project", "tests", "passed", "skipped", "failed", "differ", "packed"):
        table.add_column(name, justify="left" if name in ("project", "tests") else "right")
    for suite in suites:
        passed, skipped = suite.count("passed"), suite.count("skipped")
        failed = len(suite.plain) - passed - skipped
        numbers = (passed, skipped, failed, len(suite.differences), suite.packed)
        table.add_row(suite.project, suite.name, *map(str, numbers))
    return table


if __name__ == "__main__":
    typer.run(main)
