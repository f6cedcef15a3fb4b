"""In which order weights are used, learned from how they were."""

_PASSES = 8
"""How many uses of each weight are remembered."""


class UseOrder:
    """What was used, and what probably comes next: what came the last time that the last two uses were these.

    Weights are named by numbers.
    """

    def __init__(self, count: int):
        self._most = max(64, _PASSES * count)
        self._uses: list[int] = []
        self._next = 0  # the place in _uses that is expected to be used next

    def used(self, number: int) -> None:
        """A weight is used."""
        uses = self._uses
        if uses and uses[-1] == number:
            return
        if self._next < len(uses) and uses[self._next] == number:
            self._next += 1
        else:
            self._next = self._find(number) + 1
        uses.append(number)
        if len(uses) > self._most:
            gone = len(uses) - self._most // 2
            del uses[:gone]
            self._next = max(0, self._next - gone)

    def coming(self) -> list[int]:
        """Probable uses from now on, in order."""
        return self._uses[self._next :]

    def _find(self, number: int) -> int:
        """The place of the last use that was like the present one, or of the last use of all."""
        uses = self._uses
        found = len(uses)
        for place in range(len(uses) - 1, -1, -1):
            if uses[place] == number:
                if place == 0 or uses[place - 1] == uses[-1]:
                    return place
                if found == len(uses):
                    found = place
        return found
