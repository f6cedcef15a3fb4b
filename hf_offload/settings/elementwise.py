"""Settings of recomputing elementwise operations."""

from collections.abc import Sequence
from typing import Annotated, Any

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.classes import build, settings
from hf_offload.settings.load import choose, collect_errors
from hf_offload.settings.values import Reader, names

EXACT_SWITCHES = ("activations", "norms", "dropout")
"""Change no bit of a loss or a gradient."""
SWITCHES = (*EXACT_SWITCHES, "derivative-8bit")
ALL_EXACT = "exact"
OFF = "off"


def _switches(name: str, value: Any) -> tuple[str, ...]:
    given = () if value is None or (isinstance(value, str) and not value) else value
    read = names(f"switches, which are {', '.join(SWITCHES)} and {ALL_EXACT!r}", or_none=True)
    switches = tuple(dict.fromkeys(read(name, given)))
    with collect_errors(name) as check:
        for switch in switches:
            with check:
                choose(name, switch, (*SWITCHES, ALL_EXACT))
        with check:
            both = {"activations", ALL_EXACT}.intersection(switches)
            if both and "derivative-8bit" in switches:
                raise OffloadConfigError(
                    f"{name}: {both.pop()!r} recomputes results from the inputs of activation functions, and "
                    "'derivative-8bit' does not keep those: drop one of them."
                )
    return switches


@settings(frozen=True)
class RecomputeElementwiseConfig:
    """Which results are recomputed in backward from what is saved anyway, instead of being saved themselves.

    Args:
        switches: ``"activations"``: results of activation functions, and products with them (gated MLPs), are recomputed from
            their inputs, and ReLU keeps a bit an element. ``"norms"``: results of LayerNorm and RMSNorm are recomputed.
            ``"dropout"``: masks are kept as bits. These three are exact, to the last bit, and ``"exact"`` stands for as many
            of them as the model has use for.
            ``"derivative-8bit"``: activation functions keep their derivative in 8 bits instead of their input; not exact
            (:func:`~hf_offload.transforms.rematerialization.functions.coarse_activation` says how far off), and not
            together with ``"activations"``, which needs the input. None at all: a plan does not choose any, either.
    """

    switches: Annotated[Sequence[str], Reader(_switches, {"type": "array", "items": {"enum": SWITCHES}})]

    def asks_for(self, switch: str) -> bool:
        """Whether ``switch`` is on."""
        return switch in self.switches or (ALL_EXACT in self.switches and switch in EXACT_SWITCHES)

    def insists_on(self, switch: str) -> bool:
        """Whether ``switch`` was named itself: it is then an error if the model has no such operation."""
        return switch in self.switches

    def __str__(self) -> str:
        return ",".join(self.switches) or OFF


def read_recompute_elementwise(name: str, value: Any) -> RecomputeElementwiseConfig | None:
    """Read the setting ``name``: switches, as a list or separated by commas, ``"off"``, or nothing.

    Raises :class:`~hf_offload.errors.OffloadConfigError`.
    """
    if isinstance(value, RecomputeElementwiseConfig):
        return value
    if isinstance(value, str) and not value:
        return None
    if value is False or (isinstance(value, str) and value == OFF):
        value = ()
    return build(RecomputeElementwiseConfig, {"switches": value}, name, lambda _: name)
