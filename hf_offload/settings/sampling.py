"""What the user asked to have sampled."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.load import choose, collect_errors, from_mapping

ESTIMATORS = ("wta-crs", "crs", "rad", "features", "exact")
ACTIVATION, GRADIENT_CACHE = "activation", "gradient-cache"
PROBABILITIES = (ACTIVATION, GRADIENT_CACHE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampledLinearConfig:
    """How the weight gradients of linear layers are estimated from a part of their inputs.

    Outputs, and gradients of inputs and biases, stay exact. Weight gradients are right on average (unbiased), not each time.

    Args:
        ratio: Part of the input that is kept for backward, above 0 and at most 1: of its rows (tokens), or for ``rad`` and
            ``features`` of its columns. 1 is exact, to the last bit.
        min_rows: At least so many rows (or columns) are kept.
        estimator: ``"wta-crs"``: the rows with the largest norms, and a draw of the others (Liu et al., NeurIPS 2023,
            arXiv 2305.15265). ``"crs"``: a draw of all rows. ``"rad"``: a random projection of the columns, of which only the
            seed is kept (Oktay et al., ICLR 2021, arXiv 2007.10412). ``"features"``: a draw of the columns. ``"exact"``: all.
        probabilities: What makes a row probable: ``"activation"``, its norm; ``"gradient-cache"``, that times how large the
            gradients of its sample were in the last epoch, two bytes for each sample and layer on the model's device.
        targets: ``"auto"`` (linear layers of the repeated blocks whose input nobody else saves), ``"all"`` (every one with
            trainable weights), or the ends of module names, such as ``("mlp.up_proj", "q_proj")``.
        share_inputs: Layers that are given the same tensor (queries, keys and values) keep one part of it together.
    """

    ratio: float = 0.3
    min_rows: int = 10
    estimator: str = "wta-crs"
    probabilities: str = ACTIVATION
    targets: str | Sequence[str] = "auto"
    share_inputs: bool = True

    def __post_init__(self) -> None:
        with collect_errors("settings of sampled linear layers") as check:
            with check:
                if isinstance(self.ratio, bool) or not isinstance(self.ratio, (int, float)) or not 0 < self.ratio <= 1:
                    raise OffloadConfigError(
                        f"ratio={self.ratio!r} is not a part: give a number above 0 and at most 1."
                    )
            with check:
                if isinstance(self.min_rows, bool) or not isinstance(self.min_rows, int) or self.min_rows < 1:
                    raise OffloadConfigError(f"min_rows={self.min_rows!r} is not a number of rows: give 1 or more.")
            with check:
                choose("estimator", self.estimator, ESTIMATORS)
            with check:
                choose("probabilities", self.probabilities, PROBABILITIES)
                if self.probabilities == GRADIENT_CACHE and self.estimator in ("rad", "features"):
                    raise OffloadConfigError(
                        f"probabilities={GRADIENT_CACHE!r} is about rows, and estimator={self.estimator!r} draws columns: "
                        "take estimator='wta-crs' or 'crs'."
                    )
            with check:
                if not isinstance(self.share_inputs, bool):
                    raise OffloadConfigError(f"share_inputs={self.share_inputs!r} is neither true nor false.")
            with check:
                targets = self.targets if isinstance(self.targets, str) else tuple(self.targets)
                if not targets or not all(isinstance(name, str) and name for name in targets):
                    raise OffloadConfigError(f"targets={self.targets!r}: say 'auto', 'all', or ends of module names.")
                if isinstance(targets, str) and targets not in ("auto", "all"):
                    targets = tuple(name.strip() for name in targets.split(","))
                object.__setattr__(self, "targets", targets)

    @property
    def samples(self) -> bool:
        """Whether anything is left out at all."""
        return self.estimator != "exact" and self.ratio < 1

    def kept(self, whole: int) -> int:
        """How many of ``whole`` rows or columns are kept."""
        return min(whole, max(self.min_rows, int(self.ratio * whole)))


def sampled_linear(value: Any) -> SampledLinearConfig | None:
    """What a setting says: a ratio, a mapping, the JSON text of either, or nothing.

    Raises :class:`~hf_offload.errors.OffloadConfigError`.
    """
    if value is None or isinstance(value, SampledLinearConfig):
        return value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise OffloadConfigError(
                f"sampled_linear={value!r} is neither a ratio such as 0.3 nor settings in JSON: {error}."
            ) from error
    if isinstance(value, Mapping):
        return from_mapping(SampledLinearConfig, value, "sampled_linear")
    return SampledLinearConfig(ratio=value)
