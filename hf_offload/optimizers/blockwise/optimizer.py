"""An optimizer that trains a few blocks of a model at a time, with any optimizer of torch inside (LISA, BAdam).

Note: turns
    All parameters are in ``param_groups`` from the beginning, so learning-rate schedules and clipping see one optimizer. The
    update itself is made by an inner optimizer, which has the parameters of the running turn only: it is built at the first
    step of a turn and goes with it. What lasts is ``state``: that of parameters that train in the next turn, too, is given to
    the next inner optimizer, that of all others is dropped, or waits in RAM.
"""

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import ParamsT

from hf_offload.errors import OffloadConfigError
from hf_offload.optimizers.blockwise.checks import (
    check_data_parallel,
    check_parameters,
    checked_state,
    default_options,
)
from hf_offload.optimizers.blockwise.freezing import (
    BeforeForward,
    freeze,
    is_waiting,
    running_data_parallel,
    unfreeze,
)
from hf_offload.optimizers.blockwise.schedule import HALF, BlockwiseConfig, Schedule, find_trainable_units
from hf_offload.settings.load import collect_errors

logger = logging.getLogger(__name__)

# In a state dict, in addition to torch's own "state" and "param_groups".
_KEY = "blockwise"
# What a group has in addition to the optimizer's options.
_MEMBERS = ("params", "param_names")


class BlockwiseOptimizer(torch.optim.Optimizer):
    """Trains the blocks that ``config`` chooses; the others are frozen, and have no gradients and no state.

    Example::

        optimizer = BlockwiseOptimizer(model.parameters(), model, BlockwiseConfig.lisa(blocks_active=2), lr=1e-4)

    Turns end in :meth:`step`, after the update. Parameters that do not require gradients when the optimizer is built are the
    user's to freeze, and stay so. The first forward of ``module`` freezes those that wait (see the note in ``freezing.py``);
    call :meth:`close` when training is over.

    Frozen weights save no inputs for their gradients, and blocks below the lowest one that trains save nothing at all, unless
    something below them trains too (embeddings with ``outside="always"``) or embeddings are made to require gradients: peft
    does, and transformers' activation checkpointing, which needs them only if it is reentrant
    (``model.disable_input_require_grads()``).

    ``DistributedDataParallel`` needs ``find_unused_parameters=True``, and its buckets keep the size of all gradients. Under
    ``torch.compile`` each set of blocks is compiled when it first trains, up to ``torch._dynamo.config.recompile_limit``.

    Args:
        params: Parameters or groups of them, as every optimizer of torch takes them.
        module: The model they belong to.
        config: Which blocks train, and when.
        optimizer: Class of the inner optimizer.
        **options: What the inner optimizer's constructor takes: ``lr``, ``weight_decay`` ...

    Raises :class:`~hf_offload.errors.OffloadConfigError` that lists all errors, before anything is changed.
    """

    def __init__(
        self,
        params: ParamsT,
        module: nn.Module,
        config: BlockwiseConfig,
        optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
        **options: Any,
    ):
        module = module.module if isinstance(module, DistributedDataParallel) else module
        self.config = config
        self._class, self._options = optimizer, options
        self._names: list[str] = []
        with collect_errors("settings of block-wise training") as check:
            defaults: dict[str, Any] = {}
            with check:
                defaults = default_options(optimizer, options)
            super().__init__(params, defaults)
            names = {id(p): name for name, p in module.named_parameters()}
            mine = [p for group in self.param_groups for p in group["params"]]
            with check:
                check_parameters(mine, names, module)
            trainable = {id(p): names[id(p)] for p in mine if p.requires_grad and id(p) in names}
            with check:
                self._units = find_trainable_units(module, trainable)
                self._schedule = Schedule(self._units, config)
        self._names = [names[id(p)] for p in mine]
        # Names of parameters that the user froze, before or since.
        self._frozen = set(self._names) - set(trainable.values())
        self._turn = self._steps = 0
        self._begin_turn(self._schedule.turn(0))
        self._masters: dict[str, Tensor] = {}
        # Parameters whose state may have another device or dtype than they need: it was loaded, or has waited.
        self._foreign: set[str] = set()
        self._applied = self._warned = False
        self._seen: DistributedDataParallel | None = None
        self.model_ref = weakref.ref(module)
        self._hook = module.register_forward_pre_hook(BeforeForward(self._before_forward))

    # -- what trains --------------------------------------------------------------------------------------------------

    @property
    def active(self) -> tuple[str, ...]:
        """Names of the blocks (and modules outside of blocks) that train in this turn."""
        return self._active

    @property
    def turn(self) -> int:
        """Number of the running turn, from 0."""
        return self._turn

    @property
    def cycle(self) -> int:
        """Turns until every block had its turn; where sets are drawn, only on average."""
        return self._schedule.cycle

    def state_bytes(self) -> int:
        """Bytes of optimizer state and master weights of what trains, without the state that waits."""
        tensors = [t for name, p in self._named() if name in self._trains for t in self.state.get(p, {}).values()]
        return sum(t.nbytes for t in [*tensors, *self._masters.values()] if isinstance(t, Tensor))

    def open(self) -> None:
        """Freeze what waits at the next forward again, after a :meth:`close`. Idempotent."""
        self._hook.remove()
        module = self.model_ref()
        assert module is not None  # the optimizer has its parameters
        self._hook = module.register_forward_pre_hook(BeforeForward(self._before_forward))
        self._applied = False

    def close(self) -> None:
        """Let everything that waits require gradients again: training is over, or until :meth:`open`. Idempotent."""
        self._hook.remove()
        for _, parameter in self._named():
            if is_waiting(parameter):
                unfreeze(parameter)

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        # Through param_groups each time: sharding a model puts other parameters there.
        members = (p for group in self.param_groups for p in group["params"])
        return zip(self._names, members, strict=True)

    def _begin_turn(self, active: tuple[str, ...]) -> None:
        self._active = active
        self._trains = self._trained_in(active)
        self._inner: torch.optim.Optimizer | None = None
        self._inner_of: dict[str, Tensor] = {}

    def _trained_in(self, active: Iterable[str]) -> set[str]:
        return {name for unit in active for name in self._units.parameters[unit]} - self._frozen

    def _before_forward(self) -> None:
        wrapper = running_data_parallel()
        if wrapper is not None and wrapper is not self._seen:
            trained = set(self._names) == self._trains | self._frozen and self._schedule.cycle == 1
            check_data_parallel(wrapper, trained, any(is_waiting(p) for _, p in self._named()))
            self._seen = wrapper
        if not self._applied:
            self._apply()

    def _apply(self) -> None:
        for name, parameter in self._named():
            if name in self._trains:
                unfreeze(parameter)
            elif name not in self._frozen:
                freeze(parameter)
        self._applied = True

    def _notice_frozen(self) -> None:
        """What trains and was frozen by other code is frozen for good."""
        if self._applied:
            self._frozen |= {name for name, p in self._named() if name in self._trains and not p.requires_grad}

    def _end_turn(self) -> None:
        self._notice_frozen()
        active = self._schedule.turn(self._turn + 1)
        leaving = [(name, p) for name, p in self._named() if name in self._trains - self._trained_in(active)]
        self._turn += 1
        self._steps = 0
        self._begin_turn(active)
        for name, parameter in leaving:
            self._masters.pop(name, None)
            state = self.state.pop(parameter, None)
            if state is not None and self.config.inactive_state == "keep":
                self.state[parameter] = _on_cpu(state)
                self._foreign.add(name)
        self._apply()

    # -- steps --------------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters of this turn; after the turn's last step, others train."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._applied:
            self._apply()
        with torch.no_grad():
            self._update()
        self._steps += 1
        if self._steps >= self.config.switch_every:
            self._end_turn()
        return loss

    def _update(self) -> None:
        inner = self._inner = self._inner or self._build()
        trained = [(name, p) for name, p in self._named() if name in self._trains]
        self._check_gradients(trained)
        for name, parameter in trained:
            if name in self._masters:
                gradient = parameter.grad
                self._masters[name].grad = None if gradient is None else gradient.to(torch.float32)
        groups = list(zip(self._groups(), inner.param_groups, strict=True))
        for group, inside in groups:
            inside.update(_options_of(group))
        inner.step()
        for group, inside in groups:
            group.update(_options_of(inside))  # some optimizers keep numbers of their own there
        for name, parameter in trained:
            if name in self._masters:
                parameter.copy_(self._masters[name])
                self._masters[name].grad = None
            if self._inner_of[name] in inner.state:
                self.state[parameter] = inner.state[self._inner_of[name]]

    def _check_gradients(self, trained: list[tuple[str, nn.Parameter]]) -> None:
        if not self._warned and all(p.grad is None for _, p in trained):
            self._warned = True
            logger.warning(
                "No parameter that trains now has a gradient (%s), so nothing is updated. Reentrant activation checkpointing "
                "gives none to a block whose input needs none: set use_reentrant=False.",
                ", ".join(self._active),
            )

    def _groups(self) -> list[dict[str, Any]]:
        """The groups that have a parameter that trains now."""
        names = iter(self._names)
        return [group for group in self.param_groups if [1 for _ in group["params"] if next(names) in self._trains]]

    def _build(self) -> torch.optim.Optimizer:
        """The inner optimizer of this turn, with what is known of its parameters' state."""
        trained = {name: p for name, p in self._named() if name in self._trains}
        for name, parameter in trained.items():
            if parameter.dtype in HALF and self.config.master_weights:
                master = self._masters.get(name, parameter)
                self._masters[name] = master.detach().to(parameter.device, torch.float32).requires_grad_()
            self._inner_of[name] = self._masters.get(name, parameter)
        names = {id(p): name for name, p in trained.items()}
        groups = [
            _options_of(group) | {"params": [self._inner_of[names[id(p)]] for p in group["params"] if id(p) in names]}
            for group in self._groups()
        ]
        inner = self._class(groups, **self._options)
        made = dict(inner.state)  # some optimizers begin with a state
        foreign = {name: self.state[trained[name]] for name in self._foreign & trained.keys()}
        self._load_foreign(inner, foreign)
        for name, parameter in trained.items():
            if name in foreign:
                self.state[parameter] = inner.state[self._inner_of[name]]
            elif self.state.get(parameter):
                inner.state[self._inner_of[name]] = self.state[parameter]
            elif self._inner_of[name] in made:
                inner.state[self._inner_of[name]] = made[self._inner_of[name]]
        self._foreign -= trained.keys()
        return inner

    def _load_foreign(self, inner: torch.optim.Optimizer, foreign: dict[str, dict[str, Any]]) -> None:
        """Load states by the inner optimizer's own rules for the device and dtype of each part."""
        if not foreign:
            return
        place = {id(p): i for i, p in enumerate(p for group in inner.param_groups for p in group["params"])}
        states = {place[id(self._inner_of[name])]: state for name, state in foreign.items()}
        inner.load_state_dict({"state": states, "param_groups": inner.state_dict()["param_groups"]})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._names:
            raise OffloadConfigError(
                "Which blocks take turns was decided when the optimizer was built: give it all parameters at once."
            )
        super().add_param_group(param_group)

    # -- saving -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain numbers only: ``torch.load(..., weights_only=True)`` reads it."""
        places = {name: place for place, name in enumerate(self._names)}
        return super().state_dict() | {
            _KEY: {
                "settings": self._settings(),
                "blocks": self._schedule.names,
                "turn": self._turn,
                "steps": self._steps,
                "active": list(self._active),
                "masters": {places[name]: master.detach() for name, master in self._masters.items()},
            }
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken. Parameters are frozen and unfrozen accordingly at the next forward.

        Raises :class:`~hf_offload.errors.OffloadConfigError` that lists every difference, if it was taken with other settings
        or of other blocks: nothing has changed then.
        """
        own = checked_state(state_dict.get(_KEY), self._settings(), self._schedule.names)
        self._notice_frozen()
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self._turn, self._steps = own["turn"], own["steps"]
        self._begin_turn(tuple(own["active"]))
        self._masters = {self._names[place]: master for place, master in own["masters"].items()}
        self._foreign = set()
        for place, (name, parameter) in enumerate(self._named()):
            state = state_dict["state"].get(place)
            if state is not None:
                self.state[parameter] = state if name in self._trains else _on_cpu(state)
                self._foreign.add(name)
        self._applied = False

    def _settings(self) -> dict[str, Any]:
        return self.config.plain() | {"optimizer": self._class.__name__}


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in _MEMBERS}


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to("cpu") if isinstance(value, Tensor) else value for name, value in state.items()}
