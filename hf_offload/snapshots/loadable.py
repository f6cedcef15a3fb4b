"""Whether a resume could read what a snapshot holds: it loads tensors, numbers and texts, and runs no code of a file."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hf_offload.errors import SnapshotError

_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


@contextlib.contextmanager
def numpy_allowed() -> Iterator[None]:
    """What NumPy's generators have in their states is loaded, too, as a Trainer loads it."""
    from transformers.trainer_pt_utils import safe_globals

    with safe_globals():
        yield


def check_loadable(what: str, content: Any) -> None:
    """Raise :class:`~hf_offload.errors.SnapshotError` with the entry of ``what`` that ``torch.load(weights_only=True)``
    refuses. No tensor is read or copied.
    """
    for entry, part in _unusual("", content):
        if not _is_loadable(part):
            kind = type(part)
            raise SnapshotError(
                f"{what}{entry} is a {kind.__module__}.{kind.__qualname__}, which torch.load(weights_only=True) does not "
                "load, so a resume could not: let it be a tensor, or a number, text, list or dict of Python."
            )


def _unusual(path: str, content: Any) -> Iterator[tuple[str, Any]]:
    """All parts that are not known to be loaded, each with its place."""
    kind = type(content)
    if kind in _PLAIN or (kind in (Tensor, torch.nn.Parameter) and not content.__dict__):
        return
    if kind is dict:
        for key, value in content.items():
            if type(key) not in _PLAIN:
                yield f"{path}: its key {key!r}", key
            yield from _unusual(f"{path}[{key!r}]", value)
    elif kind in (list, tuple):
        for number, value in enumerate(content):
            yield from _unusual(f"{path}[{number}]", value)
    else:
        yield path, content


def _is_loadable(content: Any) -> bool:
    with open(os.memfd_create("hf_offload-check", os.MFD_CLOEXEC), "w+b") as file:  # noqa: PTH123  it has no path
        try:
            with torch.serialization.skip_data():  # the file has holes where tensors would be
                torch.save(content, file)
            file.seek(0)
            torch.load(file, map_location="meta", weights_only=True)
        except Exception:  # pickle calls methods of what it is given, which may raise anything
            return False
    return True
