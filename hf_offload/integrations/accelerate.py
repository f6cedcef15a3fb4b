"""Offloading for loops written with accelerate's ``Accelerator``, and for scripts that do not mention it."""

import functools
import logging
import weakref
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType, DynamoBackend
from torch import nn

from hf_offload.engine.unsupported import compiled_error
from hf_offload.errors import OffloadConfigError
from hf_offload.integrations.loop_snapshots import prepared_objects
from hf_offload.integrations.streamed import (
    ClipsStreamedGradients,
    has_own_state,
    refuse_own_state,
    stream_prepared,
)
from hf_offload.integrations.summary import has_summary, show_summary, summary_lines
from hf_offload.integrations.without_gradients import check_gradients, check_step, lacks_gradients
from hf_offload.methods.applied import apply_mode
from hf_offload.session import ENVIRONMENT, OffloadSession, attach, attached_session
from hf_offload.settings.environment import settings_with, variable
from hf_offload.settings.memory_modes import NONE
from hf_offload.settings.schema import OffloadConfig, with_checked
from hf_offload.settings.shown import cropped, shown
from hf_offload.snapshots.loops import LoopSnapshots
from hf_offload.storage.service import storage_of
from hf_offload.surgery import InertInCopies, extend

logger = logging.getLogger(__name__)


class OffloadPlugin:
    """Offload what an :class:`~accelerate.Accelerator` trains::

        accelerator = Accelerator(...)
        OffloadPlugin(tier="ssd", directory="/nvme").attach(accelerator)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    or, in one: ``accelerator = OffloadPlugin(tier="ssd").accelerator(mixed_precision="bf16")``. Nothing else in the loop
    changes. :meth:`attach` may come before or after ``prepare``.

    Args:
        settings: Those of :class:`~hf_offload.OffloadConfig`. Settings that are not given are read from the environment
            (``HF_OFFLOAD_TIER=ssd``, see :mod:`hf_offload.settings.environment`), as with accelerate's own plugins.

    Raises :class:`~hf_offload.OffloadConfigError` for wrong settings from either source.

    Attributes:
        config: The settings in effect.
    """

    def __init__(self, **settings: Any):
        self.config, found = settings_with(settings, "OffloadPlugin")
        for field in sorted(settings.keys() & found.keys()):
            if settings[field] != found[field]:
                logger.warning(
                    "%s=%s is not used: the script sets %s=%s.",
                    variable(field),
                    cropped(str(found[field])),
                    field,
                    shown(settings[field]),
                )

    def accelerator(self, **kwargs: Any) -> Accelerator:
        """An :class:`~accelerate.Accelerator` made with ``kwargs`` that offloads."""
        accelerator = Accelerator(**kwargs)
        self.attach(accelerator)
        return accelerator

    def attach(self, accelerator: Accelerator) -> "OffloadedAccelerator":
        """Offload all models that ``accelerator`` has prepared or will prepare.

        Raises :class:`~hf_offload.OffloadConfigError`, before anything is changed, if that is not possible.
        """
        return OffloadedAccelerator(accelerator, self.config, "an OffloadPlugin")


_OWN_OPTIMIZERS = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.XLA)
_attached: "weakref.WeakKeyDictionary[Accelerator, OffloadedAccelerator]" = weakref.WeakKeyDictionary()


class OffloadedAccelerator:
    """An accelerator whose models are offloaded. Made by :meth:`OffloadPlugin.attach`.

    ``accelerator.end_training()`` logs a summary and detaches; ``accelerator.free_memory()`` detaches the models that the
    accelerator drops.

    Attributes:
        config: The settings in effect.
    """

    def __init__(self, accelerator: Accelerator, config: OffloadConfig, by: str):
        _refuse(accelerator, config, by)
        self._accelerator = weakref.ref(accelerator)
        self.config = config
        self._by = by
        self._sessions: list[OffloadSession] = []  # includes those of freed models, for the summary
        self._optimizers: dict[int, Any] = {}  # id of an optimizer -> the handle of its hook
        self._not_trained: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.offloaded_models = 0
        self._takes_snapshots = False
        _attached[accelerator] = self
        self._methods = extend(accelerator, _Offloading)
        try:
            self.update()
        except BaseException:
            self.detach()
            raise

    @property
    def sessions(self) -> list[OffloadSession]:
        """One for each model that is offloaded, or was when it was freed without ``free_memory()``."""
        return list(self._sessions)

    def snapshots(self, folder: str | None = None, *, resume: bool | None = None) -> LoopSnapshots:
        """A block that takes a snapshot every ``snapshot_steps`` steps of models, optimizers, schedulers and what else is
        prepared or registered by then. It is a method of the accelerator, too. ``folder``, by default ``project_dir``, tells
        one training from another. ``resume`` goes on from the newest snapshot: by default where ``hf-offload launch`` has
        started the script again.

        Raises :class:`~hf_offload.OffloadConfigError` without ``snapshot_steps``, or for what cannot be part of one.
        """
        accelerator = self._accelerator()
        assert accelerator is not None
        folder = folder or accelerator.project_dir
        if self.config.snapshot_steps is None or folder is None:
            raise OffloadConfigError(
                "snapshots() needs OffloadPlugin(snapshot_steps=...), and a folder or project_dir."
            )
        model, objects = prepared_objects(accelerator, self.config)
        self._takes_snapshots = True
        return LoopSnapshots(model, objects, self.config, Path(folder), storage_of(accelerator._models[0]), resume)

    def check_snapshots(self) -> None:
        """Raise :class:`~hf_offload.OffloadConfigError` if snapshots are set, and the loop takes none."""
        if self.config.snapshot_steps is not None and not self._takes_snapshots:
            raise OffloadConfigError(
                "snapshot_steps is set, and this loop takes no snapshots, for it alone knows where a step ends: write "
                "with accelerator.snapshots() as snapshots, or leave snapshot_steps out."
            )

    def detach(self) -> None:
        """Restore the accelerator, its models and optimizers. Idempotent."""
        for session in self.sessions:
            session.detach()
        self._sessions.clear()
        for handle in self._optimizers.values():
            handle.remove()
        self._optimizers.clear()
        accelerator = self._accelerator()
        if accelerator is not None and _attached.get(accelerator) is self:
            del _attached[accelerator]
        self._methods.remove()

    def prepares_model(self, model: nn.Module) -> None:
        """The accelerator is about to prepare a model for training: the memory mode changes it before it is wrapped."""
        if self.config.memory_mode != NONE and any(one.requires_grad for one in model.parameters()):
            apply_mode(model, self.config)

    def prepares_optimizer(self, optimizer: Any) -> Any:
        """The accelerator is about to prepare an optimizer: that of the memory mode takes its place."""
        if self.config.memory_mode == NONE or getattr(optimizer, "_is_accelerate_prepared", False):
            return optimizer
        sessions = self._sessions_of(optimizer)
        if not sessions:
            raise OffloadConfigError(
                f"memory_mode={self.config.memory_mode!r}: an optimizer is prepared before its model: prepare the model "
                "first, or pass it in front of the optimizer."
            )
        check_step(self._accelerator(), self.config)
        return sessions[0].prepare_optimizer(optimizer)

    def _sessions_of(self, optimizer: Any) -> list[OffloadSession]:
        """Those of models with parameters of ``optimizer``."""
        mine = {id(one) for group in optimizer.param_groups for one in group["params"]}
        models = {session: session.model for session in self._sessions}
        return [
            session
            for session, model in models.items()
            if model is not None and any(id(one) in mine for one in model.parameters())
        ]

    def prepared_model(self, model: nn.Module, trained: bool) -> None:
        """The accelerator has prepared a model, ``trained`` or for evaluation only."""
        if trained:
            self._not_trained.discard(model)
        else:
            self._not_trained.add(model)
        self.update()

    def stream_optimizers(self) -> None:
        """Stream the state of the optimizers that the accelerator has prepared, if that is set."""
        accelerator = self._accelerator()
        if accelerator is None or self.config.state_place == "none":
            return
        if self.config.optimizer is None and has_own_state(accelerator):
            return
        for optimizer in accelerator._optimizers:
            for session in self._sessions_of(optimizer):
                stream_prepared(session, optimizer)

    def stepped(self) -> None:
        """An optimizer has stepped."""
        for session in self.sessions:
            session.optimizer_stepped()

    def report(self) -> None:
        """Log what was offloaded. All processes call this, and the figures are those of all of them."""
        for session in self.sessions:
            session.finish()
            lines = summary_lines(session) if has_summary(session) else []
            if session.ranks.is_first:
                show_summary(lines, logger)

    def update(self) -> None:
        """Attach to what the accelerator has prepared, and detach from what it has dropped."""
        if not self.config.changes_a_run:
            return
        accelerator = self._accelerator()
        assert accelerator is not None
        prepared = {accelerator.unwrap_model(model, keep_torch_compile=False): model for model in accelerator._models}
        for session in self.sessions:
            if session.model not in prepared:
                self._sessions.remove(session)
                session.detach()
        offloaded = {session.model for session in self._sessions}
        for model, wrapped in prepared.items():
            if model not in offloaded and wrapped not in self._not_trained:
                self._attach_model(model)
        self.stream_optimizers()
        for key in self._optimizers.keys() - {id(optimizer) for optimizer in accelerator._optimizers}:
            self._optimizers.pop(key).remove()
        for optimizer in accelerator._optimizers:
            for session in self._sessions:
                session.watch_optimizer(optimizer.optimizer)
            register = getattr(optimizer.optimizer, "register_step_post_hook", None)
            if id(optimizer) not in self._optimizers and register is not None:
                self._optimizers[id(optimizer)] = register(
                    InertInCopies(functools.partial(_stepped, weakref.ref(self)))
                )

    def _attach_model(self, model: nn.Module) -> None:
        accelerator = self._accelerator()
        assert accelerator is not None
        if self.config.tier == "auto" and accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
            raise compiled_error()
        present = attached_session(model)
        if present is not None and self._by == ENVIRONMENT:
            return  # the script offloads this model itself
        if self._by == ENVIRONMENT and self.config.snapshot_steps is not None:
            raise OffloadConfigError(
                f"snapshot_steps={self.config.snapshot_steps} is set by the environment, and a loop alone knows where a "
                "step ends: give it to OffloadTrainingArguments, or to OffloadPlugin in a loop with accelerator.snapshots()."
            )
        trains = any(one.requires_grad for one in model.parameters())
        config = with_checked(self.config, snapshot_steps=None, snapshot_dir=None, snapshot_parity=0)
        config = config if trains else config.without_mode()
        session = attach(model, config, run_id=self, owner=self._by)
        self._sessions.append(session)
        self.offloaded_models += session.changes_model
        if session.active and session.ranks.is_first:
            logger.info("Offloading activations of %s: %s.", type(model).__name__, session.plan.reason)


def _stepped(offloaded: "weakref.ref[OffloadedAccelerator]", *_: Any) -> None:
    found = offloaded()
    if found is not None:
        found.stepped()


class _Offloading(ClipsStreamedGradients):
    """The methods of an accelerator that offloads: they pass on to the session what is prepared, freed and ended.

    One accelerator gets these methods, not the class; nothing in it refers to it, so that it is freed as soon as the script
    drops it. Copies find no entry in ``_attached`` and do nothing more than the original class.
    """

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        return self._updated(super().prepare(*args, **kwargs))

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        trained = not (kwargs.get("evaluation_mode") or any(args[1:]))
        offloaded = _attached.get(self)
        if offloaded is not None and trained:
            offloaded.prepares_model(model)
            if lacks_gradients(offloaded.config):  # nothing is reduced between processes
                args, kwargs = args[:1], {**kwargs, "evaluation_mode": True}
        result = super().prepare_model(model, *args, **kwargs)
        if offloaded is not None:
            offloaded.prepared_model(result, trained)
        return result

    def prepare_optimizer(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        offloaded = _attached.get(self)
        if offloaded is not None:
            optimizer = offloaded.prepares_optimizer(optimizer)
        return self._updated(super().prepare_optimizer(optimizer, *args, **kwargs))

    def free_memory(self, *args: Any, **kwargs: Any) -> Any:
        return self._updated(super().free_memory(*args, **kwargs))

    def snapshots(self, *args: Any, **kwargs: Any) -> LoopSnapshots:
        """See :meth:`OffloadedAccelerator.snapshots`."""
        return _attached[self].snapshots(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        offloaded = _attached.get(self)
        if offloaded is not None:
            offloaded.check_snapshots()
        super().backward(*args, **kwargs)
        # DeepSpeed steps inside backward, where no hook of an optimizer sees it.
        if offloaded is not None and self.distributed_type == DistributedType.DEEPSPEED and self.sync_gradients:
            offloaded.stepped()

    def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> Any:
        self._check_gradients("clip_grad_norm_")
        return super().clip_grad_norm_(*args, **kwargs)

    def clip_grad_value_(self, *args: Any, **kwargs: Any) -> None:
        self._check_gradients("clip_grad_value_")
        super().clip_grad_value_(*args, **kwargs)

    def _check_gradients(self, method: str) -> None:
        offloaded = _attached.get(self)
        if offloaded is not None:
            check_gradients(offloaded.config, method)

    def end_training(self) -> None:
        end = super().end_training  # detach() takes this class away
        offloaded = _attached.get(self)
        if offloaded is not None:
            offloaded.report()  # while the processes can still communicate
            offloaded.detach()
        end()

    def _updated(self, result: Any) -> Any:
        offloaded = _attached.get(self)
        if offloaded is not None:
            offloaded.update()
        return result


def _refuse(accelerator: Accelerator, config: OffloadConfig, by: str) -> None:
    present = _attached.get(accelerator)
    if present is not None and present._by == ENVIRONMENT != by:
        logger.warning("%s is used for this Accelerator instead of the environment's settings.", by)
        present.detach()
    elif present is not None:
        raise OffloadConfigError(
            "This Accelerator already offloads: attach only one OffloadPlugin, or detach the first one."
        )
    if accelerator.distributed_type == DistributedType.MEGATRON_LM:
        raise OffloadConfigError(
            "Megatron-LM runs forward and backward inside its own train_step and accelerate's backward() returns at once, "
            "so there is no forward to offload: use FSDP2 or DeepSpeed, or Megatron's own activation recomputation."
        )
    if config.memory_mode != NONE and accelerator.distributed_type in _OWN_OPTIMIZERS:
        raise OffloadConfigError(
            f"memory_mode={config.memory_mode!r} brings an optimizer, and {accelerator.distributed_type.value} makes or "
            "shards its own: use one process for each GPU (DDP), or drop memory_mode."
        )
    refuse_own_state(accelerator, config)
    if config.memory_mode != NONE and accelerator._models:
        raise OffloadConfigError(
            f"memory_mode={config.memory_mode!r} changes models before the Accelerator prepares them, and some are prepared: "
            "attach the OffloadPlugin before prepare()."
        )
    if accelerator.distributed_type == DistributedType.XLA and config.tier != "none":
        raise OffloadConfigError(
            "XLA devices compile whole steps and have no saved tensors to offload: use tier='none'."
        )


def attached_accelerators() -> list[OffloadedAccelerator]:
    """All accelerators that offload now."""
    return list(_attached.values())


def offload_by_environment(accelerator: Accelerator, config: OffloadConfig) -> OffloadedAccelerator | None:
    """Offload with an accelerator of a script that does not mention offloading. None if it does: that takes precedence."""
    return None if accelerator in _attached else OffloadedAccelerator(accelerator, config, ENVIRONMENT)
