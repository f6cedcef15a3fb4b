"""The section ``evaluation`` of a recipe: what is measured on the rows of ``data.validation``."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from hf_offload.settings.classes import settings
from hf_offload.settings.load import choose, collect_errors
from hf_offload.settings.shown import shown
from hf_offload.settings.values import Reader, Whole, names, section


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricKind:
    """Which tasks a metric is for, whether the model has to write text for it, and whether more of it is better."""

    tasks: tuple[str, ...]
    generates: bool = False
    greater_is_better: bool = True


_LANGUAGE_MODELS = ("causal-lm", "masked-lm", "seq2seq-lm")
METRICS = {
    "perplexity": MetricKind(tasks=_LANGUAGE_MODELS, greater_is_better=False),
    "token_accuracy": MetricKind(tasks=("causal-lm", "masked-lm")),
    "bleu": MetricKind(tasks=("seq2seq-lm",), generates=True),
    "chrf": MetricKind(tasks=("seq2seq-lm",), generates=True),
    "accuracy": MetricKind(tasks=("sequence-classification",)),
    "f1": MetricKind(tasks=("sequence-classification",)),
    "matthews": MetricKind(tasks=("sequence-classification",)),
}
LOSS = "loss"


@settings(frozen=True, kw_only=True)
class Generation:
    """How text is written for metrics of text.

    Args:
        max_new_tokens: Most tokens of an output. Default: ``data.target_length``.
        num_beams: Of beam search; 1 takes the likeliest token each time.
    """

    max_new_tokens: Annotated[Whole | None, Field(ge=1)] = None
    num_beams: Annotated[Whole, Field(ge=1)] = 1


def _metrics(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, (list, tuple)) and not value:
        return ()
    found: tuple[str, ...] = names("metrics")(name, value)
    with collect_errors(name) as check:
        for metric in found:
            with check:
                choose(name, metric, METRICS)
    return found


@settings(frozen=True, kw_only=True)
class EvaluationRecipe:
    """What is measured in addition to the loss.

    Args:
        metrics: Of :data:`METRICS`: ``perplexity`` and ``token_accuracy`` for language models, ``bleu`` and ``chrf`` of
            written text, ``accuracy``, ``f1`` (the mean over classes) and ``matthews`` for classes. Default: ``perplexity``
            or ``accuracy``.
        early_stopping_patience: Stop after this many evaluations in a row that brought no better
            ``training.metric_for_best_model``.
        generation: Of text, for ``bleu`` and ``chrf``.
    """

    metrics: Annotated[
        Sequence[str] | str | None, Reader(_metrics, {"type": ["string", "array"], "items": {"enum": list(METRICS)}})
    ] = None
    early_stopping_patience: Annotated[Whole | None, Field(ge=1)] = None
    generation: Annotated[Generation | Mapping[str, Any] | None, section(Generation)] = None

    def metrics_for(self, task: str) -> tuple[str, ...]:
        """The metrics that were asked for, or those a task has without being asked."""
        if self.metrics is not None:
            return tuple(self.metrics)
        return ("accuracy",) if task == "sequence-classification" else ("perplexity",)

    def conflicts_with(self, task: str, training: Mapping[str, Any], *, has_validation: bool) -> Iterator[str]:
        """All that does not fit the task or the section ``training``."""
        metrics = self.metrics_for(task)
        for name in metrics:
            if task not in METRICS[name].tasks:
                fitting = [other for other, kind in METRICS.items() if task in kind.tasks]
                yield (
                    f"evaluation.metrics: {name} is computed for {' and '.join(METRICS[name].tasks)} only. Metrics of "
                    f"{task}: {', '.join(fitting)}."
                )
        if self.generation is not None and not any(METRICS[name].generates for name in metrics):
            yield (
                "evaluation.generation: none of the metrics needs text from the model: add bleu or chrf for seq2seq-lm, or "
                "drop it."
            )
        evaluates = str(training.get("eval_strategy") or "no") != "no" or training.get("eval_on_start") is True
        if not has_validation and (evaluates or self != EvaluationRecipe()):
            what = "training.eval_strategy" if evaluates else "the section evaluation"
            yield f"{what} needs data.validation: files, {{split: validation}} of data.hub, or a share such as 0.05."
        best = training.get("metric_for_best_model")
        known = [LOSS, *metrics]
        if best is not None and str(best).removeprefix("eval_") not in known:
            yield (
                f"training.metric_for_best_model={shown(best)} is not measured: choose one of {', '.join(known)}, or add it "
                "to evaluation.metrics."
            )
        if training.get("load_best_model_at_end") and not evaluates:
            yield "training.load_best_model_at_end needs training.eval_strategy: steps or epoch."
        if self.early_stopping_patience is not None and not training.get("load_best_model_at_end"):
            yield (
                "evaluation.early_stopping_patience needs training.load_best_model_at_end: true, so that what is saved is "
                "the best, not the last."
            )
