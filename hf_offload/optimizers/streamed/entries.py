"""In which order parameters have got their state, as the keys of a dictionary in memory show it."""

from collections.abc import Iterable

from torch import Tensor, nn


class Entries:
    """Of the parameters of one optimizer."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._next = 0

    def add(self, key: object) -> None:
        """A parameter has a state, as of now if it had none."""
        if isinstance(key, Tensor) and id(key) not in self._places:
            self._places[id(key)] = self._next
            self._next += 1

    def remove(self, key: object) -> None:
        """It has none any more."""
        self._places.pop(id(key), None)

    def replace(self, keys: Iterable[object]) -> None:
        """These have one, in this order, and no others."""
        self._places = {}
        for key in keys:
            self.add(key)

    def sorted(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """``parameters`` in this order, and those without a state behind."""
        return sorted(parameters, key=lambda parameter: self._places.get(id(parameter), self._next))
