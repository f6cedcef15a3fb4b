"""TRL's SFTTrainer: a class of arguments that knows both.

python examples/trl_sft.py     # after: pip install 'hf-offload[trl]'
"""

import dataclasses
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from hf_offload import OffloadArguments


@dataclasses.dataclass
class Arguments(OffloadArguments, SFTConfig):
    """TRL's arguments, and those of offloading."""


torch.manual_seed(0)
# Yours: AutoModelForCausalLM and AutoTokenizer.from_pretrained("..."), and load_dataset("...").
words = {f"w{number}": number for number in range(510)} | {"<eos>": 510, "<pad>": 511}
inner = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>")
model = LlamaForCausalLM(LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=2))
data = Dataset.from_dict({"text": [" ".join(f"w{row * place % 510}" for place in range(127)) for row in range(12)]})

with tempfile.TemporaryDirectory() as output:
    arguments = Arguments(
        output_dir=output,
        max_steps=3,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_strategy="no",
        bf16=torch.accelerator.is_available(),
        dataloader_pin_memory=torch.accelerator.is_available(),
        gradient_checkpointing=False,  # TRL's default; offloading everything takes its place
        offload="ssd",
        offload_directory=output,  # yours: a folder on the SSD
    )
    SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer).train()
