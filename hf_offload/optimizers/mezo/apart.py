"""Two passes that take turns may not leave anything to each other: what one would leave is found before the other sees it.

Note: what is looked at
    Tensors, wherever a model keeps them: each operation of a pass may read what this pass has made, and what was there before
    the step, and may write only what this pass has made (:class:`Apart`). Everything else is compared in front of each block
    (:class:`~hf_offload.optimizers.mezo.python_state.PythonState`). So a pass is given up before the other one runs on what
    it has changed, and what it has changed is put back.

    What is not seen are tensors written through an array of NumPy that is not kept, and kernels that read memory without an
    operation of PyTorch.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_offload.errors import OffloadError
from hf_offload.optimizers.mezo.pairs import UnfitError

_MADE_BY = "_hf_offload_pass"
"""On a storage: the pass that has made it."""


class Apart(TorchDispatchMode):
    """The operations of one of two passes. One that reads what the other has made, or writes what was there before, ends the
    pass with :class:`~hf_offload.optimizers.mezo.pairs.UnfitError`, without having run.

    Args:
        other: The pass that runs first.

    Attributes:
        why: What the model does then.
    """

    supports_higher_order_operators = True

    def __init__(self, other: "Apart | None" = None) -> None:
        super().__init__()
        self.why: str | None = None
        self._drawn: dict[int, tuple[torch.Generator, Tensor]] = {}  # what they were before
        self._other = other

    def restore(self) -> None:
        """Put back the generators that the pass has drawn from."""
        for generator, state in self._drawn.values():
            generator.set_state(state)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions in a model stay compiled, and have the same bits."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            given = {id(storage): storage for one in _tensors((args, kwargs)) for storage in _storage_of(one)}
            makers = {getattr(storage, _MADE_BY, self) for storage in given.values()}
            if any(getattr(one, _MADE_BY, None) is not self for one in _tensors((args, kwargs)) if _has_parts(one)):
                self._give_up("keeps tensors that are not strided", func)
            if makers - {self}:
                self._give_up("leaves tensors of one pass to another one", func)
            if _written_by(func):
                for one in _written(func, args, kwargs):
                    if any(getattr(storage, _MADE_BY, None) is not self for storage in _storage_of(one)):
                        self._give_up("changes tensors in place that it keeps", func)
            generator = kwargs.get("generator")
            if generator is not None and id(generator) not in self._drawn:
                if self._other is not None and id(generator) in self._other._drawn:
                    self._give_up("draws from a generator that it keeps", func)
                self._drawn[id(generator)] = generator, generator.get_state()
            result = func(*args, **kwargs)
            for one in _tensors((result,)):
                if _has_parts(one):
                    setattr(one, _MADE_BY, self)
                for storage in _storage_of(one):
                    if id(storage) not in given:
                        setattr(storage, _MADE_BY, self)
        return result

    def _give_up(self, why: str, func: Any) -> None:
        self.why = f"{why} ({func})"
        raise UnfitError


class Unchanging(TorchDispatchMode):
    """The operations of a forward. One that writes to any of ``weights``, by name, raises
    :class:`~hf_offload.errors.OffloadError`, without having run: a weight that leaves memory comes back without the change.

    Attributes:
        error: What it has raised, which the model may have caught.
    """

    supports_higher_order_operators = True

    def __init__(self, weights: Mapping[str, nn.Parameter]):
        super().__init__()
        self.error: OffloadError | None = None
        self._weights = weights

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions in a model stay compiled, and have the same bits."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _written_by(func):
            self._check(func, {one._cdata for each in _written(func, args, kwargs) for one in _storage_of(each)})
        return func(*args, **kwargs)

    def _check(self, func: Any, written: set[int]) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            names = [name for name, one in self._weights.items() if one.untyped_storage()._cdata in written]
        if names:
            self.error = OffloadError(
                f"The model changes its weight {names[0]} in place ({func}) while MeZO computes a loss, and a weight that "
                "leaves memory would come back without the change. Leave it out, such as max_norm of an embedding or "
                "rescale_every of RWKV, or let weights be in memory (params='none'). The weights have gone back, and no "
                "update was made."
            )
            raise self.error


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


def _storage_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    if tensor.layout is torch.strided:
        yield tensor.untyped_storage()


def _has_parts(tensor: Tensor) -> bool:
    """Whether it is sparse, or of another layout whose parts are not seen."""
    return tensor.layout is not torch.strided


@functools.cache
def _written_by(func: Any) -> tuple[tuple[int, str], ...]:
    """Places and names of the arguments that an operation writes."""
    arguments = func._schema.arguments if hasattr(func, "_schema") else ()
    return tuple(
        (place, one.name)
        for place, one in enumerate(arguments)
        if one.alias_info is not None and one.alias_info.is_write
    )


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    for place, name in _written_by(func):
        yield from _tensors((args[place] if place < len(args) else kwargs.get(name),))
