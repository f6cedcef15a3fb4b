"""Rows of random token ids, for measuring memory and time."""

import hashlib

import torch

from hf_offload.training.tasks.task import MASKED_SHARE, NO_LABEL


class RandomTokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of random token ids, each drawn from the seed and its own number: the same in every process and order.

    Labels are the ids themselves (``causal-lm``), the ids at 15 % of the places (``masked-lm``; elsewhere -100, which
    losses leave out), or as many ids drawn anew (``seq2seq-lm``).
    """

    def __init__(self, rows: int, length: int, vocabulary: int, seed: int, task: str):
        self._rows = rows
        self._length = length
        self._vocabulary = vocabulary
        self._seed = seed
        self._task = task

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        # Of a seed, the generator takes 32 bits.
        digest = hashlib.sha256(f"{self._seed} {index}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
        input_ids = self._draw(generator)
        if self._task == "seq2seq-lm":
            labels = self._draw(generator)
        elif self._task == "masked-lm":
            # Never none: the mean over no label is not a number.
            count = max(1, round(MASKED_SHARE * self._length))
            kept = torch.randperm(self._length, generator=generator, device="cpu")[:count]
            labels = torch.full_like(input_ids, NO_LABEL)
            labels[kept] = input_ids[kept]
        else:
            labels = input_ids.clone()
        return {"input_ids": input_ids, "labels": labels}

    def _draw(self, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(self._vocabulary, (self._length,), generator=generator, device="cpu")
