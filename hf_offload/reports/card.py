"""A model card from the record of a run: what was trained, how well, and what memory and time it took beside other ways."""

import dataclasses
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hf_offload.bench.formats import markdown_table
from hf_offload.errors import OffloadConfigError
from hf_offload.settings.sizes import format_bytes
from hf_offload.training.report import TrainingReport

CARD_FILE = "README.md"
LOSS_PLOT = "loss.png"
MEMORY_PLOT = "memory.png"
# What the Hub calls the tasks of recipes.
_PIPELINES = {
    "causal-lm": "text-generation",
    "masked-lm": "fill-mask",
    "seq2seq-lm": "text-generation",
    "sequence-classification": "text-classification",
}
_WAYS = {
    "keep": "keep everything",
    "recompute": "activation checkpointing",
    "ours:ssd": "offload to SSD",
    "ours:ram": "offload to RAM",
    "ours:auto": "within the budget (`tier: auto`)",
    "ours:lean": "make again what is cheap (`lean_activations`)",
}
_SMOOTHED = 50
"""A curve of losses has about as many points."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CardFacts:
    """What no run knows of itself.

    Args:
        name: Of the model.
        license: Of the trained weights, as the Hub names licences (``apache-2.0``).
        dataset: Name of the data.
        dataset_license: Its licence, in the same way.
        dataset_url: Where it comes from.
        languages: Codes such as ``en``.
        base_model: Hub name of the model that was fine-tuned. Default: the recipe's, unless that is a folder.
        purpose: A sentence that says what the model is for.
    """

    name: str
    license: str
    dataset: str
    dataset_license: str
    dataset_url: str | None = None
    languages: Sequence[str] = ()
    base_model: str | None = None
    purpose: str = "It shows what training with activation offloading costs and is no model to build on."


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The same recipe, trained in several ways: ``table.json`` of ``hf-offload bench steps``, read."""

    rows: Sequence[Mapping[str, Any]]
    machine: Mapping[str, Any]
    rounds: int

    @classmethod
    def read(cls, path: Path) -> "Comparison":
        """Raises :class:`~hf_offload.errors.OffloadConfigError` if ``path`` is something else."""
        import json

        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            rows = [row for row in values["rows"] if row["rounds"]]
            return cls(rows, values["machine"], values["rounds"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise OffloadConfigError(
                f"{path} is no comparison: {error}. Give the table.json that `hf-offload bench steps RECIPE` wrote."
            ) from error


def card_text(
    report: TrainingReport, facts: CardFacts, comparison: Comparison | None, plots: Sequence[str] = ()
) -> str:
    """The card as Markdown that begins with metadata, checked as the Hub's own library checks it.

    ``plots`` are the names of pictures that lie beside it.
    """
    from huggingface_hub import ModelCard

    data = _metadata(report, facts)
    body = "\n".join(_body(report, facts, comparison, plots))
    text = f"---\n{data.to_yaml()}\n---\n\n{body}\n"
    ModelCard(text)  # raises where the metadata cannot be read again
    return text


def write_card(report: TrainingReport, facts: CardFacts, comparison_path: Path | None, folder: Path) -> Path:
    """Write the card and its pictures into ``folder``; returns the card's path.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for a run without steps or without measured memory.
    """
    if not report.losses or report.memory is None:
        raise OffloadConfigError(
            f"The report of {report.recipe} holds {'no steps' if not report.losses else 'no memory'}: train with "
            "`hf-offload train RECIPE --report FILE`."
        )
    comparison = None if comparison_path is None else Comparison.read(comparison_path)
    folder.mkdir(parents=True, exist_ok=True)
    plots = [LOSS_PLOT]
    _plot_losses(report, folder / LOSS_PLOT)
    beside = None if comparison_path is None else comparison_path.parent / MEMORY_PLOT
    if beside is not None and beside.is_file():
        (folder / MEMORY_PLOT).write_bytes(beside.read_bytes())
        plots.append(MEMORY_PLOT)
    card = folder / CARD_FILE
    card.write_text(card_text(report, facts, comparison, plots), encoding="utf-8")
    return card


def _metadata(report: TrainingReport, facts: CardFacts) -> Any:
    from huggingface_hub import EvalResult, ModelCardData

    task = report.settings["model"]["task"]
    adapted = report.settings.get("memory", {}).get("mode") in ("lora", "qlora", "lora_fa", "dora")
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
        library_name="peft" if adapted else "transformers",
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
    model, data = report.settings["model"], report.settings["data"]
    origin = (
        f"fine-tuned from `{_base_model(report, facts) or model['name']}`"
        if model["name"]
        else f"a {model['architecture']} from random weights"
    )
    yield f"# {facts.name}"
    yield ""
    yield (
        f"{report.parameter_count / 1e6:.1f}M parameters, {origin}, trained on {facts.dataset} with "
        f"[hf_offload](https://pypi.org/project/hf-offload). {facts.purpose}"
    )
    yield ""
    yield "## Results"
    yield ""
    rows = [(name, f"{value:.4g}") for name, value in _metrics(report).items()]
    if rows:
        yield from markdown_table(("metric, on the validation data", "value"), rows)
    yield (
        f"Training loss {report.losses[0]:.3f} in the first step, "
        f"{statistics.mean(report.losses[-10:]):.3f} in the last {len(report.losses[-10:])} of {report.steps}."
    )
    yield ""
    if LOSS_PLOT in plots:
        yield f"![Loss by step]({LOSS_PLOT})"
        yield ""
    yield from _memory(report, comparison, plots)
    yield "## Data"
    yield ""
    where = f" ([source]({facts.dataset_url}))" if facts.dataset_url else ""
    yield f"{facts.dataset}{where}, licence `{facts.dataset_license}`. Rows of up to {data['sequence_length']} tokens."
    yield ""
    yield "## How to make it again"
    yield ""
    yield "```"
    yield f"pip install hf-offload=={report.versions['hf-offload']}"
    yield report.command or f"hf-offload train {report.recipe}"
    yield "```"
    yield ""
    yield f"Machine: {_machine(report.machine)}; allocator {report.allocator}. Versions: {_versions(report.versions)}."
    yield f"The weights after the last step have the SHA-256 `{report.parameters_sha256[:16]}` (first 16 digits)."
    yield ""
    yield "<details><summary>The whole recipe</summary>"
    yield ""
    yield "```yaml"
    sections = {name: section for name, section in report.settings.items() if name != "name"}
    yield yaml.safe_dump(_given(sections), sort_keys=False, default_flow_style=False).rstrip()
    yield "```"
    yield ""
    yield "</details>"


def _memory(report: TrainingReport, comparison: Comparison | None, plots: Sequence[str]) -> Iterator[str]:
    yield "## Memory and time"
    yield ""
    peak, step = report.peak_over_baseline_bytes, report.median_step_s
    assert peak is not None
    yield (
        f"This run: {format_bytes(peak)} above weights, gradients and optimizer state at its peak"
        + (" (with what evaluation left in the allocator)" if _leaves_evaluation(report) else "")
        + ("" if step is None else f", {step:.2f} s a step (median)")
        + (
            ""
            if report.offload is None
            else f"; {format_bytes(report.offload['written_bytes'])} written to disk in all, "
            f"{report.offload['stall_s']:.1f} s waited for it"
        )
        + "."
    )
    yield ""
    forecast = report.forecast
    if forecast is not None:
        measured_step = forecast["measured_step_s"]
        yield from markdown_table(
            ("plan for the budget", "predicted", "measured"),
            [
                (
                    "peak, everything included",
                    format_bytes(forecast["peak_bytes"]),
                    "-" if forecast["measured_peak_bytes"] is None else format_bytes(forecast["measured_peak_bytes"]),
                ),
                (
                    "step",
                    f"{forecast['step_s']:.2f} s",
                    f"{statistics.median(measured_step):.2f} s" if measured_step else "-",
                ),
            ],
        )
    if comparison is not None:
        yield (
            f"The same recipe in other ways, side by side on {_machine(comparison.machine)} (`hf-offload bench steps`, "
            f"{comparison.rounds} round{'s' if comparison.rounds > 1 else ''}; ratios are taken within a round):"
        )
        yield ""
        counted = all(row.get("in_use_bytes") is not None for row in comparison.rows)
        yield from markdown_table(
            ("way", "peak", "of keep", *(["in use"] if counted else []), "step", "of keep", "losses and weights"),
            [
                (
                    _WAYS.get(row["strategy"], row["strategy"]),
                    f"+{row['peak_bytes'] / 1e6:.0f} MB",
                    f"{row['peak_ratio']:.3f}",
                    *([f"+{row['in_use_bytes'] / 1e6:.0f} MB"] if counted else []),
                    f"{row['step_s']:.2f} s",
                    f"{row['step_ratio']:.3f}",
                    _identity(row),
                )
                for row in comparison.rows
            ],
        )
        if counted:
            yield (
                "Peak: of the process, above weights, gradients and optimizer state. In use: what its allocator had given "
                "out at most; the rest it kept at hand."
            )
            yield ""
        if MEMORY_PLOT in plots:
            yield f"![Memory over time]({MEMORY_PLOT})"
            yield ""


def _leaves_evaluation(report: TrainingReport) -> bool:
    # On a CPU it is the process that is measured, and nothing says what in it belongs to a step.
    assert report.memory is not None
    return report.memory["device"] == "cpu" and str(report.settings["training"].get("eval_strategy", "no")) != "no"


def _identity(row: Mapping[str, Any]) -> str:
    if row["strategy"] == "keep":
        return "-"
    return "those of keep, bit by bit" if row["losses_identical"] and row["parameters_identical"] else "others"


def _machine(machine: Mapping[str, Any]) -> str:
    device = machine["device"]
    cores = f"{machine['cores']} CPU cores"
    return cores if device == "cpu" else f"{device}, {cores}"


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(
        f"{name} {versions[name]}" for name in ("python", "torch", "transformers", "accelerate") if name in versions
    )


def _given(value: Any) -> Any:
    """Settings without those that were left out."""
    if isinstance(value, Mapping):
        return {key: given for key, item in value.items() if (given := _given(item)) not in (None, {}, [])}
    return [_given(item) for item in value] if isinstance(value, list) else value


def _plot_losses(report: TrainingReport, path: Path) -> None:
    from hf_offload.reports.curve_plots import plot_curves

    width = max(1, len(report.losses) // _SMOOTHED)
    curve = [
        (start + width, statistics.mean(report.losses[start : start + width]))
        for start in range(0, len(report.losses) - width + 1, width)
    ]
    title = "Training loss" if width == 1 else f"Training loss, mean of {width} steps"
    plot_curves({"loss": [curve]}, title, "loss", path)
