"""Translation and summaries: a source for the encoder, a target for the decoder."""

from typing import Any

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.recipe_data import DataRecipe
from hf_offload.training.tasks.task import (
    NO_LABEL,
    PAD_TO_MULTIPLE,
    Collator,
    Rows,
    Setup,
    map_rows,
    report_dropped,
    texts_of,
)


def make_rows(rows: Rows, setup: Setup, where: str) -> Rows:
    """Rows with ``input_ids`` and ``attention_mask`` of the source and ``labels`` of the target, which end with the
    end-of-text token, so that generation learns to stop.
    """
    if setup.tokenizer.eos_token_id is None:
        raise OffloadConfigError(
            "model.task=seq2seq-lm: the tokenizer has no end-of-text token, so no output would end."
        )
    data = setup.data
    encoded = map_rows(
        rows,
        _encode,
        tokenizer=setup.tokenizer,
        source=data.source_column,
        target=data.target_column,
        prefix=data.source_prefix or "",
        length=data.sequence_length,
        target_length=target_length(data),
        where=where,
    )
    report_dropped(rows, encoded, where, "their source or their target is empty")
    return encoded


def make_collator(setup: Setup, model: Any) -> Collator:
    """Transformers' own: it pads, and makes the decoder's input from the labels."""
    from transformers import DataCollatorForSeq2Seq

    return DataCollatorForSeq2Seq(
        setup.tokenizer, model=model, label_pad_token_id=NO_LABEL, pad_to_multiple_of=PAD_TO_MULTIPLE
    )


def target_length(data: DataRecipe) -> int:
    """Most tokens of a target."""
    return data.target_length or data.sequence_length


def _encode(
    batch: dict[str, list[Any]],
    tokenizer: Any,
    source: str,
    target: str,
    prefix: str,
    length: int,
    target_length: int,
    where: str,
) -> dict[str, list[list[int]]]:
    both = zip(texts_of(batch, source, where), texts_of(batch, target, where), strict=True)
    pairs = [(text, wanted) for text, wanted in both if text and wanted]
    if not pairs:
        return {"input_ids": [], "attention_mask": [], "labels": []}
    sources = tokenizer([prefix + text for text, _ in pairs], truncation=True, max_length=length)
    targets = tokenizer(text_target=[wanted for _, wanted in pairs], truncation=True, max_length=target_length)
    end = tokenizer.eos_token_id
    labels = [ids if ids[-1:] == [end] else [*ids[: target_length - 1], end] for ids in targets["input_ids"]]
    return {"input_ids": sources["input_ids"], "attention_mask": sources["attention_mask"], "labels": labels}
