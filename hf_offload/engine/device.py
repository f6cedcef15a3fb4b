"""The few operations that the transfer layer needs of a device. Tests replace it with a simulated one."""

import abc
import time
from typing import Any

import torch

from hf_offload.errors import OffloadConfigError, OffloadError
from hf_offload.storage.buffers import PAGE, empty_at_phase

Stream = Any
Event = Any

_SHORTEST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 1e-3
_NO_STREAMS = OffloadError("The CPU has no streams and events: copies need none there. This is a bug in hf_offload.")


class Device(abc.ABC):
    """A device whose saved tensors are offloaded.

    ``is_host`` says that tiers can read and write the device's memory themselves. It has no streams then, and the transfer
    layer asks for none.
    """

    torch_device: torch.device
    is_host: bool

    @abc.abstractmethod
    def make_current(self) -> None:
        """Make this the device of the calling thread, which is one of the engine's own."""

    @abc.abstractmethod
    def allocate(self, nbytes: int, phase: int) -> torch.Tensor:
        """A ``uint8`` buffer on the device, on the current stream, at address ``phase`` modulo what kernels care about."""

    def current_stream(self) -> Stream:
        """The stream on which this thread computes now. Never keep it: the user may switch at any time."""
        raise _NO_STREAMS

    @abc.abstractmethod
    def is_capturing(self) -> bool:
        """Whether what this thread computes now becomes part of a graph that is replayed later."""

    def new_stream(self) -> Stream:
        """A stream of the engine's own."""
        raise _NO_STREAMS

    def record(self, stream: Stream, timed: bool = False) -> Event:
        """An event that happens when all that is queued on ``stream`` so far is done; ``timed``, it knows when."""
        raise _NO_STREAMS

    def seconds_between(self, first: Event, second: Event) -> float:
        """How long after ``first`` did ``second`` happen; both are timed, and have happened."""
        raise _NO_STREAMS

    def wait(self, stream: Stream, event: Event) -> None:
        """Let ``stream`` (not the host) wait for ``event``."""
        raise _NO_STREAMS

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Queue a copy on ``stream``."""
        raise _NO_STREAMS

    def use(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Tell the allocator that ``stream`` uses ``tensor``, which was allocated on another one."""
        raise _NO_STREAMS

    def has_happened(self, event: Event) -> bool:
        """Whether ``event`` has happened, without waiting."""
        raise _NO_STREAMS

    def synchronize(self, event: Event) -> None:
        """Let the host wait for ``event``. Safe in threads that have no current stream or device."""
        raise _NO_STREAMS


class CpuDevice(Device):
    """Device memory is RAM, and disks read and write it directly."""

    torch_device = torch.device("cpu")
    is_host = True

    def make_current(self) -> None:
        pass

    def allocate(self, nbytes: int, phase: int) -> torch.Tensor:
        return empty_at_phase(nbytes, phase % PAGE)

    def is_capturing(self) -> bool:
        return False


class AcceleratorDevice(Device):
    """CUDA, and whatever else ``torch.accelerator`` serves with streams and events."""

    is_host = False
    # Kernels choose vectorised loads by alignment; the allocator's blocks are aligned to 512.
    _ALIGNMENT = 512

    def __init__(self, device: torch.device):
        self.torch_device = device
        # PyTorch takes a number as it is, and compares a device with the accelerator's on every call.
        self._index: int | torch.device = device if device.index is None else device.index

    def make_current(self) -> None:
        # In a thread without one, whatever names a device goes back to device 0 afterwards, which wakes it: on CUDA, some
        # 500 MiB of GPU 0 for each rank.
        torch.accelerator.set_device_index(self._index)

    def allocate(self, nbytes: int, phase: int) -> torch.Tensor:
        phase %= self._ALIGNMENT
        raw = torch.empty(nbytes + phase, dtype=torch.uint8, device=self.torch_device)
        return raw[phase:]

    def current_stream(self) -> Stream:
        return torch.accelerator.current_stream(self._index)

    def is_capturing(self) -> bool:
        if self.torch_device.type == "cuda":
            return torch.cuda.is_current_stream_capturing()
        asked = getattr(self.current_stream(), "is_capturing", None)  # newer versions of PyTorch
        return asked is not None and asked()

    def new_stream(self) -> Stream:
        return torch.Stream(device=self.torch_device)

    def record(self, stream: Stream, timed: bool = False) -> Event:
        return stream.record_event(torch.Event(device=self.torch_device, enable_timing=timed))

    def seconds_between(self, first: Event, second: Event) -> float:
        return first.elapsed_time(second) / 1e3

    def wait(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        # What was current is remembered in the object that is entered, and several threads copy on one stream.
        entered = torch.Stream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )
        with entered:
            target.copy_(source, non_blocking=True)

    def use(self, tensor: torch.Tensor, stream: Stream) -> None:
        tensor.record_stream(stream)

    def has_happened(self, event: Event) -> bool:
        return event.query()

    def synchronize(self, event: Event) -> None:
        # An event's own wait keeps a core busy on CUDA, and those that do not are CUDA's own.
        pause_s = _SHORTEST_PAUSE_S
        while not event.query():
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def device_of(model: torch.nn.Module) -> torch.device:
    """The device of the model's first trainable parameter (or of its first parameter, or the CPU)."""
    parameters = sorted(model.parameters(), key=lambda parameter: not parameter.requires_grad)
    return parameters[0].device if parameters else torch.device("cpu")


def open_device(device: torch.device) -> Device:
    """The :class:`Device` for a torch device.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for one whose copies cannot overlap with its computations.
    """
    if device.type == "cpu":
        return CpuDevice()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    try:
        if accelerator is None or accelerator.type != device.type:
            raise RuntimeError(f"the accelerator here is {accelerator}")
        torch.Stream(device=device)
    except RuntimeError as error:
        raise OffloadConfigError(
            f"The model is on {device}, which has no streams for copies to run on ({error}). Move it to the device that "
            "trains it before offloading is attached; on one without streams, set tier='none'."
        ) from error
    return AcceleratorDevice(device)
