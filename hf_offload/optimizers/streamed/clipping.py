"""Clipping by the norm of all gradients, bit for bit as PyTorch does it, wherever the gradients are."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.utils.clip_grad import _has_foreach_support
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from hf_offload.errors import OffloadError
from hf_offload.interrupts import signals_deferred
from hf_offload.optimizers.streamed.record import Record, scaled
from hf_offload.parameters.demand import gradient_of


def clip_stored(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    record_of: Callable[[Tensor], Record | None],
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_``. Gradients on a tier are scaled when they are used; of those that were used up in
    backward, only the norm is known.

    Raises :class:`~hf_offload.errors.OffloadError` if these were to be scaled.
    """
    norm_type, max_norm = float(norm_type), float(max_norm)
    with signals_deferred, torch.no_grad():  # all gradients are scaled, or none
        found: list[Tensor | Record] = []
        for parameter in parameters:
            record = record_of(parameter)
            if record is not None:
                record.streaming.gradients.join(record)
            live = gradient_of(parameter)
            if live is not None:
                found.append(live)
            elif record is not None and (record.gradient is not None or record.spent_norm is not None):
                found.append(record)
        total = _total_norm([_of_each(each, norm_type) for each in found], norm_type)
        if error_if_nonfinite and torch.logical_or(total.isnan(), total.isinf()):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
                "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
                "`error_if_nonfinite=False`"
            )
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for each in found:
            if isinstance(each, Tensor):
                scaled(each, (factor,))
            elif each.gradient is not None:
                each.streaming.gradients.scale(each, factor)
            elif factor != 1:
                raise OffloadError(
                    f"{each.name} was updated in backward, and its gradient is to be clipped only now: set max_grad_norm in "
                    "the training arguments, which then updates after backward."
                )
        return total


def norm_of(gradient: Tensor, norm_type: float) -> Tensor:
    """As ``torch.nn.utils.get_total_norm`` computes that of one tensor."""
    if _has_foreach_support([gradient], gradient.device):
        return torch._foreach_norm([gradient], norm_type)[0]
    return torch.linalg.vector_norm(gradient, norm_type)


def _of_each(each: Tensor | Record, norm_type: float) -> tuple[Tensor, torch.dtype]:
    if isinstance(each, Tensor):
        return norm_of(each, norm_type), each.dtype
    return each.streaming.gradients.norm(each, norm_type), each.dtype


def _total_norm(norms: list[tuple[Tensor, torch.dtype]], norm_type: float) -> Tensor:
    """The norm of norms, in the order of ``torch.nn.utils.get_total_norm``: by device and dtype of the gradients."""
    if not norms:
        return torch.tensor(0.0)
    first_device = norms[0][0].device
    stand_ins = [torch.empty(0, dtype=dtype, device=norm.device) for norm, dtype in norms]
    grouped = _group_tensors_by_device_and_dtype([[*stand_ins]], with_indices=True)
    order = [index for _, indices in grouped.values() for index in indices]
    return torch.linalg.vector_norm(torch.stack([norms[index][0].to(first_device) for index in order]), norm_type)
