"""One program with and without the engine: the same gradients to the bit, or the same error."""

import dataclasses
import gc
import random
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.fuzz.programs import DTYPES, OPERATIONS, WEIGHTS, Instruction, play
from tests.helpers.controlled_tier import ControlledTier, Rig

ENDINGS = ("backward", "backward", "backward", "again", "double", "never")
LEAVES = ((6, 8), (8, 6), (4, 4))


@dataclasses.dataclass(frozen=True)
class Program:
    """Some forwards, then what becomes of each."""

    forwards: tuple[tuple[Instruction, ...], ...]
    endings: tuple[str, ...]
    reverse: bool = False  # the last forward's backward first
    threads: bool = False  # each forward in a thread of its own, at the same time, and backward in another
    repeat: bool = False  # all of it twice: the second time, the order of backward is known
    parameters: bool = False
    dtype: int = 0
    # How the engine is set up.
    outside: bool = False  # double backward outside of the hooks
    settled: bool = True  # everything has left memory before backward begins
    min_bytes: int = 0
    read_ahead_bytes: int | None = None
    room_bytes: int = 1 << 30

    @classmethod
    def random(cls, rng: random.Random) -> "Program":
        """Any program at all, though rare operations are rare; hypothesis draws them as often (see test_fuzz.py)."""
        forwards = []
        for _ in range(rng.choice((1, 1, 2, 3))):
            names = rng.choices(OPERATIONS, WEIGHTS, k=rng.randint(1, 14))
            forwards.append(
                tuple(Instruction(name, rng.randrange(64), rng.randrange(64), rng.randrange(64)) for name in names)
            )
        return cls(
            forwards=tuple(forwards),
            endings=tuple(rng.choice(ENDINGS) for _ in forwards),
            reverse=rng.random() < 0.5,
            threads=rng.random() < 0.1,
            repeat=rng.random() < 0.2,
            parameters=rng.random() < 0.2,
            dtype=rng.randrange(len(DTYPES)),
            outside=rng.random() < 0.5,
            settled=rng.random() < 0.7,
            min_bytes=rng.choice((0, 0, 100)),
            read_ahead_bytes=rng.choice((None, 0, 600)),
            room_bytes=rng.choice((1 << 30, 1 << 30, 1 << 30, 1500)),
        )


_PATIENCE = 30

Outcome = tuple[str, Any]


def outcomes(program: Program, rig: Rig | None, model: nn.ParameterList) -> list[Outcome]:
    """What every forward and every backward came to: gradients as bytes, or an error."""
    found: list[Outcome] = []
    for _ in range(1 + program.repeat):
        found += _outcomes(program, rig, model)
    return found


def _outcomes(program: Program, rig: Rig | None, model: nn.ParameterList) -> list[Outcome]:
    found: list[Outcome] = []
    generator = torch.Generator().manual_seed(len(program.forwards[0]))
    leaves = []
    for index, _ in enumerate(program.forwards):
        values = [torch.randn(size, generator=generator).to(DTYPES[program.dtype]) for size in LEAVES]
        if program.parameters and index == 0:
            for parameter, value in zip(model, values, strict=True):
                parameter.data = value
            leaves.append(list(model))
        else:
            leaves.append([value.requires_grad_() for value in values])
    losses: list[torch.Tensor | None] = [None] * len(program.forwards)

    def forward(index: int) -> None:
        # The third is a leaf, which may not be changed in place: some programs try.
        own = [leaves[index][0] * 1, leaves[index][1] * 1, leaves[index][2]]
        losses[index] = play(program.forwards[index], own)

    def inside(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            if rig is None:
                work()
                return
            hooks = torch.autograd.graph.saved_tensors_hooks(rig.engine.pack, rig.engine.unpack)
            with hooks:
                work()
                rig.engine.operation_ended()

        return run

    forwards = [inside(lambda index=index: forward(index)) for index, _ in enumerate(program.forwards)]
    found += _in_threads(forwards) if program.threads else [_outcome(work) for work in forwards]
    if rig is not None and program.settled:
        rig.settle()
    order = list(range(len(losses)))
    for index in reversed(order) if program.reverse else order:
        if losses[index] is not None:
            ending = _ending(program, index, losses, leaves, inside)
            found += _in_threads([ending]) if program.threads else [_outcome(ending)]
            losses[index] = None
    return found


def _ending(
    program: Program,
    index: int,
    losses: list[torch.Tensor | None],
    leaves: list[list[torch.Tensor]],
    inside: Callable[[Callable[[], None]], Callable[[], None]],
) -> Callable[[], Any]:
    ending, own = program.endings[index], leaves[index]

    def gradients() -> list[bytes | None]:
        bits = [None if one.grad is None else one.grad.double().numpy().tobytes() for one in own]
        for one in own:
            one.grad = None
        return bits

    def run() -> Any:
        loss = losses[index]
        assert loss is not None
        if ending == "never":
            return None
        try:
            if ending == "double":
                once = torch.autograd.grad(loss, own, create_graph=True, allow_unused=True)
                penalty = sum((one.double().square().sum() for one in once if one is not None), loss * 0)
                penalty.backward()
                return gradients()
            loss.backward(retain_graph=ending == "again")
            bits = gradients()
            if ending == "again":
                loss.backward()
                bits += gradients()
            return bits
        finally:
            gradients()

    if program.outside or ending != "double":
        return run

    def inside_run() -> Any:
        result: list[Any] = []
        inside(lambda: result.append(run()))()
        return result[0]

    return inside_run


def _outcome(work: Callable[[], Any]) -> Outcome:
    try:
        return "done", work()
    except RuntimeError as error:
        # Autograd says it in two ways, and which one comes first depends on what it looks at first.
        modified = "modified by an inplace operation" in str(error) or "has been modified inplace" in str(error)
        return "RuntimeError", "modified in place" if modified else str(error)
    except Exception as error:
        return type(error).__name__, str(error)


def _in_threads(works: list[Callable[[], Any]]) -> list[Outcome]:
    # New ones: autograd counts operations thread by thread, and adds gradients up in the order of these numbers.
    found: dict[int, Outcome] = {}

    def work(index: int) -> None:
        found[index] = _outcome(works[index])

    threads = [threading.Thread(target=work, args=(index,)) for index, _ in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[index] for index, _ in enumerate(works)]


def check(program: Program) -> list[str]:
    """What went wrong: nothing, as a rule."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # checkpoints without gradients, and other things that only plain autograd minds
        oldest = torch.ones((), requires_grad=True) * 1
        expected = outcomes(program, None, some_parameters())
        model = some_parameters()
        rig = rig_for(program, model)
        found = outcomes(program, rig, model)
        problems = []
        for index, (one, other) in enumerate(zip(expected, found, strict=True)):
            if one != other:
                problems.append(f"outcome {index}: plain autograd {_short(one)}, offloaded {_short(other)}")
        # What a backward that raised had still to do, autograd keeps until a backward of something older has ended.
        oldest.backward()
        problems += _left(rig)
        rig.engine.close()
        rig.tier.close()
    return problems


def rig_for(program: Program, model: nn.ParameterList) -> Rig:
    """The engine, as ``program`` wants it."""
    return Rig(
        ControlledTier(program.room_bytes),
        model,
        min_bytes=program.min_bytes,
        read_ahead_bytes=program.read_ahead_bytes,
    )


def _short(outcome: Outcome) -> str:
    kind, what = outcome
    return kind if kind == "done" else f"{kind}: {what}"


def _left(rig: Rig) -> list[str]:
    # Tracebacks of errors hold frames, which hold graphs; what a backward that raised had still to do goes with its thread,
    # which ends a little after it was joined.
    for attempt in range(_PATIENCE):
        try:
            rig.assert_nothing_left()
        except AssertionError as error:
            problem = f"something is left: {error}"
            gc.collect()
            time.sleep(0.01 * attempt)
        else:
            return []
    return [problem]


def some_parameters() -> nn.ParameterList:
    """For programs whose leaves are a model's."""
    return nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in LEAVES])


def run(seed: int) -> list[str]:
    """What went wrong with the program of ``seed``."""
    program = Program.random(random.Random(seed))
    problems = check(program)
    return [*problems, f"with {program}"] if problems else []
