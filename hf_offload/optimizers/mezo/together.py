"""Several processes: each computes the losses of its part of a batch, and all make the same update.

Note: what ranks tell each other
    All have the same weights and draw the same directions, so that the losses of all parts are all that a rank has to know:
    a few bytes a step, and no gradients. What is different before the first step comes from rank 0, as with
    ``DistributedDataParallel``. Nothing is sent within a forward pass, so that an error in one rank's closure reaches the
    others, whose weights go back, too. The model is not wrapped: ``DistributedDataParallel`` has memory for all gradients.

Note: whose bits
    Losses are added up micro-batch by micro-batch, and each in the order of ranks: as in one process that has the same
    micro-batches in this order.
"""

import dataclasses
import functools
import platform
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_offload.errors import OffloadConfigError, OffloadError
from hf_offload.optimizers.mezo.directions import checksum
from hf_offload.optimizers.mezo.log import Setup
from hf_offload.ranks import Ranks

_DTYPES = {str(dtype): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}

Losses = tuple[Tensor, Tensor]
"""Those of ``w + eps z`` and of ``w - eps z``, of each micro-batch ``[micro-batches]``."""


class Together:
    """The ranks that train one model with MeZO. Methods are called by all of them, in the same order."""

    def __init__(self) -> None:
        self._ranks: Ranks | None = None
        self._has_met = False  # and all have the same weights

    @property
    def count(self) -> int:
        """How many there are."""
        return 1 if self._ranks is None else self._ranks.count

    def part(self) -> None:
        """The training is over: talk no more, until :meth:`begin`. Idempotent."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks, self._has_met = None, False

    def begin(
        self, model: nn.Module, setup: Setup, now: Callable[[], dict[str, Any]], check: Callable[[], None]
    ) -> None:
        """Before weights move: ``check`` all ranks, let what they are ``now`` be the same, and weights when the first step
        begins.

        Raises what ``check`` raises, :class:`~hf_offload.errors.OffloadError` where it raises in another rank, and
        :class:`~hf_offload.errors.OffloadConfigError` for ranks that train something else.
        """
        if not _is_distributed():
            check()
            return
        if self._ranks is None:
            self._ranks = Ranks()
        _compare(self._together(check, lambda: now() | ({} if self._has_met else _all_of(model, setup))))
        if not self._has_met:
            self._take_first_weights(model)
            self._has_met = True

    def agree(self, what: str, value: Any) -> None:
        """Raise :class:`~hf_offload.errors.OffloadError` in all ranks where ``value`` is not the same in all of them."""
        if self._ranks is not None and self._ranks.connected:
            _compare(self._ranks.gather({what: value}))

    def losses(self, compute: Callable[[], Losses], sums: bool) -> Losses:
        """The losses ``[]`` of the whole batch, of what ``compute`` returns in each rank: the mean of all micro-batches, or
        over ranks of their sums. Raises what it raises, and :class:`~hf_offload.errors.OffloadError` where it raises in
        another rank.
        """
        if self.count == 1:
            plus, minus = compute()
            return _total([plus], sums), _total([minus], sums)
        mine: Losses | None = None

        def own() -> None:
            nonlocal mine
            mine = compute()

        def sent() -> Any:
            assert mine is not None
            return [(str(one.dtype), one.tolist()) for one in mine]

        found = self._together(own, sent)
        first, second = (
            [torch.tensor(rank[which][1], dtype=_DTYPES[rank[which][0]], device="cpu") for rank in found]
            for which in (0, 1)
        )
        return _total(first, sums), _total(second, sums)

    def _together(self, call: Callable[[], None], sent: Callable[[], Any] = lambda: None) -> list[Any]:
        """Let all ranks ``call``. An error in one is an error in all. Returns what they have ``sent``, by rank."""
        assert self._ranks is not None
        try:
            call()
            error, value = None, sent()
        except BaseException as own:
            self._ranks.gather((_short(own), None))
            raise
        found = self._ranks.gather((error, value))
        errors = {rank: other for rank, (other, _) in enumerate(found) if other is not None}
        if errors:
            rank, text = next(iter(errors.items()))
            raise OffloadError(
                f"Rank {rank} has raised an error in a step of MeZO, which no rank makes then: {text}. Weights "
                "have gone back."
            )
        return [value for _, value in found]

    def _take_first_weights(self, model: nn.Module) -> None:
        """Parameters and buffers that differ become those of rank 0. An error while one is read or written is one in all."""
        assert self._ranks is not None
        named = dict(_tensors_of(model))
        sums: dict[str, int] = {}
        everyone = self._together(
            lambda: sums.update((name, checksum(one)) for name, one in named.items()), lambda: sums
        )
        for name, one in named.items():
            if any(other[name] != everyone[0][name] for other in everyone):
                values: list[Tensor] = []
                self._together(functools.partial(_copy, one, values))
                self._ranks.copy_first(values[0].view(-1).view(torch.uint8))
                self._together(functools.partial(self._take, one, values))

    @torch.no_grad()
    def _take(self, tensor: Tensor, values: list[Tensor]) -> None:
        assert self._ranks is not None
        if not self._ranks.is_first:
            tensor.copy_(values[0])


def _compare(everyone: Sequence[dict[str, Any]]) -> None:
    first = everyone[0]
    for rank, mine in enumerate(everyone):
        for key in first | mine:
            found, expected = mine.get(key), first.get(key)
            if found != expected:
                raise OffloadConfigError(
                    f"MeZO makes the same update in all processes, and rank {rank} has another {key} than rank 0 "
                    f"({_excerpt(found)} and {_excerpt(expected)}): give all ranks the same model, settings and schedule, on "
                    "the same kind of device, and let all of them make each step."
                )


def _is_distributed() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for found in (model.named_parameters(), model.named_buffers()):
        for name, one in found:
            wraps: Any = is_traceable_wrapper_subclass(one)
            if not (wraps or one.is_meta or one.is_sparse or isinstance(one, DTensor)):
                yield name, one


def _all_of(model: nn.Module, setup: Setup) -> dict[str, Any]:
    """What has to be the same before the first step."""
    shapes = {name: (tuple(one.shape), str(one.dtype)) for name, one in _tensors_of(model)}
    return dataclasses.asdict(setup) | {"device": _numbers_of(model), "model": shapes}


def _copy(tensor: Tensor, values: list[Tensor]) -> None:
    values.append(tensor.detach().clone(memory_format=torch.contiguous_format).cpu())


def _numbers_of(model: nn.Module) -> str:
    """What random numbers depend on."""
    device = next(one for one in model.parameters() if one.requires_grad).device
    name = getattr(torch.get_device_module(device.type), "get_device_name", None)
    kind = name(device) if name else f"{platform.machine()} with {torch.backends.cpu.get_cpu_capability()}"
    return f"{device.type}, {kind}, torch {torch.__version__}"


def _total(by_rank: Sequence[Tensor], sums: bool) -> Tensor:
    count = len(by_rank) if sums else sum(len(parts) for parts in by_rank)
    total: Tensor | None = None
    for number in range(max(len(parts) for parts in by_rank)):
        for parts in by_rank:
            if number < len(parts):
                part = parts[number] if count == 1 else parts[number] / count
                total = part if total is None else total + part
    assert total is not None
    return total


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {_excerpt(error)}"


def _excerpt(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]} ..."
