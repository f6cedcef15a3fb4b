"""Batches that know which samples they hold: row numbers of the data set, carried along through its collator."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hf_offload.errors import OffloadConfigError
from hf_offload.transforms.sampling.gradient_cache import SAMPLE_IDS, SAMPLE_PLACES


def carry_sample_ids(loader: Any) -> int:
    """Add row numbers of the data set to the batches of ``loader``; returns the number of rows.

    ``loader`` is a :class:`torch.utils.data.DataLoader` over a map-style data set, or what ``Accelerator.prepare`` made of
    one. Its collator may pad. It may pack several rows into one, if the batch has ``position_ids`` that begin anew with
    each of them. Only a model that samples with ``probabilities="gradient-cache"`` understands such batches. Idempotent.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for a stream, whose rows have no numbers.
    """
    loader = base_loader(loader)
    data = loader.dataset
    if isinstance(data, _Numbered):
        return len(data)
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise OffloadConfigError(
            "probabilities='gradient-cache' needs samples that can be told apart in the next epoch, and the rows of a "
            f"stream ({type(data).__name__}) have no numbers: load the data as a map-style data set (streaming=False), or "
            "set probabilities='activation'."
        )
    if loader.batch_sampler is None:
        raise OffloadConfigError(
            "The loader makes no batches of its own (batch_size=None), so there is no collator to carry sample ids through: "
            "set batch_size, or probabilities='activation'."
        )
    # A DataLoader refuses a new data set because samplers are made for the old one; this one has the same rows.
    vars(loader)["dataset"] = _Numbered(data)
    loader.collate_fn = _Collator(loader.collate_fn)
    return len(data)


def drop_sample_ids(loader: Any) -> None:
    """Make the batches of ``loader`` what they were before :func:`carry_sample_ids`. Idempotent."""
    loader = base_loader(loader)
    if isinstance(loader.dataset, _Numbered):
        vars(loader)["dataset"] = loader.dataset.data
        loader.collate_fn = loader.collate_fn.collate


def base_loader(loader: Any) -> Any:
    """The DataLoader inside of what accelerate makes of it."""
    inner = getattr(loader, "base_dataloader", None)
    if inner is not None:
        return base_loader(inner)
    if not isinstance(loader, DataLoader):
        raise OffloadConfigError(
            f"A {type(loader).__name__} is not a DataLoader: give the torch.utils.data.DataLoader of the training set."
        )
    return loader


class _Numbered(Dataset[Any]):
    """Rows with their numbers."""

    def __init__(self, data: Any):
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return int(index) % len(self.data), self.data[index]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[int, Any]]:
        several = getattr(self.data, "__getitems__", None)
        rows = several(indices) if several is not None else [self.data[index] for index in indices]
        return [(int(index) % len(self.data), row) for index, row in zip(indices, rows, strict=True)]

    def __getattr__(self, name: str) -> Any:
        if name == "data":  # before it is there, while unpickling
            raise AttributeError(name)
        return getattr(self.data, name)


class _Collator:
    """The collator of the rows, which adds their numbers to what it returns."""

    def __init__(self, collate: Callable[[list[Any]], Any]):
        self.collate = collate

    def __call__(self, rows: list[tuple[int, Any]]) -> Any:
        batch = self.collate([row for _, row in rows])
        ids = torch.tensor([number for number, _ in rows], device="cpu")
        if not hasattr(batch, "keys"):
            raise OffloadConfigError(
                f"The collator makes a {type(batch).__name__}, where sample ids have no place: let it make a mapping of the "
                "model's inputs, or set probabilities='activation'."
            )
        first = next((value for value in batch.values() if isinstance(value, torch.Tensor) and value.dim()), ())
        batch[SAMPLE_IDS] = ids
        if len(first) == len(rows):
            return batch
        places = _packed(batch.get("position_ids"), len(rows))
        if places is None:
            raise OffloadConfigError(
                f"The collator makes {len(first)} rows of {len(rows)} samples, without position_ids that begin anew with "
                "each of them, so the tokens of each sample cannot be found: set probabilities='activation'."
            )
        batch[SAMPLE_PLACES] = places
        return batch


def _packed(position_ids: Any, count: int) -> torch.Tensor | None:
    if not isinstance(position_ids, torch.Tensor) or position_ids.dim() != 2:
        return None
    places = (position_ids == 0).flatten().cumsum(0).reshape(position_ids.shape) - 1
    return places if int(places.max()) == count - 1 and int(places.min()) == 0 else None
