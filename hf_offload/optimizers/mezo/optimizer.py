"""The optimizer: two forward passes a step, and no gradients."""

import contextlib
import dataclasses
import logging
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_offload.errors import OffloadConfigError, OffloadError
from hf_offload.generators import process_states, set_process_states
from hf_offload.interrupts import signals_deferred
from hf_offload.optimizers.mezo.at_once import AtOnce
from hf_offload.optimizers.mezo.checks import (
    HOW,
    check_groups,
    check_model,
    check_options,
    check_ready,
    check_trainable,
    check_weights,
    losses_of,
)
from hf_offload.optimizers.mezo.course import Course
from hf_offload.optimizers.mezo.directions import BACK, MINUS, PLUS, Shift, checksum
from hf_offload.optimizers.mezo.log import Known, MezoLog, Row, Setup
from hf_offload.optimizers.mezo.passes import Passes
from hf_offload.optimizers.mezo.together import Losses, Together
from hf_offload.optimizers.projected.projections import draw_seed
from hf_offload.state.registry import parked_of

logger = logging.getLogger(__name__)

_SEED_BITS = (1 << 32) - 1
"""PyTorch's generator on the CPU uses no more of a seed."""

_RATES = "learning rate or decay"
_NARROW = (torch.float16, torch.bfloat16)


class MeZO(Optimizer):
    """Descends along random directions: ``g = (L(w + eps z) - L(w - eps z)) / (2 eps)``, then
    ``w -= lr (g z + weight_decay w)``, with ``z`` normally distributed. ::

        optimizer = MeZO(model.parameters(), model, lr=1e-6)
        loss = optimizer.step(lambda: model(**batch).loss)

    Both losses are computed in eval mode and without a graph. They have to be of the same batch, and what they draw at random
    is the same, as the generators are put back in between. Each direction is drawn
    from a seed of its own as often as it is needed, so that nothing but the weights, one ``z`` of the largest weight and the
    activations of one forward is in memory.

    With several processes (``torch.distributed``), all of them make each step, each with its part of the batch: the losses
    are averaged, and all have the same weights, which are those of rank 0 before the first step.

    Args:
        params: As for every optimizer, groups with their own ``lr`` and ``weight_decay`` included. Those that do not require
            gradients are left alone.
        model: What computes the loss, with all of ``params``. Directions are drawn in the order of its parameters.
        eps: How far the weights go in each direction.
        restore: ``"reference"``: weights go back by adding ``eps z`` again, as in the authors' code. It does not give the
            same bits: rounding errors stay. ``"pristine"``: a copy of the weights is kept while the losses are computed, or
            they are read again from a tier.
        seed: The seeds of all steps depend on it.
        lr: Learning rate, of groups that have none.
        weight_decay: Of groups that have none.

    Attributes:
        log: The steps so far (:class:`~hf_offload.optimizers.mezo.log.MezoLog`). It is a part of the state dict, and there is
            no other state.
        projected_gradient: ``g`` of the last evaluation.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for parameters that are sharded, on several devices, or not the
    model's, for a model that is wrapped for gradients, and for a state dict that was saved with other settings or other
    parameters.
    """

    def __init__(
        self,
        params: Any,
        model: nn.Module,
        *,
        eps: float = 1e-3,
        restore: str = "reference",
        seed: int = 0,
        lr: float = 1e-6,
        weight_decay: float = 0.0,
    ):
        check_options(eps, restore, seed)
        check_model(model)
        check_trainable(model)
        self._made = False
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        check_groups(self.param_groups)
        group_of = {one: number for number, group in enumerate(self.param_groups) for one in group["params"]}
        mine = [(name, one) for name, one in model.named_parameters() if one in group_of]
        self._weights = {name: one for name, one in mine if one.requires_grad}
        check_weights(self._weights, len(group_of) - len(mine))
        self._model = weakref.ref(model)
        first = next(iter(self._weights.values()))
        setup = Setup(
            names=tuple(self._weights),
            shapes=tuple(tuple(one.shape) for one in self._weights.values()),
            dtypes=tuple(str(one.dtype) for one in self._weights.values()),
            groups=tuple(group_of[one] for one in self._weights.values()),
            group_count=len(self.param_groups),
            eps=float(eps),
            restore=restore,
            seed=seed,
            device=first.device.type,
        )
        self.log = MezoLog(setup)
        self.projected_gradient: float | None = None
        self._evaluated = self._is_evaluating = False
        self._begins = True  # or goes on, after anything may have come
        self._is_changed = False  # by something else since then
        self._loaded: Known | None = None  # what a state was saved with
        self._saved: Known | None = None
        self._versions: list[int] | None = None
        self._moves: AtOnce | Course = AtOnce(self._weights)
        self._passes = Passes()
        self._together = Together()
        self._made = True

    @torch.no_grad()
    def evaluate(self, closure: Callable[[], Any], *, sums: bool = False) -> Tensor:
        """Compute the two losses, with ``closure``, and the projected gradient, which :meth:`step` then uses. Returns the
        first loss, that of ``w + eps z``, of all processes. Weights go back whatever ``closure`` raises.

        ``closure`` returns the loss, or a list of losses of micro-batches, which are averaged, or added up with ``sums``.

        Raises :class:`~hf_offload.errors.OffloadError` for a loss that is not one finite number, such as the mean over a
        batch without labels, and where another process has raised an error.
        """
        if self._is_evaluating:
            raise OffloadError("A closure of MeZO has called its step() or evaluate(): return the loss alone.")
        self._evaluated = False
        self._together.begin(self._model_alive(), self.log.setup, self._now, self._check)
        self._know_weights()
        self._is_evaluating = True
        try:
            first, second = self._together.losses(lambda: self._losses(closure), sums)
        finally:
            self._is_evaluating = False
            self._versions = self._versions_now()
        self._check_losses(first, second)
        self.projected_gradient = self._gradient(first, second)
        self._evaluated = True
        return first

    def _now(self) -> dict[str, Any]:
        return {"step": len(self.log.rows), _RATES: self._row(0, 0.0)[2:]}

    def _check(self) -> None:
        check_ready(self._weights, self._model_alive(), self.log.setup)
        check_groups(self.param_groups)
        self._mover().check()
        if self._loaded is not None:
            self._check_loaded(self._loaded.sums)

    def _check_loaded(self, saved: tuple[int, ...]) -> None:
        sums = self._sums()
        wrong = [name for name, one, other in zip(self._weights, sums, saved, strict=True) if one != other]
        if wrong:
            raise OffloadConfigError(
                f"The state of MeZO was saved with other weights than the model has: {len(wrong)} of {len(sums)} differ, "
                f"such as {', '.join(wrong[:3])}. Load all weights of that checkpoint, and look whether its loading has "
                "said that names did not match; or start without the state, and with another seed."
            )

    def _sums(self) -> tuple[int, ...]:
        return tuple(map(checksum, self._weights.values()))

    def _versions_now(self) -> list[int] | None:
        """How often each weight was changed; None for those that come and go, for which that is not counted exactly."""
        with torch._C.DisableTorchFunctionSubclass():
            return [one._version for one in self._weights.values()] if isinstance(self._moves, AtOnce) else None

    def _know_weights(self) -> None:
        """The log is to know weights before the first step, and where it cannot rebuild them from those it knows."""
        before, now, steps = self._versions, self._versions_now(), len(self.log.rows)
        changed = before is not None and now is not None and before != now
        if not self._begins and (not changed or self._is_changed):
            return
        known = Known(steps, self._sums())
        if self._saved is not None and self._saved.steps == steps:
            changed = self._saved != known
        if changed:
            self._is_changed = not self._begins
            logger.warning(
                "Something other than MeZO has changed weights after step %s, such as a checkpoint that was loaded, or a "
                "callback. From the weights training began with, the log rebuilds the first %s steps; later ones from those "
                "that it goes on with now%s.",
                steps,
                steps,
                "" if self._begins else ", unless they are changed between steps again",
            )
        if changed or (self._loaded is None and self._saved != known and known not in self.log.known[-1:]):
            self.log.known.append(known)
        self._begins, self._loaded = False, None

    def _losses(self, closure: Callable[[], Any]) -> Losses:
        """What ``closure`` returns with weights moved either way. They go back."""
        setup, model, mover = self.log.setup, self._model_alive(), self._mover()
        seed = draw_seed(setup.seed, 0, len(self.log.rows)) & _SEED_BITS
        is_pristine = setup.restore == "pristine"
        losses: list[Tensor] = []
        way = iter((PLUS, MINUS, BACK))
        before = len(self.log.rows)
        with self._eval_mode() as check_mode, mover.casting():

            def computed() -> Tensor:
                with mover.computing():
                    found = losses_of(closure())
                check_mode()
                return found

            try:
                mover.begin_step()
                if is_pristine:
                    mover.keep_here()
                with signals_deferred:
                    # Until step() says otherwise, weights go there and back, and no update is made.
                    self.log.rows.append(self._row(seed, math.nan))
                    mover.move(Shift(seed, next(way), setup.eps))
                if isinstance(mover, Course) and not is_pristine and self._passes.one_pays(mover, model):
                    with signals_deferred:
                        mover.keep_here()
                        mover.move(Shift(seed, next(way), setup.eps))
                    losses = self._passes.losses(mover, model, computed)
                else:
                    drawn = process_states(all_devices=True)
                    losses.append(computed())
                    with signals_deferred:
                        mover.move(Shift(seed, next(way), setup.eps))
                    set_process_states(drawn)
                    losses.append(computed())
            finally:
                with signals_deferred:
                    if len(self.log.rows) > before and not mover.is_changing:
                        if is_pristine:
                            mover.undo()
                        else:
                            mover.go_on()
                            # What is left, so that an aborted step has the bits of one without an update.
                            for scale in way:
                                mover.move(Shift(seed, scale, setup.eps))
                    mover.end_step()
        first, second = losses
        return first, second

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Tensor | None:  # type: ignore[override]
        """Update all weights, after :meth:`evaluate` with ``closure`` if one is given. Returns what that does, or None.

        Raises :class:`~hf_offload.errors.OffloadConfigError` for a rate or decay that is another one in another process.
        """
        loss = None if closure is None else self.evaluate(closure)
        if not self._evaluated or self.projected_gradient is None:
            raise OffloadError(f"MeZO's step() has no losses to work with: {HOW}.")
        check_groups(self.param_groups)
        mover = self._mover()
        mover.check()
        row = self._row(self.log.rows[-1].seed, self.projected_gradient)
        self._together.agree(_RATES, row[2:])
        with signals_deferred:
            self._evaluated = False
            mover.update(row.updates_of(self.log.setup.groups))
            self.log.rows[-1] = row
            self._versions = self._versions_now()
        return loss

    def _row(self, seed: int, gradient: float) -> Row:
        rates, decays = (tuple(float(group[key]) for group in self.param_groups) for key in ("lr", "weight_decay"))
        return Row(seed, gradient, rates, decays)

    def _mover(self) -> AtOnce | Course:
        """What moves the weights: at once, or when they are used, if any of them leaves memory."""
        if isinstance(self._moves, AtOnce) and any(parked_of(one) is not None for one in self._weights.values()):
            self._moves.check()
            self._moves = Course(self._weights)
        return self._moves

    def _check_losses(self, first: Tensor, second: Tensor) -> None:
        if not (math.isfinite(first.item()) and math.isfinite(second.item())):
            raise OffloadError(
                f"Step {len(self.log.rows)} of MeZO: the losses are {first.item()} and {second.item()}, which is not finite. "
                "The weights have gone back, and no update was made. If no label of the batch counts (all are -100), leave "
                "the batch out; otherwise lower the learning rate, or eps."
            )
        if first.dtype in _NARROW and len(self.log.rows) == 1:
            logger.warning(
                "MeZO divides the difference of two losses by 2 eps, and the loss is %s, which has too few digits for that: "
                "compute it in float32.",
                first.dtype,
            )

    def _gradient(self, first: Tensor, second: Tensor) -> float:
        found = float(((first - second) / (2 * self.log.setup.eps)).item())
        if not math.isfinite(found):
            raise OffloadError(
                f"Step {len(self.log.rows)} of MeZO: the losses {first.item()} and {second.item()} differ by more than their "
                "dtype can hold, divided by 2 eps. The weights have gone back, and no update was made. Lower the learning "
                "rate, or raise eps."
            )
        return found

    @contextlib.contextmanager
    def _eval_mode(self) -> Iterator[Callable[[], None]]:
        """Gives what raises :class:`~hf_offload.errors.OffloadError` if a closure has ended it."""
        model = self._model_alive()
        before = [(module, module.training) for module in model.modules()]

        def check() -> None:
            if any(module.training for module in others):
                raise OffloadError(
                    "The closure of MeZO has called train(), and its losses are those of eval mode, without dropout: leave "
                    "train() out. The weights have gone back, and no update was made."
                )

        try:
            model.eval()
            others = [module for module in model.modules() if not module.training]
            yield check
        finally:
            for module, training in before:
                module.training = training

    def _model_alive(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise OffloadError("The model of this MeZO has gone: keep it as long as its optimizer.")
        return model

    def end_training(self) -> None:
        """Let the other processes go, until the next step. Idempotent."""
        self._together.part()
        self._begins, self._is_changed = True, False

    # -- checkpoints ----------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the optimizer is made: the log knows the parameters it began with."""
        if self._made:
            raise OffloadConfigError(
                "MeZO's parameters are fixed, as its log begins with all of them: make a new optimizer with these."
            )
        super().add_param_group(param_group)

    def save_log(self, path: Any) -> None:
        """Write the log to a safetensors file, with checksums of the weights as they are now."""
        self._mover().check()
        log = self._log_with_sums()
        log.save(path)
        self._saved = None if log.final is None else Known(len(log.rows), log.final)

    def load_log(self, log: MezoLog) -> None:
        """Go on after the steps of ``log``, which :meth:`save_log` has written.

        Raises :class:`~hf_offload.errors.OffloadConfigError` if it is of other settings or other parameters. Weights that are
        not those it was saved with are an error of the next step.
        """
        self.log.setup.check(log.setup)
        is_own = (
            log.rows == self.log.rows
        )  # what Accelerate's prepare() saves and loads at once, after anything has come
        self._loaded = None if log.final is None or is_own else Known(len(log.rows), log.final)
        self.log = dataclasses.replace(log, rows=[*log.rows], known=[*log.known], final=None)
        self._evaluated, self._begins, self._is_changed = False, True, False

    def _log_with_sums(self) -> MezoLog:
        if not self.log.rows:
            return self.log
        return dataclasses.replace(self.log, final=self._sums())

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OffloadError(
            "MeZO is not copied or pickled, as it belongs to a model: make one for the other model, and load state_dict()."
        )

    def state_dict(self) -> dict[str, Any]:
        """Options of the groups, and the log, with checksums of the weights as they are now."""
        return {**super().state_dict(), **self._log_with_sums().state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over ``state_dict``.

        Raises :class:`~hf_offload.errors.OffloadConfigError` if it was saved with other settings or other parameters. Weights
        that are not those it was saved with are an error of the next step.
        """
        log = MezoLog.from_state(state_dict)
        self.log.setup.check(log.setup)
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self.load_log(log)
