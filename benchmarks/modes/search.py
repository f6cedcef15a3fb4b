"""How well does each memory mode train, and what does it cost? The same small model from the same warm start, mode by mode.

Every run is one file in the output folder, with the question it answers: a benchmark that was stopped goes on where it was,
and an answer to another question is not taken for one to this.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.modes.costs import Stepper, Times, step_times
from benchmarks.modes.runs import HEAD, RECIPE, Run, Text, build_model, build_trainer, load_text, train
from hf_offload.errors import OffloadConfigError, OffloadError
from hf_offload.reports.formats import json_text
from hf_offload.settings.load import choose, collect_errors
from hf_offload.settings.memory_modes import NONE, memory_mode
from hf_offload.settings.text_files import write_whole

PERIOD = 100
"""Steps after which each of MODES has refreshed everything once, and begins a turn."""
EVERY = 50
"""Steps from one look at the validation blocks to the next."""
SEARCH_SEED, WARM_SEED = 100, 101
WARM_RATE = 1e-3
TIMES_RATE = 1e-4
RATES = (3e-4, 1e-3, 3e-3, 1e-2)


@dataclasses.dataclass(frozen=True)
class Mode:
    """Settings of a memory mode, which is called like its entry or, of a second entry, ``of``.

    ``rank_share`` is the rank as a part of the hidden size, so that it fits any model.
    """

    why: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rank_share: float | None = None
    seeded: bool = True
    of: str | None = None

    def settings_for(self, hidden: int, seed: int) -> dict[str, Any]:
        """As the training arguments take them."""
        rank = {} if self.rank_share is None else {"rank": max(round(self.rank_share * hidden), 1)}
        return {**self.settings, **rank, **({"seed": seed} if self.seeded else {})}


MODES = {
    NONE: Mode("AdamW of all weights, which the others are compared with", seeded=False),
    "galore": Mode(
        "a quarter of the hidden size, as in the paper; a gap of 200 would refresh only four times",
        {"update_proj_gap": 100},
        rank_share=1 / 4,
    ),
    "galore_8bit": Mode("as galore: what 8 bits cost is the difference", {"update_proj_gap": 100}, rank_share=1 / 4),
    "apollo": Mode("as galore: what the SVD brings is the difference", {"update_proj_gap": 100}, rank_share=1 / 4),
    "frugal": Mode(
        "the paper's density; with a gap of 50 every matrix has its turn five times",
        {"density": 0.25, "update_proj_gap": 50},
    ),
    "frugal_svd": Mode(
        "as galore, and besides a tenth of the rate for the sign of the rest: what the rest brings is the difference",
        {"density": 0.25, "projection": "svd", "free_scale": 0.1, "update_proj_gap": 100},
        of="frugal",
    ),
    "lisa": Mode("the paper's two blocks; 50 turns for 8 blocks", {"blocks_active": 2, "switch_every": 20}),
    "badam": Mode("8 blocks, embedding, norm and head take turns: nearly two times round", {"switch_every": 50}),
    "lora": Mode("rank 16 of 320, the usual one", rank_share=1 / 20, seeded=False),
}


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is the same for all modes. The defaults are the benchmark's; others are for a look."""

    layers: int = 8
    hidden: int = 320
    warm_start_steps: int = 500
    search_steps: int = 200
    steps: int = 1000
    rates: Sequence[float] = RATES


@dataclasses.dataclass
class Findings:
    """What there is so far; ``peaks`` are bytes by mode."""

    warm_start: Run | None = None
    searches: list[Run] = dataclasses.field(default_factory=list)
    runs: list[Run] = dataclasses.field(default_factory=list)
    peaks: dict[str, int] = dataclasses.field(default_factory=dict)
    times: Times | None = None
    interrupted: bool = False


def bench_modes(
    data_dir: Path,
    modes: Sequence[str],
    seeds: Sequence[int],
    output: Path,
    setup: Setup | None = None,
    times: bool = False,
    on_run: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> Findings:
    """Make the runs that ``output`` does not hold yet.

    ``times`` measures step times, too. ``on_run`` is called before each run with its name, its number, and their count.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for all errors in the question at once, before the first run, and
    for files in ``output`` that answer another one.
    """
    setup = setup or Setup()
    _check(modes, seeds, setup, times)
    bench = _Bench(load_text(data_dir), setup, output)
    found = Findings()
    total = 1 + len(modes) * (len(setup.rates) + len(seeds) + 1) + times
    done = 0

    def begin(name: str) -> None:
        nonlocal done
        on_run(name, done, total)
        done += 1

    try:
        begin("warm start")
        found.warm_start = bench.warm_start()
        for mode in modes:
            searches = []
            for rate in setup.rates:
                begin(f"{mode}, search, rate {rate:g}")
                searches.append(bench.run(mode, rate, SEARCH_SEED, setup.search_steps, setup.search_steps))
                found.searches.append(searches[-1])
            rate = best_rate(searches)
            for seed in seeds:
                begin(f"{mode}, seed {seed}")
                found.runs.append(bench.run(mode, rate, seed, setup.steps, EVERY))
            begin(f"{mode}, memory")
            found.peaks[mode] = bench.peak(mode)
        if times:
            begin("step times, all modes in turns")
            found.times = bench.times(modes)
    except KeyboardInterrupt:
        found.interrupted = True
    return found


def best_rate(searches: Sequence[Run]) -> float:
    """The rate of the search with the lowest loss at its end; the lower one of equals.

    Raises :class:`~hf_offload.errors.OffloadError` if all of them diverged.
    """
    best = min(searches, key=lambda run: (run.final, run.rate))
    if best.final == math.inf:
        raise OffloadError(f"{best.mode} diverged at every rate of {best.rate:g} and more: give lower --rates.")
    return best.rate


def _check(modes: Sequence[str], seeds: Sequence[int], setup: Setup, times: bool) -> None:
    rates = setup.rates
    with collect_errors("benchmark of memory modes") as check:
        for name in modes:
            with check:
                choose("mode", name, MODES)
        with check:
            if setup.hidden != HEAD // 2 and setup.hidden % HEAD:
                raise OffloadConfigError(
                    f"hidden={setup.hidden} is not a multiple of heads of {HEAD}: give a multiple of {HEAD}."
                )
        with check:
            if not modes or not seeds:
                raise OffloadConfigError("Without modes or seeds there is nothing to run: give one at least of each.")
        with check:
            if not rates or len(set(rates)) < len(rates) or not all(0 < rate < math.inf for rate in rates):
                raise OffloadConfigError(
                    f"rates={list(rates)} is not a grid: give learning rates above 0, each once, such as 0.001,0.01."
                )
        with check:
            taken = sorted({SEARCH_SEED, WARM_SEED} & set(seeds))
            if taken or len(set(seeds)) < len(seeds):
                raise OffloadConfigError(
                    f"seeds={list(seeds)}: give each once, and neither {SEARCH_SEED} nor {WARM_SEED}, which the search of "
                    "the rates and the warm start have."
                )
        with check:
            if times and NONE not in modes:
                raise OffloadConfigError(f"Step times are ratios to AdamW: add {NONE!r} to the modes.")
    with collect_errors("memory modes") as check:
        for name in modes:
            with check:
                _try(name, setup)


def _try(name: str, setup: Setup) -> None:
    """Build what can be built without training: a package that is missing is better missed now than in an hour."""
    mode = memory_mode(MODES[name].of or name, MODES[name].settings_for(setup.hidden, 0))
    if mode is not None:
        model = mode.prepare(build_model(setup.layers, setup.hidden))
        mode.optimizer(model, lr=WARM_RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)


class _Bench:
    """The runs of one text and one setup, kept in one folder."""

    def __init__(self, text: Text, setup: Setup, output: Path):
        self._text = text
        self._setup = setup
        self._output = output
        self._question: dict[str, Any] = {
            "text": text.digest,
            "recipe": RECIPE,
            "layers": setup.layers,
            "hidden": setup.hidden,
        }
        self._weights = output / "warm_start.safetensors"

    def warm_start(self) -> Run:
        """Train the weights that all modes begin with, unless they are there."""
        from safetensors.torch import save_file
        from transformers import set_seed

        def make() -> Run:
            set_seed(WARM_SEED)
            model = build_model(self._setup.layers, self._setup.hidden)
            steps = self._setup.warm_start_steps
            trainer = build_trainer(model, self._text, NONE, {}, WARM_RATE, WARM_SEED, steps, self._output / "trainer")
            run = train(trainer, self._text, NONE, EVERY)
            save_file({name: value.cpu() for name, value in model.state_dict().items()}, self._weights)
            return run

        kept = self._output / "warm_start.json"
        self._output.mkdir(parents=True, exist_ok=True)
        if not self._weights.is_file():
            kept.unlink(missing_ok=True)  # says nothing without them
        question = {"steps": self._setup.warm_start_steps, "rate": WARM_RATE}
        run = Run(**self._kept(kept, question, lambda: dataclasses.asdict(make())))
        digest = hashlib.sha256(self._weights.read_bytes()).hexdigest()[:16]
        self._question = self._question | {"warm_start": digest}
        return run

    def run(self, mode: str, rate: float, seed: int, steps: int, every: int) -> Run:
        """One run of one mode."""

        def make() -> dict[str, Any]:
            return dataclasses.asdict(train(self._trainer(mode, rate, seed, steps), self._text, mode, every))

        name = f"{mode}_rate{rate:g}_seed{seed}_{steps}steps.json"
        question = {"rate": rate, "settings": MODES[mode].settings_for(self._setup.hidden, seed)}
        return Run(**self._kept(self._output / name, question, make))

    def peak(self, mode: str) -> int:
        """Most bytes alive in a step."""

        def make() -> dict[str, Any]:
            return {"peak_bytes": self._stepper(mode).peak_bytes()}

        question = {"settings": MODES[mode].settings_for(self._setup.hidden, 0)}
        return int(self._kept(self._output / f"{mode}_memory.json", question, make)["peak_bytes"])

    def times(self, modes: Sequence[str]) -> Times:
        """Of all modes, in turns."""

        def make() -> dict[str, Any]:
            return dataclasses.asdict(step_times({mode: self._stepper(mode) for mode in modes}, PERIOD))

        settings = {mode: MODES[mode].settings_for(self._setup.hidden, 0) for mode in modes}
        return Times(**self._kept(self._output / "times.json", {"settings": settings}, make))

    def _stepper(self, mode: str) -> Stepper:
        return Stepper(self._trainer(mode, TIMES_RATE, 0, 1), self._text)

    def _trainer(self, mode: str, rate: float, seed: int, steps: int) -> Any:
        from safetensors.torch import load_file

        model = build_model(self._setup.layers, self._setup.hidden)
        model.load_state_dict(load_file(self._weights))
        settings = MODES[mode].settings_for(self._setup.hidden, seed)
        named = MODES[mode].of or mode
        return build_trainer(model, self._text, named, settings, rate, seed, steps, self._output / "trainer")

    def _kept(self, file: Path, question: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The answer in ``file``, which is made if it is not there.

        Raises :class:`~hf_offload.errors.OffloadConfigError` if what is there answers another question.
        """
        asked = json.loads(json_text({**self._question, **question}))
        if file.is_file():
            there = json.loads(file.read_text(encoding="utf-8"))
            differences = [
                f"{name} {there['question'].get(name)} there and {asked.get(name)} now"
                for name in sorted(there["question"].keys() | asked.keys())
                if there["question"].get(name) != asked.get(name)
            ]
            if differences:
                raise OffloadConfigError(
                    f"{file} is of another benchmark ({', '.join(differences)}): give another --output, or delete it."
                )
            return dict(there["answer"])
        answer = make()
        write_whole(file, json_text({"question": asked, "answer": answer}))
        return answer
