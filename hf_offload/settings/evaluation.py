"""The section ``evaluation`` of a recipe: what is measured on the rows of ``data.validation``."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.load import choose, collect_errors
from hf_offload.settings.shown import shown
from hf_offload.settings.values import SCALAR, Reader, names, read_fields, section, setting, whole


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """How text is written for metrics of text.

    Args:
        max_new_tokens: Most tokens of an output. Default: ``data.target_length``.
        num_beams: Of beam search; 1 takes the likeliest token each time.
    """

    max_new_tokens: int | None = setting(None, whole(1))
    num_beams: int = setting(1, whole(1))

    def __post_init__(self) -> None:
        with read_fields(self, "evaluation.generation", "evaluation.generation."):
            pass


def _metrics(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, (list, tuple)) and not value:
        return ()
    found: tuple[str, ...] = names("metrics")(name, value)
    with collect_errors(name) as check:
        for metric in found:
            with check:
                choose(name, metric, METRICS)
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
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

    metrics: Sequence[str] | str | None = setting(None, Reader(_metrics, SCALAR))
    early_stopping_patience: int | None = setting(None, whole(1))
    generation: Generation | Mapping[str, Any] | None = setting(None, section(Generation))

    def __post_init__(self) -> None:
        with read_fields(self, "evaluation section", "evaluation."):
            pass

    def metrics_for(self, task: str) -> tuple[str, ...]:
        """The metrics that were asked for, or those a task has without being asked."""
        if self.metrics is not None:
            return tuple(self.metrics)
        return ("accuracy",) if task == "sequence-classification" else ("perplexity",)

    def check_run(self, task: str, training: Mapping[str, Any], *, has_validation: bool) -> None:
        """Raise :class:`OffloadConfigError` for all that does not fit the task or the section ``training``."""
        metrics = self.metrics_for(task)
        with collect_errors("evaluation") as check:
            for name in metrics:
                with check:
                    if task not in METRICS[name].tasks:
                        fitting = [other for other, kind in METRICS.items() if task in kind.tasks]
                        raise OffloadConfigError(
                            f"evaluation.metrics: {name} is computed for {' and '.join(METRICS[name].tasks)} only. Metrics "
                            f"of {task}: {', '.join(fitting)}."
                        )
            with check:
                if self.generation is not None and not any(METRICS[name].generates for name in metrics):
                    raise OffloadConfigError(
                        "evaluation.generation: none of the metrics needs text from the model: add bleu or chrf for "
                        "seq2seq-lm, or drop it."
                    )
            evaluates = str(training.get("eval_strategy") or "no") != "no" or training.get("eval_on_start") is True
            with check:
                if not has_validation and (evaluates or self != EvaluationRecipe()):
                    what = "training.eval_strategy" if evaluates else "the section evaluation"
                    raise OffloadConfigError(
                        f"{what} needs data.validation: files, {{split: validation}} of data.hub, or a share such as 0.05."
                    )
            best = training.get("metric_for_best_model")
            with check:
                known = [LOSS, *metrics]
                if best is not None and str(best).removeprefix("eval_") not in known:
                    raise OffloadConfigError(
                        f"training.metric_for_best_model={shown(best)} is not measured: choose one of "
                        f"{', '.join(known)}, or add it to evaluation.metrics."
                    )
            with check:
                if training.get("load_best_model_at_end") and not evaluates:
                    raise OffloadConfigError(
                        "training.load_best_model_at_end needs training.eval_strategy: steps or epoch."
                    )
            with check:
                if self.early_stopping_patience is not None and not training.get("load_best_model_at_end"):
                    raise OffloadConfigError(
                        "evaluation.early_stopping_patience needs training.load_best_model_at_end: true, so that what is "
                        "saved is the best, not the last."
                    )
