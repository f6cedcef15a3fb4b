"""TRL's trainers, with the arguments mixed into their own: the same bits as without."""

import dataclasses

import datasets
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from hf_offload import OffloadArguments, OffloadCallback
from tests.helpers.tiny_models import VOCABULARY, tiny_model, weights

# TRL switches it on; transformers has renamed it.
CHECKPOINTING = next(
    name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(SFTConfig, name)
)


@dataclasses.dataclass
class OffloadSFTConfig(OffloadArguments, SFTConfig):
    def __post_init__(self):
        super().__post_init__()


@dataclasses.dataclass
class OffloadDPOConfig(OffloadArguments, DPOConfig):
    def __post_init__(self):
        super().__post_init__()


@pytest.fixture(scope="module")
def tokenizer():
    words = {f"w{index}": index for index in range(VOCABULARY - 2)} | {"<eos>": VOCABULARY - 2, "<pad>": VOCABULARY - 1}
    inner = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>")


def words(row, count):
    return " ".join(f"w{(7 * row + index * index) % 90}" for index in range(count))


def trained(trainer, config, tokenizer, dataset, tmp_path, **settings):
    arguments = config(
        output_dir=str(tmp_path / "out"), max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2, seed=3,
        use_cpu=True, bf16=False, report_to="none", save_strategy="no", disable_tqdm=True, max_length=24,
        dataloader_pin_memory=False, **{CHECKPOINTING: False}, **settings,
    )  # fmt: skip
    others = {"ref_model": tiny_model("llama", seed=1)} if trainer is DPOTrainer else {}
    made = trainer(tiny_model("llama"), args=arguments, train_dataset=dataset, processing_class=tokenizer, **others)
    made.train()
    callback = next((one for one in made.callback_handler.callbacks if isinstance(one, OffloadCallback)), None)
    return weights(made.model), callback


def assert_same(trainer, plain, ours, tokenizer, dataset, tmp_path, **settings):
    expected, nothing = trained(trainer, plain, tokenizer, dataset, tmp_path, **settings)
    flags = {"offload": "ssd", "offload_directory": str(tmp_path), "offload_min_bytes": "0"}
    found, callback = trained(trainer, ours, tokenizer, dataset, tmp_path, **settings, **flags)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert any(not torch.equal(tensor, weights(tiny_model("llama"))[name]) for name, tensor in found.items())
    assert nothing is None
    assert callback.stats.total.offloaded_bytes > 0
    assert callback.stats.ended_steps == 3


@pytest.mark.parametrize("packing", [False, True], ids=["plain", "packed"])
def test_supervised_fine_tuning(packing, tokenizer, tmp_path):
    dataset = datasets.Dataset.from_list([{"text": words(row, 5 + row % 9)} for row in range(40)])
    settings = {"packing": packing, "packing_strategy": "wrapped"}
    assert_same(SFTTrainer, SFTConfig, OffloadSFTConfig, tokenizer, dataset, tmp_path, **settings)


def test_what_mezo_computes_in_eval_mode_is_logged_as_training(tokenizer, tmp_path):
    dataset = datasets.Dataset.from_list([{"text": words(row, 5 + row % 9)} for row in range(16)])
    arguments = OffloadSFTConfig(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, max_grad_norm=0, logging_steps=1,
        eval_strategy="steps", eval_steps=2, use_cpu=True, bf16=False, report_to="none", save_strategy="no",
        disable_tqdm=True, max_length=24, memory_mode="mezo", learning_rate=1e-2, **{CHECKPOINTING: False},
    )  # fmt: skip
    run = SFTTrainer(
        tiny_model("llama"), args=arguments, train_dataset=dataset, eval_dataset=dataset, processing_class=tokenizer
    )
    run.train()
    names = {"entropy", "mean_token_accuracy"}
    assert [entry.keys() >= names for entry in run.state.log_history if "loss" in entry] == [True, True]
    (evaluated,) = [entry for entry in run.state.log_history if "eval_loss" in entry]
    expected = run.evaluate()
    assert {name: evaluated[f"eval_{name}"] for name in names} == {name: expected[f"eval_{name}"] for name in names}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # trl still uses the older name
def test_preference_optimization(tokenizer, tmp_path):
    dataset = datasets.Dataset.from_list(
        [
            {"prompt": words(row, 4), "chosen": " " + words(row + 1, 6), "rejected": " " + words(row + 2, 5)}
            for row in range(12)
        ]
    )
    assert_same(DPOTrainer, DPOConfig, OffloadDPOConfig, tokenizer, dataset, tmp_path)
