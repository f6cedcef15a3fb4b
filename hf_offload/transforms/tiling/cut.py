"""How large pieces are."""

import dataclasses

# Every piece of the loss reads and writes the whole gradient of the head: few pieces are fast, many are small.
_LEAST_ROWS = 64
# Below, a module's matrix products take longer for being cut.
_LEAST_MODULE_ROWS = 256
_MOST_BYTES = 256 << 20
# A product of very few rows is slow, and sums up with less care.
_FEWEST_ROWS = 8
# What an MLP has between its layers is about four times as wide as hidden states, and there twice.
_MODULE_WIDTHS = 8


@dataclasses.dataclass(frozen=True)
class Cut:
    """Sizes of pieces.

    Attributes:
        tile_bytes: Of the logits of one piece in 32 bits, and of what a module makes of one. None: as below.
        most_bytes: The same, at most.
        pieces: Into how many the tokens are cut, as long as a piece is neither tiny nor large.
        exactly: Into how many the loss and a module are cut whatever that makes of a piece; for predictions, which compare
            different numbers of tokens.
    """

    tile_bytes: int | None = None
    most_bytes: int = _MOST_BYTES
    pieces: int = 16
    exactly: tuple[int, int] | None = None

    def loss_rows(self, tokens: int, vocabulary: int) -> int:
        """Tokens of one piece of the loss."""
        return self._rows(tokens, 0, 4 * vocabulary, _LEAST_ROWS)

    def module_rows(self, tokens: int, width: int) -> int:
        """Tokens of one piece of a module for hidden states of that width."""
        return self._rows(tokens, 1, 4 * _MODULE_WIDTHS * width, _LEAST_MODULE_ROWS)

    def _rows(self, tokens: int, which: int, row_bytes: int, least: int) -> int:
        if self.exactly is not None:
            return max(1, -(-tokens // self.exactly[which]))
        if self.tile_bytes is None:
            rows, most = max(least, -(-tokens // self.pieces)), self.most_bytes // row_bytes
        else:
            rows, most = tokens, self.tile_bytes // row_bytes
        pieces = -(-tokens // max(_FEWEST_ROWS, min(rows, most)))
        return max(1, -(-tokens // max(1, pieces)))  # all pieces alike
