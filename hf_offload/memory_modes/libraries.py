"""Libraries that only some memory modes need."""

import importlib
from typing import Any

from hf_offload.errors import OffloadConfigError


def load_library(name: str, mode: str, install: str) -> Any:
    """The module ``name``.

    Raises :class:`~hf_offload.errors.OffloadConfigError` with what to ``install`` for ``mode`` if it is missing.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise OffloadConfigError(f"memory_mode={mode!r} needs {package}: pip install {install}.") from error
