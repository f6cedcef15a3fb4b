"""Offloading for scripts that do not mention it: every Accelerator offloads, a Trainer's too.

:mod:`hf_offload.run` switches this on for one script. With ``HF_OFFLOAD_AUTOLOAD=1``, plain ``accelerate launch`` does so,
and understands the section ``hf_offload_config`` of its file: PyTorch calls :func:`start` at the end of ``import torch``
(entry points of the group ``torch.backends``), in every process that has this package installed. Without the variable it
does nothing. With it, accelerate's reader of config files accepts the section and passes it on as variables, and in a
process that has such variables every Accelerator offloads.

Nothing is imported here before the script makes its first Accelerator, so that a script draws the same random numbers as
under plain Python: some modules draw from ``random`` while they are imported. For the same reason neither this module nor
what it imports may import rich or typer. No error here may break ``import torch``. Wrong settings, which only a process that
opted in can have, end it with one message.
"""

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from hf_offload.errors import OffloadError
    from hf_offload.integrations.accelerate import OffloadedAccelerator
    from hf_offload.settings.schema import OffloadConfig

logger = logging.getLogger(__name__)


def start() -> None:
    """Wait for accelerate, if the variable says so."""
    if os.environ.get("HF_OFFLOAD_AUTOLOAD"):
        _guarded(_wait_for_accelerate)


def _wait_for_accelerate() -> None:
    from hf_offload.settings.environment import AUTOLOAD_VARIABLE, is_on

    if is_on(AUTOLOAD_VARIABLE):
        _Wait(_accelerate_is_there)


class _Wait:
    """Calls ``then`` once accelerate has been imported. A finder that finds nothing: Python asks it before each import."""

    def __init__(self, then: Callable[[], None]):
        self._then = then
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]
        self.find_spec()

    def find_spec(self, *_: Any) -> None:
        # accelerate.accelerator is imported early by the package accelerate: the imports that follow come before a script
        # can make an Accelerator or accelerate can read a file.
        if hasattr(sys.modules.get("accelerate.accelerator"), "Accelerator") and self in sys.meta_path:
            self.end()
            self._then()

    def end(self) -> None:
        """Wait no longer."""
        if self in sys.meta_path:
            # Another list: Python may be going through this one, and would leave out the finder behind this.
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]


class switch_on:
    """Let every Accelerator that is made from now on offload as ``config`` says, until :meth:`off`.

    A script's own plugin or callback takes precedence.
    """

    def __init__(self, config: "OffloadConfig"):
        self._config = config
        self._made: list[OffloadedAccelerator] = []
        self._restore: Callable[[], None] = lambda: None
        self._wait = _Wait(self._wrap)

    def _wrap(self) -> None:
        accelerator_class = sys.modules["accelerate.accelerator"].Accelerator
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

    def report(self, together: bool = True) -> None:
        """Log what was offloaded through each of them, as ``OffloadedAccelerator.report`` does."""
        for made in self._made:
            made.report(together)

    def off(self) -> None:
        """Restore everything. Idempotent."""
        self._wait.end()
        self._restore()
        for made in self._made:
            made.detach()


def show_log() -> None:
    """Show the package's log in a script's process, unless it is shown already; that of other ranks from warnings on."""
    log = logging.getLogger("hf_offload")
    if log.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)-8s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    log.propagate = False


def exit_with(error: "OffloadError", before: str = "") -> NoReturn:
    """End the process with an error as one message, without a traceback, and with the error's exit code."""
    # Paths may hold bytes that no terminal shows.
    sys.stderr.write(f"{before}{error}\n".encode(errors="backslashreplace").decode())
    sys.exit(error.exit_code)


def exit_from_script(error: "OffloadError") -> NoReturn:
    """End the process with an error that the script has not caught, and the line of the script."""
    traceback, place = error.__traceback__, ""
    while traceback is not None:
        script = traceback.tb_frame.f_globals
        if script.get("__name__") == "__main__":
            place = f"{script.get('__file__')}, line {traceback.tb_lineno}: "
        traceback = traceback.tb_next
    exit_with(error, place)


def _accelerate_is_there() -> None:
    _guarded(_accept_section)
    _guarded(_offload_every_accelerator)


def _offload_every_accelerator() -> None:
    from hf_offload.settings.environment import settings_with

    config, found = settings_with({}, "The process")
    if not found:
        return
    import atexit

    show_log()
    sys.excepthook = functools.partial(_show_error, sys.excepthook)
    switch = switch_on(config)
    atexit.register(lambda: switch.report(together=False))  # some processes may have ended, by an error


def _show_error(
    others: Callable[..., Any], kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    from hf_offload.errors import OffloadError

    if isinstance(error, OffloadError):
        exit_from_script(error)
    others(kind, error, traceback)


def _accept_section() -> None:
    from accelerate.commands.config.config_args import BaseConfig

    from hf_offload.integrations.launch import take_section

    original = BaseConfig.process_config

    def process_config(config: dict[str, Any]) -> Any:
        with _one_message():
            os.environ.update(take_section(config, "the config file"))
        return original(config)

    BaseConfig.process_config = staticmethod(process_config)


def _guarded(work: Callable[[], None]) -> None:
    try:
        with _one_message():
            work()
    except Exception:
        logger.warning("hf_offload could not be loaded together with torch.", exc_info=True)


@contextlib.contextmanager
def _one_message() -> Iterator[None]:
    """End the process with the error in its settings, without a traceback: that would show how torch is imported."""
    from hf_offload.errors import OffloadError

    try:
        yield
    except OffloadError as error:
        exit_with(error, "hf_offload, which HF_OFFLOAD_AUTOLOAD switches on: ")
