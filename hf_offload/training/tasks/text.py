"""Plain text for language models, causal and masked: documents are joined and cut into blocks of the same length."""

from typing import Any

import torch

from hf_offload.errors import OffloadConfigError
from hf_offload.training.tasks.task import MASKED_SHARE, Collator, Rows, Setup, map_rows, texts_of


def make_blocks(rows: Rows, setup: Setup, where: str) -> Rows:
    """Rows with ``input_ids``: ``data.sequence_length`` token ids of documents joined by the end-of-text token."""
    length = setup.data.sequence_length
    # Documents of one batch are joined; the rest that fills no block is dropped once for each such batch.
    (column,) = setup.data.text_columns()
    blocks = map_rows(rows, _join_and_cut, tokenizer=setup.tokenizer, column=column, length=length, where=where)
    if hasattr(blocks, "__len__") and len(blocks) == 0:
        raise OffloadConfigError(
            f"The text of {where} is shorter than one block of {length} tokens: lower data.sequence_length, or add data."
        )
    return blocks


def make_collator(_setup: Setup, _model: Any) -> Collator:
    """:func:`collate`."""
    return collate


def make_masked_collator(setup: Setup, _model: Any) -> Collator:
    """Transformers' own: 15 % of the tokens are to be found, most of them hidden, others each time."""
    from transformers import DataCollatorForLanguageModeling

    if setup.tokenizer.mask_token is None:
        raise OffloadConfigError(
            "model.task=masked-lm: the tokenizer has no mask token. Name one that has in data.tokenizer, such as BERT's."
        )
    return DataCollatorForLanguageModeling(setup.tokenizer, mlm=True, mlm_probability=MASKED_SHARE)


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Stack blocks into ``input_ids`` and ``labels``, both int64 of shape (batch, sequence); without labels of their own,
    the labels of blocks are their ids.

    There is no attention mask, since no token is padding: attention kernels are faster without one.
    """
    if "labels" in rows[0]:
        return {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}
    input_ids = torch.tensor([row["input_ids"] for row in rows], dtype=torch.long)
    return {"input_ids": input_ids, "labels": input_ids.clone()}


def _join_and_cut(
    batch: dict[str, list[Any]], tokenizer: Any, column: str, length: int, where: str
) -> dict[str, list[list[int]]]:
    texts = [text for text in texts_of(batch, column, where) if text]
    # Models without an end-of-text token, such as BERT, have one between sentences.
    end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    ends = [] if end is None else [end]
    ids: list[int] = []
    if texts:
        # `verbose` would warn that a document is longer than the model's context: it is cut into blocks below.
        encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        for document in encoded["input_ids"]:
            ids += document
            ids += ends
    return {"input_ids": [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]}
