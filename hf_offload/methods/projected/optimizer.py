"""AdamW whose moments of chosen matrices are those of projected gradients: GaLore, APOLLO, FRUGAL."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hf_offload.errors import OffloadConfigError
from hf_offload.interrupts import signals_deferred
from hf_offload.methods.projected import rules
from hf_offload.methods.projected.checks import check_numbers, check_parameters, check_state_dict, sharded
from hf_offload.methods.projected.config import ApolloConfig, FrugalConfig, GaLoreConfig, ProjectedConfig
from hf_offload.methods.projected.formats import StateFormat, drop
from hf_offload.methods.projected.projections import (
    Basis,
    Projection,
    draw_seed,
    drawn_space,
    is_active,
    is_refreshed,
    matrix_shape,
    new_basis,
    projection_of,
    random_basis,
    turns,
)

logger = logging.getLogger(__name__)

_MATRIX = 2
# Read on the host at every step, so they live there.
_ON_HOST = ("step", "began", "seed")


@dataclasses.dataclass(frozen=True)
class _Parameter:
    """What is fixed about one parameter: its name, and its number among the projected ones if it is one."""

    name: str
    number: int
    projection: Projection | None


class ProjectedAdamW(Optimizer):
    """GaLore, APOLLO or FRUGAL for some matrices, AdamW for all other parameters.

    Args:
        params: As for every optimizer. A group with ``"projected": True`` holds the matrices that ``method`` works on;
            ``"transposed": True`` marks those stored ``[in, out]``. ``hf_offload.methods.param_groups`` makes the
            groups of a model.
        method: :class:`GaLoreConfig`, :class:`ApolloConfig` or :class:`FrugalConfig`.
        lr, betas, eps, weight_decay: As in ``torch.optim.AdamW``: decay is decoupled, each group may have its own.

    The state of each parameter is a dict of tensors: ``step``; ``exp_avg`` and ``exp_avg_sq`` (``[r, n]``, ``[m, r]`` ...,
    in ``state_dtype``); ``left`` ``[m, r]`` or ``right`` ``[r, n]`` (in ``projector_dtype``), or the ``seed`` they are drawn
    from; ``began``, the step at which moments were reset; ``norm``, the length of APOLLO's last step. So it loads with
    ``weights_only=True``, and a resumed run has the bits of one that was never stopped. Parameters outside of projected
    groups have the bits of ``torch.optim.AdamW(foreach=False)``.

    With ``torch.nn.parallel.DistributedDataParallel`` all ranks have the same gradients and draw the same numbers. Sharded
    parameters (FSDP2's DTensors) are refused: a shard's singular vectors are not those of the matrix.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for a rank above the smaller dimension, for sharded parameters, and
    for a state dict of another method or with other settings.
    """

    in_backward = False
    """Whether an :class:`UpdateInBackward` is active."""
    _checked = False  # the first groups are checked together, so that all errors are raised at once

    def __init__(
        self,
        params: Iterable[Any],
        method: ProjectedConfig,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ):
        self.method = method
        check_numbers(lr, betas, eps, weight_decay)
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "projected": False,
            "transposed": False,
            "method": method.as_dict(),
        }
        super().__init__(params, defaults)
        self._check(self.param_groups)
        self._checked = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._set_up()
        if self._checked:
            self._check(self.param_groups[-1:])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "method": self.method, "in_backward": False}  # hooks are not copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._set_up()

    def _set_up(self) -> None:
        """Whatever follows from the method and the groups, and so is neither copied nor saved."""
        method = self.method
        self._moments = StateFormat(method.state_dtype, method.block_size)
        self._plain_moments = StateFormat(method.plain_state_dtype, method.block_size)
        self._vectors = StateFormat(None, method.block_size)
        self._projectors = StateFormat(method.projector_dtype, method.block_size)
        for form in (self._moments, self._plain_moments, self._projectors):
            form.require()
        self._fixed: dict[Tensor, _Parameter] = {}
        self._projected_count = 0
        for group in self.param_groups:
            names = group.get("param_names") or [f"number {len(self._fixed) + i}" for i in range(len(group["params"]))]
            for name, parameter in zip(names, group["params"], strict=True):
                projection = None
                if group["projected"] and parameter.dim() == _MATRIX:
                    projection = projection_of(method, matrix_shape(parameter, group["transposed"]))
                self._fixed[parameter] = _Parameter(name, self._projected_count, projection)
                self._projected_count += projection is not None
        self._turns = turns(method, self._projected_count) if isinstance(method, FrugalConfig) else []

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler.step asks for this before anything else: the one place where it can be refused by name.
        if self.in_backward:
            raise OffloadConfigError(
                "A GradScaler looks at all gradients before a step, and update in backward has one at a time: train in "
                "bfloat16, which needs no scaler, or update in step()."
            )
        return False

    def _check(self, groups: list[dict[str, Any]]) -> None:
        everything = [(parameter, group["projected"]) for group in groups for parameter in group["params"]]
        fixed = self._fixed
        check_parameters(
            ((fixed[one].name, one, wanted, fixed[one].projection) for one, wanted in everything), self.method
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]  # torch has two overloads
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group)
        return loss

    @signals_deferred
    @torch.no_grad()
    def update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """One step of one parameter with its ``grad``, and the group's numbers as they are now."""
        # A step may be asked for under autocast, whose matrix products would be rounded.
        with torch.autocast(parameter.device.type, enabled=False):
            self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient = parameter.grad
        fixed = self._fixed.get(parameter)
        if fixed is None or isinstance(parameter, DTensor):
            # The parameters were replaced since: accelerate does so under FSDP2.
            raise OffloadConfigError(sharded(self.method, "that was put in the place of another"))
        if gradient is None or gradient.is_sparse:
            raise OffloadConfigError(
                f"Parameter {fixed.name} has no dense gradient: sparse=True cannot go with this optimizer."
            )
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        steps = int(state["step"].item())  # on the host anyway
        state["step"] += 1
        if fixed.projection is None:
            form = self._plain_moments if parameter.dim() >= _MATRIX else self._vectors
            rules.adamw(parameter, gradient, state, _hyper(group, steps + 1), form)
            return
        weight = parameter.t() if group["transposed"] else parameter
        gradient = gradient.t() if group["transposed"] else gradient
        space = self._space(fixed, fixed.projection, gradient, state, steps)
        began = int(state["began"].item()) if "began" in state else 0
        hyper = _hyper(group, steps + 1 - began)
        if isinstance(self.method, FrugalConfig):
            rules.frugal(weight, gradient, state, space, hyper, self._moments, self.method)
            return
        assert space is not None
        if isinstance(self.method, ApolloConfig):
            across = 0 if fixed.projection.side == "left" else 1
            rules.apollo(weight, gradient, state, space, across, hyper, self._moments, self.method)
        elif isinstance(self.method, GaLoreConfig):
            rules.galore(weight, gradient, state, space, hyper, self._moments, self.method)

    def _space(
        self, fixed: _Parameter, projection: Projection, gradient: Tensor, state: dict[str, Any], steps: int
    ) -> Basis | None:
        """The space of this step, and in ``state`` whatever a new one changes there. None: no space at all."""
        if projection.kind == "blocks":
            return self._whole(fixed, state, steps)
        if is_refreshed(self.method, fixed.number, self._projected_count, steps):
            seed = draw_seed(self.method.seed, fixed.number, steps)
            if projection.drawn_again:
                state["seed"] = torch.tensor(seed, dtype=torch.int64, device="cpu")
            else:
                self._new_basis(fixed, projection, gradient, state, seed)
            if self.method.on_refresh == "reset":
                self._forget(state, steps)
        if projection.drawn_again:
            return drawn_space(projection, int(state["seed"].item()), gradient)
        return self._stored_basis(projection, state, gradient.dtype)

    def _whole(self, fixed: _Parameter, state: dict[str, Any], steps: int) -> Basis | None:
        assert isinstance(self.method, FrugalConfig)
        if not is_active(self.method, self._turns, fixed.number, steps):
            drop(state, rules.FIRST)
            drop(state, rules.SECOND)
            state.pop("began", None)
            return None
        if "began" not in state:
            self._forget(state, steps)
        return Basis(None, None)

    def _forget(self, state: dict[str, Any], steps: int) -> None:
        drop(state, rules.FIRST)
        drop(state, rules.SECOND)
        state["began"] = torch.tensor(steps, dtype=torch.float32, device="cpu")

    def _new_basis(
        self, fixed: _Parameter, projection: Projection, gradient: Tensor, state: dict[str, Any], seed: int
    ) -> None:
        exact = getattr(self.method, "svd", "") == "exact"
        basis = new_basis(projection, gradient, seed, exact=exact)
        has_old = all(name in state for name in projection.stored_shapes)
        if basis is None:
            logger.warning(
                "No singular vectors of the gradient of %s could be computed: its %s.",
                fixed.name,
                "projection stays as it was" if has_old else "first projection is a random one",
            )
            if has_old:
                return
            basis = random_basis(projection, gradient, torch.Generator(gradient.device).manual_seed(seed))
        for name, part in (("left", basis.left), ("right", basis.right)):
            if part is not None:
                self._projectors.write(state, name, part, gradient.dtype)

    def _stored_basis(self, projection: Projection, state: dict[str, Any], dtype: torch.dtype) -> Basis:
        parts = {name: self._projectors.read(state, name, dtype) for name in projection.stored_shapes}
        return Basis(parts.get("left"), parts.get("right"))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over ``state_dict``; tensors keep their dtypes (torch's own would cast them to the parameter's).

        Raises :class:`~hf_offload.errors.OffloadConfigError` if it was saved with another method, other settings or other
        parameters.
        """
        check_state_dict(state_dict, self.param_groups, self.method)
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                device = torch.device("cpu") if name in _ON_HOST else parameter.device
                self.state[parameter][name] = value.to(device, copy=True)


def _hyper(group: dict[str, Any], steps: int) -> rules.Hyper:
    beta1, beta2 = group["betas"]
    return rules.Hyper(group["lr"], beta1, beta2, group["eps"], group["weight_decay"], steps)


class UpdateInBackward:
    """Let backward itself update the parameters of ``optimizer``; :meth:`remove` ends it.

    A gradient is dropped right after its parameter was updated with it, by the very function that ``step()`` calls, with the
    learning rate that the group has at that moment. ``optimizer.step()`` is still called after backward (a scheduler
    counts it) and ``scheduler.step()`` after that, as always: the bits are those of a run that updates in ``step()``.
    Saving and loading go through the optimizer, before backward or after ``step()``.

    Gradients cannot be clipped by their norm: they are never there at once. Two backward passes without a ``step()`` in
    between, and the ``step`` of a ``GradScaler``, are refused by name when they happen
    (:class:`~hf_offload.errors.OffloadConfigError`). Several processes are refused at once: the gradient is not averaged over
    ranks when its parameter would be updated.
    """

    def __init__(self, optimizer: ProjectedAdamW):
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            raise OffloadConfigError(
                f"Update in backward takes a gradient before it is averaged over {distributed.get_world_size()} processes: "
                "use one process, or update in step()."
            )
        self._optimizer = optimizer
        self._updated: set[Tensor] = set()
        self._handles: list[Any] = [optimizer.register_step_post_hook(lambda *_: self._updated.clear())]
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad:
                    update = functools.partial(self._update, number)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(update))
        optimizer.in_backward = True

    def remove(self) -> None:
        """Gradients stay again, and ``step()`` uses them. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._optimizer.in_backward = False

    def _update(self, group_number: int, parameter: Tensor) -> None:
        if parameter in self._updated:
            raise OffloadConfigError(
                "A parameter got a second gradient before optimizer.step(), but it is updated in backward: call step() after "
                "each backward, without gradient accumulation, and use non-reentrant activation checkpointing."
            )
        self._updated.add(parameter)
        # The groups are other dicts after a state dict was loaded.
        self._optimizer.update(parameter, self._optimizer.param_groups[group_number])
        parameter.grad = None
