"""All transforms of a model, in the order in which they are applied."""

import logging
from typing import NamedTuple

from torch import nn

from hf_offload.settings.schema import OffloadConfig
from hf_offload.transforms.named_blocks import NamedBlocks
from hf_offload.transforms.rematerialization.apply import Rematerialization
from hf_offload.transforms.sampling.apply import Sampling
from hf_offload.transforms.tiling.apply import Tiling
from hf_offload.transforms.tiling.cut import Cut

logger = logging.getLogger(__name__)


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
