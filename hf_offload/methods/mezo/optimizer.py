"""The optimizer: two forward passes a step, and no gradients."""

import dataclasses
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hf_offload.errors import OffloadConfigError, OffloadError
from hf_offload.interrupts import signals_deferred
from hf_offload.methods.mezo.blocks import Passes
from hf_offload.methods.mezo.directions import checksum
from hf_offload.methods.mezo.log import STAGES, UPDATE, MezoLog, Row, Setup, Trained
from hf_offload.methods.mezo.processes import Losses, Processes
from hf_offload.methods.mezo.trajectory import Trajectory
from hf_offload.methods.projected.projections import draw_seed
from hf_offload.state.storages import moves

logger = logging.getLogger(__name__)

HOW = (
    "pass a closure that returns the loss to step(), and leave out backward(). With a Trainer, set memory_mode='mezo' in "
    "OffloadTrainingArguments"
)

_SEED_BITS = (1 << 32) - 1
"""PyTorch's generator on the CPU uses no more of a seed."""

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
        eps: How far the weights go in each direction. They go back by adding ``eps z`` again, as in the authors' code:
            rounding errors stay.
        seed: The seeds of all steps depend on it.
        lr: Learning rate, of groups that have none.
        weight_decay: Of groups that have none.

    Attributes:
        log: The steps so far (:class:`~hf_offload.methods.mezo.log.MezoLog`). It is a part of the state dict, and there is
            no other state.
        projected_gradient: ``g`` of the last evaluation.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for parameters that are sharded, on several devices, or not the
    model's, and for a model that is wrapped for gradients.
    """

    def __init__(
        self,
        params: Any,
        model: nn.Module,
        *,
        eps: float = 1e-3,
        seed: int = 0,
        lr: float = 1e-6,
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        _check_options(eps, self.param_groups)
        group_of = {one: number for number, group in enumerate(self.param_groups) for one in group["params"]}
        mine = [(name, one) for name, one in model.named_parameters() if one in group_of]
        self._weights = {name: one for name, one in mine if one.requires_grad}
        _check_weights(self._weights, model, len(group_of) - len(mine))
        self._model = weakref.ref(model)
        trained = tuple(Trained.of(name, one, group_of[one]) for name, one in self._weights.items())
        self.log = MezoLog(Setup(trained, float(eps), seed))
        self.projected_gradient: float | None = None
        self._evaluated = False
        self._loaded: tuple[int, ...] = ()  # checksums of the weights that a state was saved with
        self._trajectory = Trajectory(self._weights, self.log)
        self._passes = Passes(self._trajectory)
        self._processes = Processes()

    @torch.no_grad()
    def evaluate(self, closure: Callable[[], Any], *, sums: bool = False) -> Tensor:
        """Compute the two losses, with ``closure``, and the projected gradient, which :meth:`step` then uses. Returns the
        first loss, that of ``w + eps z``, of all processes. Weights go back whatever ``closure`` raises.

        ``closure`` returns the loss, or a list of losses of micro-batches, which are averaged, or added up with ``sums``.

        Raises :class:`~hf_offload.errors.OffloadError` for a loss that is not one finite number, such as the mean over a
        batch without labels, and where another process has raised an error.
        """
        self._evaluated = False
        now = {"step": len(self.log.rows), **self._rates()}
        self._processes.begin(self._model_alive(), vars(self.log.setup), now, self._check)
        if not self.log.rows:
            self.log.initial = self._sums()
        self._loaded = ()
        first, second = self._processes.losses(lambda: self._losses(closure), sums)
        self.projected_gradient = self._gradient(first, second)
        self._evaluated = True
        return first

    def _check(self) -> None:
        _check_ready(self._weights, self._model_alive(), self.log.setup)
        self._trajectory.check()
        saved = zip(self._weights.items(), self._loaded, strict=bool(self._loaded))
        wrong = [name for (name, one), known in saved if checksum(one) != known]
        if wrong:
            raise OffloadConfigError(
                f"The state of MeZO was saved with other weights than the model has: {len(wrong)} of {len(self._weights)} "
                f"differ, such as {', '.join(wrong[:3])}. Load all weights of that checkpoint, and look whether its loading "
                "has said that names did not match; or start without the state, and with another seed."
            )

    def _sums(self) -> tuple[int, ...]:
        return tuple(map(checksum, self._weights.values()))

    def _losses(self, closure: Callable[[], Any]) -> Losses:
        """What ``closure`` returns with weights moved either way. They go back."""
        trajectory, rows, model = self._trajectory, self.log.rows, self._model_alive()
        before = len(rows)
        modes = [(module, module.training) for module in model.modules()]
        try:
            model.eval()
            with signals_deferred:
                trajectory.begin_step()
                # Until step() says otherwise, weights go there and back, and no update is made.
                rows.append(self._row(draw_seed(self.log.setup.seed, 0, before) & _SEED_BITS, math.nan))
                trajectory.advance(STAGES * before + 1)
            return self._passes.losses(model, lambda: _losses_of(closure()))
        finally:
            with signals_deferred:
                for module, training in modes:
                    module.training = training
                if len(rows) > before:
                    trajectory.advance(STAGES * before + UPDATE)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Tensor | None:  # type: ignore[override]
        """Update all weights, after :meth:`evaluate` with ``closure`` if one is given. Returns what that does, or None.

        Raises :class:`~hf_offload.errors.OffloadConfigError` for a rate or decay that is another one in another process.
        """
        loss = None if closure is None else self.evaluate(closure)
        if not self._evaluated or self.projected_gradient is None:
            raise OffloadError(f"MeZO's step() has no losses to work with: {HOW}.")
        row = self._row(self.log.rows[-1].seed, self.projected_gradient)
        self._processes.check_same(self._rates())
        with signals_deferred:
            self._evaluated = False
            self.log.rows[-1] = row
            self._trajectory.advance(STAGES * len(self.log.rows))
        return loss

    def _row(self, seed: int, gradient: float) -> Row:
        return Row(seed, gradient, *self._rates().values())

    def _rates(self) -> dict[str, tuple[float, ...]]:
        return {key: tuple(float(group[key]) for group in self.param_groups) for key in ("lr", "weight_decay")}

    def _gradient(self, first: Tensor, second: Tensor) -> float:
        found = float(((first - second) / (2 * self.log.setup.eps)).item())
        if not math.isfinite(found):
            raise OffloadError(
                f"Step {len(self.log.rows)} of MeZO: the losses are {first.item()} and {second.item()}, which is not finite, "
                "or they differ by more than their dtype can hold, divided by 2 eps. The weights have gone back, and no "
                "update was made. If no label of the batch counts (all are -100), leave the batch out; otherwise lower the "
                "learning rate, or change eps."
            )
        if first.dtype in _NARROW and len(self.log.rows) == 1:
            logger.warning(
                "MeZO divides the difference of two losses by 2 eps, and the loss is %s, which has too few digits for that: "
                "compute it in float32.",
                first.dtype,
            )
        return found

    def _model_alive(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise OffloadError("The model of this MeZO has gone: keep it as long as its optimizer.")
        return model

    def end_training(self) -> None:
        """Let the other processes go, until the next step. Idempotent."""
        self._processes.end()

    # -- checkpoints ----------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the optimizer is made: the log knows the parameters it began with."""
        if hasattr(self, "log"):
            raise OffloadConfigError(
                "MeZO's parameters are fixed, as its log begins with all of them: make a new optimizer with these."
            )
        super().add_param_group(param_group)

    def save_log(self, path: Any) -> None:
        """Write the log to a file, with checksums of the weights as they are now."""
        self._log_with_sums().save(path)

    def load_log(self, log: MezoLog) -> None:
        """Go on after the steps of ``log``, which :meth:`save_log` has written.

        Raises :class:`~hf_offload.errors.OffloadConfigError` if it is of other settings or other parameters. Weights that are
        not those it was saved with are an error of the next step.
        """
        self.log.setup.check(log.setup)
        self._trajectory.settle()
        # Accelerate's prepare() saves and loads at once.
        self._loaded = () if log.rows == self.log.rows else log.final
        self.log.rows[:], self.log.initial = log.rows, log.initial
        self._trajectory.restart()
        self._evaluated = False

    def _log_with_sums(self) -> MezoLog:
        return dataclasses.replace(self.log, final=self._sums()) if self.log.rows else self.log

    def state_dict(self) -> dict[str, Any]:
        """Options of the groups, and the log, with checksums of the weights as they are now."""
        return {**super().state_dict(), **self._log_with_sums().state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over ``state_dict``. Raises as :meth:`load_log`, whose log it has."""
        log = MezoLog.from_state(state_dict)
        self.log.setup.check(log.setup)
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self.load_log(log)


def _check_options(eps: float, groups: Iterable[dict[str, Any]]) -> None:
    options = [("eps", eps, eps > 0)]
    options += [(key, group[key], group[key] >= 0) for group in groups for key in ("lr", "weight_decay")]
    for key, value, is_in_range in options:
        if not (is_in_range and value < math.inf):
            raise OffloadConfigError(f"{key}={value!r}: give a number of 0 or more, and above 0 for eps.")


def _check_weights(weights: Mapping[str, nn.Parameter], model: nn.Module, foreign: int) -> None:
    """Refuse ``weights`` that cannot be trained, a wrapped model, and parameters that are ``foreign`` to it."""
    if any(isinstance(module, (DistributedDataParallel, FullyShardedDataParallel)) for module in model.modules()):
        raise OffloadConfigError(
            "DistributedDataParallel has memory for all gradients, and FullyShardedDataParallel parts of weights, while "
            "directions are drawn for whole ones: give MeZO the model that is not wrapped, which each process computes with. "
            "MeZO averages the losses of all processes itself."
        )
    if foreign or not weights:
        raise OffloadConfigError(
            f"{foreign} parameters are not the model's, and {len(weights)} require gradients: give MeZO those of the model "
            "whose loss is computed, and unfreeze what is to be trained."
        )
    for name, one in weights.items():
        if not (moves(one) and one.is_floating_point() and one.itemsize > 1):
            raise OffloadConfigError(
                f"{name} ({one.dtype}, {one.layout}, on {one.device}) is not a whole weight with data of its own: MeZO "
                "trains dense weights of 16 bits or more that are loaded, and not sharded."
            )
    devices = sorted({str(one.device) for one in weights.values()})
    if len(devices) > 1:
        raise OffloadConfigError(
            f"Parameters are on {', '.join(devices)}: MeZO draws directions on one device. Move the model to one."
        )


def _check_ready(weights: Mapping[str, nn.Parameter], model: nn.Module, setup: Setup) -> None:
    """Refuse a gradient, and a weight that is not what it was when the optimizer was made."""
    present = dict(model.named_parameters())
    for (name, one), entry in zip(weights.items(), setup.weights, strict=True):
        if present.get(name) is not one or Trained.of(name, one, entry.group) != entry or not one.requires_grad:
            raise OffloadError(
                f"{name} was frozen after MeZO was made, or is another weight, or has another shape, dtype or device: make a "
                "new optimizer when the model is as it is to be trained."
            )
        if one.grad is not None:
            raise OffloadError(f"{name} has a gradient, which MeZO does not use: {HOW}.")


def _losses_of(value: Any) -> Tensor:
    """The losses a closure has returned, one or a list of them, ``[count]``."""
    return torch.cat([_loss_of(one) for one in (value if isinstance(value, list) and value else [value])])


def _loss_of(value: Any) -> Tensor:
    if isinstance(value, (int, float)):
        return torch.tensor([value], dtype=torch.float64, device="cpu")
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise OffloadError(
            f"The closure has returned {found}: return the loss, a tensor of one number, or a list of such losses."
        )
    return value.detach().reshape(1)
