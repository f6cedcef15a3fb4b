"""Run a training script that knows nothing of this package, with offloading::

    python -m hf_offload.run train.py --epochs 3
    HF_OFFLOAD_TIER=ssd accelerate launch --config_file c.yaml -m hf_offload.run train.py --epochs 3

Whatever the script prepares with an ``Accelerator``, its own or the Trainer's, is offloaded as the variables
``HF_OFFLOAD_*`` say (:mod:`hf_offload.settings.environment`). ``-m`` in front of a name runs a module. ``hf-offload launch``
starts its processes with this module.

Nothing of ours is imported before the script makes its first Accelerator, beyond what reads the settings, so that a script
draws the same random numbers as under plain Python: some modules draw from ``random`` while they are imported. For the same
reason neither this module nor what it imports may import rich or typer.
"""

import builtins
import functools
import importlib.util
import logging
import os
import runpy
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hf_offload.errors import OffloadConfigError, OffloadError
from hf_offload.parents import end_with_parent
from hf_offload.settings.environment import settings_with
from hf_offload.settings.schema import OffloadConfig

if TYPE_CHECKING:
    from hf_offload.integrations.accelerate import OffloadedAccelerator

logger = logging.getLogger("hf_offload.run")

_COMMAND = "python -m hf_offload.run"
_USAGE = f"Usage: {_COMMAND} [-m] SCRIPT [ARGUMENTS]..."


def main() -> None:
    """Run what the command line names, as ``python`` would, with offloading switched on."""
    end_with_parent()
    arguments = sys.argv[1:]
    if arguments[:1] in (["-h"], ["--help"]):
        sys.stdout.write(f"{_USAGE}\n\n{__doc__}\n")
        return
    is_module = arguments[:1] == ["-m"]
    program, *rest = arguments[is_module:] or [""]
    try:
        config = _checked(program, is_module)
    except OffloadError as error:
        _exit_with(error)
    _show_log()
    switch = switch_on(config)
    sys.argv = [program, *rest]
    try:
        if is_module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            _run_file(program)
    except OffloadError as error:
        _exit_with(error, _line_of_script(error))
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    if not switch.offloaded_models:
        logger.warning(
            "Nothing was offloaded: %s prepared no model for training with an Accelerator or a Trainer. In a loop of "
            "plain PyTorch, use hf_offload.offload_activations().",
            program,
        )
    switch.report()
    switch.off()


def _checked(program: str, is_module: bool) -> OffloadConfig:
    if not program:
        raise OffloadConfigError(f"There is nothing to run. {_USAGE}")
    if is_module and importlib.util.find_spec(program.partition(".")[0]) is None:
        raise OffloadConfigError(f"{_COMMAND}: no module named {program}")
    if not is_module and not Path(program).is_file():
        raise OffloadConfigError(f"{_COMMAND}: no such file: {program}")
    return settings_with({}, "The process")[0]


def _run_file(program: str) -> None:
    """As ``python program``: unlike :mod:`runpy`, with the name of the file as given in ``sys.argv`` and whole in
    ``__file__``, and with a module that stays until the process ends.
    """
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(program).resolve().parent)
    script = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(script).update(__file__=str(Path(program).absolute()), __builtins__=builtins)
    exec(compile(Path(program).read_bytes(), program, "exec"), vars(script))


class switch_on:
    """Let every Accelerator that is made from now on offload as ``config`` says, until :meth:`off`.

    accelerate has neither callbacks nor entry points for that, so the constructor is wrapped, in a process that this module
    owns. A script's own plugin or callback takes precedence.

    A finder of modules that finds nothing: Python asks it before each import, so that it knows when accelerate is there.
    """

    def __init__(self, config: OffloadConfig):
        self._config = config
        self._made: list[OffloadedAccelerator] = []
        self._restore: Callable[[], None] = lambda: None
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]
        self.find_spec()

    def find_spec(self, *_: Any) -> None:
        # The package accelerate imports accelerate.accelerator early: other imports follow before a script can make an
        # Accelerator.
        accelerator_class = getattr(sys.modules.get("accelerate.accelerator"), "Accelerator", None)
        if accelerator_class is not None and self in sys.meta_path:
            self._end_wait()
            self._wrap(accelerator_class)

    def _end_wait(self) -> None:
        if self in sys.meta_path:
            # Another list: Python may be going through this one, and would leave out the finder behind this.
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]

    def _wrap(self, accelerator_class: Any) -> None:
        original = accelerator_class.__init__

        @functools.wraps(original)
        def make(accelerator: Any, *args: Any, **kwargs: Any) -> None:
            original(accelerator, *args, **kwargs)
            from hf_offload.integrations.accelerate import offload_by_environment

            made = offload_by_environment(accelerator, self._config)
            if made is not None:
                self._made.append(made)

        def restore() -> None:
            if accelerator_class.__init__ is make:  # otherwise another library has wrapped it since
                accelerator_class.__init__ = original

        accelerator_class.__init__ = make
        self._restore = restore

    @property
    def offloaded_models(self) -> int:
        """How many models have been offloaded so far."""
        return sum(made.offloaded_models for made in self._made)

    def report(self) -> None:
        """Log what was offloaded through each of them, as ``OffloadedAccelerator.report`` does."""
        for made in self._made:
            made.report()

    def off(self) -> None:
        """Restore everything. Idempotent."""
        self._end_wait()
        self._restore()
        for made in self._made:
            made.detach()


def _show_log() -> None:
    """Show the package's log in a script's process, unless it is shown already; that of other ranks from warnings on."""
    log = logging.getLogger("hf_offload")
    if log.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)-8s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    log.propagate = False


def _exit_with(error: OffloadError, place: str = "") -> NoReturn:
    """End the process with an error as one message, without a traceback, and with the error's exit code."""
    # Paths may hold bytes that no terminal shows.
    sys.stderr.write(f"{place}{error}\n".encode(errors="backslashreplace").decode())
    sys.exit(error.exit_code)


def _line_of_script(error: OffloadError) -> str:
    """The line of the script that an error came through which the script has not caught."""
    traceback, place = error.__traceback__, ""
    while traceback is not None:
        script = traceback.tb_frame.f_globals
        if script.get("__name__") == "__main__":
            place = f"{script.get('__file__')}, line {traceback.tb_lineno}: "
        traceback = traceback.tb_next
    return place


if __name__ == "__main__":
    main()
