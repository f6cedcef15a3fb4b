"""With ``HF_OFFLOAD_AUTOLOAD=1``: plain ``accelerate launch`` understands the section ``hf_offload_config`` of its file.

PyTorch calls :func:`start` at the end of ``import torch`` (entry points of the group ``torch.backends``), in every process
that has this package installed. Without the variable it does nothing. With it, a finder on ``sys.meta_path`` waits until
accelerate has been imported and is then removed: accelerate's reader of config files accepts the section and passes it on as
variables, and in a process that has such variables every Accelerator offloads.

Nothing unneeded is imported here, and no error here may break ``import torch``. Wrong settings, which only a process that
opted in can have, end it with one message.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

logger = logging.getLogger(__name__)


def start() -> None:
    """Wait for accelerate, if the variable says so."""
    if os.environ.get("HF_OFFLOAD_AUTOLOAD"):
        _guarded(_wait_for_accelerate)


def _wait_for_accelerate() -> None:
    from hf_offload.settings.environment import AUTOLOAD_VARIABLE, is_on

    if is_on(AUTOLOAD_VARIABLE):
        sys.meta_path.insert(0, _Wait())


class _Wait:
    """A finder that finds nothing. Python asks it before it imports a module, which is how it sees what is there by then."""

    def find_spec(self, *_: Any) -> None:
        # torch is imported by accelerate.accelerator, which is itself imported early by the package accelerate: the imports
        # that follow come before a script can make an Accelerator or accelerate can read a file.
        if hasattr(sys.modules.get("accelerate.accelerator"), "Accelerator") and self in sys.meta_path:
            sys.meta_path.remove(self)  # type: ignore[arg-type]
            _guarded(_accept_section)
            _guarded(_offload_every_accelerator)


def _offload_every_accelerator() -> None:
    from hf_offload.settings.environment import settings_from

    if not settings_from():
        return
    import atexit

    from hf_offload.cli.console import show_log
    from hf_offload.integrations.accelerate import OffloadPlugin, switch_on

    show_log(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    switch = switch_on(OffloadPlugin())
    atexit.register(lambda: switch.report(together=False))  # some processes may have ended, by an error


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
        sys.exit(f"hf_offload, which HF_OFFLOAD_AUTOLOAD switches on: {error}")
