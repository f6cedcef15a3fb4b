"""Settings of sampled linear layers."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.classes import build, counted, from_mapping, settings
from hf_offload.settings.shown import shown
from hf_offload.settings.text_files import parse_json
from hf_offload.settings.values import Flag, Number, Whole, names, one_of

ESTIMATORS = ("wta-crs", "crs", "rad", "features", "exact")
ACTIVATION, GRADIENT_CACHE = "activation", "gradient-cache"
PROBABILITIES = (ACTIVATION, GRADIENT_CACHE)


@settings(frozen=True, kw_only=True)
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
        targets: ``"auto"`` (linear layers of the repeated blocks whose input no other layer saves), ``"all"`` (every one with
            trainable weights), or the ends of module names, such as ``("mlp.up_proj", "q_proj")``.
        share_inputs: Layers that are given the same tensor (queries, keys and values) keep one part of it together.
    """

    ratio: Annotated[Number, Field(gt=0, le=1)] = 0.3
    min_rows: Annotated[Whole, counted("rows", ge=1)] = 10
    estimator: Annotated[str, one_of(ESTIMATORS)] = "wta-crs"
    probabilities: Annotated[str, one_of(PROBABILITIES)] = ACTIVATION
    targets: Annotated[str | Sequence[str], names("ends of module names", alone=("auto", "all"))] = "auto"
    share_inputs: Flag = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.estimator in ("rad", "features") and self.probabilities == GRADIENT_CACHE:
            raise OffloadConfigError(
                f"probabilities={GRADIENT_CACHE!r} is about rows, and estimator={self.estimator!r} draws columns: "
                "set estimator='wta-crs' or 'crs'."
            )
        return self

    def __str__(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @property
    def samples(self) -> bool:
        """Whether anything is left out at all."""
        return self.estimator != "exact" and self.ratio < 1

    def kept(self, whole: int) -> int:
        """How many of ``whole`` rows or columns are kept."""
        return min(whole, max(self.min_rows, int(self.ratio * whole)))


def read_sampled_linear(name: str, value: Any) -> SampledLinearConfig | None:
    """Read the setting ``name``: a ratio, a mapping, the JSON text of either, or nothing.

    Raises :class:`~hf_offload.errors.OffloadConfigError`.
    """
    if isinstance(value, str):
        value = parse_json(value, f"{name}={shown(value)} is neither a ratio such as 0.3 nor settings in JSON: it")
    if value is None or isinstance(value, SampledLinearConfig):
        return value
    if isinstance(value, Mapping):
        return from_mapping(SampledLinearConfig, value, name)
    return build(SampledLinearConfig, {"ratio": value}, name, lambda _: name)
