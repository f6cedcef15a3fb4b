"""What a training run leaves behind for others to read and compare."""

import dataclasses
import hashlib
import json
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hf_offload.planning.machine import device_name
from hf_offload.settings.text_files import write_whole
from hf_offload.tensors import parameter_count
from hf_offload.versions import find_versions

TRAINER_BATCH = 8
"""The Trainer's default of ``per_device_train_batch_size``."""
WARMUP_STEPS = 2
"""Steps left out of the median time: kernels are chosen, memory is mapped and read-ahead is learned in them."""


@dataclasses.dataclass(kw_only=True)
class TrainingReport:
    """One run. Losses are exact: ``losses_hex`` holds ``float.hex`` of each step's loss, in the order of steps."""

    recipe: str
    settings: dict[str, Any]
    completed: bool
    steps: int
    losses: list[float]
    losses_hex: list[str]
    parameters_sha256: str
    parameter_count: int
    step_times_s: list[float]
    memory: dict[str, Any] | None
    """Of :class:`~hf_offload.training.memory.MemoryMeter`; ``None`` when the run was not measured."""
    offload: dict[str, Any] | None
    """Counters of the offloading session in total; ``None`` when nothing was offloaded."""
    allocator: str
    machine: dict[str, Any]
    versions: dict[str, str]
    forecast: dict[str, Any] | None = None
    """With a memory budget: what the plan was predicted to do, and what it did."""
    metrics: dict[str, float] | None = None
    """Of the evaluation at the end, on ``data.validation``: ``eval_loss``, ``eval_accuracy``, ...; ``None`` without it."""

    @property
    def median_step_s(self) -> float | None:
        """Median time of a step after the warm-up; ``None`` when no step was timed."""
        return median_after_warmup(self.step_times_s)

    @property
    def peak_over_baseline_bytes(self) -> int | None:
        """Most memory used above the level before the first step."""
        return None if self.memory is None else self.memory["peak_bytes"] - self.memory["baseline_bytes"]

    @property
    def peak_in_use_over_baseline_bytes(self) -> int | None:
        """The same for bytes in use; ``None`` where the allocator does not tell."""
        if self.memory is None or self.memory.get("peak_in_use_bytes") is None:
            return None
        return self.memory["peak_in_use_bytes"] - self.memory["baseline_in_use_bytes"]

    def write(self, path: Path) -> None:
        """Write the report as JSON; the file is complete or not there."""
        write_whole(path, json.dumps(dataclasses.asdict(self), indent=1, default=str) + "\n")

    @classmethod
    def read(cls, path: Path) -> "TrainingReport":
        """Read what :meth:`write` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def median_after_warmup(times_s: Sequence[float], warmup_steps: int = WARMUP_STEPS) -> float | None:
    """Median of the times after the first ``warmup_steps``; of all of them when there are no others."""
    return statistics.median(times_s[warmup_steps:] or times_s) if times_s else None


def parameter_digest(model: torch.nn.Module) -> str:
    """SHA-256 over names and bytes of all parameters, in the order of names: equal only if every bit is."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
        flat = parameter.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def describe_model(model: torch.nn.Module) -> str:
    """What a reader has to know of ``model`` to compare runs of it; layers of a decoder of its own after a plus."""
    config: Any = model.config
    decoder_layers = next(
        (n for key in ("num_decoder_layers", "decoder_layers") if (n := getattr(config, key, None))), 0
    )
    rates = {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}
    # Attention that drops inside its kernel has no module for it.
    rates |= {
        rate for module in model.modules() if isinstance(rate := getattr(module, "attention_dropout", None), float)
    }
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]  # every model of transformers has it
    layers = f"{config.num_hidden_layers}{f'+{decoder_layers}' if config.is_encoder_decoder else ''}"
    dropout = "/".join(f"{rate:g}" for rate in sorted(rates)) or "0"
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return (
        f"{config.model_type}, {layers} layers of width {config.hidden_size}, vocabulary {embeddings.weight.shape[0]}, "
        f"dropout {dropout}, {config._attn_implementation} attention, {dtype}, "
        f"{parameter_count(model) / 1e6:.1f} M parameters"
    )


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Processor, cores and threads, memory, and ``device``, which trained: what decides how fast a run is."""
    import psutil

    return {
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "ram_bytes": psutil.virtual_memory().total,
        "device": device_name(device),
    }


def describe_versions() -> dict[str, str]:
    """Versions of everything that takes part in the numbers."""
    packages = ("hf-offload", "torch", "transformers", "accelerate", "datasets", "tokenizers", "trl", "numpy")
    return {package: version or "not installed" for package, version in find_versions(packages).items()}
