"""What a snapshot holds of a model: its weights and buffers, or of a model of PEFT its adapter alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_offload.errors import OffloadConfigError, SnapshotError
from hf_offload.snapshots import contents
from hf_offload.state.registry import parked_of
from hf_offload.state.storages import moves

WEIGHTS_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
_ADAPTER = "default"
_REFUSED = "cannot be part of a snapshot: leave snapshot_steps out, and save checkpoints."


class ModelWeights:
    """The weights of one model, by the names that a checkpoint has for them.

    Attributes:
        model: The model.
        file: The file's name in a checkpoint.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self._is_adapted = any(kind.__name__ == "PeftModel" for kind in type(model).__mro__)
        self.file = ADAPTER_FILE if self._is_adapted else WEIGHTS_FILE
        self._saves_embeddings: bool | None = None
        if self._is_adapted:
            _check_adapter(model)
        elif getattr(model, "_hf_peft_config_loaded", False):
            raise OffloadConfigError(f"Adapters that add_adapter() has made {_REFUSED} Or use peft.get_peft_model().")

    @property
    def are_parked(self) -> bool:
        """Whether some of them leave memory between uses."""
        return any(moves(one) and parked_of(one) is not None for one in self.model.parameters())

    def tensors(self, copy_buffers: bool = False) -> dict[str, Tensor]:
        """Each by its name; with ``copy_buffers``, a copy of buffers, which a forward may change. A weight that leaves memory
        between uses is the parameter itself, which comes when it is read.
        """
        found: dict[str, Tensor] = self._adapter() if self._is_adapted else self.model.state_dict(keep_vars=True)
        if self._is_adapted or hasattr(self.model, "tie_weights"):  # they are tied again when it is loaded
            found = _without_twins(found)
        for name in getattr(self.model, "_keys_to_ignore_on_save", None) or ():
            found.pop(name, None)
        if copy_buffers:
            buffers = {id(one) for one in self.model.buffers()}
            found = {name: one.clone() if id(one) in buffers else one for name, one in found.items()}
        return found

    def check(self, folder: Path, expected: Any, what: str, file: str) -> None:
        """Raise :class:`~hf_offload.errors.SnapshotError` with the name of a weight, unless ``expected`` is the fingerprint
        of this model. ``what`` names the snapshot, whose weights are in ``folder / file``.
        """
        layout = contents.layout_of(self.tensors())
        if contents.fingerprint(layout) == expected:
            return
        there = _layout_in(folder / file)
        name = next((name for name in {**layout, **there} if layout.get(name) != there.get(name)), "the file")
        raise SnapshotError(
            f"{what} is of another model: {name} is {there.get(name, 'not')} there and {layout.get(name, 'not')} here. "
            "Resume with the model it was taken of, or start from the beginning without resume_from_checkpoint."
        )

    def load(self, path: Path) -> None:
        """Load a file with this layout, tensor by tensor."""
        from safetensors import safe_open

        with safe_open(path, "pt") as file, torch.no_grad():
            for name, tensor in self.tensors().items():
                tensor.copy_(file.get_tensor(name))

    def _adapter(self) -> dict[str, Tensor]:
        from peft import get_peft_model_state_dict

        model: Any = self.model

        def found(saves_embeddings: Any) -> dict[str, Tensor]:
            state = model.state_dict(keep_vars=True)
            return dict(get_peft_model_state_dict(model, state, _ADAPTER, save_embedding_layers=saves_embeddings))

        if self._saves_embeddings is None:  # found out once: it may look for files of the model
            self._saves_embeddings = len(found("auto")) > len(found(False))
        return found(self._saves_embeddings)


def _without_twins(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor once, by the first of its names: a file of safetensors has no place for tied weights."""
    seen: set[Any] = set()
    found = {}
    for name, tensor in weights.items():
        key: Any = id(tensor)  # not the address of a weight that leaves memory: it would stay once that is known
        if not (isinstance(tensor, nn.Parameter) and parked_of(tensor) is not None):
            key = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        if key not in seen or not tensor.numel():
            found[name] = tensor
        seen.add(key)
    return found


def _check_adapter(model: Any) -> None:
    problem = None
    if set(model.peft_config) != {_ADAPTER}:
        problem = (
            f"The adapters {', '.join(sorted(model.peft_config))}, where one is expected whose name is {_ADAPTER},"
        )
    elif model.peft_config[_ADAPTER].is_prompt_learning:
        problem = "A prompt that peft learns, of which a checkpoint holds what an encoder has made of it,"
    elif any(isinstance(one, nn.modules.batchnorm._BatchNorm) and one.track_running_stats for one in model.modules()):
        problem = "The statistics of batch norm under an adapter, which a checkpoint of peft does not hold,"
    if problem is not None:
        raise OffloadConfigError(f"{problem} {_REFUSED}")


def _layout_in(path: Path) -> contents.Layout:
    from safetensors import safe_open

    if not path.exists():
        return {}
    with safe_open(path, "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  it is not a mapping
        return {name: [one.get_dtype(), list(one.get_shape())] for name, one in slices.items()}
