"""From settings to a running engine and back. :meth:`OffloadSession._apply` shows the order of everything that is applied."""

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_offload.allocator import say_what_is_better, tune_running_allocator
from hf_offload.engine.device import device_of, open_device
from hf_offload.engine.hooks import Engine
from hf_offload.engine.phases import Phases
from hf_offload.engine.stats import OffloadStats
from hf_offload.engine.unsupported import (
    check_eager,
    check_initialized,
    check_no_graphs,
    check_no_other_offloading,
    check_one_process_per_device,
    trains_anything,
)
from hf_offload.engine.watch import ModelWatch
from hf_offload.errors import OffloadConfigError, OffloadError, OffloadPlanError
from hf_offload.interrupts import signals_deferred
from hf_offload.methods.applied import AppliedMode, apply_mode
from hf_offload.plan.plan import Plan, plan_from_settings, safest_plan
from hf_offload.planning.automatic import AutomaticPlan
from hf_offload.planning.model_state import ModelState
from hf_offload.planning.ranks import agreed
from hf_offload.planning.shape_plan import Prediction, ShapePlan
from hf_offload.ranks import Ranks
from hf_offload.settings.environment import unless_disabled
from hf_offload.settings.schema import OffloadConfig
from hf_offload.settings.sizes import format_bytes
from hf_offload.snapshots.loops import LoopSnapshots, expect_snapshots, refuse_loop
from hf_offload.state.optimizer import clip_grad_norm_
from hf_offload.state.saved import hook_saved_weights
from hf_offload.state.units import pinned
from hf_offload.state.weights import Weights, run_storage
from hf_offload.storage.opening import open_tier
from hf_offload.structure.units import find_blocks, find_units
from hf_offload.transforms.order import transforms_for
from hf_offload.transforms.rematerialization.apply import ElementwiseBlocks
from hf_offload.transforms.sampling.gradient_cache import GradientCache

logger = logging.getLogger(__name__)

ENVIRONMENT = "the environment"
"""The ``owner`` of sessions attached by environment variables; those that a script attaches itself take precedence."""

# A session lives as long as its hooks do: until it is detached or its model goes.
_attached: "weakref.WeakKeyDictionary[nn.Module, OffloadSession]" = weakref.WeakKeyDictionary()


def attach(
    model: nn.Module, config: OffloadConfig, run_id: object = None, owner: str = "attach or offload_activations"
) -> "OffloadSession":
    """Offload the saved tensors of ``model``'s forwards until :meth:`OffloadSession.detach`.

    ``run_id`` tells one run of a trainer from another, ``owner`` names the caller; a session that an earlier run of the same
    caller left behind is detached. A memory mode changes the model permanently: see :meth:`OffloadSession.prepare_optimizer`.

    With several processes (``torch.distributed``), all of them attach, with the same settings; those of one machine share
    ``ram_budget``, ``disk_budget`` and ``max_disk_write_bytes`` in equal parts.

    Raises :class:`~hf_offload.errors.OffloadConfigError` before anything is changed if the settings cannot work here.
    """
    config = unless_disabled(config)
    check_one_process_per_device(model)
    if config.tier != "none":
        check_no_other_offloading(model)
    if config.tier == "auto":
        check_initialized(model)
    _detach_former(model, run_id, owner)
    session = OffloadSession(model, config, run_id, owner)
    try:
        session._apply(model)
        if session.changes_model:
            _attached[model] = session
    except BaseException:
        session.detach()
        raise
    return session


def attached_session(model: nn.Module) -> "OffloadSession | None":
    """The session that is attached to ``model``, if there is one."""
    return _attached.get(model)


@contextmanager
def offload_activations(model: nn.Module, config: OffloadConfig | None = None) -> Iterator["OffloadSession"]:
    """Offload everything that autograd saves inside the block, in this thread, and in ``model``'s forwards in others.

    Example::

        with offload_activations(model, OffloadConfig(tier="ssd", directory="/nvme")) as session:
            for batch in loader:
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                session.end_step()
        print(session.stats.total)

    Backward may also run after the block. ``config`` defaults to ``OffloadConfig()``.
    """
    session = attach(model, config or OffloadConfig())
    try:
        with session.scope():
            yield session
    finally:
        session.detach()


class OffloadSession:
    """A model with offloading attached, as :func:`attach` and :func:`offload_activations` return it.

    It does not keep the model alive. Once the model is freed, so is everything but the counters, and ``orphaned`` is true.

    Attributes:
        config: The settings.
        stats: Counters, per step and in total (:class:`~hf_offload.engine.stats.OffloadStats`).
        ranks: The processes that train the model together.
        run_id, owner: The trainer's run the session belongs to, if one made it, and what attached it.
        must_stop: Whether the limit of bytes written was met in a step that has ended, with ``on_disk_write_limit="stop"``.
    """

    def __init__(self, model: nn.Module, config: OffloadConfig, run_id: object, owner: str):
        self.config = config
        self.run_id = run_id
        self.owner = owner
        self.ranks = Ranks()
        self.must_stop = False
        self._model = weakref.ref(model)
        self._mode: AppliedMode | None = None
        self._transforms = transforms_for(model, config)
        self._elementwise: ElementwiseBlocks | None = None
        self._engine: Engine | None = None
        self._phases: Phases | None = None
        self._automatic: AutomaticPlan | None = None
        self._watch: ModelWatch | None = None
        self._storage = run_storage(model)  # the optimizer's, too
        self._storage.members.add(self)
        self._state: ModelState | None = None
        self.stats = OffloadStats(None, self._storage.accounts)
        self._stepped = False
        self._saving: Any = None
        self._snapshots_expected: RemovableHandle | None = None

    _plan: Plan

    def _apply(self, model: nn.Module) -> None:
        """The memory mode, transforms of what it has made of the model, the plan, the engine with its storage, and hooks."""
        config = self.config = agreed(self.config, self.ranks)
        self._mode = apply_mode(model, config)  # its optimizer comes with prepare_optimizer
        self._transforms.apply()
        blocks = find_blocks(model)
        on_host = device_of(model).type == "cpu"
        automatic = config.tier == "auto"
        self._plan = safest_plan(config, on_host) if automatic else plan_from_settings(config, list(blocks), on_host)
        self._storage.begin_run(config, on_host, self.ranks.local_count)
        if config.snapshot_steps is not None:
            self._snapshots_expected = expect_snapshots(
                model, "with session.snapshots(folder, optimizer=optimizer) as snapshots"
            )
        self._state = ModelState(model, config, self._storage, self.ranks)
        if not self._plan.moves or not trains_anything(model) or not self._saves_anything:
            if self._state.residency is not None:
                self._saving = hook_saved_weights(model)
            return
        device = open_device(device_of(model))
        if automatic:
            check_eager(model)
        if not on_host:
            check_no_graphs(model)
        tier = open_tier(self._storage, config, on_host)
        if on_host:
            say_what_is_better()
            logger.info("CPU allocator: %s.", tune_running_allocator())
        ring_bytes = None if config.ring_bytes is None else int(config.ring_bytes)
        self._engine = Engine(model, self._plan, device, tier, ring_bytes, self._storage.handling)
        self._storage.free_with(self._engine.transfer.reap)
        self._phases = Phases(self._engine)
        self.stats = self._engine.stats
        self.stats.accounts = self._storage.accounts
        units: Mapping[str, nn.Module] = blocks
        if automatic:
            if config.plans_elementwise:
                self._elementwise = ElementwiseBlocks(blocks)
            self._automatic = AutomaticPlan(
                model,
                blocks,
                config,
                self._engine,
                self._plan,
                self.ranks,
                self._state,
                self._on_infeasible,
                self._elementwise,
            )
            self._state.plan_for(self._automatic.budget_bytes, self._automatic.hardware)
            units = {name: unit.module for name, unit in find_units(model).items() if unit.module is not model}
        with signals_deferred:
            self._phases.install(model, units, self.begin_forward, self.end_forward)
            # When the model goes, what the session holds is given back as if it had been detached.
            self._watch = ModelWatch(model, self._leave_thread, self._close_without_model)

    @property
    def _saves_anything(self) -> bool:
        return self._mode is None or self._mode.uses_gradients

    def _on_infeasible(self) -> bool:
        model = self._model()
        if model is not None and self._state is not None and self._state.on_infeasible(model):
            return True
        return self._transforms.tiling.on_infeasible()

    def _leave_thread(self) -> None:
        for each in (self._phases, self._automatic):
            if each is not None:
                each.leave_thread()

    def _close_without_model(self) -> None:
        assert self._engine is not None
        self._engine.enter_thread()
        self._engine.close()

    def _wait_if_gone(self) -> None:
        if self._watch is not None and self._model() is None:
            self._watch.join()

    def written(self) -> dict[str, dict[str, int]]:
        """Bytes that this process has written in the run, by the drive's name and what they are of, such as activations."""
        self._wait_if_gone()
        return self._storage.wear.report()

    def begin_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], compiled: bool = False) -> None:
        """The model's forward begins, with these inputs. Without gradients, it is not part of a step: all processes need not
        run it.
        """
        if not torch.is_grad_enabled():
            if self._automatic is not None:
                self._automatic.begin_evaluation()
            return
        self.end_pending_step()
        if self.must_stop:
            raise OffloadError(
                f"max_disk_write_bytes={format_bytes(int(self.config.max_disk_write_bytes or 0))} have been written, and "
                "on_disk_write_limit='stop'. The last step is complete: save the model, and raise the limit to go on."
            )
        if self._automatic is not None:
            model = self._model()
            assert model is not None, "a forward has a model"
            self._automatic.begin_forward(model, args, kwargs, compiled)

    def end_forward(self) -> None:
        """The model's forward has ended, in this thread."""
        if self._automatic is not None and torch.is_grad_enabled():
            self._automatic.end_forward()

    @property
    def plan(self) -> Plan:
        """What was planned; with tier ``auto``, the present plan."""
        return self._plan if self._automatic is None else self._automatic.plan

    @property
    def planned(self) -> ShapePlan | None:
        """With tier ``auto``: the current plan and the measured step that it was made of; None before the first one."""
        return None if self._automatic is None else self._automatic.planned

    @property
    def forecast(self) -> Prediction | None:
        """Prediction and measurements of what is ``planned``."""
        return None if self.planned is None else self.planned.prediction

    @property
    def most_measured_bytes(self) -> int | None:
        """With tier ``auto``: the highest peak of all steps that were measured, as :class:`Prediction` has it; None before
        the first one.
        """
        return None if self._automatic is None else self._automatic.most_measured_bytes

    @property
    def tiled(self) -> list[str]:
        """Names of the modules that are computed a few tokens at a time."""
        return list(self._transforms.tiling.names)

    @property
    def sampled(self) -> list[str]:
        """Names of the linear layers whose weight gradient is estimated."""
        return list(self._transforms.sampling.names)

    def carry_sample_ids(self, loader: Any) -> GradientCache | None:
        """Add row numbers to the batches of the training ``loader``, and return the cache of gradient norms by row; None
        unless layers are sampled with ``probabilities="gradient-cache"``.

        Raises :class:`~hf_offload.errors.OffloadConfigError` for a stream, whose rows cannot be told apart.
        """
        return self._transforms.sampling.carry_sample_ids(loader)

    @property
    def gradient_cache(self) -> GradientCache | None:
        """The gradient norms kept for each sample, if any."""
        return self._transforms.sampling.cache

    @property
    def rematerialized(self) -> list[str]:
        """Names of the modules that recompute in backward what they would save."""
        planned = [] if self._elementwise is None else self._elementwise.names
        return [*self._transforms.rematerialization.names, *planned]

    @property
    def changes_model(self) -> bool:
        """Whether anything is offloaded, computed in another way, or trained in a memory mode."""
        moved = self._state is not None and self._state.moves
        return self.active or self._mode is not None or moved or any(transform.names for transform in self._transforms)

    @property
    def active(self) -> bool:
        """Whether anything is offloaded: not with tier ``none``, of a frozen model or one that has gone, once detached."""
        return self._engine is not None and not self._engine.closed

    @property
    def streams_optimizer(self) -> bool:
        """Whether the state of an optimizer is on a tier."""
        return self._state is not None and self._state.streams

    @property
    def model(self) -> nn.Module | None:
        """The model, if there still is one."""
        return self._model()

    @property
    def orphaned(self) -> bool:
        """Whether the session was ``active`` when its model went."""
        return self._engine is not None and self._engine.closed

    def scope(self) -> AbstractContextManager[None]:
        """Offload all that this thread saves inside the block, the loss outside the model included."""
        return nullcontext() if self._phases is None else self._phases.scope()

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer to train with: the memory mode's, with the lr, betas, eps and weight decays of ``optimizer`` (an
        ``AdamW`` over the model's parameters), whose schedulers keep working. Without a memory mode, ``optimizer`` itself.
        With ``OffloadConfig(optimizer=...)``, its state and gradients leave memory from now on.

        Raises :class:`~hf_offload.errors.OffloadConfigError` that lists everything the mode's optimizer cannot take over, or
        for an optimizer whose state cannot be streamed. Of several processes, all call this, and an error of one is raised
        in all of them.
        """
        model = self._model()
        if model is None:
            return optimizer
        mode = self._mode
        if mode is not None:
            given = optimizer
            optimizer = self.ranks.each(lambda: mode.prepare_optimizer(model, given))
        if self._state is not None:
            self._state.prepare(model, optimizer)
        self.watch_optimizer(optimizer)
        return optimizer

    def watch_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Let plans of tier ``auto`` count the state of ``optimizer``, whenever it comes, which stays where it is otherwise.
        :meth:`prepare_optimizer` does, too. Idempotent.
        """
        if self._automatic is not None:
            self._automatic.watch_optimizer(optimizer)

    @property
    def residency(self) -> Weights | None:
        """Which weights are in memory; None where all of them are."""
        return None if self._state is None else self._state.residency

    @contextmanager
    def weights(self, *modules: nn.Module) -> Iterator[None]:
        """Let the weights of ``modules``, by default of the whole model, be in memory inside the block: for code that takes
        their memory without PyTorch's knowing. What it changes there stays.
        """
        model = self._model()
        found = modules or (() if model is None else (model,))
        with pinned([parameter for module in found for parameter in module.parameters()], unseen=True):
            yield

    def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``torch.nn.utils.clip_grad_norm_``, bit for bit, without bringing gradients that have left memory back. Takes
        ``(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False)``; without ``parameters``, all of the model are
        clipped. Returns the norm before clipping.

        Raises :class:`~hf_offload.errors.OffloadError` in a memory mode that has no gradients.
        """
        if self._mode is not None:
            self._mode.check_gradients("clip_grad_norm_")
        if "parameters" not in kwargs and (not args or isinstance(args[0], (int, float))):
            model = self._model()
            args = [] if model is None else list(model.parameters()), *args
        return clip_grad_norm_(*args, **kwargs)

    def snapshots(self, folder: str | os.PathLike[str], *, resume: bool | None = None, **objects: Any) -> LoopSnapshots:
        """A block that takes a snapshot every ``config.snapshot_steps`` steps, of the model and of ``objects`` with a
        ``state_dict``: optimizers, schedulers, scalers, averages, counters. ``folder`` tells one training from another, and
        ``resume`` goes on from the newest snapshot: by default where ``hf-offload launch`` has started the script again.

        Raises :class:`~hf_offload.errors.OffloadConfigError` without ``snapshot_steps``, or for what cannot be part of one.
        """
        model = self._model()
        if self.config.snapshot_steps is None or model is None:
            raise OffloadConfigError("session.snapshots() needs a model, and OffloadConfig(snapshot_steps=...).")
        if not isinstance(folder, (str, os.PathLike)):
            raise OffloadConfigError(f"session.snapshots() takes the path of a folder, and {folder!r} is none.")
        refuse_loop(self.config, self.ranks.count, [model])
        found = LoopSnapshots(model, objects, self.config, Path(folder), self._storage, resume)
        self._end_expecting()
        return found

    def _end_expecting(self) -> None:
        if self._snapshots_expected is not None:
            self._snapshots_expected.remove()
            self._snapshots_expected = None

    def defer_updates(self) -> None:
        """Let updates of weights wait until their modules run next, so that state moves during the forward.

        The caller promises that between a step and the next forward, weights are read by modules, or by operations that
        subclasses of tensors see (``__torch_function__``): ``torch.tensor(weight)``, nested tensors and transforms of
        ``torch.func`` that get a weight itself would read its former value. The Trainer's loop keeps the promise.
        """
        if self._state is not None:
            self._state.defer_updates()

    def when_streamed(self, call: Callable[[], None]) -> None:
        """``call`` once the optimizer is streamed, if it stays in memory until a plan needs its room."""
        if self._state is not None:
            self._state.when_streamed(call)

    def settle(self) -> None:
        """Wait until all pending stores have left memory: backward then has to load everything."""
        if self._engine is not None:
            self._engine.transfer.settle()

    def end_step(self) -> None:
        """Mark the end of a training step: ``stats.step`` moves to ``stats.steps``."""
        self._end_counters()
        if self._automatic is not None:
            self._automatic.end_step()
        if self._storage.stops:
            self.must_stop = any(self.ranks.gather(self._storage.must_stop))

    @signals_deferred
    def _end_counters(self) -> None:
        if self._engine is not None:
            self._engine.end_step()
        else:
            self.stats.end_step(0)  # which counts it
        self._stepped = False

    def optimizer_stepped(self) -> None:
        """An optimizer has stepped: the next forward belongs to another step. For loops that do not call :meth:`end_step`."""
        self._stepped = True

    def end_pending_step(self) -> None:
        """End the step that :meth:`optimizer_stepped` marked as over, if any."""
        if self._stepped:
            self.end_step()

    def finish(self) -> None:
        """The run is over: end the step that is pending. All processes call this, or none."""
        self._wait_if_gone()
        model = self._model()  # it stays until the step has ended
        # The garbage collector may have come to one process and not to the others, and they would wait for its part.
        if all(self.ranks.gather(model is not None)):
            try:
                self.end_pending_step()
            except OffloadPlanError as error:
                logger.warning("%s", error)  # no step comes that would need a plan
        elif self._stepped:
            self._end_counters()

    def detach(self) -> None:
        """Remove everything from the model. Live graphs keep their bytes until they are freed. Idempotent."""
        self._end_expecting()
        if self._watch is not None:
            self._watch.end()
            self._watch = None
        try:
            self._take_off()
        finally:
            self._storage.members.discard(self)
            self.ranks.close()

    @signals_deferred  # until it waits for a drive
    def _take_off(self) -> None:
        engine, phases, model = self._engine, self._phases, self._model()
        self._engine = self._phases = None
        if self._automatic is not None:
            self._automatic.close()
        self._transforms.remove()
        if self._elementwise is not None:
            self._elementwise.remove()  # below what has tiled a module since
        if self._mode is not None:
            self._mode.close()
        if phases is not None:
            phases.remove()
        if self._saving is not None:
            self._saving.remove()
        if model is not None:
            _attached.pop(model, None)
        try:
            if engine is not None:
                engine.close()
        finally:
            if self._state is not None:
                self._state.close()  # last, for updates that cannot be completed are an error


def _detach_former(model: nn.Module, run_id: object, owner: str) -> None:
    """Detach a session that gives way to one of ``owner``, or raise."""
    session = _attached.get(model)
    if session is None:
        return
    # `is`: a trainer's state compares by value, and two that have just begun are equal
    runs = (run_id, session.run_id)
    of_another_run = session.owner == owner and runs[0] is not runs[1] and all(run is not None for run in runs)
    if session.owner == ENVIRONMENT != owner and session._mode is None:
        logger.warning("%s is used for %s instead of the environment's settings.", owner, type(model).__name__)
    elif not of_another_run:
        raise OffloadConfigError(
            f"Offloading is already attached to this model by {session.owner}, and {owner} attaches it again. Use only one "
            "(the training arguments, a callback, an OffloadPlugin or offload_activations), or detach the first session."
        )
    session.detach()
