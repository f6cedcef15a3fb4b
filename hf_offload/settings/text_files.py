"""The one way to read and to write a file of text."""

import codecs
import json
import os
from pathlib import Path
from typing import Any

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.shown import LONGEST, cropped

_BLOCK_BYTES = 1 << 20


def is_file(path: Path) -> bool:
    """Whether there is a file; False as well where the path cannot be looked up (names too long, links in a circle)."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Likewise for a folder."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def read_text(path: Path, what: str) -> str:
    """The content of ``path``, which ``what`` calls in messages ("The recipe").

    Raises :class:`~hf_offload.errors.OffloadConfigError` for a file that cannot be read or is not UTF-8 text.
    """
    check_text(path, what)
    text = path.read_bytes().decode("utf-8-sig")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def check_text(path: Path, what: str) -> None:
    """Raise as :func:`read_text` does, of a file of any size."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                if "\0" in decoder.decode(block):
                    raise OffloadConfigError(
                        f"{what} {cropped(str(path))} cannot be read: it holds NUL characters, as binary files and UTF-16 do."
                    )
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise OffloadConfigError(
            f"{what} {cropped(str(path))} cannot be read: it is not UTF-8 text ({error.reason})."
        ) from error
    except OSError as error:
        raise OffloadConfigError(f"{what} {cropped(str(path))} cannot be read: {reason_of(error)}.") from error


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` to a temporary file and rename it to ``path``, which is therefore complete whenever it exists.

    Raises ``OSError`` that names ``path``; nothing is left behind then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    target = Path(os.path.realpath(path))
    is_device = target.exists() and not target.is_file()  # such as /dev/stdout
    unfinished = target if is_device else target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_text(text, encoding="utf-8")
        if not is_device:
            unfinished.replace(target)
    except OSError as error:
        if not is_device:
            unfinished.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def parse_json(text: str, where: str) -> Any:
    """What the JSON ``text`` says. Raises :class:`~hf_offload.errors.OffloadConfigError` that begins with ``where``."""
    try:
        return json.loads(text)
    except RecursionError:
        problem = "it is nested too deeply"
    except ValueError as error:  # numbers of thousands of digits, too
        problem = cropped(str(error))
    raise OffloadConfigError(f"{where} is not valid JSON: {problem}.")


def reason_of(error: Exception, most: int = LONGEST) -> str:
    """Why the system or a library refuses something: of the system's errors without the path."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = cropped(str(error), most)
    named = isinstance(error, (LookupError, AttributeError)) or not text  # what they say is the key alone
    return f"{type(error).__name__}: {text}".removesuffix(": ") if named else text
