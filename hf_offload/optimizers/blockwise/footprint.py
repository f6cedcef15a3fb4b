"""How many bytes block-wise training needs in addition to weights and activations, in closed form."""

import dataclasses
from collections.abc import Callable

from torch import Tensor, nn

from hf_offload.optimizers.blockwise.freezing import is_waiting
from hf_offload.optimizers.blockwise.optimizer import HALF
from hf_offload.optimizers.blockwise.schedule import BlockwiseConfig, Schedule, Units, find_trainable_units

_SINGLE_BYTES = 4


@dataclasses.dataclass(frozen=True)
class BlockwiseBytes:
    """Most bytes of each kind in any turn, counted apart, so their sum may belong to no single turn of a mixed model.

    Attributes:
        gradients: Of the parameters that train, in their own dtype.
        state: The inner optimizer's.
        all_state: That of all blocks together: what there is where no state is dropped, of which all but ``state`` waits.
        masters: float32 copies of 16-bit parameters.
        step_gradients: float32 copies of their gradients, while a step runs.
    """

    gradients: int
    state: int
    all_state: int
    masters: int
    step_gradients: int

    @property
    def total(self) -> int:
        """All of them in one turn."""
        return self.gradients + self.state + self.masters + self.step_gradients


def peak_bytes(model: nn.Module, config: BlockwiseConfig, moments: int = 2, scalars: int = 1) -> BlockwiseBytes:
    """What a :class:`BlockwiseOptimizer` over all trainable parameters of ``model`` will need at most, per process.

    ``moments`` and ``scalars`` count what the inner optimizer keeps of a parameter: tensors of its size, and single float32
    numbers. AdamW has two and one.

    Raises :class:`~hf_offload.errors.OffloadConfigError` if the settings do not fit the model.
    """
    trainable, units, schedule = _plan_turns(model, config)

    def has_master(parameter: Tensor) -> bool:
        return config.master_weights and parameter.dtype in HALF

    def state(parameter: Tensor) -> int:
        size = _SINGLE_BYTES if has_master(parameter) else parameter.element_size()
        return moments * parameter.numel() * size + scalars * _SINGLE_BYTES

    def by_unit(of: Callable[[Tensor], int]) -> dict[str, int]:
        return {unit: sum(of(trainable[name]) for name in names) for unit, names in units.parameters.items()}

    def largest(of: Callable[[Tensor], int]) -> int:
        return schedule.largest(by_unit(of))

    masters = largest(lambda p: _SINGLE_BYTES * p.numel() if has_master(p) else 0)
    states = by_unit(state)
    all_state = sum(states[name] for name in schedule.names)
    return BlockwiseBytes(largest(lambda p: p.nbytes), schedule.largest(states), all_state, masters, masters)


def deepest_turn(model: nn.Module, config: BlockwiseConfig) -> set[str]:
    """Names of the parameters that train in a turn in which backward goes through most of ``model``'s blocks, and so needs
    most of what their forward saved.

    Raises as :func:`peak_bytes` does.
    """
    _, units, schedule = _plan_turns(model, config)
    return {name for unit in schedule.deepest() for name in units.parameters[unit]}


def _plan_turns(model: nn.Module, config: BlockwiseConfig) -> tuple[dict[str, nn.Parameter], Units, Schedule]:
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad or is_waiting(p)}
    units = find_trainable_units(model, {id(p): name for name, p in trainable.items()})
    return trainable, units, Schedule(units, config)
