"""Conversations for causal language models: the loss is taken on the answers, and on nothing else.

The tokenizer's chat template writes a conversation as text. What an answer is in that text, the template says itself where
it has ``{% generation %}`` around it. Otherwise it is what the template adds to the conversation before the answer, written
with the beginning of an answer: so the end of a turn belongs to it, and a trained model learns to stop.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hf_offload.errors import OffloadConfigError
from hf_offload.training.tasks.task import (
    NO_LABEL,
    PAD_TO_MULTIPLE,
    Collator,
    Rows,
    Setup,
    logger,
    map_rows,
    report_dropped,
)

ANSWERING = "assistant"
DEFAULT_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
"""For tokenizers without one; saved with the tokenizer, so that the model is prompted as it was trained."""
_MARKS_ANSWERS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def make_rows(rows: Rows, setup: Setup, where: str) -> Rows:
    """Rows with ``input_ids`` and ``labels``, cut off after ``data.sequence_length`` tokens; packed ones have
    ``position_ids`` that begin again with each conversation.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for a template that does not tell what is an answer, and if no row
    has one.
    """
    data, tokenizer = setup.data, setup.tokenizer
    ensure_template(tokenizer)
    length = data.sequence_length
    columns = data.text_columns()
    encoded = map_rows(rows, _encode, tokenizer=tokenizer, columns=columns, length=length, where=where)
    report_dropped(
        rows,
        encoded,
        where,
        f"within data.sequence_length={length} tokens there is nothing that the role {ANSWERING} says",
    )
    return map_rows(encoded, pack_rows, length=length) if data.packing else encoded


def make_collator(setup: Setup, _model: Any) -> Collator:
    """Transformers' own, which pads ids and labels; for packed rows :func:`~.packing.collate_packed`."""
    from transformers import DataCollatorForSeq2Seq

    if setup.data.packing:
        return collate_packed
    tokenizer = setup.tokenizer
    if tokenizer.padding_side != "right":  # for generation; padding in front would move positions in training
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.padding_side = "right"
    return DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=NO_LABEL, pad_to_multiple_of=PAD_TO_MULTIPLE)


def check_model(setup: Setup, model: torch.nn.Module) -> None:
    """Refuse packing for a model that lets conversations of a row see each other."""
    if setup.data.packing:
        refuse_mixing(model)


def ensure_template(tokenizer: Any) -> None:
    """Give a tokenizer without a chat template the default one."""
    if not tokenizer.is_fast:
        raise OffloadConfigError(
            f"data: {type(tokenizer).__name__} does not give the positions of tokens in a text, so answers cannot be found "
            "in conversations: use a fast tokenizer."
        )
    if tokenizer.chat_template is None:
        if tokenizer.eos_token is None:
            raise OffloadConfigError(
                "The tokenizer has neither a chat template nor an end-of-text token, so no answer would end: set "
                "data.tokenizer to one that has."
            )
        tokenizer.chat_template = DEFAULT_CHAT_TEMPLATE
        logger.info(f"The tokenizer has no chat template and gets this one: {DEFAULT_CHAT_TEMPLATE!r}")


def _encode(
    batch: dict[str, list[Any]], tokenizer: Any, columns: tuple[str, ...], length: int, where: str
) -> dict[str, list[list[int]]]:
    rows = (_messages(values, columns, where) for values in zip(*(batch[column] for column in columns), strict=True))
    answered = [
        messages for messages in rows if any(turn["role"] == ANSWERING and turn["content"] for turn in messages)
    ]
    result: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    for ids, is_answer in _tokens(tokenizer, answered):
        labels = [token if answer else NO_LABEL for token, answer in zip(ids, is_answer, strict=True)][:length]
        # The first token is predicted from nothing.
        if any(label != NO_LABEL for label in labels[1:]):
            result["input_ids"].append(ids[:length])
            result["labels"].append(labels)
    return result


def _messages(values: tuple[Any, ...], columns: tuple[str, ...], where: str) -> list[dict[str, Any]]:
    if len(columns) > 1:
        prompt, answer = ("" if value is None else str(value) for value in values)
        return [{"role": "user", "content": prompt}, {"role": ANSWERING, "content": answer}]
    (turns,) = values
    if not isinstance(turns, list) or not all(
        isinstance(turn, dict) and {"role", "content"} <= set(turn) for turn in turns
    ):
        raise OffloadConfigError(
            f"data.messages_column={columns[0]!r}: a conversation in {where} is not a list of turns, each with role and "
            f"content: {str(turns)[:100]}"
        )
    # Columns have the same fields in every row, empty ones where a turn has none.
    return [
        {name: value for name, value in turn.items() if value is not None} | {"content": turn["content"] or ""}
        for turn in turns
    ]


def _tokens(tokenizer: Any, conversations: list[list[dict[str, Any]]]) -> Iterator[tuple[list[int], list[bool]]]:
    """Ids of each conversation, and which of them an answer has a part in."""
    if _MARKS_ANSWERS.search(tokenizer.get_chat_template()):
        for messages in conversations:
            marked = _apply(tokenizer, messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
            yield marked["input_ids"], [bool(answer) for answer in marked["assistant_masks"]]
        return
    if not conversations:
        return
    texts, spans = zip(*(_write(tokenizer, messages) for messages in conversations), strict=True)
    encoded = tokenizer(
        list(texts), add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False
    )
    for ids, offsets, answers in zip(encoded["input_ids"], encoded["offset_mapping"], spans, strict=True):
        # A token that begins before the answer, with a space of the template, is the answer's first.
        yield (
            ids,
            [start < end and any(start < stop and end > begin for begin, stop in answers) for start, end in offsets],
        )


def _write(tokenizer: Any, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
    """The conversation as text, and where its answers begin and end."""
    text = _apply(tokenizer, messages, tokenize=False)
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != ANSWERING:
            continue
        answered = _apply(tokenizer, messages[: number + 1], tokenize=False)
        if number == 0:  # no template is asked to write nothing
            before = answered.partition(message["content"])[0]
        else:
            before = _apply(tokenizer, messages[:number], tokenize=False, add_generation_prompt=True)
        if not (answered.startswith(before) and text.startswith(answered)):
            raise OffloadConfigError(
                "The tokenizer's chat template writes a turn differently when others come after it, so it does not tell "
                "what is to be answered: put {% generation %} and {% endgeneration %} around the answers in it, or take "
                "conversations of one answer."
            )
        spans.append((len(before), len(answered)))
    return text, spans


def _apply(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> Any:
    from jinja2.exceptions import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, **options)
    except (TemplateError, ValueError, TypeError, IndexError) as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise OffloadConfigError(
            f"The tokenizer's chat template refuses a conversation with the roles {roles or 'none'}: {error}."
        ) from error


def pack_rows(batch: Mapping[str, list[list[int]]], length: int) -> dict[str, list[list[int]]]:
    """Put each conversation of ``batch`` into the first row of at most ``length`` tokens that has room for it.

    None sees another: where there is neither an attention mask nor a cache, transformers finds out from ``position_ids`` that
    begin again where a conversation begins, and keeps attention within each. No label is predicted across a border.
    """
    packed: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "position_ids": []}
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        row = next((i for i, filled in enumerate(packed["input_ids"]) if len(filled) + len(ids) <= length), None)
        if row is None:
            row = len(packed["input_ids"])
            for column in packed.values():
                column.append([])
        packed["input_ids"][row] += ids
        # The first token would be predicted from the conversation before.
        packed["labels"][row] += [NO_LABEL, *labels[1:]]
        packed["position_ids"][row] += range(len(ids))
    return packed


def collate_packed(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Stack packed rows into ``input_ids``, ``labels`` and ``position_ids``, int64 of shape (batch, sequence).

    Padding is one more conversation in the row, without labels: with an attention mask, transformers would not look at
    positions.
    """
    longest = max(len(row["input_ids"]) for row in rows)
    longest += -longest % PAD_TO_MULTIPLE
    batch: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "position_ids": []}
    for row in rows:
        missing = longest - len(row["input_ids"])
        batch["input_ids"].append([*row["input_ids"], *[0] * missing])
        batch["labels"].append([*row["labels"], *[NO_LABEL] * missing])
        batch["position_ids"].append([*row["position_ids"], *range(missing)])
    return {name: torch.tensor(column, dtype=torch.long) for name, column in batch.items()}


@torch.no_grad()
def refuse_mixing(model: Any) -> None:
    """Try two short conversations in a row: what the second one is answered must not depend on the first, not by a bit.

    Raises :class:`~hf_offload.errors.OffloadConfigError` if it does.
    """
    name = type(model).__name__
    attention = str(getattr(model.config, "_attn_implementation", ""))
    if "flash" in attention and not torch.accelerator.is_available():
        return  # cannot be tried here; transformers hands the same positions to these kernels
    half = torch.arange(1, 7, device=model.device)
    tokens = torch.stack([torch.cat([half, half]), torch.cat([half.flip(0), half])])
    positions = torch.arange(6, device=model.device).repeat(2, 2)
    was_training = model.training
    model.eval()
    try:
        logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits[:, 6:]
    except TypeError as error:
        raise OffloadConfigError(f"data.packing: {name} takes no position_ids: drop packing.") from error
    finally:
        model.train(was_training)
    if not torch.equal(logits[0], logits[1]):
        raise OffloadConfigError(
            f"data.packing: in {name} with {attention or 'its'} attention, conversations of one row see each other: drop "
            "packing, or take another model or model.attention."
        )
