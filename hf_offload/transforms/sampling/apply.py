"""Converting linear layers to sampled ones, and back; and row numbers of the data set, which batches carry to them.

A layer's class is swapped, and nothing else of it changes: its parameters, its place in the state dict, what adapters and
tied heads hold of it. So checkpoints do not depend on sampling, and LoRA finds an ``nn.Linear``.
"""

import dataclasses
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers.pytorch_utils import Conv1D

from hf_offload.errors import OffloadConfigError
from hf_offload.methods.blockwise.freezing import is_waiting
from hf_offload.settings.sampling import GRADIENT_CACHE, SampledLinearConfig
from hf_offload.structure.linears import choose_linears, outside_of_blocks
from hf_offload.surgery import Undo, swap_class
from hf_offload.transforms.sampling.gradient_cache import SAMPLE_IDS, SAMPLE_PLACES, GradientCache, TakeSampleIds
from hf_offload.transforms.sampling.linear import Draws, NoteMask, SampledConv1D, SampledLinear
from hf_offload.transforms.transform import Transform

logger = logging.getLogger(__name__)

# Subclasses (quantised layers, parallel ones) have forwards of their own and are left alone.
_SAMPLED: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: SampledLinear, Conv1D: SampledConv1D}
# The projection of attention's output: its input is what attention itself saves.
_ATTENTION_OUTPUT = re.compile(
    r"(attn|attention|self_attn|SelfAttention|EncDecAttention|crossattention)(\.self)?\.(o_proj|out_proj|c_proj|o|dense)$"
    r"|attention\.output\.dense$|attention\.dense$"
)


class Sampling(Transform):
    """Makes linear layers of a model estimate the gradient of their weight."""

    def __init__(self, model: nn.Module, config: SampledLinearConfig | None):
        super().__init__(model)
        self._config = config
        self.cache: GradientCache | None = None

    def apply(self) -> None:
        """Convert what was asked for.

        Raises :class:`~hf_offload.errors.OffloadConfigError` if there is nothing to convert.
        """
        if self._config is None or not self._config.samples:
            return
        conversion = convert_linears(self.model, self._config)
        for name, change in conversion.changes.items():
            self.note(change, name)
        self.note(self.model.register_forward_pre_hook(NoteMask(conversion.draws), prepend=True, with_kwargs=True))
        self.warn_if_checkpointed("sampling its linear layers saves")

    def carry_sample_ids(self, loader: Any) -> GradientCache | None:
        """Add sample ids to the batches of ``loader``, and return the cache of their gradient norms.

        None unless layers are sampled with ``probabilities="gradient-cache"``. Idempotent.

        Raises :class:`~hf_offload.errors.OffloadConfigError` for a stream, whose rows cannot be told apart.
        """
        if not self.names or self._config is None or self._config.probabilities != GRADIENT_CACHE:
            return None
        samples = carry_sample_ids(loader)
        self.note(Undo(base_loader(loader), drop_sample_ids))
        if self.cache is None:
            layers = [self.model.get_submodule(name) for name in self.names]
            self.cache = GradientCache(samples, self.names, layers[0].weight.device)  # type: ignore[arg-type]
            for layer in layers:
                layer.draws.cache = self.cache  # type: ignore[union-attr]
            hook = TakeSampleIds(self.cache)
            self.note(self.model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))
        return self.cache

    def remove(self) -> None:
        """Restore every layer. Idempotent."""
        super().remove()
        self.cache = None


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What was converted, and why the rest was not: by the name of the module. ``draws`` is what the converted share."""

    changes: dict[str, Undo[nn.Module]]
    left: dict[str, str]
    draws: Draws

    def restore(self) -> None:
        """Make them usual layers again. Idempotent."""
        for change in self.changes.values():
            change.remove()


def convert_linears(model: nn.Module, config: SampledLinearConfig) -> Conversion:
    """Let the linear layers that ``config.targets`` names estimate the gradient of their weight.

    Raises :class:`~hf_offload.errors.OffloadConfigError` if targets match nothing; the model is unchanged then.
    """
    chosen, left = sampled_linears(model, config)
    draws = Draws(config)
    logger.info(
        "%d linear layers estimate the gradient of their weight (%s, %g of the input): right on average, not each time.",
        len(chosen),
        config.estimator,
        config.ratio,
    )
    changes = {
        name: swap_class(module, _SAMPLED[type(module)], draws=draws, sampled_as=name)
        for name, module in chosen.items()
    }
    return Conversion(changes, left, draws)


def sampled_linears(model: nn.Module, config: SampledLinearConfig) -> tuple[dict[str, Any], dict[str, str]]:
    """The layers that ``config.targets`` names, by name, and why each of the others is left alone.

    Raises :class:`~hf_offload.errors.OffloadConfigError` if targets match nothing.
    """
    outside = outside_of_blocks(model)

    def saved_anyway(name: str, layer: Any) -> str | None:
        return None if config.targets == "all" else outside(name, layer) or _saved_anyway(name)

    return choose_linears(model, config.targets, _unfit, saved_anyway)


def _unfit(name: str, layer: Any) -> str | None:
    if type(layer) in _SAMPLED.values():
        return "it is sampled already"
    if type(layer) not in _SAMPLED:
        return f"a {type(layer).__name__} has a forward of its own"
    frozen = not layer.weight.requires_grad and not is_waiting(layer.weight)
    return "its weight is frozen, so its input is not saved" if frozen else None


def _saved_anyway(name: str) -> str | None:
    if ".lora_B." in name:
        return "its input has only the rank of the adapter"
    plain = name.removesuffix(".default").removesuffix(".lora_A").removesuffix(".base_layer")
    return "its input is what attention saves anyway" if _ATTENTION_OUTPUT.search(plain) else None


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
