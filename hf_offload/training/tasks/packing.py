"""Several conversations in one row, none of which sees another.

Transformers finds out from ``position_ids`` that begin again where a conversation begins, if there is neither an attention
mask nor a cache; attention is then kept within each. The loss is right too: no label is predicted across a border.
"""

from collections.abc import Mapping
from typing import Any

import torch

from hf_offload.errors import OffloadConfigError
from hf_offload.training.tasks.task import NO_LABEL, PAD_TO_MULTIPLE


def pack_rows(batch: Mapping[str, list[list[int]]], length: int) -> dict[str, list[list[int]]]:
    """Put each conversation of ``batch`` into the first row of at most ``length`` tokens that has room for it."""
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
