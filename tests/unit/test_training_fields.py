"""What is read from transformers' source is what transformers says once it is imported."""

import dataclasses

from transformers import TrainingArguments

from hf_offload.settings.recipe_training import training_fields


def test_the_fields_of_training_arguments():
    assert set(training_fields()) == {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    assert training_fields()["max_steps"] == {"int"}
    assert training_fields()["bf16"] == {"bool"}
    assert training_fields()["data_seed"] == {"int", "None"}
    assert training_fields()["lr_scheduler_kwargs"] == {"dict", "str", "None"}
    assert training_fields()["liger_kernel_config"] == {"dict", "None"}
