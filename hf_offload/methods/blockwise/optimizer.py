"""An optimizer that trains a few blocks of a model at a time, with any optimizer of torch inside (LISA, BAdam).

Note: turns
    All parameters are in ``param_groups`` from the beginning, so learning-rate schedules and clipping see one optimizer. The
    update itself is that of a :class:`~hf_offload.state.shadow.Shadow` of the inner optimizer, which steps the parameters of
    the running turn, or their copies in float32. State is dropped when the turn of its parameter ends, or waits in RAM.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import ParamsT

from hf_offload.errors import OffloadConfigError
from hf_offload.methods.blockwise.freezing import BeforeForward, freeze, is_waiting, unfreeze
from hf_offload.methods.blockwise.schedule import HALF, BlockwiseConfig, Schedule, find_trainable_units
from hf_offload.settings.load import collect_errors
from hf_offload.state.shadow import Shadow

# In a state dict, in addition to torch's own "state" and "param_groups".
_KEY = "blockwise"
# What a group has in addition to the optimizer's options.
_MEMBERS = ("params", "param_names")


class BlockwiseOptimizer(torch.optim.Optimizer):
    """Trains the blocks that ``config`` chooses; the others are frozen, and have no gradients and no state.

    Example::

        optimizer = BlockwiseOptimizer(model.parameters(), model, BlockwiseConfig(blocks_active=2), lr=1e-4)

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
        self._class = optimizer
        self._names: list[str] = []
        with collect_errors("settings of block-wise training") as check:
            defaults: dict[str, Any] = {}
            with check:
                inner = _inner_optimizer(optimizer, options)
                self._shadow, defaults = Shadow(inner, optimizer), inner.defaults
            super().__init__(params, defaults)
            names = {id(p): name for name, p in module.named_parameters()}
            mine = [p for group in self.param_groups for p in group["params"]]
            with check:
                _check_parameters(mine, names, module)
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
        self._applied = False
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

    def _trained_in(self, active: Iterable[str]) -> set[str]:
        return {name for unit in active for name in self._units.parameters[unit]} - self._frozen

    def _before_forward(self) -> None:
        wrapper: DistributedDataParallel | None = DistributedDataParallel._get_active_ddp_module()
        if wrapper is not None and wrapper is not self._seen:
            all_train = set(self._names) == self._trains | self._frozen and self._schedule.cycle == 1
            finds_unused = wrapper.find_unused_parameters and not wrapper.static_graph
            if not (all_train or finds_unused) or any(is_waiting(p) for _, p in self._named()):
                raise OffloadConfigError(
                    "DistributedDataParallel waits for gradients of blocks that are frozen, and averages none of blocks that "
                    "waited when it was built: build it before the model's first forward, or call release(model), with "
                    "find_unused_parameters=True and no static_graph (the Trainer: ddp_find_unused_parameters=True)."
                )
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
        """A step of the inner optimizer's class, with the parameters of this turn."""
        names = iter(self._names)
        groups, inside = [], []
        stepped: dict[str, Tensor] = {}
        for group in self.param_groups:
            members = {next(names): parameter for parameter in group["params"]}
            trained = {name: self._stepped(name, p) for name, p in members.items() if name in self._trains}
            for name in self._foreign & trained.keys():
                parameter = members[name]
                # By the class's own rules for the device and dtype of each part.
                self.state[parameter] = self._shadow.loaded(trained[name], _options_of(group), self.state[parameter])
            if trained:
                groups.append(group)
                inside.append(_options_of(group) | {"params": list(trained.values())})
                stepped |= trained
        self._foreign -= stepped.keys()
        parameters = {name: parameter for name, parameter in self._named() if name in stepped}
        before = {stepped[name]: self.state[p] for name, p in parameters.items() if self.state.get(p)}
        after = self._shadow.step(inside, before, self._shadow.attributes)
        for group, changed in zip(groups, inside, strict=True):
            group.update(_options_of(changed))  # some optimizers keep numbers of their own there
        for name, parameter in parameters.items():
            tensor = stepped[name]
            if tensor is not parameter:
                parameter.copy_(tensor)
                tensor.grad = None
            if tensor in after:
                self.state[parameter] = after[tensor]

    def _stepped(self, name: str, parameter: Tensor) -> Tensor:
        """What the inner optimizer steps: the parameter, or its copy in float32, with its gradient."""
        if parameter.dtype not in HALF or not self.config.master_weights:
            return parameter
        master = self._masters.get(name, parameter).detach().to(parameter.device, torch.float32).requires_grad_()
        master.grad = None if parameter.grad is None else parameter.grad.to(torch.float32)
        self._masters[name] = master
        return master

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._names:
            raise OffloadConfigError(
                "Which blocks take turns was decided when the optimizer was built: give it all parameters at once."
            )
        super().add_param_group(param_group)

    # -- saving -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain numbers only: ``torch.load(..., weights_only=True)`` reads it."""
        numbers = {name: number for number, name in enumerate(self._names)}
        return super().state_dict() | {
            _KEY: {
                "settings": self._settings(),
                "blocks": self._schedule.names,
                "turn": self._turn,
                "steps": self._steps,
                "active": list(self._active),
                "masters": {numbers[name]: master.detach() for name, master in self._masters.items()},
            }
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken. Parameters are frozen and unfrozen accordingly at the next forward.

        Raises :class:`~hf_offload.errors.OffloadConfigError` that lists every difference, if it was taken with other settings
        or of other blocks: nothing has changed then.
        """
        own = self._checked(state_dict.get(_KEY))
        self._notice_frozen()
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self._turn, self._steps = own["turn"], own["steps"]
        self._begin_turn(tuple(own["active"]))
        self._masters = {self._names[number]: master for number, master in own["masters"].items()}
        self._foreign = set()
        for number, (name, parameter) in enumerate(self._named()):
            state = state_dict["state"].get(number)
            if state is not None:
                self.state[parameter] = state if name in self._trains else _on_cpu(state)
                self._foreign.add(name)
        self._applied = False

    def _settings(self) -> dict[str, Any]:
        settings = dataclasses.asdict(self.config) | {"optimizer": self._class.__name__}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}

    def _checked(self, own: dict[str, Any] | None) -> dict[str, Any]:
        """The optimizer's part of a state dict, if it was saved with the same settings and of the same blocks."""
        if own is None:
            raise OffloadConfigError(
                "This state was not saved by a BlockwiseOptimizer's own state_dict(): start without it, or load it into the "
                "optimizer that saved it."
            )
        saved, mine = own["settings"] | {"blocks": own["blocks"]}, self._settings() | {"blocks": self._schedule.names}
        wrong = [
            f"{name}={saved.get(name)!r}, and the optimizer has {value!r}"
            for name, value in mine.items()
            if saved.get(name) != value
        ]
        if wrong:
            raise OffloadConfigError(
                f"The state was saved with {'; '.join(wrong)}: use the same settings and the same model, with the same "
                "parameters frozen, or start without the state."
            )
        return own


def _inner_optimizer(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> torch.optim.Optimizer:
    """An optimizer of this class, for a parameter that does not matter."""
    try:
        made = kind([nn.Parameter(torch.zeros(1))], **options)
    except (TypeError, ValueError) as error:
        raise OffloadConfigError(f"{kind.__name__} cannot be built with {options}: {error}") from error
    if made.state:
        raise OffloadConfigError(
            f"{kind.__name__} makes its state before its first step, and blocks have one for their turn only: use AdamW."
        )
    return made


def _check_parameters(parameters: list[nn.Parameter], names: dict[int, str], module: nn.Module) -> None:
    strangers = [tuple(p.shape) for p in parameters if id(p) not in names]
    if strangers:
        raise OffloadConfigError(
            f"{len(strangers)} parameters are not of this {type(module).__name__} (shapes {strangers[:3]}): give the "
            "optimizer parameters of the module it is given."
        )
    waiting = [name for name, p in module.named_parameters() if is_waiting(p)]
    if waiting:
        raise OffloadConfigError(
            f"{len(waiting)} parameters still wait for their turn in another BlockwiseOptimizer ({waiting[0]} ...): "
            "close() that one, or call release(model), before the parameters are listed for a new one."
        )


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in _MEMBERS}


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to("cpu") if isinstance(value, Tensor) else value for name, value in state.items()}
