"""``python -m tests.fuzz.weights --count 5000``: random models and steps, with the weights in memory and on a tier.

A program makes a model of random modules, and then does what users of PyTorch do with models. Both runs do all of it; losses,
errors, whatever is read, and in the end all weights and gradients have to be the same to the bit. ``--seed N`` repeats one.
Seeds run in a process of their own: one that crashes has failed. One that two runs in memory do not agree on is left out.
"""

import copy
import functools
import gc
import logging
import pickle
import random
import tempfile
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from hf_offload import OffloadConfig
from hf_offload.session import attach
from tests.fuzz.blocks import BATCH, BLOCKS, WIDTH, WRAPPINGS, Stumbled, Wrapped
from tests.fuzz.training import Trains
from tests.fuzz.uses import HOLDS, READS, WRITES, as_values, look
from tests.helpers.crashing import Crashing
from tests.helpers.seed_search import LeftOut, try_seeds
from tests.helpers.streamed import same

OPTIMIZERS: list[Callable[..., torch.optim.Optimizer]] = [
    torch.optim.AdamW,
    functools.partial(torch.optim.AdamW, foreach=True),
    functools.partial(torch.optim.SGD, momentum=0.9),
    torch.optim.SGD,
    torch.optim.RMSprop,
]
DTYPES = (torch.float32, torch.float32, torch.float32, torch.float64, torch.bfloat16)
PLACES = ("ssd", "ram")
LIMITS = (1, 1, 1, 600, 3000, 1 << 40)


class Player(Trains):
    """One of the two runs of a program. ``place`` is None for the one in memory."""

    def __init__(self, rng: random.Random, place: str | None, directory: str):
        self.rng = rng
        self.log: list[Any] = []
        self.read_bytes = 0
        self.stores: list[Any] = []
        self._place = place
        self._directory = directory
        self._held: list[Any] = []
        self._losses: list[Tensor] = []
        self._saved: Any = None
        self._limit_bytes = rng.choice(LIMITS)
        self._streamed = rng.random() < 0.25
        self._activations = rng.random() < 0.25
        self._dtype = rng.choice(DTYPES)
        self._kind = rng.choice(OPTIMIZERS)
        torch.manual_seed(rng.randrange(1000))
        self.made: list[str] = []
        self.model = self._make_model()
        if any("shared" in name or "aliases" in name for name in self.made):
            self._streamed = False  # updates of one memory would come one after the other
        self._hook(rng)
        self._make_optimizer()
        self._attach()

    def play(self, steps: int) -> None:
        """So many things, each of which may end with an error."""
        names, weights = list(ACTIONS), [weight for _, weight in ACTIONS.values()]
        for name in self.rng.choices(names, weights, k=steps):
            rng = random.Random(self.rng.randrange(1 << 30))
            self._log(name, lambda name=name, rng=rng: ACTIONS[name][0](self, rng))
            if name.startswith("step") and self.log[-1][1] == "RuntimeError":
                return  # an update that is an error has changed some of the weights, and which ones is not promised
        self._log("weights", lambda: [as_values(value) for value in self.model.state_dict().values()])
        self._log("gradients", lambda: [p.grad for p in self.model.parameters()])

    def _log(self, name: str, action: Callable[[], Any]) -> None:
        said = ""
        try:
            found = as_values(action())
        except Stumbled:
            found = "stumbled"
        except Exception as error:
            found, said = _kind_of(error), f"({error})"
        self.log.append((name, found, said))

    # -- what both runs have --------------------------------------------------------------------------------------------

    def _make_model(self) -> nn.Module:
        rng, modules = self.rng, []
        for _ in range(rng.randint(1, 4)):
            name = rng.choice(list(BLOCKS))
            module = BLOCKS[name]()
            for how in rng.choices(WRAPPINGS, (10, 2, 2, 2, 2, 1, 1, 1), k=rng.choice((1, 1, 2))):
                if how == "called" and "checkpoint" in name:
                    continue  # a recompute would find the other weights
                module = module if how == "plain" else Wrapped(module, how)
                name += "" if how == "plain" else f" {how}"
            modules.append(module)
            self.made.append(name)
        if rng.random() < 0.1 and len(modules) > 1:
            modules.append(modules[0])  # used twice
        return nn.Sequential(*modules).to(self._dtype)

    def _hook(self, rng: random.Random) -> None:
        """Hooks that read and write weights, of the model's or its parameters'."""
        self._hooked = rng.choice(("", "", "", "", "forward", "gradient", "accumulated"))
        weights = [p for p in self.model.parameters() if p.requires_grad]
        if not weights:
            return
        weight = rng.choice(weights)
        if self._hooked == "forward":
            self.model[0].register_forward_hook(_LooksAt(self.log))
        elif self._hooked == "gradient":
            weight.register_hook(lambda gradient: gradient * 2)
        elif self._hooked == "accumulated":
            weight.register_post_accumulate_grad_hook(_steps)

    def _make_optimizer(self) -> None:
        self.optimizer = self._kind(list(self.model.parameters()) or [nn.Parameter(torch.zeros(1))], lr=0.01)

    def _attach(self) -> None:
        self.session = None
        if self._place is None:
            return
        config = OffloadConfig(
            tier=self._place if self._activations else "none",
            params=self._place,
            optimizer=self._place if self._streamed else "none",
            min_bytes=1,
            **({"directory": self._directory} if self._place == "ssd" else {}),
        )
        self.session = attach(self.model, config)
        residency = self.session.residency
        assert residency is not None
        residency.limit_bytes = self._limit_bytes
        self.stores.append(residency.store)
        if self._streamed:
            self.session.prepare_optimizer(self.optimizer)
            self.session.defer_updates()

    def _weight(self, rng: random.Random) -> nn.Parameter:
        return rng.choice(list(self.model.parameters()) or [nn.Parameter(torch.zeros(1))])

    def _forward(self, rng: random.Random) -> Tensor:
        generator = torch.Generator().manual_seed(rng.randrange(1000))
        inputs = torch.randn(BATCH, WIDTH, generator=generator).to(self._dtype)
        if rng.random() < 0.5:
            inputs.requires_grad_()
        how = rng.choice(("plain", "plain", "plain", "autocast", "own hooks"))
        if how == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                hidden = self.model(inputs)
        elif how == "own hooks":
            with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
                hidden = self.model(inputs)
        else:
            hidden = self.model(inputs)
        return hidden.float().square().mean()

    # -- what they do ---------------------------------------------------------------------------------------------------

    def backward_twice(self, rng: random.Random) -> Any:
        loss = self._forward(rng)
        if loss.requires_grad:
            loss.backward(retain_graph=True)
            if rng.random() < 0.3:
                WRITES[rng.choice(list(WRITES))](self._weight(rng).detach())  # type: ignore[arg-type]
            loss.backward()
        return loss

    def broken_forward(self, rng: random.Random) -> Any:
        module = rng.choice([module for module in self.model.modules() if not list(module.children())])
        handle = module.register_forward_hook(_stumble)
        try:
            return self.backward(rng)
        finally:
            handle.remove()

    def graph_of_gradients(self, rng: random.Random) -> Any:
        loss = self._forward(rng)
        weights = [p for p in self.model.parameters() if p.requires_grad]
        if loss.requires_grad and weights:
            gradients = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
            penalty = sum(one.abs().float().square().sum() for one in gradients if one is not None)
            if isinstance(penalty, Tensor) and penalty.requires_grad:
                penalty.backward()
        return loss

    def clip(self, rng: random.Random) -> Any:
        weights = [p for p in self.model.parameters() if not p.is_complex()]
        if self.session is not None and self._streamed and len(weights) == len(list(self.model.parameters())):
            return self.session.clip_grad_norm_(0.1)
        return nn.utils.clip_grad_norm_(weights, 0.1)

    def evaluate(self, rng: random.Random) -> Any:
        self.model.eval()
        try:
            with rng.choice((torch.no_grad, torch.inference_mode, torch.enable_grad))():
                return self._forward(rng).clone()
        finally:
            self.model.train(rng.random() < 0.8)

    def read(self, rng: random.Random) -> Any:
        name = rng.choice(list(READS))
        return name, READS[name](self._weight(rng))

    def read_with(self, rng: random.Random) -> Any:
        with rng.choice((torch.no_grad, torch.inference_mode))():
            return as_values(self.read(rng))

    def read_all(self, rng: random.Random) -> Any:
        reads: list[Callable[[], Any]] = [
            lambda: self.model.state_dict(),
            lambda: copy.deepcopy(self.model).state_dict(),
            lambda: pickle.loads(pickle.dumps(self.model)).state_dict(),
            lambda: copy.copy(self.model).state_dict(),
            lambda: torch._foreach_norm([p for p in self.model.parameters() if p.is_floating_point()]),
            lambda: [p.shape for p in self.model.parameters()],
            lambda: str(self.model),
            lambda: sum(p.abs().double().sum() for p in self.model.parameters()),
            lambda: torch.func.functional_call(
                self.model, {name: p * 2 for name, p in self.model.named_parameters()}, (torch.ones(BATCH, WIDTH),)
            ),
        ]
        return rng.choice(reads)()

    def write(self, rng: random.Random) -> Any:
        name = rng.choice(list(WRITES))
        with torch.no_grad():
            WRITES[name](self._weight(rng))
        return name

    def write_with_gradients(self, rng: random.Random) -> Any:
        WRITES[rng.choice(list(WRITES))](self._weight(rng))

    def write_state(self, rng: random.Random) -> Any:
        """Through what a state dict holds: the memory of the weights, where it is that."""
        if self._limit_bytes < 1 << 40:
            return  # it may hold copies
        for value in self.model.state_dict().values():
            value.mul_(2)

    def hold(self, rng: random.Random) -> Any:
        self._held.append(HOLDS[rng.choice(list(HOLDS))](self._weight(rng)))
        if len(self._held) > 2:
            self._held.pop(0)

    def look_at_held(self, rng: random.Random) -> Any:
        return [look(one, rng) for one in self._held if one is not None]

    def replace(self, rng: random.Random) -> Any:
        """A weight, in its module: by a new one, which the optimizer does not know."""
        module, name = rng.choice([(m, n) for m in self.model.modules() for n in m._parameters] or [(None, "")])
        if module is None or module._parameters[name] is None:
            return
        old = getattr(module, name)
        new: Any = rng.choice((lambda: old.detach() * 2, lambda: old, lambda: old.data))()
        setattr(module, name, nn.Parameter(new, requires_grad=old.requires_grad))

    def freeze(self, rng: random.Random) -> None:
        weight = self._weight(rng)
        if weight.is_floating_point():
            weight.requires_grad_(rng.random() < 0.6)

    def convert(self, rng: random.Random) -> None:
        self._dtype = rng.choice((torch.float32, torch.float64))
        self.model.to(self._dtype)

    def move(self, rng: random.Random) -> None:
        moves: list[Callable[[], Any]] = [
            lambda: self.model.to("cpu"),
            lambda: self.model.cpu(),
            lambda: self.model.zero_grad(set_to_none=rng.random() < 0.5),
            lambda: self.model.to(memory_format=torch.channels_last),
            lambda: self.model.requires_grad_(True),
            lambda: self.model._apply(lambda value: value.clone()),
            lambda: self.model.apply(_initialise),
            lambda: self.model.share_memory(),
        ]
        rng.choice(moves)()

    def save(self, rng: random.Random) -> Any:
        self._saved = copy.deepcopy(self.model.state_dict())
        return list(self._saved)

    def load(self, rng: random.Random) -> Any:
        if self._saved is None:
            return None
        return str(self.model.load_state_dict(self._saved, assign=rng.random() < 0.3))

    def copy_all(self, rng: random.Random) -> None:
        """The copies are in memory."""
        self.model, self.optimizer = copy.deepcopy((self.model, self.optimizer))
        self._forget()

    def attach_again(self, rng: random.Random) -> None:
        """With whatever has become of the model since."""
        if self.session is not None:
            self.session.detach()
            self._attach()

    def bring_all(self, rng: random.Random) -> None:
        if self.session is not None:
            self.session.detach()
            attach(self.model, OffloadConfig(tier="none", params="none", optimizer="none")).detach()
            self.session = None

    def inside(self, rng: random.Random) -> Any:
        """Code that PyTorch does not see, where the weights are said to be in memory."""
        weight, name = self._weight(rng), rng.choice(list(WRITES))
        if self.session is None:
            with torch.no_grad():
                WRITES[name](weight)
            return
        with self.session.weights(), torch.no_grad():
            WRITES[name](weight)

    def change_limit(self, rng: random.Random) -> None:
        self._limit_bytes = rng.choice(LIMITS)
        if self.session is not None and self.session.residency is not None:
            self.session.residency.limit_bytes = self._limit_bytes

    def another_optimizer(self, rng: random.Random) -> None:
        self.optimizer = None  # type: ignore[assignment]
        gc.collect()
        self._make_optimizer()
        if self.session is not None and self._streamed:
            self.session.prepare_optimizer(self.optimizer)
            self.session.defer_updates()

    def _forget(self) -> None:
        self._held, self._losses = [], []
        if self.session is not None:
            self.session.detach()
            self.session = None


def _pack(value: Tensor) -> Any:
    return (value if value.is_leaf else value.detach()), value._version


def _unpack(saved: Any) -> Tensor:
    """As autograd does where there are no hooks."""
    value, version = saved
    if value._version != version:
        raise RuntimeError("modified by an inplace operation")
    return value


class _LooksAt:
    def __init__(self, log: list[Any]):
        self._log = log

    def __deepcopy__(self, memo: Any) -> "_LooksAt":
        return self

    def __reduce__(self) -> Any:
        return _LooksAt, ([],)

    def __call__(self, module: nn.Module, args: Any, result: Tensor) -> Tensor:
        for parameter in module.parameters():
            self._log.append(("looked", as_values(parameter), ""))
            parameter.data.mul_(0.5)
        return result


def _steps(weight: Tensor) -> None:
    with torch.no_grad():
        assert weight.grad is not None
        weight -= 0.01 * weight.grad
    weight.grad = None


def _stumble(*_: Any) -> None:
    raise Stumbled


def _initialise(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def _kind_of(error: Exception) -> str:
    if "inplace operation" in str(error) or "modified inplace" in str(error):
        return "modified in place"
    return next(kind.__name__ for kind in type(error).__mro__ if not kind.__module__.startswith("hf_offload"))


ACTIONS: dict[str, tuple[Callable[[Player, random.Random], Any], int]] = {
    "backward": (Player.backward, 12),
    "backward_twice": (Player.backward_twice, 2),
    "broken_backward": (Player.broken_backward, 1),
    "broken_forward": (Player.broken_forward, 1),
    "keep_loss": (Player.keep_loss, 2),
    "backward_of_kept": (Player.backward_of_kept, 3),
    "graph_of_gradients": (Player.graph_of_gradients, 1),
    "step": (Player.step, 10),
    "step_with_closure": (Player.step_with_closure, 1),
    "clip": (Player.clip, 2),
    "evaluate": (Player.evaluate, 5),
    "read": (Player.read, 6),
    "read_with": (Player.read_with, 2),
    "read_all": (Player.read_all, 2),
    "write": (Player.write, 8),
    "write_with_gradients": (Player.write_with_gradients, 1),
    "write_state": (Player.write_state, 1),
    "hold": (Player.hold, 2),
    "look_at_held": (Player.look_at_held, 3),
    "replace": (Player.replace, 1),
    "freeze": (Player.freeze, 2),
    "convert": (Player.convert, 1),
    "move": (Player.move, 1),
    "save": (Player.save, 1),
    "load": (Player.load, 2),
    "copy_all": (Player.copy_all, 1),
    "attach_again": (Player.attach_again, 1),
    "bring_all": (Player.bring_all, 1),
    "inside": (Player.inside, 1),
    "change_limit": (Player.change_limit, 1),
    "another_optimizer": (Player.another_optimizer, 1),
}


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    gc.collect()
    gc.freeze()  # what was imported need not be searched each time
    return tempfile.TemporaryDirectory(prefix="hf_offload-weights-")


def run(seed: int) -> list[str]:
    """What went wrong with the program of ``seed``: nothing, as a rule."""
    return check(seed)[0]


def check(seed: int) -> tuple[list[str], Player]:
    """What went wrong, and the run whose weights are on a tier."""
    players = [_played(seed, place) for place in (None, PLACES[seed % 2])]
    expected, found = (player.log for player in players)
    problems = _differences(expected, found)
    if problems and _differences(expected, _played(seed, None).log):
        problems = [LeftOut("a second run in memory differs from the first one")]
    elif problems:
        names = [entry[0] for entry in expected if entry[0] != "looked"]
        said = f"{players[1].made}, limit {players[1]._limit_bytes}: {names}"
        problems = [*problems[:1], said]
    players[1].read_bytes = sum(store.tier.stats.read_bytes for store in players[1].stores)
    return problems, players[1]


def _played(seed: int, place: str | None) -> Player:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rng = random.Random(seed)
        player = Player(rng, place, _directory().name)
        player.play(rng.randint(3, 20))
    return player


def _differences(expected: list[Any], found: list[Any]) -> list[str]:
    return [
        f"{number} {one[0]}: {_short(one[1:])} in memory, {_short(other[1:])} on a tier"
        for number, (one, other) in enumerate(zip(expected, found, strict=False))
        if one[0] != other[0] or not same(one[1], other[1])
    ]


def _short(value: Any) -> str:
    return str(value)[:160].replace("\n", " ")


def main(
    count: Annotated[int, typer.Option(help="How many programs.")] = 5_000,
    first: Annotated[int, typer.Option(help="The seed of the first.")] = 0,
    seed: Annotated[int | None, typer.Option(help="This seed only, in this process.")] = None,
    stop: Annotated[bool, typer.Option(help="Stop at the first that fails.")] = False,
) -> None:
    """Look for programs whose results depend on where weights are."""
    logging.disable(logging.CRITICAL)
    if seed is not None:
        try_seeds(run, "tests.fuzz.weights", seed, 1, stop)
    with Crashing(run) as guarded:
        try_seeds(guarded, "tests.fuzz.weights", first, count, stop)


if __name__ == "__main__":
    typer.run(main)
