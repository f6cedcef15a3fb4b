"""From settings to a running engine and back: the order of everything that is applied can be read in :func:`attach`."""

import logging
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from hf_offload.allocator import tune_running_allocator
from hf_offload.engine.device import device_of, open_device
from hf_offload.engine.hooks import Engine
from hf_offload.engine.phases import Phases
from hf_offload.engine.recompute import Recompute
from hf_offload.engine.stats import OffloadStats
from hf_offload.engine.watch import ModelWatch
from hf_offload.errors import OffloadConfigError, OffloadError
from hf_offload.interrupts import signals_deferred
from hf_offload.plan.hardware import BUDGET_SHARE, Hardware
from hf_offload.plan.plan import Plan, plan_from_settings, safest_plan
from hf_offload.planning.feedback import Feedback
from hf_offload.planning.known import Prediction
from hf_offload.planning.ranks import Ranks, agreed, hardware_of_all
from hf_offload.settings.environment import DISABLE_VARIABLE, check_variables, is_on
from hf_offload.settings.schema import OffloadConfig
from hf_offload.settings.sizes import format_bytes
from hf_offload.storage.disk import DiskTier
from hf_offload.storage.opening import open_tier
from hf_offload.storage.wear import Wear, Written
from hf_offload.structure.units import find_blocks, find_units
from hf_offload.transforms.rematerialization.apply import Lean
from hf_offload.transforms.sampling.convert import Sampling
from hf_offload.transforms.sampling.gradient_cache import GradientCache
from hf_offload.transforms.sampling.sample_ids import carry_sample_ids, drop_sample_ids
from hf_offload.transforms.tiling.apply import Tiling

logger = logging.getLogger(__name__)

ENVIRONMENT = "the environment"
"""Who attaches to the models of a script that knows nothing of it; whatever the script says itself goes before."""

# A session lives as long as its hooks do: until it is detached or its model goes.
_attached: "weakref.WeakKeyDictionary[nn.Module, OffloadSession]" = weakref.WeakKeyDictionary()


def attach(
    model: nn.Module, config: OffloadConfig, training: object = None, by: str = "attach or offload_activations"
) -> "OffloadSession":
    """Offload the saved tensors of ``model``'s forwards until :meth:`OffloadSession.detach`.

    ``training`` is whatever tells one run of a trainer from another, ``by`` names the caller. A session that another run
    of the same caller left behind, because it raised, is detached first.

    With several processes (``torch.distributed``), all of them attach, with the same settings; those of one machine share
    ``ram_budget``, ``disk_budget`` and ``max_disk_write_bytes`` in equal parts.

    Raises :class:`~hf_offload.errors.OffloadConfigError` before anything is changed if the settings cannot work here.
    """
    config = _with_environment(config)
    _check_model(model, training, by)
    ranks = Ranks()
    sampling, tiling = Sampling(model, config.sampling), Tiling(model, config)
    lean = Lean(model, config.lean, tiling.head)
    try:
        config = agreed(config, ranks)
        sampling.apply()
        lean.apply()
        tiling.apply()
        session = _attach(model, config, sampling, lean, tiling, ranks)
    except BaseException:
        tiling.remove()
        lean.remove()
        sampling.remove()
        ranks.close()
        raise
    session.training, session.by = training, by
    return session


def attached_session(model: nn.Module) -> "OffloadSession | None":
    """The session that is attached to ``model``, if there is one."""
    return _attached.get(model)


def _attach(
    model: nn.Module, config: OffloadConfig, sampling: Sampling, lean: Lean, tiling: Tiling, ranks: Ranks
) -> "OffloadSession":
    blocks = find_blocks(model)
    on_host = device_of(model).type == "cpu"
    automatic = config.tier == "auto"
    plan = safest_plan(config, on_host) if automatic else plan_from_settings(config, list(blocks), on_host)
    if not plan.moves or not _has_work(model):
        return OffloadSession(model, config, plan, sampling, lean, tiling, ranks)
    device = open_device(device_of(model))
    if automatic:
        _check_eager(model)
    if not on_host:
        _check_no_graphs(model)
    tier, disk = open_tier(config, on_host, ranks.local_count)
    if on_host:
        logger.info("CPU allocator: %s.", tune_running_allocator())
    engine = Engine(model, plan, device, tier)
    phases = Phases(engine)
    session = OffloadSession(model, config, plan, sampling, lean, tiling, ranks, engine, phases)
    session.watch_writes(disk)
    units: Mapping[str, nn.Module] = blocks
    if automatic:
        session.plan_while_training(hardware_of_all(config, ranks, device.torch_device), Recompute(blocks))
        units = {name: unit.module for name, unit in find_units(model).items() if unit.module is not model}
    with signals_deferred:
        phases.install(model, units, session.begin_forward, session.end_forward)
        session.watch_model()
    return session


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
    """A model with offloading attached. Made by :func:`attach` and :func:`offload_activations`.

    It does not keep the model. Once nobody else does, all that it holds is given back but the counters, and ``orphaned``
    says so.

    Attributes:
        config: What was asked for.
        plan: What was decided.
        stats: Counters, per step and in total (:class:`~hf_offload.engine.stats.OffloadStats`).
        ranks: The processes that train the model together.
        training: The trainer's run the session belongs to, if one made it.
        by: What attached it.
        must_stop: The limit of bytes written was met in a step that has ended, and ``on_disk_write_limit`` is ``"stop"``.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OffloadConfig,
        plan: Plan,
        sampling: Sampling,
        lean: Lean,
        tiling: Tiling,
        ranks: Ranks,
        engine: Engine | None = None,
        phases: Phases | None = None,
    ):
        self.config = config
        self.plan = plan
        self.stats = engine.stats if engine is not None else OffloadStats(None)
        self._model = weakref.ref(model)
        self._engine = engine
        self._phases = phases
        self._feedback: Feedback | None = None
        self._recompute: Recompute | None = None
        self._sampling = sampling
        self._lean = lean
        self._tiling = tiling
        self.ranks = ranks
        self.training: object = None
        self.by = ""
        self._loader: Any = None
        self._stepped = False
        self._watch: ModelWatch | None = None
        self._disk: DiskTier | None = None
        self._wear: Wear | None = None
        self.must_stop = False
        if engine is not None or self.tiled or self.sampled or self.lean:
            _attached[model] = self

    def plan_while_training(self, hardware: Hardware, recompute: Recompute) -> None:
        """Let measured steps decide about the plan from now on."""
        engine, model = self._engine, self._model()
        assert engine is not None
        assert model is not None
        budget = self.config.memory_budget
        engine.transfer.time_stalls()  # else transfers would be taken for compute, and plans be made of that
        self._recompute = recompute
        self._feedback = Feedback(
            model,
            int(hardware.memory_bytes.value * BUDGET_SHARE) if budget is None else int(budget),
            hardware,
            safest=self.plan,
            apply=self._follow,
            engine=engine,
            need_less=self._tiling.need_less,
            ranks=self.ranks,
        )

    def watch_model(self) -> None:
        """Give back what the session holds when the model goes, as if it had been detached."""
        model = self._model()
        assert model is not None
        self._watch = ModelWatch(model, self._leave_thread, self._close_without_model)

    def _leave_thread(self) -> None:
        if self._phases is not None:
            self._phases.leave_thread()
        if self._feedback is not None:
            self._feedback.leave_thread()

    def _close_without_model(self) -> None:
        assert self._engine is not None
        self._engine.enter_thread()
        self._close()

    def _close(self) -> None:
        assert self._engine is not None
        self._engine.close()
        if self._wear is not None:
            self._wear.keep()

    def _wait_if_gone(self) -> None:
        """What is left to do for a model that has gone is done when this returns."""
        if self._watch is not None and self._model() is None:
            self._watch.join()

    def watch_writes(self, disk: DiskTier | None) -> None:
        """Count from now on what is written to the drives of ``disk``."""
        self._disk = disk
        self._wear = None if disk is None else Wear(disk.files)

    def written(self) -> list[Written]:
        """What was written to each drive, by this process and by all runs together. Keeps the count first."""
        if self._wear is None:
            return []
        self._wait_if_gone()
        self._wear.keep()
        return self._wear.report()

    def _follow(self, plan: Plan) -> None:
        assert self._engine is not None
        assert self._recompute is not None
        with signals_deferred:
            self.plan = plan
            self._engine.follow(plan)
            self._recompute.apply(name for name, placement in plan.placements.items() if placement.recomputes)

    def begin_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], compiled: bool = False) -> None:
        """The model's forward begins, with these inputs."""
        self.end_pending_step()
        if self.must_stop:
            raise OffloadError(
                f"max_disk_write_bytes={format_bytes(int(self.config.max_disk_write_bytes or 0))} have been written, and "
                "on_disk_write_limit='stop'. The last step is complete: save the model, and raise the limit to go on."
            )
        if self._feedback is not None:
            model = self._model()
            assert model is not None, "a forward has a model"
            _check_eager(model, compiled)  # again: it may have been compiled since
            self._feedback.begin_forward(args, kwargs)

    def end_forward(self) -> None:
        """The model's forward has ended, in this thread."""
        if self._feedback is not None:
            self._feedback.end_forward()

    @property
    def forecast(self) -> Prediction | None:
        """With tier ``auto``: what the plan in force was predicted to do, and what it did; None before there is one."""
        return None if self._feedback is None else self._feedback.prediction

    @property
    def tiled(self) -> list[str]:
        """Names of the modules that are computed a few tokens at a time."""
        return self._tiling.names

    @property
    def sampled(self) -> list[str]:
        """Names of the linear layers whose weight gradient is estimated."""
        return list(self._sampling.names)

    def carry_sample_ids(self, loader: Any) -> GradientCache | None:
        """Let the batches of the training ``loader`` say which rows of its data set they hold, and remember how large the
        gradients of those rows were; None unless layers are sampled with ``probabilities="gradient-cache"``, which needs it.

        Raises :class:`~hf_offload.errors.OffloadConfigError` for a stream, whose rows cannot be told apart.
        """
        if not self._sampling.caches_gradients:
            return None
        cache = self._sampling.start_cache(carry_sample_ids(loader))
        self._loader = loader
        return cache

    @property
    def gradient_cache(self) -> GradientCache | None:
        """What is remembered of the gradients of each sample, if anything is."""
        return self._sampling.cache

    @property
    def lean(self) -> list[str]:
        """Names of the modules that save less for backward."""
        return list(self._lean.names)

    @property
    def active(self) -> bool:
        """Whether anything is offloaded: not with tier ``none``, a frozen model, one that has gone, or after
        :meth:`detach`.
        """
        return self._engine is not None and not self._engine.closed

    @property
    def model(self) -> nn.Module | None:
        """The model, if there still is one."""
        return self._model()

    @property
    def orphaned(self) -> bool:
        """Whether the session was ``active`` when its model went."""
        return self._engine is not None and self._engine.closed

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Offload all that this thread saves inside the block, the loss outside the model included."""
        if self._phases is None:
            yield
        else:
            with self._phases.scope():
                yield

    def settle(self) -> None:
        """Wait until whatever is on its way out has left memory: backward then has to bring all of it back."""
        if self._engine is not None:
            self._engine.transfer.settle()

    def end_step(self) -> None:
        """Mark the end of a training step: ``stats.step`` moves to ``stats.steps``."""
        self._end_counters()
        if self._feedback is not None:
            self._feedback.end_step()
        if self._wear is not None:
            self._wear.keep(now=False)
        if self._disk is not None and self.config.on_disk_write_limit == "stop":
            self.must_stop = any(self.ranks.gather(self._disk.write_limit_reached))

    def _end_counters(self) -> None:
        with signals_deferred:
            if self._engine is not None:
                self._engine.end_step()
            self._stepped = False

    def optimizer_stepped(self) -> None:
        """An optimizer has stepped: the next forward belongs to another step. For loops that do not call :meth:`end_step`."""
        self._stepped = True

    def end_pending_step(self) -> None:
        """End the step that :meth:`optimizer_stepped` said was over, if there is one."""
        if self._stepped:
            self.end_step()

    def finish(self, together: bool = True) -> None:
        """The run is over: end the step that is pending. ``together``, all processes call this, or none."""
        self._wait_if_gone()
        model = self._model()  # it stays until the step has ended
        # The garbage collector may have come to one process and not to the others, and they would wait for its part.
        if together and all(self.ranks.gather(model is not None)):
            self.end_pending_step()
        elif self._stepped:
            self._end_counters()

    def detach(self) -> None:
        """Take everything off the model. Graphs that are still alive keep their bytes until they go. Idempotent."""
        if self._watch is not None:
            self._watch.end()
            self._watch = None
        try:
            with signals_deferred:  # until it waits for a drive
                self._take_off()
        finally:
            if self._wear is not None:
                self._wear.keep()
            self.ranks.close()

    def _take_off(self) -> None:
        engine, phases, model = self._engine, self._phases, self._model()
        self._engine = self._phases = None
        if self._feedback is not None:
            self._feedback.close()
        if self._recompute is not None:
            self._recompute.remove()
        self._tiling.remove()
        self._lean.remove()
        self._sampling.remove()
        if self._loader is not None:
            drop_sample_ids(self._loader)
            self._loader = None
        if phases is not None:
            phases.remove()
        if model is not None:
            _attached.pop(model, None)
        if engine is not None:
            engine.close()


def _with_environment(config: OffloadConfig) -> OffloadConfig:
    check_variables()  # a misspelt switch would go unnoticed
    if is_on(DISABLE_VARIABLE):
        logger.warning("%s is set: nothing is offloaded.", DISABLE_VARIABLE)
        return OffloadConfig(tier="none")
    return config


def _check_model(model: nn.Module, training: object, by: str) -> None:
    if isinstance(model, nn.DataParallel):
        raise OffloadConfigError(
            "nn.DataParallel runs forwards in threads with copies of the model and cannot be offloaded. Start one process "
            "per GPU instead: `accelerate launch --multi_gpu train.py`, or set CUDA_VISIBLE_DEVICES to one GPU."
        )
    session = _attached.get(model)
    if session is None:
        return
    if session.by == ENVIRONMENT != by:
        logger.warning("%s is used for %s, and not the environment's settings.", by, type(model).__name__)
        session.detach()
        return
    # `is`: a trainer's state compares by value, and two that have just begun are equal
    runs = (training, session.training)
    if session.by == by and runs[0] is not runs[1] and all(run is not None for run in runs):
        session.detach()
        return
    raise OffloadConfigError(
        f"Offloading is attached to this model already, by {session.by}; now {by} wants to, too. Use one surface only (the "
        "training arguments, a callback, an OffloadPlugin or offload_activations), or detach the first session."
    )


def _check_eager(model: nn.Module, compiled: bool = False) -> None:
    if compiled or any(
        getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"
        for module in model.modules()
    ):
        raise compiled_error()


def _check_no_graphs(model: nn.Module) -> None:
    """Refuse compile modes that replay CUDA graphs: what they save lives in memory that the next replay writes to."""
    for module in model.modules():
        call: Any = module if hasattr(module, "get_compiler_config") else getattr(module, "_compiled_call_impl", None)
        options = call.get_compiler_config() if hasattr(call, "get_compiler_config") else None
        if options and options.get("triton.cudagraphs"):
            raise OffloadConfigError(
                f"{type(module).__name__} is compiled with CUDA graphs (mode 'reduce-overhead' or 'max-autotune'), whose "
                "saved tensors live in memory that the next replay overwrites: compile it with mode='default' or "
                "'max-autotune-no-cudagraphs'."
            )


def compiled_error() -> OffloadConfigError:
    """What ``tier="auto"`` says to a compiled model."""
    return OffloadConfigError(
        "tier='auto' measures operations one by one, and a compiled model has none to show: take tier='ssd' or 'ram' "
        "with torch.compile."
    )


def _has_work(model: nn.Module) -> bool:
    if any(parameter.requires_grad for parameter in model.parameters()):
        return True
    logger.warning(
        "No parameter of %s requires a gradient, so autograd saves nothing and there is nothing to offload.",
        type(model).__name__,
    )
    return False
