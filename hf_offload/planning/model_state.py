"""Weights, gradients and optimizer state of a session's model: in memory as long as the budget allows it."""

import dataclasses
import logging
import weakref
from collections.abc import Callable, Sequence

from torch import nn
from torch.optim import Optimizer

from hf_offload.errors import OffloadConfigError
from hf_offload.plan.choosing import choose, least_memory
from hf_offload.plan.footprint import Footprint
from hf_offload.plan.hardware import Hardware
from hf_offload.plan.problem import limit_of
from hf_offload.plan.rules import state_window
from hf_offload.plan.state_placement import Allowed, StatePlacement, least_weights
from hf_offload.planning.state_bytes import (
    gradient_and_state_bytes,
    initial_estimate,
    step_bytes,
    trained_in,
    unit_weights,
)
from hf_offload.ranks import Ranks
from hf_offload.settings.memory_modes import NONE, OF_ADAPTERS
from hf_offload.settings.schema import OffloadConfig, snapshots_held, with_checked
from hf_offload.settings.sizes import format_bytes
from hf_offload.state.optimizer import check_streamable, state_per_weight
from hf_offload.state.registry import parked_of
from hf_offload.state.setting import StreamedSetting
from hf_offload.state.weights import Weights, park_weights, weights_of
from hf_offload.storage.service import RunStorage
from hf_offload.structure.units import find_units
from hf_offload.tensors import nbytes_of

logger = logging.getLogger(__name__)

_FOR_ACTIVATIONS = 0.25
"""Of the budget: what the first step may have of them, which moves all that can be moved."""
_MOST_ON_DEVICE = 0.25
"""Of the budget: gradients and state of adapters, which may stay where the model's weights leave."""


class ModelState:
    """What ``params`` and ``optimizer`` say about the model of one session. It keeps neither the model nor an optimizer.

    Where they are ``auto`` together with the tier, a plan without activations says what leaves memory when the optimizer is
    prepared, which is when its bytes are known: nothing, if all of them are within the budget. After a measured step, another
    one says what is where (:meth:`place`). Of several processes, the first one decides for all. Gradients then stay in
    memory, where processes reduce them, and so do weights on accelerators.

    Attributes:
        residency: Which weights are in memory; None where all of them are.
        streamed: The setting of what is streamed; None where state and gradients are in memory.
        storage: Of the run.
        left_for_a_step: Whether state that had stayed has left for a step that may need more memory than those before.
    """

    def __init__(self, model: nn.Module, config: OffloadConfig, storage: RunStorage, ranks: Ranks):
        self.residency: Weights | None = None
        self.streamed: StreamedSetting | None = None
        self.left_for_a_step = False
        self._config = config
        self.storage = storage
        self._ranks = ranks
        self._model = weakref.ref(model)
        self._on_host = next((p.device.type == "cpu" for p in model.parameters()), True)
        self._place = "ssd" if self._on_host or config.drive_settings else "ram"
        automatic = config.tier == "auto"
        can_park = (
            automatic and (ranks.count == 1 or self._on_host) and any(p.requires_grad for p in model.parameters())
        )
        self._may_stream = automatic and config.state_place == "auto"
        self._may_stay = self._may_stream  # gradients and state of some weights, where those of others leave memory
        self._may_park = can_park and config.weights_place == "auto"
        self._may_resize = can_park and config.weights_place != "none"
        self._limit_bytes = self._budget_bytes = 0
        self._hardware: Hardware | None = None
        self._optimizers: dict[int, weakref.ref[Optimizer]] = {}
        self._defers_updates = False
        self._state_per_weight = 0.0
        self._has_warned = False
        self._is_measured = True
        self._usual_bytes: int | None = None  # of weights, while fewer are in memory
        self._staying: frozenset[str] = frozenset()
        self._width = 1  # of the windows of gradients and state
        self._has_returned = False  # all weights, which had left
        self._after_streaming: list[Callable[[], None]] = []
        present = weights_of(model)
        if self._may_park and present is not None:
            self._park(model, self._place)
        elif not self._may_park and (config.params not in (None, "none") or present is not None):
            self.residency = park_weights(model, config, storage, ranks.count)
        if not self._may_stream and config.optimizer not in (None, "none"):
            self.streamed = StreamedSetting(model, config, storage, ranks.count)

    def plan_for(self, budget_bytes: int, hardware: Hardware) -> None:
        """Steps are planned for a budget. Without one, what is ``auto`` stays in memory."""
        self._budget_bytes, self._limit_bytes, self._hardware = budget_bytes, limit_of(budget_bytes), hardware

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Stream ``optimizer`` if that is set, or if the plan for the first step says so. Idempotent; called by all
        processes.
        """
        streamed = self.streamed
        if streamed is not None:
            self._ranks.each(lambda: streamed.prepare(model, optimizer))
        elif self.residency is not None and not self._may_stream:
            self._warn_of(optimizer, self.residency)
        if not self._limit_bytes or id(optimizer) in self._optimizers or not (self._may_stream or self._may_park):
            return
        self._optimizers[id(optimizer)] = weakref.ref(optimizer)
        weights = sum(nbytes_of(p) for p in model.parameters())
        trained = sum(nbytes_of(p) for p in model.parameters() if p.requires_grad)
        more = gradient_and_state_bytes(model, self._prepared(), self._limit_bytes)
        if self._may_stream and self.streamed is None:
            placement = self._initial_placement(model, more - trained, activation_bytes=0)
            if placement.state is not None:
                total = format_bytes(weights + more)
                self._stream(model, placement.state, f"weights, gradients and optimizer state take {total}")
                self._is_measured = False
        if self._may_park and self.residency is None:
            # Where state does not fit, weights leave in any case: what activations take is known after the step.
            share = 1.0 if self.streams else _FOR_ACTIVATIONS
            placement = self._initial_placement(model, 0, activation_bytes=int(share * self._limit_bytes))
            if placement.weights is not None and self._can_park(model):
                self._park(model, placement.weights)
                self._is_measured = False
                # How much activations need is not known: more weights stay once the first step has been measured.
                self._let_stay(least_weights(self._initial_estimate(model, 0, 0)))

    def _initial_placement(self, model: nn.Module, state_bytes: int, activation_bytes: int) -> StatePlacement:
        """What the plan moves of a step that has ``activation_bytes`` in memory, of any place in it: of the process that
        needs most.
        """
        assert self._hardware is not None
        own = self._initial_estimate(model, state_bytes, activation_bytes)
        footprint = self._ranks.largest(own, lambda one: one.optimizer_peak_bytes)
        allowed = self.allowed
        if activation_bytes:
            allowed = dataclasses.replace(allowed, state="none")
        arguments = footprint, self._hardware, self._budget_bytes, allowed
        return self._ranks.first(lambda: (choose(*arguments) or least_memory(*arguments)).state_placement)

    def _initial_estimate(self, model: nn.Module, state_bytes: int, activation_bytes: int) -> Footprint:
        return initial_estimate(
            model,
            state_bytes=state_bytes,
            state_is_there=activation_bytes == 0,
            streams=self.streams,
            keeps_gradients=self._keeps_gradients,
            activation_bytes=activation_bytes,
            step_bytes=0 if activation_bytes else step_bytes(self._prepared()),
            smallest_bytes=self._config.smallest_bytes(self._on_host),
        )

    def _warn_of(self, optimizer: Optimizer, residency: Weights) -> None:
        """Say, once, that the step of ``optimizer`` needs more memory than ``residency`` leaves for weights."""
        trained = [p for group in optimizer.param_groups for p in group["params"] if parked_of(p) is not None]
        nbytes = sum(nbytes_of(p) for p in trained)
        if nbytes > residency.limit_bytes and not self._has_warned and self._config.memory_mode == NONE:
            self._has_warned = True
            logger.warning(
                "params=%r lets %s of weights be in memory, but the optimizer trains %s of them: its state, and all of these "
                "weights in its step, take memory. Set optimizer='ssd' or optimizer='ram' as well.",
                self._config.params,
                format_bytes(residency.limit_bytes),
                format_bytes(nbytes),
            )

    @property
    def state_placement(self) -> StatePlacement:
        """Where weights, gradients and state are now."""
        state = self.streamed.place if self.streamed is not None and self.streamed.is_used else None
        if self.residency is None:
            return StatePlacement(
                state, None, 0, self._updates_in_backward, self._keeps_gradients, self._staying, self._width
            )
        place = "ram" if self.residency.store.tier.name == "ram" else "ssd"
        staying = self.residency.limit_bytes if self._usual_bytes is None else self._usual_bytes
        return StatePlacement(
            state, place, staying, self._updates_in_backward, self._keeps_gradients, self._staying, self._width
        )

    @property
    def _keeps_gradients(self) -> bool:
        """Whether gradients stay where state leaves memory."""
        if self.streamed is None or not self.streamed.is_used:
            return self._ranks.count > 1
        return not self.streamed.streams_gradients

    @property
    def _updates_in_backward(self) -> bool:
        return self._config.update_in_backward and not self._keeps_gradients

    @property
    def allowed(self) -> Allowed:
        """What a plan may do with them."""
        written = self._config.max_step_write_bytes
        can_stream = self._may_stream and bool(self._prepared())
        return Allowed(
            state="auto" if can_stream or (self._may_stay and self.streams) else "none",
            weights="auto" if self._may_park or (self._may_resize and self.residency is not None) else "none",
            in_backward=self._updates_in_backward,
            keeps_gradients=self._keeps_gradients,
            now=self.state_placement,
            written_bytes=None if written is None else int(written),
            snapshots=snapshots_held(self._config),
            snapshots_of_trained=self._config.memory_mode in OF_ADAPTERS,
            is_measured=self._is_measured,
        )

    def with_weights(self, model: nn.Module, footprint: Footprint) -> Footprint:
        """A measured ``footprint`` with what may leave memory of the model's units."""
        trained = sum(nbytes_of(p) for p in model.parameters() if p.requires_grad)
        state_bytes = int(self._state_per_weight * trained) if self.streams else footprint.state_bytes
        weights = unit_weights(model, footprint.units, state_bytes, self._config.smallest_bytes(self._on_host))
        at_once = step_bytes(self._prepared()) if self.streams else 0
        return dataclasses.replace(footprint, weights=weights, step_share=at_once / max(1, trained))

    def place(self, model: nn.Module, placement: StatePlacement) -> bool:
        """Let weights, gradients and state be where a plan has them, as far as they can be; whether that changed anything."""
        before = self.state_placement
        self.let_few_stay(False)
        self._is_measured, self.left_for_a_step = True, False
        if placement.state is not None and self._may_stream and self.streamed is None:
            self._stream(model, placement.state, "activations do not fit next to them, or take longer")
        self._let_state_stay(model, placement.staying & self._staying)
        if placement.weights is not None:
            if self.residency is None and self._can_park(model):
                self._park(model, placement.weights)
            if self._may_resize:
                self._let_stay(placement.weights_bytes)
        self._let_state_stay(model, placement.staying)
        if self.streamed is not None and self.streamed.is_used:
            self.streamed.set_window(state_window(self._budget_bytes, placement.width))
        self._width = placement.width
        return self.state_placement != before

    def _let_state_stay(self, model: nn.Module, units: frozenset[str]) -> None:
        """Let gradients and state of these units be in memory, and those of all others leave it."""
        streamed = self.streamed
        if self._may_stay and streamed is not None and streamed.is_used:
            self._ranks.each(lambda: streamed.let_stay(trained_in(model, find_units(model), units)))
            self._staying = units

    def on_infeasible(self, model: nn.Module) -> bool:
        """No plan fits the budget: let all that can leave memory; whether there was anything."""
        if self._config.max_step_write_bytes is not None and self._place == "ssd":
            return False  # the plan that was refused has looked at all that may be moved
        least = least_weights(self._initial_estimate(model, 0, 0))
        return self.place(model, StatePlacement(self._place, self._place, least))

    def let_few_stay(self, few: bool) -> None:
        """Let as ``few`` weights as possible be in memory, in a step that may need more of it than those before, or as many
        as usual again. That is not where a plan has them. State that stays leaves for good: the next plan says what stays.
        """
        model = self._model()
        if few and model is not None and self._staying:
            self._let_state_stay(model, frozenset())
            self._is_measured, self.left_for_a_step = False, True
        if not self._may_resize or few == (self._usual_bytes is not None):
            return
        if few and model is not None:
            if self.residency is None and self._has_returned:
                self._park(model, self._place)
            if self.residency is not None:
                self._usual_bytes = self.residency.total_bytes if self._has_returned else self.residency.limit_bytes
                self._let_stay(min(self._usual_bytes, least_weights(self._initial_estimate(model, 0, 0))))
        elif self._usual_bytes is not None:
            self._let_stay(self._usual_bytes)
            self._usual_bytes = None

    def _let_stay(self, nbytes: int) -> None:
        """Let so many bytes of weights be in memory; where these are all, none of them asks any more whether it is there."""
        model, residency = self._model(), self.residency
        if residency is None or model is None:
            return
        if residency.limit_bytes != nbytes:
            residency.limit_bytes = nbytes
        self._has_returned = self._may_park and nbytes >= residency.total_bytes and not residency.is_home
        if self._has_returned:
            self.residency = park_weights(
                model, with_checked(self._config, params="none"), self.storage, self._ranks.count
            )

    @property
    def moves(self) -> bool:
        """Whether anything of it may be on a tier."""
        return self.streamed is not None or self.residency is not None

    @property
    def streams(self) -> bool:
        """Whether the state of an optimizer is on a tier."""
        return self.streamed is not None and self.streamed.is_used

    def when_streamed(self, call: Callable[[], None]) -> None:
        """``call`` once an optimizer that stays in memory at first is streamed."""
        if self._may_stream:
            self._after_streaming.append(call)

    def defer_updates(self) -> None:
        """See :meth:`hf_offload.session.OffloadSession.defer_updates`."""
        self._defers_updates = True
        if self.streamed is not None:
            self.streamed.defer_updates()

    def close(self) -> None:
        """Compute what is noted. Streamed optimizers stay so. Idempotent."""
        if self.streamed is not None:
            self.streamed.close()

    def _prepared(self) -> list[Optimizer]:
        return [found for reference in self._optimizers.values() if (found := reference()) is not None]

    def _stream(self, model: nn.Module, place: str, why: str) -> bool:
        optimizers = self._prepared()
        nowhere = "Only an optimizer that is passed to session.prepare_optimizer() can be streamed."
        if not any(self._ranks.gather(bool(optimizers))):
            logger.info("Gradients and optimizer state stay in memory, though %s. %s", why, nowhere)
            return False
        self._may_stream = False
        setting, problem = None, "" if optimizers else nowhere
        try:
            setting = StreamedSetting(
                model, with_checked(self._config, optimizer=place), self.storage, self._ranks.count, is_planned=True
            )
            setting.open()
            for optimizer in optimizers if self._ranks.connected else ():
                check_streamable(optimizer)
        except OffloadConfigError as error:
            problem = str(error)
        # Where one process cannot, none does: a plan is for all of them.
        problem = next(filter(None, self._ranks.gather(problem)), "")
        if setting is not None and not problem:
            problem = self._prepare_all(setting, model, optimizers)
        if problem:
            logger.info("Gradients and optimizer state stay in memory, though %s. %s", why, problem)
        if setting is None or not setting.is_used:
            if setting is not None:
                setting.close()
            return False
        logger.info(
            "%s to %s, for %s of a budget of %s.",
            "Gradients and optimizer state go" if setting.streams_gradients else "Optimizer state goes",
            place,
            why,
            format_bytes(self._limit_bytes),
        )
        self.streamed = setting
        for call in self._after_streaming:
            call()
        self._after_streaming.clear()
        if self._defers_updates:
            setting.defer_updates()
        self._state_per_weight = max(map(state_per_weight, optimizers))
        return True

    def _prepare_all(self, setting: StreamedSetting, model: nn.Module, optimizers: Sequence[Optimizer]) -> str:
        """Stream ``optimizers``; returns why the first that cannot be stays in memory, with those after it."""

        def prepare() -> None:
            for optimizer in optimizers:
                setting.prepare(model, optimizer)

        try:
            self._ranks.each(prepare)
        except OffloadConfigError as error:
            if self._ranks.connected:
                setting.close()
                raise  # some have been streamed, others not: no plan is for both
            return str(error)
        return ""

    def _can_park(self, model: nn.Module) -> bool:
        if not self._may_park:
            return False
        if self.streams:
            return True
        trained = sum(nbytes_of(p) for p in model.parameters() if p.requires_grad)
        # Else the optimizer's step takes all weights at once.
        return (
            trained + gradient_and_state_bytes(model, self._prepared(), self._limit_bytes)
            <= _MOST_ON_DEVICE * self._limit_bytes
        )

    def _park(self, model: nn.Module, place: str) -> None:
        try:
            self.residency = park_weights(
                model, with_checked(self._config, params=place), self.storage, self._ranks.count
            )
        except OffloadConfigError as error:
            self._may_park = False
            logger.info("Weights stay in memory. %s", error)
