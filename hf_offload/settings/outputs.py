"""Checks of output paths, before the work rather than after it."""

import os
import tempfile
from pathlib import Path

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.shown import shown


def check_output_folder(path: str | os.PathLike[str], option: str, *files: str) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` that names ``option`` if no files can be written to ``path``, or
    not those called ``files``.

    Nothing is created: what is missing of the path is only checked for whether it could be.
    """
    _refuse(path, option, _problem(path, is_file=False), "name a folder in which you may create files.")
    for name in files:
        problem = _problem(Path(path) / name, is_file=True)
        advice = "remove it, or name another folder."
        _refuse(path, option, problem and f"{name} is to lie in it, and {problem}", advice)


def check_output_file(path: str | os.PathLike[str], option: str, *endings: str) -> None:
    """The same of a file, and of the folder it is to lie in. Its name ends in one of ``endings``, if any are given."""
    _refuse(path, option, _problem(path, is_file=True), "name a file that can be written.")
    if endings and Path(path).suffix.lower() not in endings:
        raise OffloadConfigError(
            f"{option}={shown(os.fspath(path))} is not written in that format: end the name in {' or '.join(endings)}."
        )


def _refuse(path: str | os.PathLike[str], option: str, problem: str | None, advice: str) -> None:
    if problem is not None:
        raise OffloadConfigError(f"{option}={shown(os.fspath(path))} cannot be written to: {problem}; {advice}")


def _problem(path: str | os.PathLike[str], is_file: bool) -> str | None:
    """What stands in the way."""
    try:
        there = Path(os.path.realpath(path))
        if is_file and there.is_dir():
            return "it is a folder"
        if is_file and there.exists():
            with there.open("r+b"):
                return None
        missing: list[str] = []
        while not there.is_dir():
            if os.path.lexists(there):  # after realpath(), a link that is left leads in a circle
                return f"{_name(there)} is not a folder" if there.exists() else f"{_name(there)} is a link to itself"
            missing.append(there.name)
            there = there.parent
        longest = os.pathconf(there, "PC_NAME_MAX")
        if any(len(os.fsencode(name)) > longest for name in missing):
            return f"a name in it has more than {longest} bytes"
        with tempfile.TemporaryFile(dir=there):  # permissions, read-only and full file systems
            return None
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:  # a null character
        return str(error)


def _name(path: Path) -> str:
    return shown(str(path))
