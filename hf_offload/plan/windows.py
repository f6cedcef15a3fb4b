"""How much memory weights, gradients and optimizer state take on their way: what the engine keeps to, and plans count on."""

STATE_WINDOW_BYTES = 96 << 20
"""On the way to a tier and back at any time, of optimizer state and of gradients each."""
PART_BYTES = 8 << 20
"""Of a parameter, where it can be cut, at most: an update then needs memory for the state of so much."""

_SMALLEST_PART_BYTES = 64 << 10
_PARTS = 3
"""Of a part that is updated: its state (AdamW's), and a copy."""
_WEIGHTS_WINDOW_BYTES = 64 << 20
_SPARE_PARTS = 4
_STATE_SHARE = 32
WIDTHS = (2, 1)
"""Of the windows of gradients and state that plans try, as multiples of the narrowest: wider ones wait less for a drive."""
_WEIGHTS_SHARE = 4


def state_window(budget_bytes: int | None, width: int = 1) -> int:
    """Bytes of state, and as many of gradients, that may be on the way: of a memory budget, a small part at most, ``width``
    times as much where a plan has room for it.
    """
    return STATE_WINDOW_BYTES if budget_bytes is None else min(STATE_WINDOW_BYTES, budget_bytes * width // _STATE_SHARE)


def weights_window(staying_bytes: int, largest_bytes: int) -> int:
    """The same of weights, of which ``staying_bytes`` may be in memory, and the largest has ``largest_bytes``."""
    return max(2 * largest_bytes, min(_WEIGHTS_WINDOW_BYTES, staying_bytes // _WEIGHTS_SHARE))


def spare_bytes(window_bytes: int, smallest_bytes: int = 0) -> int:
    """Of a window, what may be kept in buffers that nothing uses, for the next of their size: none where even the smallest
    buffer is larger.
    """
    spare = window_bytes // _SPARE_PARTS
    return spare if smallest_bytes <= spare else 0


def part_bytes(budget_bytes: int | None) -> int:
    """Size of the parts that parameters are cut into: no larger than what may be on the way."""
    return min(PART_BYTES, max(_SMALLEST_PART_BYTES, state_window(budget_bytes)))


def update_bytes(needed_bytes: int, budget_bytes: int) -> int:
    """Memory of an update that takes ``needed_bytes`` for all parameters at once, where they are cut into parts."""
    return min(needed_bytes, _PARTS * part_bytes(budget_bytes))
