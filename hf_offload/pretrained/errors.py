"""Short errors for what cannot be loaded."""

import contextlib
from collections.abc import Iterator

from hf_offload.errors import OffloadConfigError, OffloadError

_LONGEST_REASON = 300
_OUT_OF_REACH = (
    "connect", "connection", "couldn't reach", "gated", "not a local folder", "not found", "offline", "resolve", "restricted",
    "unauthorized", "doesn't exist on the hub",
)  # fmt: skip
_HINTS = (
    (
        ("size mismatch", "mismatched", "ignore_mismatched_sizes"),
        " The checkpoint is of a model with other shapes: take the configuration that belongs to it.",
    ),
    (
        ("no such file", "does not appear to have a file named"),
        " A file of it is missing: was all of it copied or downloaded?",
    ),
    (
        ("dataset scripts are no longer supported",),
        " `datasets` runs no programs that come with a data set: take one whose rows are Parquet files, or convert it "
        "elsewhere and give the files as data.files.",
    ),
    (
        _OUT_OF_REACH,
        " Is the name right? Something gated needs `hf auth login` after its terms were accepted on its page. "
        "Without a network, download it elsewhere with `hf download`, and give the folder here instead of the name.",
    ),
)
"""Words in what was raised -> what to do about it."""


@contextlib.contextmanager
def loading(setting: str, name: str, hint: str = "") -> Iterator[None]:
    """Turn whatever the libraries raise for ``name`` into a configuration error: for a damaged file they may raise anything.

    ``hint`` says what to do about it; without one, the words of the error decide.
    """
    try:
        yield
    except OffloadError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, (AttributeError, LookupError)):
            reason = f"a file of it is damaged ({type(error).__name__}: {reason})"
        hint = hint or next((hint for words, hint in _HINTS if any(word in reason.lower() for word in words)), "")
        if len(reason) > _LONGEST_REASON:
            reason = reason[:_LONGEST_REASON].rpartition(" ")[0] + " ..."
        raise OffloadConfigError(f"{setting}: {name!r} cannot be loaded: {reason.rstrip('.')}.{hint}") from error
