"""The published configuration of a pretrained model, written into a recipe, so that plans need no hub."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hf_offload.settings.values import mapping, names, read_fields, setting, text


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What a plan needs to know of a model whose weights are elsewhere.

    Args:
        of: Whose configuration this is, one or several names of the hub. A recipe that names another model does without the
            shape.
        architecture: Model type of transformers, such as ``llama``.
        config: Fields of the configuration; those left out have the architecture's defaults.
    """

    of: str | Sequence[str] = setting((), names("names of the hub"))
    architecture: str = setting("", text())
    config: Mapping[str, Any] = setting({}, mapping("of configuration fields"))

    def __post_init__(self) -> None:
        with read_fields(self, "model.shape", "model.shape."):
            pass
