"""``python -m tests.fuzz.steps --count 10000``: random programs of training steps, with the optimizer in memory and streamed.

A program is a list of things that users of torch.optim do. Both runs do all of it; losses, norms, errors, whatever is read,
and in the end all weights, gradients and state have to be the same to the bit. ``--seed N`` repeats one.
"""

import copy
import functools
import gc
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_offload import OffloadConfig
from hf_offload.session import attach
from hf_offload.state import setting
from hf_offload.state.optimizer import streaming_of
from tests.fuzz.training import Stumbled, Trains, Unknown
from tests.helpers.seed_search import try_seeds
from tests.helpers.train import copied, same

KINDS: list[Callable[..., torch.optim.Optimizer]] = [
    torch.optim.AdamW,
    functools.partial(torch.optim.AdamW, fused=True),
    functools.partial(torch.optim.AdamW, foreach=True),
    functools.partial(torch.optim.Adam, amsgrad=True),
    functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
    torch.optim.SGD,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adafactor,
    torch.optim.Rprop,
    Unknown,
    Unknown,
]
DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16)
PLACES = ("ram", "ssd")
_PATIENCE = 30
_PART_BYTES = 4096 * 4
_WIDTH = 65  # four parts of a matrix, the last one smaller


def _look(log: list[Any], weight: torch.Tensor) -> None:
    log.append(copied(weight.grad))


def _change(log: list[Any], weight: torch.Tensor) -> None:
    if weight.grad is not None:  # it may be frozen by now
        weight.grad.mul_(0.5)


def _replace(log: list[Any], weight: torch.Tensor) -> None:
    if weight.grad is not None:
        weight.grad = weight.grad * 0.5


def _clip(log: list[Any], weight: torch.Tensor) -> None:
    log.append(nn.utils.clip_grad_norm_([weight], 0.1))


def _drop(log: list[Any], weight: torch.Tensor) -> None:
    weight.grad = None


HOOKS: list[Callable[[list[Any], torch.Tensor], None] | None] = [_look, _change, _replace, _clip, _drop, None]


class Model(nn.Module):
    """Two matrices that may be left out, one that is used twice, and small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(_WIDTH, _WIDTH)
        self.tied = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.norm = nn.LayerNorm(_WIDTH)
        self.last = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, inputs: torch.Tensor, used: int = 7) -> torch.Tensor:
        hidden = self.first(inputs) if used & 1 else inputs
        hidden = nn.functional.linear(self.tied(hidden).tanh(), self.tied.weight.t())
        if used & 2:
            hidden = self.norm(hidden)
        return self.last(hidden) if used & 4 else hidden


class Player(Trains):
    """One of the two runs of a program. ``place`` is None for the one in memory."""

    def __init__(self, rng: random.Random, place: str | None, directory: str):
        self.rng = rng
        self.log: list[Any] = []
        self.streamed: list[Any] = []
        self.written_bytes = 0
        self._place = place
        self._directory = directory
        self._kind = rng.choice(KINDS)
        self._dtype = rng.choice(DTYPES)
        self._grouped = rng.random() < 0.4
        self._held: list[Any] = []
        self._losses: list[torch.Tensor] = []
        self._saved: list[Any] = []
        self._dead = False
        # Of weights, by their number: they are there before the optimizer is prepared.
        self._hooks = [rng.choice(HOOKS) for _ in Model().parameters()] if rng.random() < 0.3 else []
        torch.manual_seed(rng.randrange(1000))
        self.model = Model().to(self._dtype)
        self._make_optimizer()
        self._prepare(in_memory=rng.random() < 0.2)

    def play(self, steps: int) -> None:
        """So many things, each of which may end with an error."""
        names = list(ACTIONS)
        weights = [weight for _, weight in ACTIONS.values()]
        for name in self.rng.choices(names, weights, k=steps):
            seed = self.rng.randrange(1 << 30)
            try:
                self.log.append((name, copied(ACTIONS[name][0](self, random.Random(seed)))))
            except Stumbled:
                self.log.append((name, "stumbled"))
            except RuntimeError as error:
                modified = "inplace operation" in str(error)
                self.log.append((name, "modified in place" if modified else str(error).splitlines()[0]))
        self.log += [copied(self._state_dict()), copied(self.model.state_dict())]
        self.log.append([copied(p.grad) for p in self.model.parameters()])

    # -- what both runs have ---------------------------------------------------------------------------------------------

    def _make_optimizer(self) -> None:
        parameters: Any = list(self.model.parameters())
        for hook, parameter in zip(self._hooks, parameters, strict=False):
            if hook is not None and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(functools.partial(hook, self.log))
        if self._grouped:
            parameters = [{"params": parameters[:3], "lr": 0.02}, {"params": parameters[3:]}]
        self.optimizer = self._kind(parameters, lr=0.01)
        self.optimizer.factor = 1.0  # type: ignore[attr-defined]
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1, (step + 1) / 4))

    def _prepare(self, in_memory: bool) -> None:
        self.session = None
        if self._place is None or in_memory:
            return
        where = {"directory": self._directory} if self._place == "ssd" else {}
        self.session = attach(self.model, OffloadConfig(tier="none", optimizer=self._place, min_bytes=4096, **where))
        self.session.prepare_optimizer(self.optimizer)
        self.session.defer_updates()
        self.streamed.append(streaming_of(self.optimizer))

    def _state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.optimizer.state_dict())

    def _weight(self, rng: random.Random) -> nn.Parameter:
        return rng.choice(list(self.model.parameters()))

    def _forward(self, rng: random.Random) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rng.randrange(1000))
        inputs = torch.randn(4, _WIDTH, generator=generator).to(self._dtype)
        used = rng.choice((7, 7, 7, 6, 5, 3, 1))
        how = rng.choice(("plain", "plain", "checkpoint", "autocast", "reentrant"))
        if how == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                hidden = self.model(inputs, used)
        elif how == "plain":
            hidden = self.model(inputs, used)
        else:
            hidden = checkpoint(self.model, inputs.requires_grad_(), used, use_reentrant=how == "reentrant")
        return hidden.float().square().mean() * rng.choice((1, 1, 1, 10, 1e4))

    # -- what they do ----------------------------------------------------------------------------------------------------

    def backward_twice(self, rng: random.Random) -> Any:
        loss = self._forward(rng)
        if loss.requires_grad:
            loss.backward(retain_graph=True)
            if rng.random() < 0.5:
                self.step(rng)
            loss.backward()
        return loss

    def graph_of_gradients(self, rng: random.Random) -> Any:
        loss = self._forward(random.Random(rng.choice((1, 2, 5))))
        weights = [p for p in self.model.parameters() if p.requires_grad]
        if loss.requires_grad:
            gradients = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
            penalty = sum(one.float().square().sum() for one in gradients if one is not None)
            if isinstance(penalty, torch.Tensor) and penalty.requires_grad:
                penalty.backward()
        return loss

    def zero_grad(self, rng: random.Random) -> None:
        owner: Any = rng.choice((self.model, self.optimizer))
        owner.zero_grad(set_to_none=rng.random() < 0.5)

    def clip(self, rng: random.Random) -> Any:
        max_norm, norm_type = rng.choice((0.1, 1.0, float("inf"))), rng.choice((2.0, 2.0, 1.0, float("inf")))
        if self.session is not None and rng.random() < 0.8:
            return self.session.clip_grad_norm_(max_norm, norm_type)
        return nn.utils.clip_grad_norm_(list(self.model.parameters()), max_norm, norm_type)

    def clip_values(self, rng: random.Random) -> None:
        nn.utils.clip_grad_value_(list(self.model.parameters()), 0.01)

    def evaluate(self, rng: random.Random) -> Any:
        with rng.choice((torch.no_grad, torch.inference_mode))():
            return self._forward(rng).clone()

    def read(self, rng: random.Random) -> Any:
        weight = self._weight(rng)
        reads: list[Callable[[], Any]] = [
            lambda: weight,
            lambda: weight.grad,
            lambda: torch.from_numpy(weight.detach().float().numpy()),
            lambda: self.model.state_dict(),
            lambda: copy.deepcopy(self.model).state_dict(),
            lambda: nn.utils.parameters_to_vector(self.model.parameters()),
            lambda: torch._foreach_mul(list(self.model.parameters()), 2),
            lambda: dict(self.optimizer.state.get(weight, {})),
            lambda: len(self.optimizer.state),
            lambda: str(weight),
            self._state_dict,
        ]
        return rng.choice(reads)()

    def write(self, rng: random.Random) -> Any:
        weight = self._weight(rng)
        with torch.no_grad():
            what = rng.randrange(5)
            if what == 0:
                weight.mul_(0.9)
            elif what == 1:
                weight.data = weight.data * 0.9
            elif what == 2:
                torch._foreach_mul_(list(self.model.parameters()), 0.9)
            elif what == 3:
                for value in self.optimizer.state.get(weight, {}).values():
                    if isinstance(value, torch.Tensor) and value.dim():
                        value.mul_(0.5)
            else:
                self.optimizer.state.pop(weight, None)

    def set_gradient(self, rng: random.Random) -> Any:
        weight = self._weight(rng)
        if not weight.requires_grad:
            return
        what = rng.randrange(4)
        if what == 0:
            weight.grad = None
        elif what == 1:
            weight.grad = torch.full_like(weight, 0.1)
        elif weight.grad is not None and what == 2:
            weight.grad *= 2
        elif weight.grad is not None:
            weight.grad.mul_(0.5)

    def hold(self, rng: random.Random) -> Any:
        weight = self._weight(rng)
        self._held.append(rng.choice((weight.grad, weight.detach(), None)))
        if len(self._held) > 2:
            self._held.pop(0)

    def look_at_held(self, rng: random.Random) -> Any:
        held = [one for one in self._held if one is not None]
        values = copied(held)
        if held and rng.random() < 0.5:
            held[0].mul_(0.5)
        return values

    def freeze(self, rng: random.Random) -> None:
        self._weight(rng).requires_grad_(rng.random() < 0.6)

    def change_options(self, rng: random.Random) -> None:
        group = rng.choice(self.optimizer.param_groups)
        group["lr"] = rng.choice((0.0, 0.001, 0.03))
        self.optimizer.factor = rng.choice((0.5, 1.0))  # type: ignore[attr-defined]
        if "weight_decay" in group:
            group["weight_decay"] = rng.choice((0.0, 0.1))

    def schedule(self, rng: random.Random) -> None:
        self.scheduler.step()

    def save(self, rng: random.Random) -> Any:
        self._saved = [self._state_dict(), copied(self.model.state_dict())]
        return self._saved

    def load(self, rng: random.Random) -> None:
        if self._saved:
            self.optimizer.load_state_dict(copy.deepcopy(self._saved[0]))
            if rng.random() < 0.5:
                self.model.load_state_dict(self._saved[1])

    def go_on_elsewhere(self, rng: random.Random) -> None:
        """With new objects, which may be streamed if the old ones were not, and the other way round."""
        saved, weights, frozen = (
            self._state_dict(),
            self.model.state_dict(),
            [p.requires_grad for p in self.model.parameters()],
        )
        self._forget()
        self.model = Model().to(self._dtype)
        self.model.load_state_dict(weights)
        for parameter, trains in zip(self.model.parameters(), frozen, strict=True):
            parameter.requires_grad_(trains)
        self._make_optimizer()
        in_memory, late = rng.random() < 0.4, rng.random() < 0.3
        if late:
            self.optimizer.load_state_dict(saved)
        self._prepare(in_memory)
        if not late:
            self.optimizer.load_state_dict(saved)

    def copy_all(self, rng: random.Random) -> None:
        """The copies are in memory."""
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        self._forget()
        self.model, self.optimizer, self.session = model, optimizer, None
        self.optimizer.factor = 1.0  # type: ignore[attr-defined]
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1)

    def another_optimizer(self, rng: random.Random) -> None:
        in_memory = self.session is None
        self.optimizer = None  # type: ignore[assignment]
        self.scheduler = None  # type: ignore[assignment]
        gc.collect()
        self._make_optimizer()
        if not in_memory and self.session is not None:
            self.session.prepare_optimizer(self.optimizer)
            self.session.defer_updates()
            self.streamed.append(streaming_of(self.optimizer))

    def let_stay(self, rng: random.Random) -> None:
        """As plans do: state of some weights comes to memory, and leaves it again."""
        chosen = [p for p in self.model.parameters() if rng.random() < 0.5]
        streaming = streaming_of(self.optimizer)
        if streaming is not None:
            streaming.let_stay(chosen)

    def _forget(self) -> None:
        self._held, self._losses = [], []
        if self.session is not None:
            self.session.detach()


ACTIONS: dict[str, tuple[Callable[[Player, random.Random], Any], int]] = {
    "backward": (Player.backward, 12),
    "backward_twice": (Player.backward_twice, 2),
    "broken_backward": (Player.broken_backward, 1),
    "keep_loss": (Player.keep_loss, 1),
    "backward_of_kept": (Player.backward_of_kept, 2),
    "graph_of_gradients": (Player.graph_of_gradients, 1),
    "step": (Player.step, 12),
    "step_with_closure": (Player.step_with_closure, 2),
    "zero_grad": (Player.zero_grad, 3),
    "clip": (Player.clip, 5),
    "clip_values": (Player.clip_values, 1),
    "evaluate": (Player.evaluate, 3),
    "read": (Player.read, 4),
    "write": (Player.write, 2),
    "set_gradient": (Player.set_gradient, 2),
    "hold": (Player.hold, 1),
    "look_at_held": (Player.look_at_held, 1),
    "freeze": (Player.freeze, 2),
    "change_options": (Player.change_options, 2),
    "schedule": (Player.schedule, 3),
    "save": (Player.save, 1),
    "load": (Player.load, 1),
    "go_on_elsewhere": (Player.go_on_elsewhere, 1),
    "copy_all": (Player.copy_all, 1),
    "another_optimizer": (Player.another_optimizer, 1),
    "let_stay": (Player.let_stay, 2),
}


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    gc.collect()
    gc.freeze()  # what was imported need not be searched each time
    return tempfile.TemporaryDirectory(prefix="hf_offload-steps-")


def run(seed: int) -> list[str]:
    """What went wrong with the program of ``seed``: nothing, as a rule."""
    return check(seed)[0]


def check(seed: int) -> tuple[list[str], Player]:
    """What went wrong, and the streamed run."""
    own, setting.part_bytes = setting.part_bytes, lambda _: _PART_BYTES
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            players = []
            for place in (None, PLACES[seed % 2]):
                rng = random.Random(seed)
                players.append(Player(rng, place, _directory().name))
                players[-1].play(rng.randint(4, 30))
    finally:
        setting.part_bytes = own
    expected, found = (player.log for player in players)
    problems = [
        f"{number} {one[0] if isinstance(one, tuple) else ''}: {_short(one)} in memory, {_short(other)} streamed"
        for number, (one, other) in enumerate(zip(expected, found, strict=True))
        if not same(_plain(one), _plain(other))
    ]
    problems = problems[:3] + ([f"of {[e[0] for e in expected if isinstance(e, tuple)]}"] if problems else [])
    return problems + _left(players[1]), players[1]


def _left(player: Player) -> list[str]:
    """What stays on tiers when everything has gone."""
    stores = [store for one in player.streamed for store in (one.state_store, one.gradient_store) if store is not None]
    written = sum(store.tier.stats.written_bytes for store in stores)
    cut = sum(one.spans(p) is not None for one in player.streamed for p in one.parameters())
    player.__dict__ = {"log": player.log, "written_bytes": written, "cut_weights": cut}
    gc.collect()
    for attempt in range(_PATIENCE):  # a thread that has just written something may still hold it
        for store in stores:
            store.collect()
        left = {store.tier.name: store.tier.stats.used_bytes for store in stores if store.tier.stats.used_bytes}
        if not left:
            return []
        time.sleep(0.01 * attempt)
    return [f"bytes are left on tiers: {left}"]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _short(value: Any) -> str:
    return str(value[1] if isinstance(value, tuple) else value)[:80].replace("\n", " ")


if __name__ == "__main__":
    sys.exit(try_seeds(run, "tests.fuzz.steps"))
