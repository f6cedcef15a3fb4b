"""One cell of a benchmark: a training run in a process of its own.

The parent writes what to run into a file, :class:`CellSpec`; ``python -m hf_offload.bench.cell FILE`` runs it and leaves
a :class:`CellResult`, also when the run fails. A cell can be repeated by hand with the same command.
"""

import contextlib
import dataclasses
import json
import logging
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_offload.bench.strategies import find_strategy
from hf_offload.errors import OffloadConfigError
from hf_offload.parents import bound
from hf_offload.settings.sizes import format_bytes
from hf_offload.settings.text_files import write_whole
from hf_offload.training.report import TrainingReport, describe_model
from hf_offload.training.run import run_recipe

DONE = "done"
OUT_OF_MEMORY = "out of memory"
CRASHED = "crashed"
NOT_INSTALLED = "not installed"
INTERRUPTED = "interrupted"

_EXIT_CODES = {DONE: 0, INTERRUPTED: 130}
_LONGEST_ERROR = 300
_END_S = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class CellSpec:
    """What a child runs. ``base`` is the path of its files without their endings."""

    recipe: str
    overrides: tuple[str, ...]
    strategy: str
    base: str
    measure: bool = True
    memory_limit_bytes: int | None = None
    """Of the accelerator's memory, what PyTorch may take: stands in for a smaller card."""

    @property
    def spec_path(self) -> Path:
        """This, as JSON."""
        return Path(f"{self.base}.spec.json")

    @property
    def result_path(self) -> Path:
        """The result, as JSON."""
        return Path(f"{self.base}.json")

    @property
    def log_path(self) -> Path:
        """All output of the child."""
        return Path(f"{self.base}.log")

    @classmethod
    def read(cls, path: Path) -> "CellSpec":
        """Read what :func:`run_cell` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(**(values | {"overrides": tuple(values["overrides"])}))


@dataclasses.dataclass
class CellResult:
    """How a cell ended, and its report if it has one."""

    outcome: str
    error: str | None = None
    """One line."""
    model: str | None = None
    """Known as soon as the model is built."""
    report: TrainingReport | None = None

    def write(self, path: Path) -> None:
        """Write this as JSON; the file is complete or not there."""
        write_whole(path, json.dumps(dataclasses.asdict(self), indent=1, default=str) + "\n")

    @classmethod
    def read(cls, path: Path) -> "CellResult":
        """Read what :meth:`write` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        report = values.pop("report")
        return cls(**values, report=None if report is None else TrainingReport(**report))


def run_cell(spec: CellSpec, environment: Mapping[str, str]) -> CellResult:
    """Run ``spec`` in a process of its own and say how it ended.

    Ctrl-C ends the child, too, and raises ``KeyboardInterrupt``. Whatever else ends this process ends the child.
    """
    strategy = find_strategy(spec.strategy)
    if not strategy.is_installed:
        return CellResult(NOT_INSTALLED, f"{strategy.package} is not installed")
    write_whole(spec.spec_path, json.dumps(dataclasses.asdict(spec), indent=1) + "\n")
    spec.result_path.unlink(missing_ok=True)
    command = bound([sys.executable, "-m", "hf_offload.bench.cell", str(spec.spec_path)])
    with spec.log_path.open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, env=dict(environment), stdout=log, stderr=subprocess.STDOUT)
        try:
            code = process.wait()
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(timeout=_END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
    if code == _EXIT_CODES[INTERRUPTED]:
        # A terminal sends Ctrl-C to the child as well, and the child may be faster.
        raise KeyboardInterrupt
    if spec.result_path.is_file():
        return CellResult.read(spec.result_path)
    if code == -signal.SIGKILL:
        return CellResult(OUT_OF_MEMORY, "killed with SIGKILL, as the kernel does when memory runs out")
    return CellResult(CRASHED, f"ended with code {code} and without a result; its output is in {spec.log_path}")


def main() -> None:
    """The child: run the cell whose file is the only argument."""
    logging.basicConfig(level=logging.INFO)
    spec = CellSpec.read(Path(sys.argv[1]))
    result = execute(spec)
    result.write(spec.result_path)
    sys.exit(_EXIT_CODES.get(result.outcome, 1))


def execute(spec: CellSpec) -> CellResult:
    """Run ``spec`` in this process; whatever goes wrong becomes part of the result."""
    result = CellResult(CRASHED)
    try:
        result.report = _train(spec, result)
        result.outcome = DONE if result.report.completed else INTERRUPTED
    except KeyboardInterrupt:
        result.outcome = INTERRUPTED
    except Exception as error:  # that of a peer is a finding
        traceback.print_exc()
        result.outcome = OUT_OF_MEMORY if is_out_of_memory(error) else CRASHED
        text = " ".join((str(error).strip() or "no message").splitlines()[0].split())
        short = text if len(text) <= _LONGEST_ERROR else f"{text[: _LONGEST_ERROR - 3]}..."
        result.error = f"{type(error).__name__}: {short}"
    return result


def _train(spec: CellSpec, result: CellResult) -> TrainingReport:
    strategy = find_strategy(spec.strategy)
    recipe = strategy.load(spec.recipe, spec.overrides)
    if spec.memory_limit_bytes is not None:
        limit_memory(spec.memory_limit_bytes)

    def around_step(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        result.model = describe_model(model)
        return contextlib.nullcontext() if strategy.around_step is None else strategy.around_step(model)

    return run_recipe(recipe, measure=spec.measure, save=False, evaluate=False, around_step=around_step)


def require_memory_limit() -> None:
    """Raise :class:`OffloadConfigError` where no memory limit can be set."""
    if not torch.cuda.is_available():
        raise OffloadConfigError(
            "A memory limit, which simulates a smaller GPU, needs a CUDA device, and this machine has none."
        )


def limit_memory(nbytes: int) -> None:
    """Let PyTorch's allocator take at most ``nbytes`` of the current CUDA device's memory."""
    require_memory_limit()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    if nbytes > total:
        raise OffloadConfigError(f"memory limit {format_bytes(nbytes)}: the device has only {format_bytes(total)}.")
    torch.cuda.set_per_process_memory_fraction(nbytes / total)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory of any kind running out is what ``error``, or what it was raised from, is about."""
    while error is not None:
        text = str(error)
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        # Pinned memory on an accelerator, and any memory on a CPU, have no class of their own.
        if isinstance(error, RuntimeError) and ("CUDA error: out of memory" in text or "DefaultCPUAllocator" in text):
            return True
        error = error.__cause__ or error.__context__
    return False


if __name__ == "__main__":
    main()
