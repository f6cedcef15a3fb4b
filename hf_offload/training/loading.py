"""What cannot be loaded, told in a few words."""

import contextlib
from collections.abc import Iterator

from hf_offload.errors import OffloadConfigError

_LONGEST_REASON = 300
_OUT_OF_REACH = (
    "connect", "connection", "couldn't reach", "gated", "not a local folder", "not found", "offline", "resolve", "restricted",
    "unauthorized", "doesn't exist on the hub",
)  # fmt: skip


@contextlib.contextmanager
def loading(setting: str, name: str, *also: type[Exception]) -> Iterator[None]:
    """Turn what transformers and the hub raise for ``name``, and ``also`` other errors, into a configuration error."""
    kinds: tuple[type[Exception], ...] = (OSError, ValueError, TypeError, ImportError, *also)
    try:
        yield
    except OffloadConfigError:
        raise
    except kinds as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if len(reason) > _LONGEST_REASON:
            reason = reason[:_LONGEST_REASON].rpartition(" ")[0] + " ..."
        hint = ""
        if any(word in reason.lower() for word in _OUT_OF_REACH):
            hint = (
                " Is the name right? Something gated needs `hf auth login` after its terms were accepted on its page. "
                "Without a network, download it elsewhere with `hf download`, and give the folder here instead of the name."
            )
        raise OffloadConfigError(f"{setting}: {name!r} cannot be loaded: {reason.rstrip('.')}.{hint}") from error
