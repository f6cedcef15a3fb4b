"""``hf-offload doctor``."""

import dataclasses
import json as json_format
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from hf_offload.allocator import best_allocator
from hf_offload.cli.console import (
    clear_errors,
    loading_torch,
    make_table,
    print_table,
    progress_bar,
    spinner,
    write,
    write_json,
)
from hf_offload.cli.options import Json
from hf_offload.errors import EXIT_PROBLEM
from hf_offload.settings.sizes import format_bytes

if TYPE_CHECKING:
    from hf_offload.bench.results import Results, Row
    from hf_offload.planning.machine import Machine, Rate

_CHECKED = "baseline,ours:ram,ours:ssd"
# For --check: small enough for a CPU; with odd sizes, so that no tensor fills whole pages.
_SMALL = (
    "model.config.n_layer=3", "model.config.n_embd=96", "model.config.n_head=3", "model.config.vocab_size=1031",
    "data.sequence_length=127", "training.per_device_train_batch_size=5", "training.max_steps=4",
    "training.full_determinism=true", "offload.min_bytes=1",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Effect:
    """Something that reaches beyond the objects a run creates.

    ``changes`` says for each way to offload what differs in the process.
    """

    when: str
    what: str
    changes: dict[str, tuple[str, ...]]


_RUNS = ("arguments", "memory mode", "callback", "plugin", "plain loop", "auto", "hf_offload.run")
_STATE = ("optimizer", "weights")

# All of them: tests/integration/test_effects.py compares the state of processes with this list.
EFFECTS = (
    Effect(
        "import of the training arguments",
        "one entry in transformers' table of reporters, so that Trainers find the callback",
        dict.fromkeys(
            ("arguments", "memory mode"), ("transformers.integrations.integration_utils.INTEGRATION_TO_CALLBACK",)
        ),
    ),
    Effect(
        "disk tier or snapshots, on first use",
        "one os.register_at_fork() handler, so that no direct read runs during a fork, and children do not keep the "
        "connection to a snapshot process",
        dict.fromkeys((*_RUNS, *_STATE, "snapshots"), ("fork handlers",)),
    ),
    Effect(
        "CPU, on first use",
        "mallopt() keeps freed memory in glibc's heap; a preloaded allocator is left alone",
        dict.fromkeys(_RUNS, ("mallopt",)),
    ),
)

# The same, in a process that a command starts to run a script.
COMMANDS = (
    Effect(
        "command launch, python -m hf_offload.run",
        "Accelerator.__init__ is wrapped, so that every one offloads, and the package's log is shown",
        {"hf_offload.run": ("accelerate.accelerator.Accelerator.__init__", "logging.hf_offload")},
    ),
)

WITHIN_A_STEP = (
    "forward of a model that offloads, or a block of offload_activations: hooks for saved tensors, in its thread",
    "weights or state that leave memory, while bytes move or an update is computed: autocast, modes, transforms and "
    "traces are switched off in its thread, and PyTorch's default dtype is that of the step",
    "bookkeeping of the engine, microseconds at a time: handlers of signals such as Ctrl-C's run right after it",
    "tier auto, in a step that is measured: hooks around every optimizer's step, and a dispatch mode that counts tensors",
)
PROCESSES_OF_COMMANDS = (
    *(f"{effect.when}: {effect.what}" for effect in COMMANDS),
    "command launch: when it ends, the kernel sends its processes SIGTERM, and half a minute later they are killed",
    "commands train, launch and bench on a CPU: processes may run with a better allocator, by LD_PRELOAD",
)
FILES = ("tier auto and command plan: what this machine was measured to do, in ~/.cache/hf_offload",)
_HEADINGS = {
    "process-wide effects": tuple(f"{effect.when}: {effect.what}" for effect in EFFECTS),
    "effects within a step": WITHIN_A_STEP,
    "effects on processes that commands start": PROCESSES_OF_COMMANDS,
    "files that are kept": FILES,
}


def doctor(
    directory: Annotated[
        list[Path] | None, typer.Option("--directory", "-d", help="Where offload files would go; may be repeated.")
    ] = None,
    json: Json = False,
    measure: Annotated[
        bool, typer.Option(help="Write and read 256 MiB in each directory, also at once, to measure it.")
    ] = True,
    check: Annotated[
        bool, typer.Option("--check", help="Try offloading on this machine's device, in about a minute.")
    ] = False,
) -> None:
    """Show what this machine offers for offloading: memory, drives, direct I/O, versions. Or try it, with --check."""
    if check:
        _check(directory or [Path.cwd()], json)
        return
    with clear_errors():
        with loading_torch():
            from hf_offload.planning.machine import SAMPLE_BYTES, probe_machine

        with spinner("Measuring the machine"):
            machine = probe_machine(directory or [Path.cwd()], sample_bytes=SAMPLE_BYTES if measure else 0)
    if json:
        effects = {heading.replace("-", " ").replace(" ", "_"): lines for heading, lines in _HEADINGS.items()}
        write_json(dataclasses.asdict(machine) | effects)
        return
    _show(machine)


def _check(directories: list[Path], json: bool) -> None:
    """Train a small model without offloading and with each tier, and compare losses and weights bit by bit."""
    with clear_errors(), tempfile.TemporaryDirectory() as folder, progress_bar() as progress:
        from hf_offload.bench.steps import plan_steps, run_steps  # slow: it loads torch
        from hf_offload.bench.strategies import parse_strategies
        from hf_offload.planning.machine import default_device
        from hf_offload.storage.file_systems import check_directory

        for one in directories:
            check_directory(one)
        where = json_format.dumps([str(one.resolve()) for one in directories])
        plan = plan_steps(
            "gpt2-small", [*_SMALL, f"offload.directory={where}"], parse_strategies(_CHECKED), output=Path(folder),
            allocator="auto",
        )  # fmt: skip
        task = progress.add_task("starting", total=plan.cell_count)
        results = run_steps(plan, lambda name, done, _: progress.update(task, completed=done, description=escape(name)))
        if results.interrupted:
            raise KeyboardInterrupt
        checks, device = [_checked(row, results) for row in results.rows()], str(default_device())
    passed = all(check["passed"] for check in checks)
    if json:
        write_json({"device": device, "passed": passed, "checks": checks})
    else:
        table = make_table(f"Offloading on {device}", ("", "", ""), left=("",))
        for check in checks:
            verdict = "[green]passed[/]" if check["passed"] else "[bold red]failed[/]"
            table.add_row(verdict, check["name"], escape(check["detail"]))
        print_table(table)
        if passed:
            write("Everything works on this device.", "green")
        else:
            write(
                "Do not train with it here. Please report the lines above, with `hf-offload doctor --json`.", "bold red"
            )
    if not passed:
        raise typer.Exit(EXIT_PROBLEM)


def _checked(row: "Row", results: "Results") -> dict[str, Any]:
    """What came of one way to train, in words."""
    from hf_offload.bench.cell import DONE
    from hf_offload.reports.formats import REFERENCE

    reports = results.reports(row.strategy).values()
    moved = sum((report.offload or {}).get("offloaded_bytes", 0) for report in reports)
    passed, detail = False, row.ended
    if row.outcome == DONE and row.strategy == REFERENCE:
        passed, detail = True, "trained without offloading, which the others are compared with"
    elif row.outcome == DONE and row.differs:
        detail = "losses or weights differ from those without offloading"
    elif row.outcome == DONE and not moved:
        detail = "nothing was moved"
    elif row.outcome == DONE:
        same = "are identical" if row.losses_identical else "cannot be compared: without offloading they vary here"
        passed, detail = True, f"losses and weights {same}; {format_bytes(moved)} were moved"
    return {"name": row.strategy, "passed": passed, "detail": detail}


def _show(machine: "Machine") -> None:
    device = machine.device
    table = make_table("This machine", ("", ""), left=("",))
    free = f"{_size(device.free_bytes)} of {_size(device.total_bytes)} free"
    table.add_row("device", escape(f"{device.name} ({device.type}): {free}"))
    available = f"{_size(machine.ram_available_bytes)} of {_size(machine.ram_total_bytes)} available"
    table.add_row("RAM", f"{available}, {machine.cpu_count} CPU cores")
    for drive in machine.drives:
        way = "direct I/O" if drive.direct_io.usable else "through the page cache"
        of_drive = (
            f"{drive.file_system}, {_size(drive.free_bytes)} free",
            f"write {_rate(drive.write)}, read {_rate(drive.read)}, both at once {_rate(drive.both)}",
            f"{way}: {drive.direct_io.reason}",
        )
        table.add_row(escape(str(drive.directory)), escape("\n".join(of_drive)))
    answer = "yes" if machine.gpu_direct.usable else "no"
    table.add_row("GPUDirect", escape(f"{answer}: {machine.gpu_direct.reason}"))
    allocator = machine.allocator
    settings = [f"{name}={value}" for name, value in allocator.environment.items()]
    huge_pages = f"transparent huge pages {allocator.transparent_huge_pages}"
    best = f"train, launch and bench start with {best_allocator()}"
    table.add_row("CPU allocator", escape(", ".join([allocator.name, huge_pages, *settings, best])))
    table.add_row("versions", ", ".join(f"{name} {version or '-'}" for name, version in machine.versions.items()))
    for heading, lines in _HEADINGS.items():
        table.add_row(heading, "\n".join(lines))
    print_table(table)


def _size(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else format_bytes(nbytes)


def _rate(rate: "Rate") -> str:
    if rate.bytes_per_s is None:
        return f"unknown ({rate.reason})"
    return f"{format_bytes(rate.bytes_per_s)}/s ({rate.source})"
