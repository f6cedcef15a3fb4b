"""Which version of a package is installed."""

import platform
from collections.abc import Iterable
from importlib import metadata


def find_versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Installed versions of Python and of ``packages``; ``None`` for what is not, as in a checkout that is only run."""
    return {"python": platform.python_version(), **{package: _version(package) for package in packages}}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
