"""What is read from transformers' source is what transformers says once it is imported."""

import dataclasses

import pytest
from transformers import TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames

from hf_offload.settings.library_source import (
    architectures,
    config_fields,
    enum_values,
    reporters,
    training_fields,
)


def test_the_fields_of_training_arguments():
    assert set(training_fields()) == {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    assert training_fields()["max_steps"] == {"int"}
    assert training_fields()["bf16"] == {"bool"}
    assert training_fields()["data_seed"] == {"int", "None"}
    assert training_fields()["lr_scheduler_kwargs"] == {"dict", "str", "None"}
    assert training_fields()["liger_kernel_config"] == {"dict", "None"}


@pytest.mark.parametrize("kind", [IntervalStrategy, SaveStrategy, SchedulerType, OptimizerNames])
def test_words_of_enumerations(kind):
    assert set(enum_values(kind.__name__)) == {one.value for one in kind}
    assert enum_values("NoSuchKind") == ()


def test_reporters():
    assert set(reporters()) == set(INTEGRATION_TO_CALLBACK) - {"hf_offload"}


def test_architectures():
    assert set(architectures()) == set(CONFIG_MAPPING_NAMES)
    assert set(architectures("causal-lm")) == set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert set(architectures("masked-lm")) == set(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    assert set(architectures("seq2seq-lm")) == set(modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    found = set(architectures("sequence-classification"))
    assert found == set(modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)


_COMMON = (
    "bert",
    "distilbert",
    "electra",
    "gpt2",
    "gpt_neox",
    "llama",
    "mistral",
    "opt",
    "phi3",
    "qwen3",
    "t5",
    "bart",
)


@pytest.mark.parametrize(
    "names", [_COMMON, pytest.param(tuple(CONFIG_MAPPING_NAMES), marks=pytest.mark.full)], ids=["common", "all"]
)
def test_no_field_of_a_configuration_is_missing(names):
    known = 0
    for name in names:
        found = config_fields(name)
        try:
            kind = CONFIG_MAPPING[name]
            fields = {*kind().to_dict(), *kind.attribute_map}
        except Exception as error:  # a configuration that cannot be made without its parts
            assert name not in _COMMON, error  # noqa: PT017  it goes on with the next one
            continue
        assert found is None or fields <= found, name
        known += found is not None
    assert known > 0.9 * len(names)
    assert "n_layers_" not in (config_fields("gpt2") or ())
