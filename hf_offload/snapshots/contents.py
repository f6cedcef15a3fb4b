"""The files of a snapshot: in memory, without a name, with a checksum, and written as those of a checkpoint are."""

import io
import json
import mmap
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
import xxhash
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.serialization import config as serialization_config

from hf_offload.errors import SnapshotError
from hf_offload.ranks import Ranks
from hf_offload.state.guard import own_class

_PIECE_BYTES = 1 << 20
_CHUNK_BYTES = 8 << 20

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


class MemoryFile:
    """A file that only this process, and those it is passed on to, can open. It takes the memory of what is written, of at
    most ``most_bytes`` as a rule.
    """

    def __init__(self, most_bytes: int = 0) -> None:
        self._most_bytes = most_bytes
        self.number = os.memfd_create("hf_offload-snapshot", os.MFD_CLOEXEC)
        os.fchmod(self.number, 0o600)
        self._mapped = np.empty(0, np.uint8)
        self.begin()

    @property
    def checksum(self) -> int:
        """The checksum of all that was written."""
        return self._digest.intdigest()

    def begin(self) -> None:
        """Write from the first byte on."""
        self.nbytes = 0
        self._digest = xxhash.xxh3_64()

    def write(self, data: Any) -> int:
        """Write ``data`` behind what was written before, through a map: that takes a core half as long as system calls do.
        Raises ``OSError``.
        """
        content = np.frombuffer(data, np.uint8)
        end = self.nbytes + len(content)
        if len(content):  # allocated first: writing where the machine has no room ends the process
            os.posix_fallocate(self.number, self.nbytes, len(content))
        if len(self._mapped) < end:
            size = max(end, 2 * len(self._mapped), self._most_bytes)  # all pages of another map have to be found again
            os.ftruncate(self.number, size)  # takes no memory
            self._mapped = np.frombuffer(mmap.mmap(self.number, size), np.uint8)
        for start in range(0, len(content), _PIECE_BYTES):
            piece = content[start : start + _PIECE_BYTES]
            self._mapped[self.nbytes : self.nbytes + len(piece)] = piece
            self._digest.update(piece.data)  # while it is in a cache
            self.nbytes += len(piece)
        return len(content)

    def end(self) -> None:
        """All is written: what was longer before ends here."""
        os.ftruncate(self.number, self.nbytes)

    def close(self) -> None:
        """Give it up. It goes with the last process that has it open."""
        self._mapped = np.empty(0, np.uint8)
        os.close(self.number)


class Content(NamedTuple):
    """What a file holds: about how many bytes, and what writes them."""

    nbytes: int
    write: Callable[[MemoryFile], object]


def damage_of(number: int, nbytes: int, checksum: int) -> str | None:
    """What is wrong with a file that had this size and checksum, in words; None if nothing is."""
    size = os.fstat(number).st_size
    if size != nbytes:
        return f"has {size} bytes instead of {nbytes}"
    found, done = xxhash.xxh3_64(), 0
    try:
        while done < nbytes:  # not mapped: where a drive fails to read a map, it ends the process
            chunk = os.pread(number, _CHUNK_BYTES, done)
            if not chunk:
                return f"ends after {done} bytes"
            found.update(chunk)
            done += len(chunk)
    except OSError as error:
        return f"cannot be read: {error}"
    return None if found.intdigest() == checksum else "does not match its checksum"


# -- what PyTorch saves ----------------------------------------------------------------------------------------------------


def archive(content: Any) -> Content:
    """A file as ``torch.save`` writes it, but without checksums of its parts: they take longer than the copy, and the
    snapshot's record has one of the file.
    """

    def write(file: MemoryFile) -> None:
        output: Any = _Output(file)
        with serialization_config.patch({"save.compute_crc32": False}):  # type: ignore[attr-defined]
            torch.save(content, output)
        if output.error is not None:
            raise output.error

    return Content(sum(one.nbytes for one in tree_leaves(content) if isinstance(one, Tensor)), write)


class _Output(io.RawIOBase):
    """Keeps the error of a write from PyTorch's writer, whose destructor would end the process after one."""

    def __init__(self, file: MemoryFile):
        super().__init__()
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
    """Raise :class:`~hf_offload.errors.SnapshotError` if a resume could not load ``content``: it runs no code of a file."""
    try:
        load(io.BytesIO(archived(tree_map_only(Tensor, lambda one: None, content))))
    except Exception as error:  # pickle calls methods of what it is given, which may raise anything
        reason = " ".join(str(error).rpartition("WeightsUnpickler error:")[2].split()).partition(". ")[0]
        raise SnapshotError(
            f"{what} holds what torch.load(weights_only=True) does not load, so a resume could not ({reason}): let it have "
            "tensors, or numbers, texts, lists and dicts of Python."
        ) from error


def load(file: Path | IO[bytes]) -> Any:
    """What an archive holds: tensors, numbers, texts, and the states of NumPy's generators, as a Trainer loads them."""
    from transformers.trainer_pt_utils import safe_globals

    with safe_globals():
        return torch.load(file, map_location="cpu", weights_only=True)


def small_file(content: bytes) -> Content:
    """A file with this content."""
    return Content(len(content), lambda file: file.write(content))


def of_rank(name: str, ranks: Ranks) -> str:
    """The name of a file of which each rank has its own, as a Trainer gives it: ``rng_state_1.pth``."""
    stem, ending = name.rsplit(".", 1)
    return name if ranks.count == 1 else f"{stem}_{ranks.number}.{ending}"


# -- weights ---------------------------------------------------------------------------------------------------------------


def weights_file(weights: Mapping[str, Tensor]) -> Content:
    """A file of safetensors (https://github.com/huggingface/safetensors#format), written tensor by tensor.

    Raises :class:`~hf_offload.errors.SnapshotError` for what safetensors does not hold.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in weights.items():
        if not isinstance(tensor, Tensor):  # from get_extra_state()
            raise SnapshotError(
                f"{name} is a {type(tensor).__name__}, which snapshots do not hold: drop snapshot_steps."
            )
        kind = own_class(tensor) if isinstance(tensor, nn.Parameter) else type(tensor)
        if kind not in (Tensor, nn.Parameter, nn.Buffer) or tensor.dtype not in _NAMES or tensor.is_meta:
            raise SnapshotError(
                f"{name} ({type(tensor).__name__} of {tensor.dtype} on {tensor.device}) cannot be part of a snapshot: drop "
                "snapshot_steps."
            )
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def write(file: MemoryFile) -> None:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in weights.values():
            if tensor.numel():
                host = tensor.detach().to("cpu").contiguous()
                file.write(host.reshape(-1).view(torch.uint8).numpy().data)

    return Content(end, write)


def once(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor by the first of its names: a file of safetensors has no place for tied weights."""
    firsts = {id(one): name for name, one in reversed(list(weights.items()))}
    return {name: one for name, one in weights.items() if firsts[id(one)] == name}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers of a model; of a model of PEFT not what is frozen, which is the script's. A weight that leaves
    memory between uses is the parameter itself, which comes when it is read.
    """
    adapted = [one for one in model.modules() if any(kind.__name__ == "PeftModel" for kind in type(one).__mro__)]
    frozen = {id(weight) for one in adapted for weight in one.parameters() if not weight.requires_grad}
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    found = once(model.state_dict(keep_vars=True))
    return {name: one for name, one in found.items() if id(one) not in frozen and name not in ignored}


def check_weights(weights: Mapping[str, Tensor], path: Path, what: str) -> None:
    """Raise :class:`~hf_offload.errors.SnapshotError` with the name of a weight, unless the file at ``path`` has all of
    these, and nothing else. ``what`` names the snapshot.
    """
    with safe_open(path, "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  it is not a mapping
        there = {name: [one.get_dtype(), one.get_shape()] for name, one in slices.items()}
    here = {name: [_NAMES.get(one.dtype), list(one.shape)] for name, one in weights.items()}
    name = next((name for name in {**here, **there} if here.get(name) != there.get(name)), None)
    if name is not None:
        raise SnapshotError(
            f"{what} is of another model: {name} is {there.get(name, 'not')} there and {here.get(name, 'not')} here. Resume "
            "with the model it was taken of, or start from the beginning without resume_from_checkpoint."
        )


def load_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Load a file with this layout, tensor by tensor."""
    with safe_open(path, "pt") as file, torch.no_grad():
        for name, tensor in weights.items():
            tensor.copy_(file.get_tensor(name))
