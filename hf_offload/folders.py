"""Where the package keeps what it has learned about a machine, among the user's files."""

import os
from pathlib import Path


def user_folder(variable: str, usual: str) -> Path:
    """The package's folder in the one that ``variable`` names, or else in ``usual``, such as ``~/.cache``.

    Raises ``OSError`` for a user without a home folder, as containers have: HOME is not set, and no account is known.
    """
    try:
        return Path(os.environ.get(variable) or usual).expanduser() / "hf_offload"
    except RuntimeError as error:
        raise FileNotFoundError(f"{error} Set {variable} to a folder that can be written to") from error
