"""What the settings ask to have cut, applied to a model and taken off again."""

import logging
import weakref

from torch import nn

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.schema import OffloadConfig
from hf_offload.transforms.tiling.cut import Cut
from hf_offload.transforms.tiling.head import TiledHead, find_head
from hf_offload.transforms.tiling.mlp import TiledModule, chosen_modules, position_wise

logger = logging.getLogger(__name__)

# With a memory budget, a piece may take so much of it.
_BUDGET_SHARE = 64


class Tiling:
    """The pieces of one model, which it does not keep: made by :meth:`apply`, taken off by :meth:`remove`."""

    def __init__(self, model: nn.Module, config: OffloadConfig, cut: Cut | None = None):
        self._model_ref = weakref.ref(model)
        self._config = config
        self._cut = cut or cut_for(config)
        self._done: list[tuple[str, weakref.ref[TiledHead | TiledModule]]] = []
        self._needed_less = False

    @property
    def _model(self) -> nn.Module:
        model = self._model_ref()
        assert model is not None, "whoever asks for pieces has the model"
        return model

    def apply(self) -> None:
        """Cut what was asked for.

        Raises :class:`~hf_offload.errors.OffloadConfigError` where that cannot be done; ``auto`` leaves it alone and says so.
        """
        if self._config.tiled_loss != "off":
            self._cut_head()
        if self._config.tiled_mlp not in ("off", "auto"):
            self.cut_modules()

    @property
    def head(self) -> nn.Module | None:
        """The output head that :meth:`apply` cuts, if it finds one."""
        if self._config.tiled_loss == "off":
            return None
        try:
            return find_head(self._model)[1]
        except OffloadConfigError:
            return None

    def cut_modules(self) -> bool:
        """Cut the modules that were asked for, with ``auto`` all that can be; whether there were any."""
        names = self._config.tiled_mlp
        found = position_wise(self._model) if names == "auto" else chosen_modules(self._model, names)
        for name, module in found.items():
            self._install(TiledModule(name, module, self._cut.module_rows))
        if found:
            logger.info("%d modules are computed a few tokens at a time: %s.", len(found), _listed(list(found)))
        return bool(found)

    def need_less(self) -> bool:
        """With ``tiled_mlp="auto"``: cut all modules that can be, once; whether there were any."""
        asked = self._config.tiled_mlp == "auto" and not self._needed_less
        self._needed_less = True
        return asked and self.cut_modules()

    @property
    def names(self) -> list[str]:
        """The modules that are cut."""
        return [name for name, _ in self._done]

    def remove(self) -> None:
        """Give every module its forward back. Idempotent."""
        while self._done:
            one = self._done.pop()[1]()
            if one is not None:
                one.remove()

    def _cut_head(self) -> None:
        try:
            name, head = find_head(self._model)
        except OffloadConfigError as error:
            if self._config.tiled_loss == "on":
                raise
            logger.warning("The loss is computed in one piece. %s", error)
            return
        self._install(TiledHead(name, head, self._cut))
        logger.info("%s and the loss are computed a few tokens at a time.", name)

    def _install(self, one: TiledHead | TiledModule) -> None:
        one.install()
        self._done.append((one.name, weakref.ref(one)))


def cut_for(config: OffloadConfig) -> Cut:
    """How large the pieces are that the settings ask for."""
    if config.tile_bytes is not None:
        return Cut(tile_bytes=int(config.tile_bytes))
    if config.memory_budget is None:
        return Cut()
    return Cut(most_bytes=max(1, int(config.memory_budget) // _BUDGET_SHARE))


def _listed(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} ... {names[-1]}"
