"""What recipes say of tasks and evaluation, and how mistakes in it are told."""

import os

import numpy as np
import pytest
from transformers import EvalPrediction

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.evaluation import METRICS
from hf_offload.settings.recipes import TASKS, load_recipe
from hf_offload.training import metrics
from hf_offload.training.arguments import build_arguments

EVALUATED = ["data.validation=0.1", "training.eval_strategy=steps", "training.eval_steps=2"]
CLASSES = ["model={architecture: bert, task: sequence-classification}", "data.label_column=kind"]
PAIRS = ["model={architecture: t5, task: seq2seq-lm}", "data.source_column=en", "data.target_column=de"]


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (
            ["data.label_column=kind"],
            "data.label_column: model.task=causal-lm does not read it, sequence-classification do",
        ),
        (["data.target_length=8"], "data.target_length: model.task=causal-lm does not read it"),
        (CLASSES[:1], "data.label_column is missing: sequence-classification needs"),
        (PAIRS[:2], "data.target_column is missing"),
        ([*CLASSES, "data.packing=true"], "data.packing: model.task=sequence-classification does not read it"),
        (["data.packing=true"], "data.prompt_column is missing"),
        (["data.prompt_column=q"], "data.answer_column is missing"),
        (["data.prompt_column=q", "data.answer_column=a", "data.messages_column=m"], "not both"),
        (["data.messages_column=m", "data.text_column=text"], "data.text_column: conversations are read from other"),
        (["data.validation=1.5"], "data.validation=1.5 is not a share"),
        (["data.validation={split: test}"], "only data.hub has splits"),
        (["data={hub: a/b, validation: x.txt, tokenizer: gpt2}"], "give {split: validation}, or a share"),
        (["data={hub: a/b, validation: {name: x}, tokenizer: gpt2}"], "write {split: validation}"),
        (["data.streaming=true", "data.validation=0.1"], "no share can be taken of a stream"),
        (["data={source: random-tokens, validation: 0.1}"], "data.validation: random-tokens are not text"),
        ([*CLASSES[:1], "data={source: random-tokens}"], "random-tokens have no classes"),
        (["data={source: python-stdlib, data_dir: x, tokenizer: gpt2}"], "data.data_dir is for data.files"),
        (["training.eval_strategy=steps"], "training.eval_strategy needs data.validation"),
        (["training.eval_on_start=true"], "training.eval_strategy needs data.validation"),
        (["evaluation.metrics=[perplexity]"], "the section evaluation needs data.validation"),
        ([*EVALUATED, "evaluation.metrics=[acuracy]"], "Did you mean 'accuracy'"),
        (
            [*EVALUATED, "evaluation.metrics=[bleu]"],
            "bleu is computed for seq2seq-lm only. Metrics of causal-lm: perplexity, token_accuracy",
        ),
        ([*EVALUATED, "evaluation.metrics=accuracy"], "accuracy is computed for sequence-classification only"),
        ([*EVALUATED, "evaluation.generation={max_new_tokens: 4}"], "none of the metrics needs text"),
        ([*EVALUATED, "training.metric_for_best_model=bleu"], "is not measured: choose one of loss, perplexity"),
        (["data.validation=0.1", "training.load_best_model_at_end=true"], "needs training.eval_strategy"),
        ([*EVALUATED, "evaluation.early_stopping_patience=2"], "needs training.load_best_model_at_end"),
        (["training.do_eval=true"], "a recipe with data.validation is evaluated"),
        (["training.resume_from_checkpoint=x"], "start the run with --resume"),
        (["training.predict_with_generate=true"], "has no field 'predict_with_generate'"),
    ],
)
def test_each_mistake_says_what_and_where(tiny_recipe, overrides, part):
    with pytest.raises(OffloadConfigError) as caught:
        load_recipe(tiny_recipe, overrides)
    assert part in str(caught.value)


@pytest.mark.parametrize(("metric", "greater"), [("perplexity", False), ("eval_token_accuracy", True), ("loss", False)])
def test_what_is_better_is_known_for_each_metric(tiny_recipe, metric, greater):
    asked = [
        *EVALUATED,
        "training.save_strategy=steps",
        "training.save_steps=2",
        "training.load_best_model_at_end=true",
        f"training.metric_for_best_model={metric}",
        "evaluation.metrics=[perplexity, token_accuracy]",
    ]
    assert build_arguments(load_recipe(tiny_recipe, asked)).greater_is_better is greater
    assert (
        build_arguments(load_recipe(tiny_recipe, [*asked, "training.greater_is_better=true"])).greater_is_better is True
    )


def test_generation_reaches_the_arguments(tiny_recipe):
    asked = [*PAIRS, "data.validation=0.1", "data.target_length=9", "evaluation.metrics=[chrf]"]
    arguments = build_arguments(load_recipe(tiny_recipe, asked))
    assert (arguments.predict_with_generate, arguments.generation_max_length) == (True, 10)
    asked.append("evaluation.generation={max_new_tokens: 5, num_beams: 3}")
    arguments = build_arguments(load_recipe(tiny_recipe, asked))
    assert (arguments.generation_max_length, arguments.generation_num_beams) == (6, 3)
    without = build_arguments(load_recipe(tiny_recipe, [*PAIRS, "data.validation=0.1"]))
    assert not without.predict_with_generate


def test_the_hub_reaches_the_arguments(tiny_recipe):
    asked = ["training.push_to_hub=true", "training.hub_model_id=owner/mine"]
    arguments = build_arguments(load_recipe(tiny_recipe, asked))
    assert (arguments.push_to_hub, arguments.hub_model_id) == (True, "owner/mine")


@pytest.mark.parametrize("asked", [[], ["training.bf16=false"]])
def test_the_precision_is_the_recipes_whatever_the_launcher_says(tiny_recipe, monkeypatch, asked):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert build_arguments(load_recipe(tiny_recipe, asked)).mixed_precision == "no"
    wide = [*asked, "training.bf16=true", "training.use_cpu=true"]
    assert build_arguments(load_recipe(tiny_recipe, wide)).mixed_precision == "bf16"
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"


def test_unused_parameters_are_looked_for_where_a_recipe_asks(tiny_recipe):
    assert build_arguments(load_recipe(tiny_recipe)).ddp_find_unused_parameters is False
    asked = ["training.ddp_find_unused_parameters=true"]
    assert build_arguments(load_recipe(tiny_recipe, asked)).ddp_find_unused_parameters is True


def test_every_metric_has_a_task_and_every_task_a_metric():
    assert {task for kind in METRICS.values() for task in kind.tasks} == set(TASKS)


def test_metrics_of_classes():
    compute = metrics.make_compute(["accuracy", "f1", "matthews"], "sequence-classification", None)
    found = compute(EvalPrediction(predictions=np.array([0, 1, 1, 2]), label_ids=np.array([0, 1, 2, 2])))
    # of three classes: f1 of 1, 2/3 and 2/3
    assert found == {"accuracy": 0.75, "f1": pytest.approx(7 / 9), "matthews": pytest.approx(0.7, abs=1e-12)}


def test_accuracy_of_tokens_compares_a_prediction_with_the_next_token_that_counts():
    shown = EvalPrediction(
        predictions=np.array([[5, 6, 7, 0], [9, 9, 0, 0]]), label_ids=np.array([[4, 5, -100, 7], [1, 9, 2, -100]])
    )
    assert metrics.make_compute(["token_accuracy"], "causal-lm", None)(shown) == {"token_accuracy": 0.75}
    masked = EvalPrediction(predictions=np.array([[5, 6]]), label_ids=np.array([[5, -100]]))
    assert metrics.make_compute(["token_accuracy"], "masked-lm", None)(masked) == {"token_accuracy": 1.0}


def test_the_loss_alone_needs_no_predictions():
    assert metrics.make_compute(["perplexity"], "causal-lm", None) is None
    assert metrics.perplexity(0.0) == 1.0
    assert metrics.perplexity(1e6) == float("inf")


def test_a_missing_library_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OffloadConfigError, match=r"bleu needs sacrebleu: pip install 'hf-offload\[metrics\]'"):
        metrics.check_installed(["bleu"])
    metrics.check_installed(["accuracy", "perplexity", "token_accuracy"])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("values", "expected"), [
    (["training.gradient_checkpointing=true"], (True, None)),
    (["training.gradient_checkpointing_kwargs={use_reentrant: true}", "training.gradient_checkpointing=true"],
     (True, {"use_reentrant": True})),
    (["training.gradient_checkpointing=true", "training.activation_checkpointing=false"], (False, None)),
])  # fmt: skip
def test_checkpointing_by_its_former_name_warns_of_nothing(tiny_recipe, values, expected):
    arguments = build_arguments(load_recipe(tiny_recipe, values))
    assert (arguments.gradient_checkpointing, arguments.gradient_checkpointing_kwargs) == expected
