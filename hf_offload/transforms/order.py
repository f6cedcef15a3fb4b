"""All transforms of a model, in the order in which they are applied; first of all, the blocks that the user names."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.schema import OffloadConfig
from hf_offload.settings.shown import nearest
from hf_offload.surgery import extend
from hf_offload.transforms.rematerialization.apply import Rematerialization
from hf_offload.transforms.sampling.apply import Sampling
from hf_offload.transforms.tiling.apply import Tiling
from hf_offload.transforms.tiling.cut import Cut
from hf_offload.transforms.transform import Transform

logger = logging.getLogger(__name__)


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


class Transforms(NamedTuple):
    """The transforms of one model.

    Blocks come first: the others ask which modules lie in one. Sampling comes before recompute, which leaves layers alone
    that are no longer plain linear ones. Tiling comes last: a piece runs what the others have made of a module.
    """

    blocks: NamedBlocks
    sampling: Sampling
    rematerialization: Rematerialization
    tiling: Tiling

    def apply(self) -> None:
        """Apply all of them.

        Raises :class:`~hf_offload.errors.OffloadConfigError` if one cannot do what was asked for.
        """
        for transform in self:
            transform.apply()
        if self.sampling.names and self.rematerialization.rebuilds_inputs:
            logger.warning(
                "Sampled linear layers save rows of their inputs. 'activations' and 'norms' recompute most of those inputs, "
                "exactly and without saving anything: together with them, sampled_linear saves time but no memory."
            )

    def remove(self) -> None:
        """Restore the model. Idempotent."""
        for transform in reversed(self):
            transform.remove()


def transforms_for(model: nn.Module, config: OffloadConfig, cut: Cut | None = None) -> Transforms:
    """The transforms that ``config`` asks for, not applied yet; ``cut`` overrides the sizes of tiled pieces."""
    tiling = Tiling(model, config, cut)
    sampling = Sampling(model, config.sampling)
    rematerialization = Rematerialization(model, config.elementwise, left_alone=tiling.head)
    return Transforms(NamedBlocks(model, config.recompute_blocks or ()), sampling, rematerialization, tiling)
