"""Clipping by the norm of all gradients, bit for bit as PyTorch does it, wherever the gradients are."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from hf_offload.errors import OffloadError
from hf_offload.interrupts import signals_deferred
from hf_offload.state import guard
from hf_offload.state.contexts import is_outside
from hf_offload.state.gradients import gradient_of, norm_of, parked_gradient, scaled
from hf_offload.state.parameter import StreamedParameter


@signals_deferred  # all gradients are scaled, or none
def clip_parked(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    streamed_of: Callable[[Tensor], StreamedParameter | None],
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_``. Gradients that have left memory are scaled when they are used; of those that were
    used up in backward, only the norm is known.

    Raises :class:`~hf_offload.errors.OffloadError` if these were to be scaled.
    """
    norm_type, max_norm = float(norm_type), float(max_norm)
    with torch.no_grad():
        found: list[Tensor | StreamedParameter] = []
        norms: list[tuple[Tensor, torch.dtype]] = []
        for parameter in parameters:
            trained, gradient = streamed_of(parameter), gradient_of(parameter)
            if trained is not None:
                trained.finish()  # a step that was taken is one with the gradient as it was
            if gradient is not None:
                found.append(gradient)
                norms.append((_norm(gradient, norm_type, trained), gradient.dtype))
            elif trained is not None and trained.norm_in_backward is not None:
                if norm_type != 2.0:
                    raise OffloadError(
                        f"{trained.name} was updated in backward: of its gradient, only the 2-norm is known."
                    )
                found.append(trained)
                norms.append((trained.norm_in_backward, parameter.dtype))
        total = _total_norm(norms, norm_type)
        if error_if_nonfinite and torch.logical_or(total.isnan(), total.isinf()):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
                "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
                "`error_if_nonfinite=False`"
            )
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for each in found:
            if isinstance(each, StreamedParameter):
                if factor != 1:
                    raise OffloadError(
                        f"{each.name} was updated in backward, and its gradient is to be clipped only now: leave "
                        "update_in_backward out."
                    )
                continue
            parked = parked_gradient(each)
            if parked is None or parked.is_here or parked.is_held:  # others see that it is scaled
                guard.settle([each])
                scaled(each, (factor,))
            else:
                parked.scale(factor)
        return total


def _norm(gradient: Tensor, norm_type: float, trained: StreamedParameter | None) -> Tensor:
    """The norm of a gradient. From now on, those of its optimizer are measured as they leave memory."""
    if trained is not None and norm_type == 2.0:
        trained.streaming.wants_norms = True
    parked = parked_gradient(gradient)
    if parked is not None:
        if parked.norm is not None and norm_type == 2.0 and not parked.factors and is_outside():
            return parked.norm
        parked.settle(unseen=False)
        parked.come()
        norm = norm_of(gradient, norm_type)
        parked.leave()
        parked.store.throttle()
        return norm
    guard.settle([gradient])
    return norm_of(gradient, norm_type)


def _total_norm(norms: list[tuple[Tensor, torch.dtype]], norm_type: float) -> Tensor:
    """The norm of norms, in the order of ``torch.nn.utils.get_total_norm``: by device and dtype of the gradients."""
    if not norms:
        return torch.tensor(0.0)
    first_device = norms[0][0].device
    stand_ins = [torch.empty(0, dtype=dtype, device=norm.device) for norm, dtype in norms]
    grouped = _group_tensors_by_device_and_dtype([[*stand_ins]], with_indices=True)
    order = [index for _, indices in grouped.values() for index in indices]
    return torch.linalg.vector_norm(torch.stack([norms[index][0].to(first_device) for index in order]), norm_type)
