"""Gradient norms of each sample when it was last seen, layer by layer: an estimate of which rows matter.

The best probability of a row is proportional to the norm of the row of the input times that of the gradient of the output
(WTA-CRS, arXiv 2305.15265). The second is not known in forward; what it was in the last epoch is a guess. A guess changes the
variance of an estimate and never its mean, so samples that were not seen yet, stale values and zeros do no harm.
"""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.sizes import format_bytes

logger = logging.getLogger(__name__)

SAMPLE_IDS = "sample_ids"
"""The entry of a batch that says which samples it holds: ``[count]``."""
SAMPLE_PLACES = "sample_places"
"""The entry of a packed batch that says which of them each token belongs to: ``[batch, sequence]``."""
CACHE_FILE = "gradient_cache.safetensors"
# A guess that is far too low makes the one row in a million that it is wrong about very heavy: none is below this part of the
# mean.
_LEAST = 0.1
# Norms differ by orders of magnitude: two digits are enough.
_DTYPE = torch.bfloat16


class GradientCache:
    """Root mean squares of the gradients of the outputs' rows: ``norms`` is ``[samples, inputs]``, bfloat16, zero for unseen.

    An input that several layers share has one column, the sum of their squares. ``names`` are the layers that may draw.
    """

    def __init__(self, samples: int, names: Sequence[str], device: torch.device):
        self.names = tuple(names)
        self.norms = torch.zeros(samples, len(names), dtype=_DTYPE, device=device)
        self._slots = {name: slot for slot, name in enumerate(names)}
        self._own = torch.zeros(samples, dtype=torch.bool, device=device)
        self._waiting: list[_Batch] = []
        self._batch: _Batch | None = None
        logger.info(
            "Gradient norms of %d samples and %d layers are kept on %s: %s, and as much in each checkpoint.",
            samples,
            len(names),
            device,
            format_bytes(self.norms.numel() * self.norms.element_size()),
        )

    def begin(self, samples: Tensor, places: Tensor | None = None) -> None:
        """A forward begins with these samples, ``[count]``. ``places`` is ``[batch, sequence]``: which of them each token
        belongs to; without it, each row of the batch is one sample.

        Raises :class:`~hf_offload.errors.OffloadConfigError` for ids of no sample.
        """
        self.flush()
        count, device = len(self.norms), self.norms.device
        if samples.device.type == "cpu" and not bool(((samples >= 0) & (samples < count)).all()):
            raise OffloadConfigError(
                f"The batch has sample ids from {int(samples.min())} to {int(samples.max())}, and there are {count} samples: "
                "ids are row numbers of the training set."
            )
        self._batch = _Batch(self, samples.to(device), None if places is None else places.to(device))

    def rows_of(self, name: str, inputs: Tensor) -> "SampleRows | None":
        """The samples that the rows of a layer's ``inputs`` belong to, or None where that is unknown."""
        batch = self._batch
        places = None if batch is None else batch.places(inputs.shape[:-1])
        return None if batch is None or places is None else SampleRows(batch, self._slots[name], places)

    def flush(self) -> None:
        """Write down what the backwards that are over have seen."""
        waiting, self._waiting = self._waiting, []
        for batch in waiting:
            norms = batch.mean_squares().sqrt()
            known = self.norms[batch.samples].float()
            # Zero where no backward came by, infinite where a scaler skips the step.
            norms = torch.where((norms > 0) & norms.isfinite(), norms, known)
            self.norms[batch.samples] = norms.to(_DTYPE)
            self._own[batch.samples] = True

    def wait_for(self, batch: "_Batch") -> None:
        """A backward has begun to write into ``batch``."""
        self._waiting.append(batch)

    def share(self) -> None:
        """Exchange the samples seen since the last call. All processes call it."""
        self.flush()
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        own = self._own.float()
        sums = self.norms.float() * own[:, None]
        torch.distributed.all_reduce(sums)
        torch.distributed.all_reduce(own)
        mean = sums / own.clamp_min(1)[:, None]
        self.norms = torch.where(own[:, None] > 0, mean, self.norms.float()).to(_DTYPE)
        self._own.zero_()

    def save(self, file: Path) -> None:
        """Write ``norms`` as safetensors."""
        self.flush()
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({"norms": self.norms.cpu()}, file, metadata={"names": "\n".join(self.names)})

    def load(self, file: Path) -> bool:
        """Take over what ``file`` holds, if it is of the same samples and layers; whether it was."""
        try:
            with safe_open(file, framework="pt") as stored:
                names = tuple((stored.metadata() or {}).get("names", "").split("\n"))
                norms = stored.get_tensor("norms")
        except (OSError, SafetensorError) as error:
            logger.warning("The gradient norms of %s cannot be read (%s): all samples count as new.", file, error)
            return False
        if names != self.names or norms.shape != self.norms.shape:
            logger.warning(
                "The gradient norms of %s are of %d samples and %d layers, and this run has %d and %d, or other ones: all "
                "samples count as new.",
                file,
                norms.shape[0],
                len(names),
                *self.norms.shape,
            )
            return False
        self.norms.copy_(norms)
        return True


class _Batch:
    """The samples of one forward: what is known of their gradients, and what backward finds."""

    def __init__(self, cache: GradientCache, samples: Tensor, places: Tensor | None):
        self.samples = samples
        self._places = places
        self._cache = cache
        known = cache.norms[samples].float()
        seen = known > 0
        mean = (known.sum(0) / seen.sum(0)).nan_to_num(1.0)
        self.guesses = torch.where(seen, known, mean).maximum(_LEAST * mean)
        self._squares = torch.zeros_like(known)
        self._counts = torch.zeros_like(known)
        self._seen = False
        self._found: dict[torch.Size, Tensor] = {}

    def places(self, shape: torch.Size) -> Tensor | None:
        """Which sample each row of inputs of ``[*shape, columns]`` belongs to; None where that is unknown."""
        if self._places is not None:
            return self._places.flatten() if self._places.shape == shape else None
        count = len(self.samples)
        if not shape or shape[0] != count:
            return None
        if shape not in self._found:  # once for all layers
            rows = torch.arange(count, device=self.samples.device)
            self._found[shape] = rows.repeat_interleave(shape.numel() // count, output_size=shape.numel())
        return self._found[shape]

    def add(self, slot: int, places: Tensor, gradient: Tensor) -> None:
        """Backward has come to a layer whose output has ``gradient`` ``[rows, columns]``."""
        squares = gradient.float().square().sum(1)
        self._squares[:, slot].index_add_(0, places, squares)
        self._counts[:, slot] = torch.zeros_like(self._counts[:, slot]).index_add_(0, places, torch.ones_like(squares))
        if not self._seen:
            self._seen = True
            self._cache.wait_for(self)

    def mean_squares(self) -> Tensor:
        """Of the rows of each sample, summed over the layers that share an input: ``[samples, inputs]``."""
        return self._squares / self._counts.clamp_min(1)


@dataclasses.dataclass(frozen=True)
class SampleRows:
    """Which samples the rows of one layer's input belong to."""

    batch: _Batch
    slot: int
    places: Tensor

    def guesses(self) -> Tensor:
        """How large the gradient of each row of the output is likely to be: ``[rows]``, positive."""
        return self.batch.guesses[:, self.slot][self.places]

    def seen(self, gradient: Tensor) -> None:
        """How large it was: ``gradient`` is ``[rows, columns]``."""
        self.batch.add(self.slot, self.places, gradient)


class TakeSampleIds:
    """A forward pre-hook that takes the samples' ids out of the model's inputs, where the model itself does not know them."""

    def __init__(self, cache: GradientCache | None):
        self._cache = cache

    @torch.compiler.disable
    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The inputs without ids.

        Raises :class:`~hf_offload.errors.OffloadConfigError` for a training forward that says nothing of its samples.
        """
        kwargs = dict(kwargs)
        ids, places = kwargs.pop(SAMPLE_IDS, None), kwargs.pop(SAMPLE_PLACES, None)
        if self._cache is not None and model.training and torch.is_grad_enabled():
            if ids is None:
                raise OffloadConfigError(
                    f"probabilities='gradient-cache' has to know which samples a batch holds, and this one has "
                    f"no {SAMPLE_IDS}: train on the loader that was given to session.carry_sample_ids, or set "
                    "probabilities='activation'."
                )
            self._cache.begin(ids, places)
        return args, kwargs

    def __reduce__(self) -> tuple[Any, ...]:
        return TakeSampleIds, (None,)
