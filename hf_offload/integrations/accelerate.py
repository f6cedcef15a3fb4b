"""Offloading for loops written with accelerate's ``Accelerator``, and for scripts that know nothing of it."""

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType, DynamoBackend
from torch import nn

from hf_offload.engine.unsupported import compiled_error
from hf_offload.errors import OffloadConfigError
from hf_offload.integrations.summary import summary_lines
from hf_offload.session import ENVIRONMENT, OffloadSession, attach, attached_session
from hf_offload.settings.environment import FIELDS, settings_with, variable
from hf_offload.settings.renamed import with_current_names
from hf_offload.settings.schema import OffloadConfig
from hf_offload.settings.shown import cropped, shown
from hf_offload.surgery import InertInCopies

logger = logging.getLogger(__name__)


class OffloadPlugin:
    """Offload what an :class:`~accelerate.Accelerator` trains::

        accelerator = Accelerator(...)
        OffloadPlugin(tier="ssd", directory="/nvme").attach(accelerator)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    or, in one: ``accelerator = OffloadPlugin(tier="ssd").accelerator(mixed_precision="bf16")``. Nothing else in the loop
    changes. :meth:`attach` may come before or after ``prepare``.

    Args:
        settings: Those of :class:`~hf_offload.OffloadConfig`. What is not given here is taken from the environment
            (``HF_OFFLOAD_TIER=ssd``, see :mod:`hf_offload.settings.environment`), as accelerate's own plugins do.

    Raises :class:`~hf_offload.OffloadConfigError` for wrong settings, wherever they come from.

    Attributes:
        config: The settings that hold.
        sources: Where each one comes from that is not a default: ``"given"`` or a variable's name.
    """

    def __init__(self, **settings: Any):
        settings = with_current_names(settings, FIELDS)
        self.config, found = settings_with(settings, "OffloadPlugin")
        for field in sorted(settings.keys() & found.keys()):
            if settings[field] != found[field]:
                logger.warning(
                    "%s=%s is not used: the script says %s=%s.",
                    variable(field),
                    cropped(str(found[field])),
                    field,
                    shown(settings[field]),
                )
        self.sources = {field: variable(field) for field in found} | dict.fromkeys(settings, "given")

    def __repr__(self) -> str:
        named = [
            f"{field}={getattr(self.config, field)!r}"
            + ("" if self.sources[field] == "given" else f" (from {self.sources[field]})")
            for field in FIELDS
            if field in self.sources
        ]
        return f"OffloadPlugin({', '.join(named)})"

    def accelerator(self, **kwargs: Any) -> Accelerator:
        """An :class:`~accelerate.Accelerator` made with ``kwargs`` that offloads."""
        accelerator = Accelerator(**kwargs)
        self.attach(accelerator)
        return accelerator

    def attach(self, accelerator: Accelerator) -> "OffloadedAccelerator":
        """Offload all models that ``accelerator`` has prepared, and those that it will prepare.

        Raises :class:`~hf_offload.OffloadConfigError` if that cannot be done; nothing has been changed then.
        """
        return OffloadedAccelerator(accelerator, self.config, "an OffloadPlugin")


_attached: "weakref.WeakKeyDictionary[Accelerator, OffloadedAccelerator]" = weakref.WeakKeyDictionary()


class OffloadedAccelerator:
    """An accelerator whose models are offloaded. Made by :meth:`OffloadPlugin.attach`.

    ``accelerator.end_training()`` logs a summary and detaches; ``accelerator.free_memory()`` detaches the models that it
    forgets.
    """

    def __init__(self, accelerator: Accelerator, config: OffloadConfig, by: str):
        _refuse(accelerator, config, by)
        self._accelerator = weakref.ref(accelerator)
        self._config = config
        self._by = by
        self._sessions: list[OffloadSession] = []  # of models that have gone, too: a script may end before it is asked
        self._optimizers: dict[int, Any] = {}  # id of an optimizer -> the handle of its hook
        self._not_trained: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.offloaded_models = 0
        _attached[accelerator] = self
        _watch_methods()
        weakref.finalize(accelerator, _unwatch_methods_if_unused).atexit = False
        try:
            if config.changes_a_run:
                self._follow()
        except BaseException:
            self.detach()
            raise

    @property
    def sessions(self) -> list[OffloadSession]:
        """One for each model that is offloaded now, or that went without having been forgotten."""
        return list(self._sessions)

    def detach(self) -> None:
        """Give the accelerator, its models and optimizers back as they were. Idempotent."""
        for session in self.sessions:
            session.detach()
        self._sessions.clear()
        for handle in self._optimizers.values():
            handle.remove()
        self._optimizers.clear()
        accelerator = self._accelerator()
        if accelerator is not None and _attached.get(accelerator) is self:
            del _attached[accelerator]
        _unwatch_methods_if_unused()

    # -- what the accelerator does --------------------------------------------------------------------------------------

    def prepared(self, result: Any, args: Any, kwargs: Any) -> None:
        """It has prepared something, or forgotten everything."""
        if self._config.changes_a_run:
            self._follow()

    def prepared_model(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """It has prepared a model, for training or for evaluation alone."""
        if kwargs.get("evaluation_mode") or any(args[2:]):
            self._not_trained.add(model)
        else:
            self._not_trained.discard(model)
        self.prepared(model, args, kwargs)

    def after_backward(self, result: Any, args: Any, kwargs: Any) -> None:
        """A backward is over. DeepSpeed steps in it, out of sight of any hook."""
        accelerator = self._accelerator()
        assert accelerator is not None
        if accelerator.distributed_type == DistributedType.DEEPSPEED and accelerator.sync_gradients:
            self.stepped()

    def stepped(self) -> None:
        """An optimizer has stepped."""
        for session in self.sessions:
            session.optimizer_stepped()

    def report(self, together: bool = True) -> None:
        """Log what was offloaded, ``together`` by all processes: then all of them call this, or none."""
        for session in self.sessions:
            session.finish(together)
            lines = summary_lines(session, together) if session.active or session.orphaned else []
            if session.ranks.is_first:
                for line in lines:
                    logger.info("%s", line)

    # -- following it -----------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Attach to what was prepared, and let go of what was forgotten."""
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
        for key in self._optimizers.keys() - {id(optimizer) for optimizer in accelerator._optimizers}:
            self._optimizers.pop(key).remove()
        for optimizer in accelerator._optimizers:
            register = getattr(optimizer.optimizer, "register_step_post_hook", None)
            if id(optimizer) not in self._optimizers and register is not None:
                self._optimizers[id(optimizer)] = register(
                    InertInCopies(functools.partial(_stepped, weakref.ref(self)))
                )

    def _attach_model(self, model: nn.Module) -> None:
        accelerator = self._accelerator()
        assert accelerator is not None
        if self._config.tier == "auto" and accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
            raise compiled_error()
        present = attached_session(model)
        if present is not None and self._by == ENVIRONMENT:
            return  # the script offloads this model itself, and knows better
        session = attach(model, self._config, run_id=self, owner=self._by)
        self._sessions.append(session)
        self.offloaded_models += session.changes_model
        if session.active and session.ranks.is_first:
            logger.info("Offloading activations of %s: %s.", type(model).__name__, session.plan.reason)


def _stepped(offloaded: "weakref.ref[OffloadedAccelerator]", *_: Any) -> None:
    found = offloaded()
    if found is not None:
        found.stepped()


_AFTER: dict[str, Callable[..., None]] = {
    "prepare": OffloadedAccelerator.prepared,
    "prepare_model": OffloadedAccelerator.prepared_model,
    "prepare_optimizer": OffloadedAccelerator.prepared,
    "free_memory": OffloadedAccelerator.prepared,
    "backward": OffloadedAccelerator.after_backward,
}
# Name of a method of Accelerator -> the one that stood there, and the one that stands there now.
_replaced: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}


def _replace(name: str, method: Callable[..., Any]) -> None:
    _replaced[name] = getattr(Accelerator, name), method
    setattr(Accelerator, name, method)


def _restore(name: str) -> None:
    original, method = _replaced.pop(name)
    if getattr(Accelerator, name) is method:  # else somebody has put theirs around it
        setattr(Accelerator, name, original)


def _watch_methods() -> None:
    """Replace the class's methods while there is an accelerator that offloads.

    Not those of the one accelerator: it would hold itself then, and scripts count on accelerators going when nobody needs
    them any more.
    """
    if "prepare" not in _replaced:
        for name, after in _AFTER.items():
            _replace(name, _with_after(getattr(Accelerator, name), after))
        _replace("end_training", _with_report(Accelerator.end_training))


def _with_after(original: Callable[..., Any], after: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(accelerator: Accelerator, *args: Any, **kwargs: Any) -> Any:
        result = original(accelerator, *args, **kwargs)
        offloaded = _attached.get(accelerator)
        if offloaded is not None:
            after(offloaded, result, args, kwargs)
        return result

    return method


def _with_report(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def end_training(accelerator: Accelerator, *args: Any, **kwargs: Any) -> Any:
        offloaded = _attached.get(accelerator)
        if offloaded is not None:
            offloaded.report()  # as long as processes can talk
            offloaded.detach()
        return original(accelerator, *args, **kwargs)

    return end_training


def _unwatch_methods_if_unused() -> None:
    if not list(_attached.keys()) and "prepare" in _replaced:
        for name in (*_AFTER, "end_training"):
            _restore(name)


def _refuse(accelerator: Accelerator, config: OffloadConfig, by: str) -> None:
    present = _attached.get(accelerator)
    if present is not None and present._by == ENVIRONMENT != by:
        logger.warning("%s is used for this Accelerator, and not the environment's settings.", by)
        present.detach()
    elif present is not None:
        raise OffloadConfigError(
            "This Accelerator offloads already: attach one OffloadPlugin only, or detach the first one before."
        )
    if accelerator.distributed_type == DistributedType.MEGATRON_LM:
        raise OffloadConfigError(
            "Megatron-LM runs forward and backward inside its own train_step and accelerate's backward() returns at once, "
            "so there is no forward to offload: use FSDP2 or DeepSpeed, or Megatron's own activation recomputation."
        )
    if accelerator.distributed_type == DistributedType.XLA and config.tier != "none":
        raise OffloadConfigError(
            "XLA devices compile whole steps and have no saved tensors to offload: use tier='none'."
        )


def attached_accelerators() -> list[OffloadedAccelerator]:
    """All accelerators that offload now."""
    return list(_attached.values())


# -- for scripts that know nothing of it -------------------------------------------------------------------------------


class switch_on:
    """Attach ``plugin`` to every Accelerator that is made from now on, until :meth:`off`.

    A script's own plugin or callback goes before. Used by ``python -m hf_offload.run`` and the like, not by scripts.
    """

    def __init__(self, plugin: OffloadPlugin):
        self._made: list[OffloadedAccelerator] = []
        original = Accelerator.__init__

        @functools.wraps(original)
        def make(accelerator: Accelerator, *args: Any, **kwargs: Any) -> None:
            original(accelerator, *args, **kwargs)
            if accelerator not in _attached:
                self._made.append(OffloadedAccelerator(accelerator, plugin.config, ENVIRONMENT))

        _replace("__init__", make)

    @property
    def offloaded_models(self) -> int:
        """How many models have been offloaded so far."""
        return sum(made.offloaded_models for made in self._made)

    def report(self, together: bool = True) -> None:
        """Log what was offloaded through all of them, ``together`` by all processes."""
        for made in self._made:
            made.report(together)

    def off(self) -> None:
        """Take everything off again. Idempotent."""
        if "__init__" in _replaced:
            _restore("__init__")
        for made in self._made:
            made.detach()
