"""Metrics of an evaluation, from the libraries that define them."""

import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.evaluation import METRICS
from hf_offload.training.tasks.task import NO_LABEL

if TYPE_CHECKING:
    from transformers import EvalPrediction, PreTrainedTokenizerBase

Compute = Callable[["EvalPrediction"], dict[str, float]]
_LIBRARIES = {"f1": "sklearn", "matthews": "sklearn", "bleu": "sacrebleu", "chrf": "sacrebleu"}
_PACKAGES = {"sklearn": "scikit-learn", "sacrebleu": "sacrebleu"}
FROM_LOSS = "perplexity"


def check_installed(metrics: Sequence[str]) -> None:
    """Raise :class:`OffloadConfigError` for metrics whose library is missing."""
    for name in metrics:
        library = _LIBRARIES.get(name)
        if library is not None and importlib.util.find_spec(library) is None:
            raise OffloadConfigError(
                f"evaluation.metrics: {name} needs {_PACKAGES[library]}: pip install 'hf-offload[metrics]'."
            )


def needs_generation(metrics: Sequence[str]) -> bool:
    """Whether the model has to write text for one of ``metrics``."""
    return any(METRICS[name].generates for name in metrics)


def make_compute(metrics: Sequence[str], task: str, tokenizer: "PreTrainedTokenizerBase") -> Compute | None:
    """What the Trainer calls with predictions (:func:`choose_likeliest`, or written tokens) and labels of all rows; None if
    the loss is enough.
    """
    wanted = [name for name in metrics if name != FROM_LOSS]
    if not wanted:
        return None

    def compute(prediction: "EvalPrediction") -> dict[str, float]:
        found, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
        if task == "seq2seq-lm":
            return {name: _of_text(name, *(_decode(tokenizer, ids) for ids in (found, labels))) for name in wanted}
        if task == "causal-lm":  # what is predicted at a place is the next token
            found, labels = found[:, :-1], labels[:, 1:]
        counted = labels != NO_LABEL
        return {name: _of_classes(name, found[counted], labels[counted]) for name in wanted}

    return compute


def choose_likeliest(logits: Any, _labels: torch.Tensor) -> torch.Tensor:
    """What is kept of ``logits`` until the end of an evaluation: the likeliest class or token, int64."""
    first: torch.Tensor = logits[0] if isinstance(logits, tuple) else logits
    return first.argmax(dim=-1)


def perplexity(loss: float) -> float:
    """E to the ``loss``; infinite where that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _of_classes(name: str, found: np.ndarray, labels: np.ndarray) -> float:
    if name in ("accuracy", "token_accuracy"):
        return float((found == labels).mean())
    from sklearn.metrics import f1_score, matthews_corrcoef

    if name == "f1":
        return float(f1_score(labels, found, average="macro", zero_division=0.0))
    return float(matthews_corrcoef(labels, found))


def _of_text(name: str, found: list[str], wanted: list[str]) -> float:
    import sacrebleu

    metric = sacrebleu.BLEU() if name == "bleu" else sacrebleu.CHRF()
    return float(metric.corpus_score(found, [wanted]).score)


def _decode(tokenizer: Any, ids: np.ndarray) -> list[str]:
    # Shorter rows are padded with a number that is not a token.
    written = np.where(ids < 0, tokenizer.pad_token_id, ids)
    return [text.strip() for text in tokenizer.batch_decode(written, skip_special_tokens=True)]
