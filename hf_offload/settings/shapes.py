"""The published configuration of a pretrained model, written into a recipe, so that plans need no hub."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.load import collect_errors


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What a plan needs to know of a model whose weights are elsewhere.

    Args:
        of: Whose configuration this is, one or several names of the hub. A recipe that names another model does without the
            shape.
        architecture: Model type of transformers, such as ``llama``.
        config: Fields of the configuration; those left out have the architecture's defaults.
    """

    of: str | Sequence[str] = ()
    architecture: str = ""
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        with collect_errors("model.shape") as check:
            with check:
                names = (self.of,) if isinstance(self.of, str) else self.of
                if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) for name in names):
                    raise OffloadConfigError(f"model.shape.of={self.of!r} is neither a name nor a list of names.")
                object.__setattr__(self, "of", tuple(names))
            with check:
                if not isinstance(self.architecture, str) or not self.architecture:
                    raise OffloadConfigError(f"model.shape.architecture={self.architecture!r} is not text.")
            with check:
                if not isinstance(self.config, Mapping):
                    raise OffloadConfigError(
                        f"model.shape.config={self.config!r} is not a mapping of configuration fields."
                    )
