"""The section ``meta`` of a recipe: what it is, how it is launched, and what is predicted for which machine.

It changes nothing about a run, and layers named under ``base`` do not pass theirs on.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import Field, ValidationInfo, model_validator

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.classes import explained_settings, from_mapping, in_section, settings
from hf_offload.settings.recipe_files import find_recipe, read_yaml
from hf_offload.settings.shown import shown
from hf_offload.settings.values import Flag, Number, Reader, Text, Whole, items, path_text, section

META = "meta"
PREDICTED = "predicted"
PROGRAM = "hf-offload"


class _Section:
    @property
    def given(self) -> dict[str, Any]:
        """What is given, by field."""
        return {name: value for name, value in vars(self).items() if value is not None}


@explained_settings(frozen=True, kw_only=True)
class Machine(_Section):
    """A machine in words: the options of ``hf-offload plan`` that describe it."""

    gpu: Text | None = None
    """A GPU such as rtx4090, or the size of its memory, such as 24GiB."""
    tflops: Annotated[Number | None, Field(gt=0)] = None
    """What the GPU reaches in matrix multiplication in 16 bits."""
    memory_bandwidth: Text | None = None
    """Of the GPU's memory, such as 900GB/s."""
    pcie: Text | None = None
    """Bandwidth between GPU and RAM, such as 25GB/s."""
    ssd: Text | None = None
    """Bandwidth of the drive, such as 5GB/s, or 4GB/s,6GB/s for writing and reading."""
    ram: Text | None = None
    """RAM that activations may take, such as 64GB."""
    disk: Text | None = None
    """Disk space that activations may take, such as 500GB."""
    gpus: Annotated[Whole | None, Field(ge=1)] = None
    """How many such GPUs train the model. Default: 1."""
    link: Text | None = None
    """Bandwidth between two of them, in one direction, such as 300GB/s. Default: NVLink where the GPU has it, or PCIe."""

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Self:
        name = info.context or str
        if self.gpu is None and self.given:
            raise OffloadConfigError(f"{', '.join(map(name, self.given))} describe another machine: add {name('gpu')}.")
        return self


def _read_overrides(name: str, value: Any) -> tuple[str, ...]:
    found = tuple(items(value))
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) and "=" in one for one in found):
        raise OffloadConfigError(f"{name}={shown(value)} is not a list of overrides, such as [memory=null].")
    return found


@settings(frozen=True, kw_only=True)
class Launch:
    """How a recipe is trained on several GPUs.

    Args:
        config_file: For ``hf-offload launch``: the name of a file that comes with the package, such as ``ddp``, or a path.
        overrides: Changes of the recipe that several GPUs need.
        required: Whether one GPU is not enough.
    """

    config_file: Annotated[str, path_text()]
    overrides: Annotated[Sequence[str], Reader(_read_overrides, {"type": "array", "items": {"type": "string"}})] = ()
    required: Flag = False


@settings(frozen=True, kw_only=True)
class Predicted(_Section):
    """What is predicted for the recipe's machine, as text with units. Times are those of a micro-batch with the optimizer's
    step.

    Args:
        peak, budget: Most memory that is used, weights included, and most that may be.
        micro_batch: Time.
        baseline_peak, baseline_micro_batch: The same without offloading; no time where it does not fit.
        auto_micro_batch: Time with ``offload.tier=auto``, where the recipe has another tier.
        ram, drive: Where weights or state leave memory: what all that leaves takes in RAM and on drives.
        million_tokens: Where they do: hours for a million tokens, with a step for each micro-batch.
    """

    peak: Text | None = None
    budget: Text | None = None
    micro_batch: Text | None = None
    baseline_peak: Text | None = None
    baseline_micro_batch: Text | None = None
    auto_micro_batch: Text | None = None
    ram: Text | None = None
    drive: Text | None = None
    million_tokens: Text | None = None


@settings(frozen=True, kw_only=True)
class MetaRecipe:
    """The section itself.

    Args:
        summary: The recipe in a sentence.
        launch: How it is trained on several GPUs.
        machine: The machine it is meant for.
        predicted: What is predicted for that machine; written by ``python -m benchmarks predictions --write``.
    """

    summary: Text | None = None
    launch: Annotated[Launch | Mapping[str, Any] | None, section(Launch, "with config_file and overrides")] = None
    machine: Annotated[Machine | Mapping[str, Any] | None, section(Machine, "such as {gpu: rtx4090, ssd: 5GB/s}")] = (
        None
    )
    predicted: Annotated[Predicted | Mapping[str, Any] | None, section(Predicted, "such as {peak: 9.50 GiB}")] = None

    @property
    def target(self) -> Machine:
        """The machine that the recipe is meant for; without a GPU if it names none."""
        return self.machine if isinstance(self.machine, Machine) else Machine()

    @property
    def prediction(self) -> Predicted:
        """What is predicted; empty if nothing is."""
        return self.predicted if isinstance(self.predicted, Predicted) else Predicted()

    def command_lines(self, name: str) -> list[str]:
        """How the recipe ``name`` is trained, on one GPU and on several, and planned for its machine."""
        train = ["train", name]
        lines = [] if isinstance(self.launch, Launch) and self.launch.required else [[PROGRAM, *train]]
        if isinstance(self.launch, Launch):
            options = ["--config_file", self.launch.config_file, "-m", "hf_offload"]
            lines.append([PROGRAM, "launch", *options, *train, *self.launch.overrides])
        if self.target.gpu is not None:
            options = [part for field, value in self.target.given.items() for part in (_option(field), str(value))]
            lines.append([PROGRAM, "plan", name, *options])
        return list(map(shlex.join, lines))

    def header(self, name: str) -> str:
        """:meth:`command_lines` as the comment that the recipe's file begins with."""
        return "".join(f"# {line}\n" for line in self.command_lines(name))


def read_meta(name: str) -> MetaRecipe:
    """The section ``meta`` of a recipe, by name or file; nothing else of it is checked.

    Raises :class:`~hf_offload.errors.OffloadConfigError`.
    """
    content = read_yaml(find_recipe(name))
    meta = content.get(META) if isinstance(content, dict) else None
    return from_mapping(MetaRecipe, meta if isinstance(meta, dict) else {}, META, in_section(META))


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"
