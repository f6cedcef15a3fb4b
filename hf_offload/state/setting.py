"""The setting ``optimizer`` of one session: which optimizers are streamed, where to, and what is refused."""

import logging
import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hf_offload.errors import OffloadConfigError
from hf_offload.plan.rules import part_bytes, state_window
from hf_offload.settings.schema import OffloadConfig
from hf_offload.state.optimizer import USUAL_STATE, stream, streaming_of
from hf_offload.state.refusals import is_compiled, refuse_scripts, refuse_shards
from hf_offload.state.step import Streaming
from hf_offload.state.units import units_of
from hf_offload.state.weights import place_for
from hf_offload.storage.opening import named_directories, open_tier
from hf_offload.storage.service import OPTIMIZER_STATE, RunStorage
from hf_offload.storage.tier import Tier
from hf_offload.tensors import nbytes_of

logger = logging.getLogger(__name__)


class StreamedSetting:
    """``config.state_place`` for the model of a session. It keeps neither the model nor an optimizer.

    Gradients stay in memory until an optimizer is prepared, which is said once.
    ``is_planned``: a plan has chosen the place, so what cannot be streamed stays in memory, as with ``"auto"``.
    """

    def __init__(
        self, model: nn.Module, config: OffloadConfig, storage: RunStorage, processes: int, is_planned: bool = False
    ):
        self._config = config
        self._is_planned = is_planned
        self._must_stream = not is_planned and config.state_place != "auto"
        self._storage = storage
        self._alone = processes == 1
        self._streamings: weakref.WeakSet[Streaming] = weakref.WeakSet()
        self._on_host = next((p.device.type == "cpu" for p in model.parameters()), True)
        self._place = config.state_place
        if self._place == "auto":
            trained = sum(nbytes_of(p) for p in model.parameters() if p.requires_grad)
            needed = sum(nbytes_of(p) for p in model.parameters()) + round(trained * (1 + USUAL_STATE))
            what = "weights, gradients and state"
            self._place = place_for("optimizer", what, needed, config, self._on_host)
        if self._place != "none":
            refuse_scripts("optimizer", model.named_modules())
        refuse_shards("optimizer", model)
        self._opened: dict[str, Tier] = {}  # and in no use yet
        self._warnings: list[RemovableHandle] = []
        if self._place != "none":
            self._warnings = [
                p.register_post_accumulate_grad_hook(self._say_staying) for p in model.parameters() if p.requires_grad
            ]

    def open(self) -> None:
        """Open the tier of the state, which may be refused on one machine alone, before anything is changed.

        Raises :class:`~hf_offload.errors.OffloadConfigError`.
        """
        if self._place != "none":
            self._opened[OPTIMIZER_STATE] = self._open(OPTIMIZER_STATE)

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Stream ``optimizer``, which is the same object afterwards. Idempotent."""
        if self._place == "none":
            return
        compiled = any(is_compiled(module) for module in model.modules())
        in_graph = self._alone and not compiled
        units_of(model).refresh(model)
        names = {id(p): name for name, p in model.named_parameters()}
        present = streaming_of(optimizer)
        budget = None if self._config.memory_budget is None else int(self._config.memory_budget)
        try:
            refuse_shards("optimizer", model)  # which may have been sharded since
            streaming = stream(
                optimizer,
                self._storage,
                self._open,
                names,
                smallest_bytes=self._config.smallest_bytes(self._on_host),
                gradients=in_graph,
                part_bytes=part_bytes(budget),
                window_bytes=state_window(budget),
                must_stream=self._must_stream,
            )
        except OffloadConfigError as error:
            if self._is_planned or self._must_stream:
                raise
            self._place = "none"
            self.close()
            logger.warning("State and gradients stay in memory, though optimizer='auto' would move them. %s", error)
            return
        streaming.in_backward = self._config.update_in_backward and streaming.streams_gradients and not streaming.whole
        streaming.let_stay(())  # what a plan of another session has kept
        self._end_watch()
        self._streamings.add(streaming)
        if present is None:
            self._tell(streaming, optimizer, compiled)

    def set_window(self, nbytes: int) -> None:
        """So many bytes of state, and of gradients, may be on the way."""
        for streaming in list(self._streamings):
            for store in (streaming.state_store, streaming.gradient_store):
                if store is not None:
                    store.window_bytes = nbytes

    def let_stay(self, parameters: Sequence[nn.Parameter]) -> None:
        """See :meth:`~hf_offload.state.step.Streaming.let_stay`."""
        for streaming in list(self._streamings):
            streaming.let_stay(parameters)

    @property
    def place(self) -> str:
        """The tier of gradients and state."""
        return self._place

    @property
    def is_used(self) -> bool:
        """Whether an optimizer is streamed."""
        return bool(self._streamings)

    @property
    def streams_gradients(self) -> bool:
        """Whether the gradients of all optimizers that are streamed leave memory, too."""
        return all(streaming.streams_gradients for streaming in list(self._streamings))

    def defer_updates(self) -> None:
        """See :meth:`hf_offload.session.OffloadSession.defer_updates`."""
        for streaming in list(self._streamings):
            streaming.defers = streaming.streams_gradients and not streaming.whole

    def close(self) -> None:
        """Compute what is noted. Streamed optimizers stay so. Idempotent."""
        self._end_watch()
        while self._opened:
            self._opened.popitem()[1].close()
        for streaming in list(self._streamings):
            streaming.finish()

    def _say_staying(self, parameter: Any) -> None:
        self._end_watch()
        logger.warning(
            "optimizer=%r is set, but no optimizer was prepared: gradients and state stay in memory. Pass yours to "
            "session.prepare_optimizer() before the first step.",
            self._config.state_place,
        )

    def _end_watch(self) -> None:
        while self._warnings:
            self._warnings.pop().remove()

    def _open(self, account: str) -> Tier:
        if account in self._opened:
            return self._opened.pop(account)
        directories = named_directories(self._config) if self._place == "ssd" else ()
        return open_tier(self._storage, self._config, self._on_host, account, directories)

    def _tell(self, streaming: Streaming, optimizer: Optimizer, compiled: bool) -> None:
        why = "gradients stay in memory, for several processes reduce them there"
        if compiled:
            why = "gradients stay in memory, where compiled code expects them"
        if streaming.streams_gradients:
            why = "weights are updated in backward" if streaming.in_backward else "gradients leave memory in backward"
        if streaming.whole:
            why = (
                "all of it comes back for each step, and gradients, too: its class is not one of those that are known to "
                "update each weight by itself"
            )
        logger.info(
            "The state of %s (%d of its weights are large enough) goes to %s; %s.",
            type(optimizer).__name__,
            len(streaming.records),
            streaming.state_store.tier.name,
            why,
        )
