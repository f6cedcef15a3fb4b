"""What the files of a checkpoint are written with: weights as safetensors, the rest as PyTorch saves it."""

import hashlib
import io
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hf_offload.errors import SnapshotError, TierFullError, WriteLimitError
from hf_offload.ranks import Ranks
from hf_offload.snapshots.memory import Small, Writable, Write
from hf_offload.state.guard import own_class
from hf_offload.state.lent import complete, lent_of
from hf_offload.state.registry import parked_of
from hf_offload.state.storages import moves
from hf_offload.storage.kept import Kept

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


def without_twins(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor once, by the first of its names: a format without tied weights has no place for the others."""
    seen = set()
    found = {}
    for name, tensor in weights.items():
        place = _place_of(tensor)
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        found[name] = tensor
    return found


def _place_of(tensor: Tensor) -> tuple[Any, ...]:
    if isinstance(tensor, torch.nn.Parameter) and parked_of(tensor) is not None:
        return (id(tensor),)  # its memory comes and goes, and would stay once its address is known
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def layout_of(weights: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Name -> type and shape. Raises :class:`~hf_offload.errors.SnapshotError` for what safetensors does not hold."""
    layout = {}
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


def fingerprint(layout: Mapping[str, list[Any]]) -> str:
    """By which two models with the same layout are told apart from others."""
    return hashlib.sha256(json.dumps(layout, sort_keys=True).encode()).hexdigest()


def weights_file(weights: Mapping[str, Tensor], layout: Mapping[str, list[Any]], kept: Kept | None = None) -> Write:
    """A file of safetensors (https://github.com/huggingface/safetensors#format), written tensor by tensor. What is ``kept``
    on a drive is left out.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (kind, shape) in layout.items():
        begin, end = end, end + weights[name].nbytes
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start, tensors = struct.pack("<Q", len(text)) + text, [weights[name] for name in layout]

    def write(file: Writable) -> None:
        file.write(start)
        for tensor in tensors:
            if kept is not None and kept.has(tensor):
                file.leave_out(kept.parts_of(tensor.untyped_storage()) or ())
                file.seek(tensor.nbytes, os.SEEK_CUR)
            elif tensor.numel():
                host = tensor.detach().to("cpu").contiguous()
                file.write(host.reshape(-1).view(torch.uint8).numpy().data)

    return write


def optimizer_state(optimizer: Any, kept: Kept | None) -> Any:
    """The state dict of an optimizer, to be written by :func:`archive`. With ``kept``, what is on drives stays there."""
    state = optimizer.state_dict()
    return state if kept is None else left_on_drives(state, kept)


def left_on_drives(content: Any, kept: Kept) -> Any:
    """``content``, with placeholders of ``kept`` for tensors whose drives have their bytes: those of now, whatever becomes of
    the tensors.
    """
    placeholders: dict[int, Tensor] = {}  # by tensor, which may be there more than once

    def left(tensor: Tensor) -> Tensor:
        if id(tensor) not in placeholders:
            placeholders[id(tensor)] = _placeholder(tensor, kept)
        return placeholders[id(tensor)]

    return tree_map_only(Tensor, left, content)


def _placeholder(tensor: Tensor, kept: Kept) -> Tensor:
    """One for ``tensor``, or itself."""
    if kept.refusal is not None or not moves(tensor):
        return tensor
    given = lent_of(tensor)
    parked = parked_of(tensor) if given is None else given.parked
    if parked is None or not parked.store.tier.may_keep:
        return tensor
    complete(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.nbytes != parked.nbytes or torch._debug_has_internal_overlap(tensor) != 0:
            return tensor
    try:
        ranges = parked.keep()
    except WriteLimitError:
        return tensor
    except (OSError, TierFullError) as error:
        kept.refusal = error
        return tensor
    if not ranges:
        return tensor
    changes = tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter)
    return kept.placeholder(tensor, tensor.shape, [ranges[0].slot], ranges, changes=changes)


def archive(content: Any, kept: Kept | None = None) -> Write:
    """A file as ``torch.save`` writes it, but for checksums of its parts, which take longer than the copy and are not asked
    for by ``torch.load``: the snapshot's record has one of the file. What is ``kept`` on a drive is left out.
    """

    def write(file: Writable) -> None:
        later = _FailsLater(file)
        # The writer asks for these methods, and is asked for its own.
        writer: Any = torch._C.PyTorchFileWriter(later, False, _ALIGNMENT)  # type: ignore[call-overload]
        archives = torch.serialization
        archives._save(content, _LeavesOut(writer, file, kept), archives.pickle, archives.DEFAULT_PROTOCOL, False)
        writer.write_end_of_file()
        if later.error is not None:
            raise later.error

    return write


class _FailsLater:
    """Writes to ``file`` for a writer of PyTorch, whose end would end the process after an error that it has seen."""

    def __init__(self, file: Writable):
        self.error: Exception | None = None
        self._file = file

    def write(self, data: Any) -> int:
        self._try(lambda: self._file.write(data))
        return memoryview(data).nbytes

    def seek(self, count: int, whence: int) -> None:
        self._try(lambda: self._file.seek(count, whence))

    def flush(self) -> None:
        self._try(self._file.flush)

    def _try(self, call: Callable[[], object]) -> None:
        if self.error is None:
            try:
                call()
            except Exception as error:
                self.error = error


class _LeavesOut:
    """Writes an archive's records, without the bytes of placeholders."""

    def __init__(self, writer: Any, file: Writable, kept: Kept | None):
        self._writer = writer
        self._file = file
        self._kept = kept

    def write_record(self, name: str, data: Any, nbytes: int) -> None:
        parts = None if self._kept is None else self._kept.parts_of(data)
        if parts is None:
            self._writer.write_record(name, data, nbytes)
        else:
            self._file.leave_out(parts)
            self._writer.write_record_metadata(name, nbytes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


def archived(content: Any) -> bytes:
    """The bytes of such a file, of something small as it is now."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def archive_now(content: Any) -> Write:
    """A file with these bytes."""
    return small_file(archived(content))


def small_file(content: bytes) -> Write:
    """A file with this content."""
    return Small(lambda: content)


def of_rank(name: str, ranks: Ranks) -> str:
    """The name of a file of which each rank has its own, as a Trainer gives it: ``rng_state_1.pth``."""
    stem, ending = name.rsplit(".", 1)
    return name if ranks.count == 1 else f"{stem}_{ranks.number}.{ending}"


def of_all_ranks(own: Mapping[str, bytes], ranks: Ranks) -> dict[str, Write]:
    """Small files of all ranks, so that the snapshot of one of them is a whole checkpoint. All ranks call it."""
    everyone = [*ranks.gather(dict(own)), own]  # those that all have under the same name are one's own
    return {name: small_file(content) for files in everyone for name, content in files.items()}


def tensors_in(content: Any) -> Iterator[Tensor]:
    """All tensors in nested dicts, lists and tuples."""
    if isinstance(content, Tensor):
        yield content
    elif isinstance(content, Mapping):
        for value in content.values():
            yield from tensors_in(value)
    elif isinstance(content, (list, tuple)):
        for value in content:
            yield from tensors_in(value)
