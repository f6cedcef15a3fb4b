"""The state of a parameter as ``state_dict`` returns it where what is on a drive is kept there."""

from typing import Any

from torch import Tensor

from hf_offload.optimizers.streamed.parts import is_of_elements, own
from hf_offload.optimizers.streamed.record import KeptPart, Record
from hf_offload.storage.kept import Kept, KeptRange
from hf_offload.storage.stored import as_bytes


def kept_state(kept: Kept, record: Record) -> dict[str, Any] | None:
    """The state of the whole parameter, whose tensors on a drive are placeholders of ``kept``; None if not all of them are
    there.
    """
    parts: list[KeptPart] = []
    for state in record.states:
        part = state.keep()
        if part is None:
            return None
        parts.append(part)
    first = parts[0]
    found: dict[str, Any] = {}
    for name in first.names:
        if name in first.rest:
            if is_of_elements(first.rest[name], record):
                return None
            found[name] = own(first.rest[name])
            continue
        like = first.places[name][1]
        whole = is_of_elements(like, record)
        shape = record.shape if whole else like.shape
        used = parts if whole else parts[:1]
        ranges = [_bytes_of(part, name) for part in used]
        found[name] = kept.placeholder(like, shape, [part.slot for part in used if part.slot is not None], ranges)
    return found


def _bytes_of(part: KeptPart, name: str) -> KeptRange | bytes:
    if name in part.places:
        return part.range_of(name)
    small: Tensor = part.rest[name]
    return as_bytes(small).numpy().tobytes()
