"""Blocks that the user names: modules whose class does not say itself that they may be recomputed."""

from collections.abc import Sequence

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.shown import nearest
from hf_offload.surgery import extend
from hf_offload.transforms.transform import Transform


class NamedBlocks(Transform):
    """Makes a :class:`~transformers.modeling_layers.GradientCheckpointingLayer` of each module whose class, or a base of it,
    is named in ``recompute_blocks``.
    """

    def __init__(self, model: nn.Module, classes: Sequence[str]):
        super().__init__(model)
        self._classes = classes

    def apply(self) -> None:
        """Apply the change to the outermost of these modules.

        Raises :class:`~hf_offload.errors.OffloadConfigError` if the model has no module of a class that was named.
        """
        if not self._classes or self.names:
            return
        names_of = {
            name: {cls.__name__ for cls in type(module).__mro__} for name, module in self.model.named_modules() if name
        }
        known = set().union(*names_of.values())
        for wanted in self._classes:
            if wanted not in known:
                kinds = sorted({type(module).__name__ for module in self.model.modules()})
                raise OffloadConfigError(
                    f"recompute_blocks: no module of {type(self.model).__name__} is of a class {wanted!r}."
                    f"{nearest(wanted, kinds)} Classes of its modules: {', '.join(kinds)}."
                )
        blocks: list[str] = []
        for name, kinds_of in names_of.items():
            if kinds_of.isdisjoint((GradientCheckpointingLayer.__name__, *self._classes)):
                continue
            if any(name.startswith(f"{outer}.") for outer in blocks):
                continue
            blocks.append(name)
            module = self.model.get_submodule(name)
            if not isinstance(module, GradientCheckpointingLayer):
                self.note(extend(module, GradientCheckpointingLayer), name)
