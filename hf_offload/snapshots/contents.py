"""What the files of a checkpoint are written with: weights as safetensors, the rest as PyTorch saves it."""

import hashlib
import io
import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from hf_offload.errors import SnapshotError
from hf_offload.ranks import Ranks
from hf_offload.snapshots.memory import MemoryFile, Write
from hf_offload.state.guard import own_class

Layout = dict[str, list[Any]]
"""Name of a weight -> its type and shape."""

_ALIGNMENT = 64
"""Of tensors in an archive, as ``torch.save`` has it."""

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def layout_of(weights: Mapping[str, Tensor]) -> Layout:
    """Name -> type and shape. Raises :class:`~hf_offload.errors.SnapshotError` for what safetensors does not hold."""
    layout: Layout = {}
    for name, tensor in weights.items():
        if not isinstance(tensor, Tensor):  # from get_extra_state()
            raise SnapshotError(
                f"{name} is a {type(tensor).__name__}, which snapshots do not hold: drop snapshot_steps."
            )
        kind = own_class(tensor) if isinstance(tensor, torch.nn.Parameter) else type(tensor)
        if kind not in (Tensor, torch.nn.Parameter, torch.nn.Buffer) or tensor.dtype not in _NAMES or tensor.is_meta:
            raise SnapshotError(
                f"{name} ({type(tensor).__name__} of {tensor.dtype} on {tensor.device}) cannot be part of a snapshot: drop "
                "snapshot_steps."
            )
        layout[name] = [_NAMES[tensor.dtype], list(tensor.shape)]
    return layout


def fingerprint(layout: Layout) -> str:
    """Tells models with different layouts apart."""
    return hashlib.sha256(json.dumps(layout, sort_keys=True).encode()).hexdigest()


def weights_file(weights: Mapping[str, Tensor], layout: Layout) -> Write:
    """A file of safetensors (https://github.com/huggingface/safetensors#format), written tensor by tensor."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (kind, shape) in layout.items():
        begin, end = end, end + weights[name].nbytes
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start, tensors = struct.pack("<Q", len(text)) + text, [weights[name] for name in layout]

    def write(file: MemoryFile) -> None:
        file.write(start)
        for tensor in tensors:
            if tensor.numel():
                host = tensor.detach().to("cpu").contiguous()
                file.write(host.reshape(-1).view(torch.uint8).numpy().data)

    return write


def archive(content: Any) -> Write:
    """A file as ``torch.save`` writes it, but without checksums of its parts: they take longer than the copy, ``torch.load``
    does not ask for them, and the snapshot's record has one of the file.
    """

    def write(file: MemoryFile) -> None:
        output = _Output(file)
        writer: Any = torch._C.PyTorchFileWriter(output, False, _ALIGNMENT)  # type: ignore[call-overload]
        archives = torch.serialization
        archives._save(content, writer, archives.pickle, archives.DEFAULT_PROTOCOL, False)
        writer.write_end_of_file()
        if output.error is not None:
            raise output.error

    return write


class _Output:
    """Keeps the error of a write from PyTorch's writer, whose destructor would end the process after one."""

    def __init__(self, file: MemoryFile):
        self.error: Exception | None = None
        self._file = file

    def write(self, data: Any) -> int:
        if self.error is None:
            try:
                self._file.write(data)
            except Exception as error:
                self.error = error
        return memoryview(data).nbytes


def archived(content: Any) -> bytes:
    """The bytes of such a file, of something small as it is now."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def check_loadable(what: str, content: Any) -> None:
    """Raise :class:`~hf_offload.errors.SnapshotError` if a resume could not load ``content``: it runs no code of a file. No
    tensor is read or copied.
    """
    number = os.memfd_create("hf_offload-check", os.MFD_CLOEXEC)
    try:
        with open(number, "w+b") as file:  # noqa: PTH123  it has no path
            with torch.serialization.skip_data():  # the file has holes where tensors would be
                torch.save(content, file)
            file.seek(0)
            load(file, "meta")
    except Exception as error:  # pickle calls methods of what it is given, which may raise anything
        if isinstance(error, OSError) or isinstance(error.__context__, OSError):
            return  # the size of files is limited: writing the snapshot says so
        reason = " ".join(str(error).rpartition("WeightsUnpickler error:")[2].split()).partition(". ")[0]
        raise SnapshotError(
            f"{what} holds what torch.load(weights_only=True) does not load, so a resume could not ({reason}): let it have "
            "tensors, or numbers, texts, lists and dicts of Python."
        ) from error


def load(file: Path | IO[bytes], device: str = "cpu") -> Any:
    """What an archive holds: tensors, numbers, texts, and the states of NumPy's generators, as a Trainer loads them."""
    from transformers.trainer_pt_utils import safe_globals

    with safe_globals():
        return torch.load(file, map_location=device, weights_only=True)


def small_file(content: bytes) -> Write:
    """A file with this content."""
    return lambda file: file.write(content)


def of_rank(name: str, ranks: Ranks) -> str:
    """The name of a file of which each rank has its own, as a Trainer gives it: ``rng_state_1.pth``."""
    stem, ending = name.rsplit(".", 1)
    return name if ranks.count == 1 else f"{stem}_{ranks.number}.{ending}"


def of_all_ranks(own: Mapping[str, bytes], ranks: Ranks) -> dict[str, Write]:
    """Small files of all ranks, so that the snapshot of one of them is a whole checkpoint. All ranks call it."""
    everyone = [*ranks.gather(dict(own)), own]  # files that all have under the same name are one's own
    return {name: small_file(content) for files in everyone for name, content in files.items()}


def tensors_in(content: Any) -> Iterator[Tensor]:
    """All tensors in nested dicts, lists and tuples."""
    if isinstance(content, Tensor):
        yield content
    elif isinstance(content, (Mapping, list, tuple)):
        for value in content.values() if isinstance(content, Mapping) else content:
            yield from tensors_in(value)
