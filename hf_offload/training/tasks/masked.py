"""Masked language models on plain text: blocks as for causal ones, masked anew each time."""

from typing import Any

from hf_offload.errors import OffloadConfigError
from hf_offload.training.random_tokens import MASKED_SHARE
from hf_offload.training.tasks.task import Collator, Setup


def make_collator(setup: Setup, _model: Any) -> Collator:
    """Transformers' own: 15 % of the tokens are to be found, most of them hidden."""
    from transformers import DataCollatorForLanguageModeling

    if setup.tokenizer.mask_token is None:
        raise OffloadConfigError(
            "model.task=masked-lm: the tokenizer has no mask token. Name one that has in data.tokenizer, such as BERT's."
        )
    return DataCollatorForLanguageModeling(setup.tokenizer, mlm=True, mlm_probability=MASKED_SHARE)
