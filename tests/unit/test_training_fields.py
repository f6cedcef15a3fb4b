"""Which types a recipe may give to a training argument: those that transformers declares."""

import dataclasses
import types

from transformers import TrainingArguments

from hf_offload.settings.recipe_training import training_fields


def test_the_fields_of_training_arguments():
    assert set(training_fields()) == {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    assert training_fields()["max_steps"] == (int,)
    assert training_fields()["bf16"] == (bool,)
    assert set(training_fields()["data_seed"]) == {int, types.NoneType}
    assert set(training_fields()["lr_scheduler_kwargs"]) == {dict, str, types.NoneType}
    assert set(training_fields()["save_strategy"]) == {str}
