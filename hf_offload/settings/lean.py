"""What the user asked to have saved in fewer bytes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.load import choose, collect_errors, renaming
from hf_offload.settings.values import names

EXACT_SWITCHES = ("activations", "norms", "dropout")
"""Change no bit of a loss or a gradient."""
SWITCHES = (*EXACT_SWITCHES, "derivative-8bit")
ALL_EXACT = "exact"


@dataclasses.dataclass(frozen=True)
class LeanConfig:
    """Which tensors are not saved for backward, but made again from what is saved anyway.

    Args:
        switches: ``"activations"``: results of activation functions, and products with them (gated MLPs), are made again from
            the inputs, and ReLU keeps a bit an element. ``"norms"``: results of LayerNorm and RMSNorm are made again.
            ``"dropout"``: masks are kept as bits. These three are exact, to the last bit, and ``"exact"`` stands for as many
            of them as the model has use for.
            ``"derivative-8bit"``: activation functions keep their derivative in 8 bits instead of their input; not exact
            (:func:`~hf_offload.transforms.rematerialization.functions.coarse_activation` says how far off), and not
            together with ``"activations"``, which needs the input.
    """

    switches: Sequence[str]

    def __post_init__(self) -> None:
        read: Any = names(f"switches, which are {', '.join(SWITCHES)} and {ALL_EXACT!r}", or_none=True)(
            "lean_activations", self.switches
        )
        switches = tuple(dict.fromkeys(read))
        with collect_errors("lean activations") as check:
            for switch in switches:
                with check:
                    choose("lean_activations", switch, (*SWITCHES, ALL_EXACT))
            with check:
                both = {"activations", ALL_EXACT}.intersection(switches)
                if both and "derivative-8bit" in switches:
                    raise OffloadConfigError(
                        f"lean_activations: {both.pop()!r} makes results again from the inputs of activation functions, and "
                        "'derivative-8bit' does not keep those: drop one of them."
                    )
        object.__setattr__(self, "switches", switches)

    def asks_for(self, switch: str) -> bool:
        """Whether ``switch`` is on."""
        return switch in self.switches or (ALL_EXACT in self.switches and switch in EXACT_SWITCHES)

    def insists_on(self, switch: str) -> bool:
        """Whether ``switch`` is on by its own name, so that finding nothing to do is a mistake."""
        return switch in self.switches

    def __str__(self) -> str:
        return ",".join(self.switches)


def lean_activations(value: Any, name: str = "lean_activations") -> LeanConfig | None:
    """What a setting says: names of switches, as a list or separated by commas, or nothing.

    Raises :class:`~hf_offload.errors.OffloadConfigError`.
    """
    if value is None or isinstance(value, LeanConfig):
        return value
    if value is False or (isinstance(value, (str, tuple, list)) and value in ("", "off", (), [])):
        return None
    with renaming(name, {"lean_activations": name}):
        return LeanConfig(value)
