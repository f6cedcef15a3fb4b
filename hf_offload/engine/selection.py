"""Which saved tensors may be moved: activations, never weights, and nothing whose bytes we cannot put back exactly."""

import weakref

import torch
from torch import nn

from hf_offload.tensors import has_bytes, is_ordinary

# A weight reaches autograd through these when a layer or autocast reshaped or cast it first.
_VIEW_NODES = frozenset(
    ("TBackward0", "ToCopyBackward0", "ViewBackward0", "TransposeBackward0", "PermuteBackward0", "UnsafeViewBackward0")
)
_MAX_VIEW_NODES = 4
# A view that spans less than this share of its storage gets a record of its span alone.
_SPAN_SHARE = 0.5
# Spans begin on this boundary, so that a copy can have the original's address modulo what kernels care about.
_SPAN_ALIGNMENT = 512


class WeightIndex:
    """Recognises a model's parameters and buffers in the disguises in which they are saved.

    Three rules, each for a case the others miss: the storage is a weight's (Conv1D saves reshaped views of it), the base
    of a view is a :class:`~torch.nn.Parameter` (FSDP2 swaps storages), or the graph leads over casts and transposes to a
    leaf Parameter (autocast copies). A frozen weight cast by autocast has no graph and is not recognised: moving it is
    wasteful, never wrong.
    """

    def __init__(self, model: nn.Module):
        self._model = weakref.ref(model)
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Look at the model again: parameters may have been moved, resized or replaced."""
        model = self._model()
        if model is None:
            return
        found: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensors in (model.parameters(), model.buffers()):
            for tensor in tensors:
                local = getattr(tensor, "_local_tensor", tensor)  # a DTensor's shard
                # torch.func puts tensors without a storage of their own in a parameter's place for a while.
                if is_ordinary(type(local)) and has_bytes(local):
                    storage = local.untyped_storage()
                    found[id(storage)] = weakref.ref(storage)
        self._storages = found

    def __contains__(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        known = self._storages.get(id(storage))
        if known is not None and known() is storage:
            return True
        if _is_parameter(tensor._base):
            return True
        node = tensor.grad_fn
        for _ in range(_MAX_VIEW_NODES):
            if node is None or node.name() not in _VIEW_NODES:
                break
            node = node.next_functions[0][0]
        return node is not None and _is_parameter(getattr(node, "variable", None))


def _is_parameter(found: object) -> bool:
    # Parameter has an isinstance() of its own in Python: too slow for the usual answer, that there is nothing.
    return found is not None and isinstance(found, nn.Parameter)


def record_span(begin: int, end: int, whole: int) -> tuple[int, int]:
    """Which bytes of a storage of ``whole`` bytes are moved for a tensor that spans ``[begin, end)`` of them."""
    if end - begin >= whole * _SPAN_SHARE:
        return 0, whole
    return begin - begin % _SPAN_ALIGNMENT, end
