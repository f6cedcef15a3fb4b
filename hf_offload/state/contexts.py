"""Where an update is computed: as at the step that it belongs to, whatever the thread is in the midst of by then.

Note: an update that waits
    It is computed when its parameter is used next: in a forward under autocast, in inference, in a transform of
    ``torch.func``, under a trace. None of these may change it, or become part of what is traced. So an update waits only if
    its step was taken outside of all of them, and is computed outside, too. A step that was taken inside is computed there,
    at once.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from hf_offload.interrupts import signals_deferred


@dataclasses.dataclass(frozen=True)
class StepContext:
    """What all updates of one step have in common: the optimizer's ``attributes``, and PyTorch's default dtype."""

    attributes: Mapping[str, Any]
    default_dtype: torch.dtype

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """As at the step, which was taken :func:`outside`."""
        present = torch.get_default_dtype()
        with outside():
            try:
                if present != self.default_dtype:
                    torch.set_default_dtype(self.default_dtype)
                yield
            finally:
                if present != self.default_dtype:
                    torch.set_default_dtype(present)


def is_outside() -> bool:
    """Whether the thread is in the midst of nothing that changes what operations compute."""
    return not (
        _autocast_kinds()
        or torch.is_inference_mode_enabled()
        or _get_current_function_mode_stack()
        or _get_current_dispatch_mode_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or torch.compiler.is_compiling()
    )


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Outside of autocast, inference, modes, transforms and traces, and without a graph. Signals are deferred: they would
    leave switched what is about to be.
    """
    with signals_deferred, contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # which switches gradients on
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._C.DisableTorchFunction())
        for kind in _autocast_kinds():
            stack.enter_context(torch.autocast(kind, enabled=False))
        if _get_current_dispatch_mode_stack():
            stack.enter_context(_disable_current_modes())
        if torch._C._functorch.peek_interpreter_stack() is not None:
            from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

            stack.enter_context(temporarily_clear_interpreter_stack())
        if torch.compiler.is_compiling():  # Dynamo looks at a parameter, and optimizers compute otherwise then
            torch.compiler._is_compiling_flag = False
            stack.callback(setattr, torch.compiler, "_is_compiling_flag", True)
        trace = torch._C._get_tracing_state()
        if trace is not None:
            set_trace: Any = torch._C._set_tracing_state  # type: ignore[attr-defined]
            set_trace(None)
            stack.callback(set_trace, trace)
        yield


def hidden_from_modes() -> contextlib.AbstractContextManager[Any]:
    """Hide what runs inside from modes of dispatch: it is the package's own work, not the training's."""
    return _disable_current_modes() if _get_current_dispatch_mode_stack() else contextlib.nullcontext()


def _autocast_kinds() -> list[str]:
    """The kinds of device under autocast."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    return [kind for kind in kinds if torch.is_autocast_enabled(kind)]
