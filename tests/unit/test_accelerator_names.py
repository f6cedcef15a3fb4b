"""What is CUDA's own in the source, each with its reason: everything else goes through ``torch.accelerator``."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import hf_offload

_PACKAGE = Path(hf_offload.__file__).parent
_REPOSITORY = _PACKAGE.parent

_LIMIT = "torch.accelerator has no limit to set, and what stands in for a smaller card is CUDA's share of memory"
_CUFILE = "GPUDirect Storage is NVIDIA's"
_REGISTER = "only CUDA's driver page-locks memory that is there already"
_WIDE_PRODUCT = "torch.mm with out_dtype, 16 bits multiplied into 32, is CUDA's"

REASONS = {
    ("bench/cell.py", "torch.cuda.get_device_properties"): _LIMIT,
    ("bench/cell.py", "torch.cuda.current_device"): _LIMIT,
    ("bench/cell.py", "torch.cuda.is_available"): _LIMIT,
    ("bench/cell.py", "torch.cuda.set_per_process_memory_fraction"): _LIMIT,
    ("benchmarks/loss.py", ".is_cuda"): "Liger's kernels are Triton's, which other accelerators need not have",
    ("engine/device.py", "'cuda'"): "before PyTorch 2.13, streams of no other kind say whether they are captured",
    ("engine/device.py", "torch.cuda.is_current_stream_capturing"): "torch.accelerator has no word for it",
    ("state/guard.py", "'is_cuda'"): "an attribute of tensors, which reads no value",
    ("plan/hardware.py", "'cuda'"): "the cards whose data sheets are known are NVIDIA's",
    ("planning/machine.py", "torch.cuda.is_available"): _CUFILE,
    ("planning/machine.py", "'cuda.bindings.cufile'"): _CUFILE,
    ("storage/buffers.py", "torch.cuda.is_available"): _REGISTER,
    ("storage/buffers.py", "torch.cuda.cudart"): _REGISTER,
    ("storage/buffers.py", "torch.cuda.current_device"): _REGISTER,
    ("storage/buffers.py", "torch.cuda.device"): _REGISTER,
    ("transforms/tiling/logits.py", ".is_cuda"): "an attribute that a model may ask of logits, as is_cpu",
    ("transforms/tiling/loss.py", ".is_cuda"): _WIDE_PRODUCT,
    ("transforms/tiling/sums.py", ".is_cuda"): _WIDE_PRODUCT,
}


def _dotted(node: ast.expr) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id if isinstance(node, ast.Name) else "", *reversed(parts)])


def mentions(tree: ast.AST) -> Iterator[str]:
    """Each name of CUDA's in the code: ``torch.cuda.this``, ``.is_cuda``, and strings that are such a name or a device's."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Attribute) and _dotted(node).startswith("torch.cuda"):
            yield _dotted(node)
            continue  # what it is an attribute of is the same mention
        if isinstance(node, ast.Attribute) and node.attr == "is_cuda":
            yield ".is_cuda"
        elif isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name.startswith("torch.cuda"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [f"{node.module}.{one.name}" for one in node.names]
            yield from (name for name in names if name.startswith("torch.cuda"))
        elif isinstance(node, ast.Constant) and re.fullmatch(r"(torch\.)?cuda([.:]\S*)?|is_cuda", str(node.value)):
            yield repr(node.value)
        yield from mentions(node)


def in_package() -> set[tuple[str, str]]:
    """Every file and what it mentions."""
    return {
        (path.relative_to(folder).as_posix(), mention)
        for folder, part in ((_PACKAGE, _PACKAGE), (_REPOSITORY, _REPOSITORY / "benchmarks"))
        for path in part.rglob("*.py")
        for mention in mentions(ast.parse(path.read_text(encoding="utf-8")))
    }


def test_what_is_cudas_own_has_a_reason():
    found = in_package()
    assert found - REASONS.keys() == set(), "use torch.accelerator, or say above why it cannot be"
    assert REASONS.keys() - found == set(), "these are gone: take their reasons away, too"


def test_every_way_to_name_cuda_is_seen():
    source = """
import torch.cuda.nvtx
from torch import cuda
from torch.cuda import Stream
torch.cuda.synchronize(device.index)
tensor.data.is_cuda
torch.device("cuda:1"); "cuda"; getattr(tensor, "is_cuda")
"CUDA is what this sentence is about"; cuda.synchronize
"""
    assert list(mentions(ast.parse(source))) == [
        "torch.cuda.nvtx", "torch.cuda", "torch.cuda.Stream", "torch.cuda.synchronize", ".is_cuda", "'cuda:1'", "'cuda'",
        "'is_cuda'",
    ]  # fmt: skip
