"""Values of parameters that are made when they are used, of what is kept while their memory is elsewhere."""

from typing import Protocol

from torch import Tensor


class Derivation(Protocol):
    """Makes the value that a parameter is used with from another one, which is kept while its memory is elsewhere."""

    @property
    def is_due(self) -> bool:
        """Whether the value in memory is not yet the one to use."""

    @property
    def is_lost(self) -> bool:
        """Whether the value to use cannot be made from the one in memory, but only from the one that is kept."""

    @property
    def is_fixed(self) -> bool:
        """Whether nothing else may change the value now."""

    @property
    def may_come_again(self) -> bool:
        """Whether the value that is kept may be needed again after it has come to memory and was changed there."""

    @property
    def is_kept_next(self) -> bool:
        """Whether, on the way to the value to use, there is one to be kept first: :meth:`derive` stops there."""

    @property
    def may_go(self) -> bool:
        """Whether the value in memory need not be kept: it is computed anew from the one that was."""

    def arrived(self) -> None:
        """The value that is kept is in memory."""

    def changes_in_sight(self) -> None:
        """The value in memory is about to change where others may look at it."""

    def kept(self) -> None:
        """The value in memory is kept from now on."""

    def copy(self, value: Tensor) -> None:
        """Keep a copy of ``value``, the one in memory, whose memory others may look at: it changes where it is."""

    def derive(self, value: Tensor) -> None:
        """Change ``value``, the one in memory, to the one to use, or to the next one that is to be kept."""
