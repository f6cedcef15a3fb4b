"""What is done to every operator: run it with and without offloading, and look when its saved bytes become final."""

import collections
import contextlib
import dataclasses
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torchgen
from torch import Tensor, nn
from torchgen.model import SchemaKind
from torchgen.packaged.autograd.load_derivatives import load_derivatives

from hf_offload import OffloadConfig, OffloadSession, attach
from hf_offload.tensors import is_plain
from tests.helpers.controlled_tier import wait_for_stores
from tests.operators.catalogue import Call, seed


def bits(tensor: Tensor) -> tuple[Any, ...]:
    """What two tensors have in common when no bit differs: NaNs and signs of zeros count."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    data = plain.clone(memory_format=torch.contiguous_format).view(-1)
    return tensor.dtype, tuple(tensor.shape), data.view(torch.uint8).numpy().tobytes() if data.numel() else b""


class Trouble(Exception):
    """A call that fails; the message says how."""


def train(
    call: Call,
    forward_in: Callable[[], Any] = contextlib.nullcontext,
    before_backward: Callable[[], None] = lambda: None,
) -> list[tuple[Any, ...]]:
    """Bits of all results and gradients of one call. Raises :class:`Trouble`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's, for what it has deprecated, or not yet finished
        try:
            with forward_in():
                results, leaves = call.run()
            found = [bits(one) for one in results]
            before_backward()
            seed(1)
            if results:
                torch.autograd.backward(results, [torch.randn_like(one.detach()) for one in results])
            return found + [bits(one.grad) for one in leaves if one.grad is not None]
        except Exception as error:
            text = (str(error).splitlines() or [""])[0]
            raise Trouble(f"{type(error).__name__}: {text[:120]}") from error


@dataclasses.dataclass
class Tally:
    """What came of many calls."""

    calls: int = 0
    moved_bytes: int = 0
    operators: set[str] = dataclasses.field(default_factory=set)
    moved: set[str] = dataclasses.field(default_factory=set)
    saved: set[str] = dataclasses.field(default_factory=set)
    different: list[str] = dataclasses.field(default_factory=list)
    skipped: "collections.Counter[str]" = dataclasses.field(default_factory=collections.Counter)
    skipped_operators: dict[str, set[str]] = dataclasses.field(default_factory=dict)

    def skip(self, call: Call, reason: str) -> None:
        self.skipped[reason.partition(":")[0]] += 1
        self.skipped_operators.setdefault(call.operator, set()).add(reason)

    def __str__(self) -> str:
        never = sorted(self.skipped_operators.keys() - self.operators)
        return "\n".join(
            [
                f"{len(self.operators)} operators, {self.calls} calls compared, {len(self.different)} different; "
                f"{len(self.moved)} operators moved {self.moved_bytes / 2**20:.0f} MiB",
                f"saved nothing that could be moved: {len(self.operators - self.saved - self.moved)} operators",
                f"saved only what is below the minimum: {', '.join(sorted(self.saved - self.moved)) or 'none'}",
                f"calls left out: {dict(self.skipped)}",
                f"operators left out: {', '.join(f'{one} {sorted(self.skipped_operators[one])}' for one in never) or 'none'}",
                *self.different,
            ]
        )


class Comparison:
    """Runs calls with and without offloading to one tier; backward begins when everything has been written."""

    def __init__(self, tier: str, directory: Path, minimum: int | None):
        settings: dict[str, Any] = {} if minimum is None else {"min_bytes": minimum}
        settings |= {"directory": directory} if tier == "ssd" else {}
        self._model = nn.Linear(1, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # RAM on a CPU saves nothing
            self.session: OffloadSession = attach(self._model, OffloadConfig(tier=tier, read_ahead_bytes=0, **settings))
        self.tally = Tally()

    def close(self) -> None:
        transfer = self.session._engine.transfer
        self.session.detach()
        transfer.reap()
        assert transfer.live_records == 0

    def compare(self, calls: Iterable[Call]) -> None:
        for call in calls:
            self._compare(call)

    def _compare(self, call: Call) -> None:
        tally = self.tally
        try:
            expected = train(call)
        except Trouble as trouble:
            self._also_refused(call, trouble)
            return
        found, why = self._offloaded(call)
        if found != expected and train(call) != expected:
            tally.skip(call, "differs from run to run without offloading")
            return
        tally.calls += 1
        tally.operators.add(call.operator)
        if call.operator not in tally.moved | tally.saved and self._saves(call):
            tally.saved.add(call.operator)
        if found != expected:
            tally.different.append(f"{call}: {why or 'other bits'}")

    def _saves(self, call: Call) -> bool:
        saved = Saved()
        train(call, saved.watch)
        return any(is_plain(one.tensor) and one.tensor.is_cpu and one.tensor.numel() for one in saved.seen)

    def _also_refused(self, call: Call, trouble: Trouble) -> None:
        found, _ = self._offloaded(call)
        if found is None:
            self.tally.skip(call, f"raises without offloading: {trouble}")
        else:
            self.tally.different.append(f"{call}: nothing is raised; without offloading, {trouble}")

    def _offloaded(self, call: Call) -> tuple[list[tuple[Any, ...]] | None, str]:
        try:
            return train(call, self.session.scope, self._settle), ""
        except Trouble as trouble:
            where = traceback.extract_tb(trouble.__cause__.__traceback__)[-1] if trouble.__cause__ else ""
            return None, f"{trouble} ({where})"
        finally:
            self.session.end_step()
            moved = self.session.stats.steps.pop().offloaded_bytes
            self.tally.moved_bytes += moved
            if moved:
                self.tally.moved.add(call.operator)

    def _settle(self) -> None:
        wait_for_stores(self.session._engine.transfer)


# ------------------------------------------------------------------------------------------------- when bytes become final


@dataclasses.dataclass
class Kept:
    tensor: Tensor
    version: int
    before: tuple[Any, ...]
    required_gradient: bool
    operation: int
    written_later: bool = False
    written_by_others: bool = False  # not only by the operation that saved it

    def look(self) -> None:
        if self.tensor._version == self.version:
            now = bits(self.tensor)
            self.written_later |= now != self.before
            self.before = now


class Saved:
    """Notes what autograd saves, and, with ``compare``, what is written to it afterwards without a new version."""

    def __init__(self, compare: bool = False):
        self.seen: list[Kept] = []
        self._compare = compare

    def watch(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        plain = tensor.detach()
        operation = torch.autograd._get_sequence_nr()
        if self._compare:
            last = self.seen[-1].operation if self.seen else operation
            if last != operation:
                self._look(last)
        before = bits(plain) if self._compare else ()
        self.seen.append(Kept(plain, tensor._version, before, tensor.requires_grad, operation))
        return plain

    def _look(self, operation: int) -> None:
        for one in self.seen:
            if one.operation == operation:
                one.look()

    def end(self) -> None:
        """The forward has ended."""
        if self.seen:
            self._look(self.seen[-1].operation)
        for one in self.seen:
            before = one.before
            one.look()
            one.written_by_others = one.before != before


def mutable_arguments_saved() -> dict[tuple[str, str], bool]:
    """Arguments that operators save before they run, and may write to; whether they have a derivative of their own."""
    root = Path(torchgen.__file__).parent / "packaged"
    native = root / "ATen" / "native"
    table, _ = load_derivatives(
        str(root / "autograd" / "derivatives.yaml"), str(native / "native_functions.yaml"), str(native / "tags.yaml")
    )
    found = {}
    for function, by_key in table.items():
        written = {one.name for one in function.arguments.flat_non_out if one.annotation and one.annotation.is_write}
        if function.kind() is SchemaKind.inplace:
            written.discard("self")  # autograd saves a copy of that one, and counts its version
        for info in by_key.values():
            saved = {str(getattr(one.nctype.name, "name", one.nctype.name)) for one in info.all_saved_inputs}
            differentiable = {name for one in info.derivatives for name in one.var_names}
            found |= {(str(function.name), name): name in differentiable for name in written & saved}
    return found
