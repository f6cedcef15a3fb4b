"""Values and names in messages: the one place that decides how much of them is repeated."""

import difflib
import reprlib
from collections.abc import Iterable
from typing import Any

LONGEST = 200
"""Most characters of a value in a message."""
MOST_NAMES = 5
"""Most names that a message lists."""


class _Repr(reprlib.Repr):
    """Looks at no more of a value than it shows: nested lists that share their parts can stand for billions of items."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxstring = self.maxother = self.maxlong = LONGEST
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 12

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write numbers of more than 4,300 digits.
        return repr(x) if x.bit_length() <= 4 * LONGEST else f"<a whole number of {x.bit_length()} bits>"


def shown(value: Any) -> str:
    """``repr(value)``, cut off after :data:`LONGEST` characters; of any value, however large."""
    return cropped(_Repr().repr(value))


def cropped(text: str, most: int = LONGEST) -> str:
    """``text`` on one line, cut off after ``most`` characters."""
    line = " ".join(text.split()) if "\n" in text else text
    return line if len(line) <= most else f"{line[: most - 3]}..."


def nearest(word: object, names: Iterable[str]) -> str:
    """``" Did you mean 'ssd'?"`` or an empty string."""
    names, word = list(names), str(word)[:LONGEST]
    begun = [name for name in names if word and name.startswith(word)]
    found = begun or difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f" Did you mean {found[0]!r}?" if found else ""


def listed(names: Iterable[str], word: object = "") -> str:
    """Names with commas between: all of a few, otherwise those nearest to ``word``, and how many more there are."""
    names = list(names)
    if len(names) <= 2 * MOST_NAMES:
        return ", ".join(names) or "none"
    word = str(word)[:LONGEST]
    ranked = sorted(names, key=lambda name: -difflib.SequenceMatcher(None, word, name).ratio()) if word else names
    return f"{', '.join(ranked[:MOST_NAMES])} and {len(names) - MOST_NAMES} more"
