"""A model card from the record of a run: what was trained, how well, and what it took, compared with other ways."""

import dataclasses
import re
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_offload.errors import OffloadConfigError
from hf_offload.reports.card_memory import MEMORY_PLOT, Comparison, describe_machine, memory_section
from hf_offload.reports.formats import markdown_table
from hf_offload.settings.load import collect_errors
from hf_offload.settings.memory_modes import NONE, mode_class
from hf_offload.settings.outputs import check_output_folder
from hf_offload.settings.shown import cropped, shown
from hf_offload.settings.text_files import write_whole
from hf_offload.settings.yaml_text import dump_yaml
from hf_offload.training.report import TrainingReport

CARD_FILE = "README.md"
LOSS_PLOT = "loss.png"
# What the Hub calls the tasks of recipes.
_PIPELINES = {
    "causal-lm": "text-generation",
    "masked-lm": "fill-mask",
    "seq2seq-lm": "text-generation",
    "sequence-classification": "text-classification",
}
_SCALES = {"bleu": "0 to 100", "chrf": "0 to 100"}
_POINTS = 50
"""A curve of losses has about as many."""
_SENTENCES = ("dataset_note", "how", "purpose")
_LONGEST_NAME = 200


@dataclasses.dataclass(frozen=True, kw_only=True)
class CardFacts:
    """What no run knows of itself: the options of ``hf-offload card``. Names are one line, three of them sentences."""

    name: str
    license: str
    dataset: str
    dataset_license: str
    dataset_url: str | None = None
    dataset_note: str | None = None
    how: str | None = None
    languages: Sequence[str] = ()
    base_model: str | None = None
    purpose: str = "It shows what training with activation offloading costs, and is not meant to be built on."

    def __post_init__(self) -> None:
        with collect_errors("card") as check:
            for field in dataclasses.fields(self):
                found = getattr(self, field.name)
                for value in [found] if isinstance(found, str) else found or ():
                    with check:
                        _check_fact(field.name, value)


def _check_fact(field: str, value: str) -> None:
    """Metadata and headings take a name on one line; a file takes no half characters."""
    option = f"--{field.replace('_', '-').removesuffix('s')}"
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise OffloadConfigError(f"{option}={shown(value)} holds bytes that are not UTF-8 text.") from error
    is_name = 0 < len(value) <= _LONGEST_NAME and value.isprintable() and value == value.strip()
    if field not in _SENTENCES and not is_name:
        raise OffloadConfigError(
            f"{option}={shown(value)} is not a name: give 1 to {_LONGEST_NAME} characters on one line, without spaces around."
        )


def write_card(
    report: TrainingReport, facts: CardFacts, comparison_path: Path | None, folder: Path, plot: bool
) -> Path:
    """Write the card and its pictures into ``folder``; returns the card's path.

    With ``plot``, the losses are drawn. The comparison's picture of memory is copied from its folder.
    Raises :class:`~hf_offload.errors.OffloadConfigError` for a run without steps or without measured memory.
    """
    card_of(report, facts, None)  # so that damage of the report is not blamed on the comparison
    comparison = None if comparison_path is None else Comparison.read(comparison_path)
    memory = None if comparison_path is None else comparison_path.parent / MEMORY_PLOT
    copied = memory is not None and memory.is_file()
    plots = [*([LOSS_PLOT] if plot else []), *([MEMORY_PLOT] if copied else [])]
    text = card_of(report, facts, comparison, plots)
    check_output_folder(folder, "--output", CARD_FILE, *plots)
    folder.mkdir(parents=True, exist_ok=True)
    if plot:
        _plot_losses(report, folder / LOSS_PLOT)
    if memory is not None and copied:
        (folder / MEMORY_PLOT).write_bytes(memory.read_bytes())
    write_whole(folder / CARD_FILE, text)
    return folder / CARD_FILE


def card_of(report: TrainingReport, facts: CardFacts, comparison: Comparison | None, plots: Sequence[str] = ()) -> str:
    """The card as Markdown that begins with metadata, checked as the Hub's own library checks it.

    ``plots`` are the names of pictures in the same folder. The record is from a file, which may be damaged:
    :class:`~hf_offload.errors.OffloadConfigError` is raised then, and for a run without steps or without measured memory.
    """
    from huggingface_hub import ModelCard

    try:
        if not report.losses or report.memory is None:
            what = "no steps" if not report.losses else "no memory"
            raise OffloadConfigError(
                f"The report of {cropped(str(report.recipe))} holds {what}: train with "
                "`hf-offload train RECIPE --report FILE`."
            )
        body = "\n\n".join(_body(report, facts, comparison, plots))
        text = f"---\n{_metadata(report, facts).to_yaml()}\n---\n\n{body}\n"
        ModelCard(text)  # raises where the metadata cannot be read again
        return text
    except OffloadConfigError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        which = f"The report of {cropped(str(report.recipe))}" if comparison is None else "The comparison"
        reason = f"{type(error).__name__}: {cropped(str(error))}"
        raise OffloadConfigError(f"{which} is damaged ({reason}): run it again.") from error


def _metadata(report: TrainingReport, facts: CardFacts) -> Any:
    from huggingface_hub import EvalResult, ModelCardData

    task = report.settings["model"]["task"]
    mode = report.settings["offload"].get("memory_mode", NONE)
    results = [
        EvalResult(
            task_type=_PIPELINES[task],
            dataset_type=re.sub(r"[^a-z0-9]+", "-", facts.dataset.lower()).strip("-"),
            dataset_name=facts.dataset,
            metric_type=name,
            metric_value=value,
        )
        for name, value in _metrics(report).items()
    ]
    return ModelCardData(
        language=list(facts.languages) or None,
        license=facts.license,
        library_name="transformers" if mode == NONE else mode_class(mode).card_library,
        base_model=_base_model(report, facts),
        pipeline_tag=_PIPELINES[task],
        tags=["hf_offload", task],
        model_name=facts.name if results else None,
        eval_results=results or None,
    )


def _base_model(report: TrainingReport, facts: CardFacts) -> str | None:
    """What the Hub can link to: a folder is none of its names."""
    name = report.settings["model"]["name"]
    return facts.base_model or (None if name is None or Path(name).is_dir() else name)


def _metrics(report: TrainingReport) -> dict[str, float]:
    """Those of the final evaluation, by their names without ``eval_``."""
    return {name.removeprefix("eval_"): value for name, value in (report.metrics or {}).items()}


def _body(
    report: TrainingReport, facts: CardFacts, comparison: Comparison | None, plots: Sequence[str]
) -> Iterator[str]:
    """The paragraphs."""
    model, data = report.settings["model"], report.settings["data"]
    origin = "trained from random weights"
    if model["name"]:
        origin = f"fine-tuned from `{_base_model(report, facts) or model['name']}`"
    kind = f" of the architecture `{model['architecture']}`" if model.get("architecture") else ""
    yield f"# {facts.name}"
    yield (
        f"A model{kind} with {report.parameter_count / 1e6:.1f}M parameters, {origin} on {facts.dataset} with hf_offload. "
        f"{facts.purpose}"
    )
    yield "## Results"
    rows = [
        (f"{name} ({_SCALES[name]})" if name in _SCALES else name, f"{value:.4g}")
        for name, value in _metrics(report).items()
    ]
    if rows:
        yield markdown_table(("metric, on the validation data", "value"), rows)
    last = report.losses[-10:]
    yield (
        f"Training loss {report.losses[0]:.3f} in the first step, {statistics.mean(last):.3f} in the last {len(last)} of "
        f"{report.steps}."
    )
    if LOSS_PLOT in plots:
        yield f"![Loss by step]({LOSS_PLOT})"
    yield from memory_section(report, comparison, plots)
    yield "## Data"
    where = f" ([source]({facts.dataset_url}))" if facts.dataset_url else ""
    yield (
        f"Trained on {facts.dataset}{where}, licence `{facts.dataset_license}`, in rows of up to {data['sequence_length']} "
        "tokens."
    )
    if facts.dataset_note:
        yield facts.dataset_note
    yield "## How to reproduce it"
    if facts.how:
        yield facts.how
    notes = {"--dataset-note": facts.dataset_note, "--how": facts.how}
    given = " and ".join(f"`{option}`" for option, sentences in notes.items() if sentences)
    yield (
        f"The single commands, with hf_offload {report.versions['hf-offload']}"
        f"{f'; the notes above are given with {given}' * bool(given)}:"
    )
    yield "\n".join(["```", *_commands(report, facts, comparison, plots), "```"])
    versions = [f"{name} {report.versions[name]}" for name in ("python", "torch", "transformers", "accelerate")
                if name in report.versions]  # fmt: skip
    yield (
        f"Machine: {describe_machine(report.machine)}; allocator {report.allocator}. Versions: {', '.join(versions)}.\n"
        f"The weights after the last step have the SHA-256 `{report.parameters_sha256[:16]}` (first 16 digits)."
    )
    sections = {name: section for name, section in report.settings.items() if name != "name"}
    yield "<details><summary>The whole recipe</summary>"
    yield f"```yaml\n{dump_yaml(_given(sections)).rstrip()}\n```"
    yield "</details>"


def _commands(
    report: TrainingReport, facts: CardFacts, comparison: Comparison | None, plots: Sequence[str]
) -> Iterator[str]:
    train = shlex.split(report.command) if report.command else ["hf-offload", "train", report.recipe]
    yield shlex.join([*train, "--report", "run.json"])
    card = ["hf-offload", "card", "run.json", "--output", "card"]
    if comparison is not None:
        yield comparison.command(train[2], report.settings)
        card += ["--comparison", "comparison/table.json"]
    options = {
        "--name": facts.name,
        "--dataset": facts.dataset,
        "--dataset-license": facts.dataset_license,
        "--dataset-url": facts.dataset_url,
        "--license": facts.license,
        "--language": ",".join(facts.languages),
        "--base-model": facts.base_model,
        "--purpose": None if facts.purpose == CardFacts.purpose else facts.purpose,
    }
    card += [text for option, value in options.items() if value for text in (option, value)]
    yield shlex.join([*card, *(["--plot"] if LOSS_PLOT in plots else [])])


def _given(value: Any) -> Any:
    """Settings without those that were left out."""
    if isinstance(value, Mapping):
        return {key: given for key, item in value.items() if (given := _given(item)) not in (None, {}, [])}
    return [_given(item) for item in value] if isinstance(value, list) else value


def _plot_losses(report: TrainingReport, path: Path) -> None:
    from hf_offload.reports.plots import COLOURS, figure_at, plain

    width = max(1, len(report.losses) // _POINTS)
    ends = range(width, len(report.losses) + 1, width)
    means = [statistics.mean(report.losses[end - width : end]) for end in ends]
    with figure_at(path, 9, 5) as figure:
        axes = figure.add_subplot()
        axes.plot(ends, means, linewidth=1.6, color=COLOURS["black"])
        title = "Training loss" if width == 1 else f"Training loss, mean of {width} steps"
        axes.set_title(f"{title}; {means[-1]:.3f} at the end", fontsize=12, loc="left")
        plain(axes, "step", "loss")
