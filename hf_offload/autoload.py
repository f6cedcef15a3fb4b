"""With ``HF_OFFLOAD_AUTOLOAD=1``: plain ``accelerate launch`` understands the section ``hf_offload_config`` of its file.

PyTorch calls :func:`start` at the end of ``import torch`` (entry points of the group ``torch.backends``), in every process
that has this package. Without the variable it does nothing. With it, accelerate's modules are watched while they are
imported: the one that reads config files learns the section and hands it on as variables; in a process that has such
variables, every Accelerator offloads.

Nothing is imported here that is not needed, and nothing that goes wrong here may stop ``import torch``. Wrong settings, which
only a process that asked for this can have, end it with one message.
"""

import contextlib
import importlib.machinery
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

_READS_FILES = "accelerate.commands.config.config_args"
_HAS_ACCELERATOR = "accelerate.accelerator"


def start() -> None:
    """Watch accelerate's modules, if the variable says so."""
    try:
        if os.environ.get("HF_OFFLOAD_AUTOLOAD"):
            from hf_offload.settings.environment import AUTOLOAD_VARIABLE, is_on

            with _one_message():
                if is_on(AUTOLOAD_VARIABLE):
                    sys.meta_path.insert(0, _Watch())
    except Exception:
        logger.warning("hf_offload could not be loaded together with torch.", exc_info=True)


class _Watch:
    """A finder of modules that finds none itself. It leaves when its work is done."""

    def __init__(self) -> None:
        self._waiting = True

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Called before any module is imported."""
        if self._waiting and hasattr(sys.modules.get(_HAS_ACCELERATOR), "Accelerator"):
            # Imported by now, or just being imported when torch was: it is what accelerate imports first.
            self._waiting = False
            _guarded(_offload_every_accelerator)
        if name != _READS_FILES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            load: Any = spec.loader.exec_module

            def execute(module: ModuleType) -> None:
                load(module)
                _guarded(lambda: _understand_section(module))

            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


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


def _understand_section(module: ModuleType) -> None:
    from hf_offload.integrations.launch import take_section

    original = module.BaseConfig.process_config

    def process_config(config: dict[str, Any]) -> Any:
        with _one_message():
            os.environ.update(take_section(config, "the config file"))
        return original(config)

    module.BaseConfig.process_config = staticmethod(process_config)


def _guarded(work: Any) -> None:
    try:
        with _one_message():
            work()
    except Exception:
        logger.warning("hf_offload could not be loaded together with torch.", exc_info=True)


@contextlib.contextmanager
def _one_message() -> Iterator[None]:
    """Wrong settings end the process with what is wrong with them, and no traceback: it would show how torch is imported."""
    from hf_offload.errors import OffloadError

    try:
        yield
    except OffloadError as error:
        sys.exit(f"hf_offload, which HF_OFFLOAD_AUTOLOAD switches on: {error}")
