"""A Trainer with snapshots, with checkpoints, and with neither, in turns: time of a step, and how long training waits."""

import contextlib
import json as json_format
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.cells import digest_of, random_gpt2
from benchmarks.console import names_of, show_table
from hf_offload import OffloadTrainingArguments
from hf_offload.cli.console import clear_errors, output
from hf_offload.cli.options import Json
from hf_offload.integrations.extended_trainer import snapshots_of_training
from hf_offload.settings.load import choose

EVERY = 10
FIRST = 2
"""Times as many steps come before those that are measured: their snapshots' memory is new."""
NONE, SNAPSHOTS, SAVES, ASYNC = "none", "snapshots", "save_steps", "async_save"
WAYS = (NONE, SNAPSHOTS, SAVES, ASYNC)


def snapshots(
    layers: Annotated[int, typer.Option(help="Layers of the GPT-2.")] = 12,
    width: Annotated[int, typer.Option(help="Its width.")] = 768,
    vocabulary: Annotated[int, typer.Option(help="Its vocabulary.")] = 50257,
    batch: Annotated[int, typer.Option(help="Rows a step.")] = 2,
    sequence: Annotated[int, typer.Option(help="Tokens of a row.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each way, in turns.")] = 2,
    periods: Annotated[int, typer.Option(min=1, help=f"Times {EVERY} steps of a run that are measured.")] = 1,
    ways: Annotated[str, typer.Option(help=f"Ways, separated by commas, {NONE} among them.")] = ",".join(WAYS),
    json: Json = False,
) -> None:
    """Compare a snapshot every ten steps with a checkpoint every ten steps, and with neither."""
    names = [NONE, *(name for name in names_of(ways) if name != NONE)]
    rows: dict[str, list[dict[str, Any]]] = {way: [] for way in names}
    shape = {"layers": layers, "width": width, "vocabulary": vocabulary, "batch": batch, "sequence": sequence}
    with clear_errors():
        for name in names:
            choose("way", name, WAYS)
        for _ in range(rounds):
            for way in names:
                with (
                    tempfile.TemporaryDirectory(prefix="benchmark-") as folder,
                    contextlib.redirect_stdout(sys.stderr),
                ):
                    rows[way].append(_measured(way, Path(folder), periods, shape))
                    sys.stderr.write(f"{way}: {rows[way][-1]}\n")
    found = [_row(way, rows) for way in names]
    if json:
        output().print_json(json_format.dumps({**shape, "rounds": rounds, "periods": periods, "rows": found}))
        return
    show_table(
        ("way", "step (s)", "ratio", "at first", "stall (ms)", "of a step", "same bits"),
        [
            [
                row["way"],
                f"{row['step_s']:.3f}",
                f"{row['ratio']:.3f}",
                f"{row['first_ratio']:.3f}",
                f"{1000 * row['stall_s']:.0f}",
                f"{row['stall_share']:.1%}",
                "yes" if row["same_bits"] else "NO",
            ]
            for row in found
        ],
        left=("way", "same bits"),
        caption="Ratio: to the run with neither, in the same round; at first, of the steps before those that are measured. "
        "Stall: what training waits for each.",
    )


class _Clock(TrainerCallback):
    """Notes when steps begin, and starts DCP's asynchronous save."""

    def __init__(self, way: str, folder: Path):
        self.begins: list[float] = []
        self.stalls: list[float] = []
        self.trainer: Any = None
        self._way = way
        self._folder = folder
        self._pending: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begins.append(time.perf_counter())

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self._way == ASYNC and state.global_step % EVERY == 0:
            import torch.distributed.checkpoint as dcp

            began = time.perf_counter()
            if self._pending is not None:
                self._pending.result()
            content = {"model": model.state_dict(), "optimizer": self.trainer.optimizer.state_dict()}
            self._pending = dcp.async_save(content, checkpoint_id=str(self._folder / f"step-{state.global_step}"))
            self.stalls.append(time.perf_counter() - began)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        taking = getattr(snapshots_of_training(self.trainer), "taking", None)
        if taking is not None:
            self.stalls = [taking.stalled_s / max(1, taking.taken)]
        if self._pending is not None:
            self._pending.result()


class _Rows(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self, count: int, shape: dict[str, int]):
        random = torch.Generator().manual_seed(1)
        self._tokens = torch.randint(0, shape["vocabulary"], (count, shape["sequence"]), generator=random)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


def _measured(way: str, folder: Path, periods: int, shape: dict[str, int]) -> dict[str, Any]:
    steps = (FIRST + periods) * EVERY + 2
    sizes = {name: shape[name] for name in ("layers", "width", "vocabulary", "sequence")}
    settings: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "max_steps": steps,
        "per_device_train_batch_size": shape["batch"],
        "save_strategy": "steps" if way == SAVES else "no",
        "save_steps": EVERY,
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": not torch.accelerator.is_available(),
    }
    args = TrainingArguments(**settings)
    if way == SNAPSHOTS:
        args = OffloadTrainingArguments(**settings, offload_snapshot_steps=EVERY)
    clock = _Clock(way, folder)
    trainer: Any = Trainer(
        random_gpt2(**sizes), args, train_dataset=_Rows(steps * shape["batch"], shape), callbacks=[clock]
    )
    clock.trainer = trainer
    if way == SAVES:
        save = trainer._save_checkpoint

        def timed(*args: Any, **kwargs: Any) -> None:
            began = time.perf_counter()
            save(*args, **kwargs)
            clock.stalls.append(time.perf_counter() - began)

        trainer._save_checkpoint = timed
    trainer.train()
    # From the second step on: ten steps, and all that comes between them and the next one.
    begin, measured = clock.begins[1], 1 + FIRST * EVERY
    return {
        "first_step_s": (clock.begins[measured] - begin) / (measured - 1),
        "step_s": (clock.begins[steps - 1] - clock.begins[measured]) / (steps - 1 - measured),
        "stall_s": statistics.mean(clock.stalls) if clock.stalls else 0.0,
        "weights_sha256": digest_of(trainer.model.parameters()),
    }


def _ratio(name: str, own: list[dict[str, Any]], plain: list[dict[str, Any]]) -> float:
    return statistics.median(one[name] / other[name] for one, other in zip(own, plain, strict=True))


def _row(way: str, rows: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    own, plain = rows[way], rows[NONE]
    step, stall = (statistics.median(one[name] for one in own) for name in ("step_s", "stall_s"))
    before = statistics.median(one["step_s"] for one in plain)
    return {
        "way": way,
        "step_s": step,
        "ratio": _ratio("step_s", own, plain),
        "first_ratio": _ratio("first_step_s", own, plain),
        "stall_s": stall,
        "stall_share": stall / before,
        "same_bits": all(
            one["weights_sha256"] == other["weights_sha256"] for one, other in zip(own, plain, strict=True)
        ),
        "rounds": own,
    }
