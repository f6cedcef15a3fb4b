"""Applying tiling to a model, and removing it."""

import logging

from torch import nn

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.schema import OffloadConfig
from hf_offload.transforms.tiling.cut import Cut
from hf_offload.transforms.tiling.head import TiledHead, find_head
from hf_offload.transforms.tiling.mlp import TiledModule, chosen_modules, position_wise
from hf_offload.transforms.transform import Transform

logger = logging.getLogger(__name__)

# With a memory budget, a piece may take this share of it.
_BUDGET_SHARE = 64


class Tiling(Transform):
    """Makes the output head with its loss, and MLPs, work on a few tokens at a time."""

    def __init__(self, model: nn.Module, config: OffloadConfig, cut: Cut | None = None):
        super().__init__(model)
        self._config = config
        self._cut = cut or cut_for(config)
        self._needed_less = False

    def apply(self) -> None:
        """Cut what was asked for.

        Raises :class:`~hf_offload.errors.OffloadConfigError` where that cannot be done; ``auto`` leaves it alone and says so.
        """
        if self._config.tiled_loss != "off":
            self._cut_head()
        if self._config.tiled_mlp not in ("off", "auto"):
            self._cut_modules()

    @property
    def head(self) -> nn.Module | None:
        """The output head that :meth:`apply` cuts, if it finds one."""
        if self._config.tiled_loss == "off":
            return None
        try:
            return find_head(self.model)[1]
        except OffloadConfigError:
            return None

    def on_infeasible(self) -> bool:
        """With ``tiled_mlp="auto"``: cut all modules that can be, once; whether there were any."""
        asked = self._config.tiled_mlp == "auto" and not self._needed_less
        self._needed_less = True
        return asked and self._cut_modules()

    def _cut_modules(self) -> bool:
        """Cut the modules that were asked for, with ``auto`` all that can be; whether there were any."""
        asked = self._config.tiled_mlp
        found = position_wise(self.model) if asked == "auto" else chosen_modules(self.model, asked)
        for name, module in found.items():
            self.replace(TiledModule(name, module, self._cut.module_rows))
        if found:
            names = list(found)
            shown = ", ".join(names) if len(names) <= 3 else f"{names[0]} ... {names[-1]}"
            logger.info("%d modules are computed a few tokens at a time: %s.", len(names), shown)
        return bool(found)

    def _cut_head(self) -> None:
        try:
            name, head = find_head(self.model)
        except OffloadConfigError as error:
            if self._config.tiled_loss == "on":
                raise
            logger.warning("The loss is computed in one piece. %s", error)
            return
        self.replace(TiledHead(name, head, self._cut))
        logger.info("%s and the loss are computed a few tokens at a time.", name)


def cut_for(config: OffloadConfig) -> Cut:
    """How large the pieces are that the settings ask for."""
    if config.tile_bytes is not None:
        return Cut(tile_bytes=int(config.tile_bytes))
    if config.memory_budget is None:
        return Cut()
    return Cut(most_bytes=max(1, int(config.memory_budget) // _BUDGET_SHARE))
