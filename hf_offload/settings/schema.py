"""Settings of offloading. Frozen and checked on construction; nothing here touches a device or a disk."""

import copy
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, ValidationInfo, model_validator

from hf_offload.settings.classes import Named, Scope, counted, described, explained_settings, forms
from hf_offload.settings.elementwise import RecomputeElementwiseConfig, read_recompute_elementwise
from hf_offload.settings.load import choose, refuse
from hf_offload.settings.memory_modes import MODES, NONE, memory_mode, mode_names, read_mode_settings
from hf_offload.settings.sampling import SampledLinearConfig, read_sampled_linear
from hf_offload.settings.values import Flag, Reader, Whole, folders, names, one_of, path_text, size

if TYPE_CHECKING:
    from hf_offload.methods.protocol import MemoryMode

TIERS = ("none", "ram", "ssd", "auto")
TIER_ALIASES = {"cpu": "ram", "disk": "ssd", "nvme": "ssd"}
VERIFY = ("off", "checksum")
ON_LIMIT = ("keep", "stop")
TILED = ("auto", "on", "off")
MOST_THREADS = 256
"""Per drive. More do not make a drive faster, and a process cannot start any number of them."""
MIN_BYTES = 256 << 10
MIN_BYTES_OF_ACCELERATORS = 2 << 20
"""Storing and loading a tensor takes its host some 80 us, in which a link of 25 GB/s moves this much: the host of an
accelerator, which it must keep busy, would spend longer on smaller tensors than the link does."""

_OF_MODES = (
    f"What is trained and what the optimizer keeps of it: {', '.join(MODES)}, or none for all weights and AdamW."
)

Directory = str | os.PathLike[str]


def _tiled_mlp(name: str, value: Any) -> str | tuple[str, ...]:
    if isinstance(value, bool):
        value = "on" if value else "off"
    found: str | tuple[str, ...] = names("module names", alone=TILED)(name, value)
    return found


def _mode(name: str, value: Any) -> str:
    choose(name, value, mode_names())
    return str(value)


def snapshots_held(config: "OffloadConfig") -> int:
    """How many snapshots are in memory at a time: the newest two, and one that may be on its way to a drive."""
    if config.snapshot_steps is None:
        return 0
    return 2 if config.snapshot_dir is None else 3


@described
@explained_settings(frozen=True, kw_only=True)
class OffloadConfig:
    """Settings of one offloaded run.

    Sizes are numbers of bytes or strings such as ``"20GiB"``; after construction they are ``int``. All wrong values are
    reported in one :class:`~hf_offload.errors.OffloadConfigError`; once there are none, all that exclude each other.
    """

    tier: Annotated[str, one_of(TIERS, TIER_ALIASES)] = "auto"
    """Where saved activations go: "auto" (only as much as {memory_budget} needs, wherever it costs least time), "ram"
    (pinned memory on an accelerator), "ssd" (files; with {ram_budget}, RAM first) or "none". "cpu" is accepted for
    ram; "disk" and "nvme" for ssd."""
    optimizer: Annotated[str | None, one_of(TIERS, TIER_ALIASES)] = None
    """Where the optimizer's state lives, and the gradients between backward and step: "ram" (pinned memory on an
    accelerator), "ssd" (files; with {ram_budget}, RAM first), "auto" (only if {memory_budget} needs it; with another
    {tier} than "auto", if weights, gradients and state would take more than half of it) or "none" (with the weights).
    Results keep their bits. Default: "auto" where {tier} is and one process trains, else "none"."""
    params: Annotated[str | None, one_of(TIERS, TIER_ALIASES)] = None
    """Where weights are while no operation uses them: "ram" (pinned memory on an accelerator), "ssd" (files; with
    {ram_budget}, RAM first), "auto" (only if {memory_budget} needs it; with another {tier} than "auto", if weights
    would take more than half of it) or "none" (in memory). As many stay as fit into half of {memory_budget}; without
    one, two blocks. Results keep their bits. Default: "auto" where {tier} is and one process trains, else "none"."""
    memory_budget: Annotated[int | str | None, size(at_least=1)] = None
    """With {tier}="auto": limit of device memory for everything, weights and optimizer state included; on a CPU, for
    tensors. Default: 90 % of what is available to this process, including what it already uses."""
    directory: Annotated[Directory | Sequence[Directory] | None, folders(), Scope.DRIVES] = None
    """One directory for files, or several to stripe over. Default: the system's temporary folder, named in the log;
    on an accelerator, {tier}="auto" writes no files unless a setting of drives is given."""
    ram_budget: Annotated[int | str | None, size()] = None
    """Most RAM to use. With {tier}="ssd", files are written once it is full. Default on an accelerator: 60 % of the
    RAM that is available, in equal parts for the machine's processes."""
    disk_budget: Annotated[int | str | None, size(), Scope.DRIVES] = None
    """Most disk space to occupy at any time, over all directories."""
    min_bytes: Annotated[int | str | None, size()] = None
    """Smaller tensors stay where they are. Default: 256 KiB on a CPU, 2 MiB on an accelerator."""
    keep_last_count: Annotated[Whole, counted("blocks", ge=0)] = 0
    """Number of the model's last blocks that keep their activations: backward needs those first."""
    read_ahead_bytes: Annotated[int | str | None, size()] = None
    """How far backward reads ahead. Default: six tensors of average size."""
    io_threads: Annotated[Whole | None, counted("threads", ge=1, le=MOST_THREADS), Scope.DRIVES] = None
    """Threads per drive for writing, and as many for reading. Default: 2 for writing and 4 for reading."""
    io_chunk_bytes: Annotated[int | str | None, size(at_least=4096), Scope.DRIVES] = None
    """Bytes that one call writes or reads at most: larger tensors are shared by the threads of {io_threads}. Rounded
    down to whole blocks of the drive. Default: 8 MiB."""
    ring_bytes: Annotated[int | str | None, size(at_least=1 << 20), Scope.DRIVES] = None
    """On an accelerator, the pinned memory through which tensors pass on their way to drives and back. Default: 512
    MiB."""
    verify: Annotated[str, one_of(VERIFY)] = "off"
    """"checksum" compares a CRC-32 of every buffer before the store and after the load; "off" does not."""
    max_disk_write_bytes: Annotated[int | str | None, size(), Scope.DRIVES] = None
    """Stop writing to disk after this many bytes in one run, to spare the drive."""
    on_disk_write_limit: Annotated[str, one_of(ON_LIMIT), Scope.DRIVES] = "keep"
    """What happens at {max_disk_write_bytes}: "keep" (activations stay in memory, or in the RAM tier if there is one)
    or "stop" (the run ends after the step: a Trainer saves, a loop of your own gets an error)."""
    max_step_write_bytes: Annotated[int | str | None, size()] = None
    """With {tier}="auto": most bytes that a planned step of one micro-batch writes to drives. Measured steps may
    write more. Default: no limit."""
    update_in_backward: Flag = False
    """With gradients and optimizer state on a tier: update each weight as soon as it has its gradient, which then never
    leaves memory. By setting it you promise that a step has one backward, and that nothing reads, changes, scales or
    clips gradients before the step."""
    drive_endurance_bytes: Annotated[int | str | None, size(at_least=1), Scope.DRIVES] = None
    """Bytes that the drive is rated to take in its lifetime (TBW), such as 600TB: the summary reports the share that
    the run has used."""
    tiled_loss: Annotated[str, one_of(TILED, on_off=True), Scope.MODEL] = "off"
    """Compute output head and loss a few tokens at a time, so that the logits never exist: "on", "auto" (where the
    model allows it) or "off". Losses and gradients change in their last bits, as with a larger batch."""
    tiled_mlp: Annotated[
        str | Sequence[str], Reader(_tiled_mlp, {"type": ["string", "array", "boolean"]}), Scope.MODEL
    ] = "off"
    """The same for modules that treat every token by itself: "on" (all of them), names of modules, "auto" (only where
    {memory_budget} needs it) or "off". Backward computes them once more."""
    tile_bytes: Annotated[int | str | None, size(at_least=1), Scope.MODEL] = None
    """Size of the logits of one tile. Default: a sixteenth of all logits, or a 64th of {memory_budget}."""
    sampled_linear: Annotated[
        float | str | Mapping[str, Any] | SampledLinearConfig | None,
        Reader(read_sampled_linear, {"type": ["number", "string", "object"]}, SampledLinearConfig),
        Scope.MODEL,
    ] = None
    """Estimate the weight gradients of linear layers from this part of their input: a ratio such as 0.3, or the
    settings of SampledLinearConfig (as a mapping or JSON). Gradients are then correct only on average."""
    recompute_elementwise: Annotated[
        str | Sequence[str] | RecomputeElementwiseConfig | None,
        Reader(read_recompute_elementwise, {"type": ["string", "array", "boolean"], "items": {"type": "string"}}),
        Scope.MODEL,
    ] = None
    """Results of elementwise operations to recompute in backward instead of saving them: "activations", "norms",
    "dropout" ("exact": these three, which change no bit), "derivative-8bit" (not exact) or "off". Default: with tier
    "auto", the plan decides about the exact ones; else off."""
    recompute_blocks: Annotated[str | Sequence[str] | None, names("names of classes"), Scope.MODEL] = None
    """With {tier}="auto": classes of modules that plans may recompute in backward as whole blocks, as they do with
    layers of transformers (GradientCheckpointingLayer). By naming a class you promise that its forward reads the same
    values when it runs a second time, and changes nothing outside of it."""
    memory_mode: Annotated[str, Reader(_mode, {"type": "string"}), Scope.MODEL, Field(description=_OF_MODES)] = NONE
    memory_mode_kwargs: Annotated[
        str | Mapping[str, Any] | None,
        Reader(lambda name, value: dict(read_mode_settings(value, name)), {"type": ["string", "object"]}),
        Scope.MODEL,
    ] = None
    """Settings of {memory_mode}, such as its rank, as a mapping or JSON."""

    snapshot_steps: Annotated[Whole | None, counted("steps", ge=1)] = None
    """Take a snapshot of the run every so many steps: a process of its own keeps it in memory, and the next start
    with resume_from_checkpoint=True (in loops, session.snapshots or accelerator.snapshots with resume=True) goes on
    from there. Takes twice the memory of weights and optimizer state (three times with {snapshot_dir}), of
    {ram_budget} if there is one, wherever weights and state are."""
    snapshot_dir: Annotated[Directory | None, path_text()] = None
    """Where snapshots are written, too, from memory and as checkpoints: the two newest stay."""
    snapshot_wait_s: Annotated[Whole, counted("seconds", ge=0)] = 3600
    """How long snapshots stay in memory after a training that did not end well."""
    snapshot_parity: Annotated[Whole, Field(ge=0, le=1)] = 0
    """With several processes, how many may lose their snapshot in memory: with 1, each also holds a part of the
    parity of the others', by which one that is lost is rebuilt. Adds to each snapshot its bytes, divided by the
    number of the other processes."""

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Self:
        refuse("offload settings", self._conflicts(info.context or str))
        return self

    def _conflicts(self, name: Named) -> Iterator[str]:
        """Settings that exclude each other, or need another one."""
        tier = name("tier")
        of_snapshots = [each for each in ("snapshot_dir", "snapshot_parity") if getattr(self, each)]
        if self.snapshot_steps is None and of_snapshots:
            yield (
                f"{name(of_snapshots[0])} is given, but no snapshots are taken: set {name('snapshot_steps')}, or leave it "
                "out."
            )
        if self.on_disk_write_limit == "stop" and self.max_disk_write_bytes is None:
            yield (
                f"{name('on_disk_write_limit')}='stop', but there is no limit: set {name('max_disk_write_bytes')}, or leave "
                "it out."
            )
        if self.tile_bytes is not None and not self.tiles:
            yield f"{name('tile_bytes')} is given, but nothing is tiled: set {name('tiled_loss')}='on', or leave it out."
        plans = "auto" in (self.tier, self.optimizer) or self.weights_place != "none"
        if self.memory_budget is not None and not plans:
            yield f"{name('memory_budget')} is given, but {tier}={self.tier!r} does not use it: set {tier}='auto'."
        if self.tier == "auto" and (self.keep_last_count or self.read_ahead_bytes is not None):
            yield (
                f"{tier}='auto' chooses what is kept and how far backward reads ahead: drop {name('keep_last_count')} and "
                f"{name('read_ahead_bytes')}, or set {tier}='ram' or 'ssd'."
            )
        if self.max_step_write_bytes is not None and self.tier != "auto":
            yield (
                f"{name('max_step_write_bytes')} is given, but {tier}={self.tier!r} plans nothing: set {tier}='auto', or "
                "leave it out."
            )
        if self.update_in_backward and self.state_place == "none":
            yield (
                f"{name('update_in_backward')} is given, but gradients and optimizer state stay in memory: set "
                f"{name('optimizer')}='ssd' or 'ram', or leave it out."
            )
        if self.recompute_blocks is not None and self.tier != "auto":
            yield (
                f"{name('recompute_blocks')} is given, but {tier}={self.tier!r} recomputes nothing: set {tier}='auto', or "
                "leave it out."
            )
        if self.tiled_mlp == "auto" and self.tier != "auto":
            yield (
                f"{name('tiled_mlp')}='auto' tiles where nothing else fits the memory budget, and {tier}={self.tier!r} has "
                f"none: set {tier}='auto', or {name('tiled_mlp')}='on'."
            )
        if self.memory_mode == NONE:
            self.mode()  # raises for settings of none
        given = [name(field) for field in self.drive_settings if self.tier == "ram" or field == "directory"]
        if self.tier in ("none", "ram") and given and not self._state_goes_to_files():
            yield f"{', '.join(given)} given, but {tier}={self.tier!r} writes no files: set {tier}='ssd', or leave it out."

    @property
    def tiles(self) -> bool:
        """Whether anything may be computed in pieces."""
        return self.tiled_loss != "off" or self.tiled_mlp != "off"

    @property
    def changes_a_run(self) -> bool:
        """Whether these settings change anything."""
        changes_step = self.tier != "none" or self.tiles or self.sampling is not None or self.elementwise is not None
        limits_files = self.disk_budget is not None or self.max_disk_write_bytes is not None  # those of a mode, too
        changes_state = self.memory_mode != NONE or self.parks_state
        return changes_step or limits_files or changes_state or self.snapshot_steps is not None

    @property
    def parks_state(self) -> bool:
        """Whether weights, or gradients and the optimizer's state, leave memory."""
        return {self.state_place, self.weights_place} != {"none"}

    @property
    def state_place(self) -> str:
        """``optimizer``, or its default with this ``tier``."""
        return self._by_default if self.optimizer is None else self.optimizer

    @property
    def weights_place(self) -> str:
        """``params``, or its default with this ``tier``."""
        return self._by_default if self.params is None else self.params

    @property
    def _by_default(self) -> str:
        return "auto" if self.tier == "auto" else "none"

    def mode(self) -> "MemoryMode | None":
        """The memory mode, if one is set. Loads its libraries.

        Raises :class:`~hf_offload.errors.OffloadConfigError` that lists all errors in its settings.
        """
        return memory_mode(self.memory_mode, self.memory_mode_kwargs)

    def without_mode(self) -> "OffloadConfig":
        """The same for a model that is prepared for its memory mode already."""
        return with_checked(self, memory_mode=NONE, memory_mode_kwargs=None)

    def _state_goes_to_files(self) -> bool:
        return bool({self.optimizer, self.params} & {"ssd", "auto"})

    @property
    def sampling(self) -> SampledLinearConfig | None:
        """How linear layers are sampled, if they are."""
        return self.sampled_linear  # type: ignore[return-value]  # reading made it one

    @property
    def elementwise(self) -> RecomputeElementwiseConfig | None:
        """Which elementwise operations are recomputed, if any are."""
        found: RecomputeElementwiseConfig | None = self.recompute_elementwise  # type: ignore[assignment]
        return found if found is not None and found.switches else None

    @property
    def plans_elementwise(self) -> bool:
        """Whether a plan may choose it for blocks: where nothing is said about it."""
        return self.recompute_elementwise is None

    def smallest_bytes(self, on_host: bool) -> int:
        """Bytes of the smallest tensor that is moved; ``on_host``, the model is in RAM itself."""
        return smallest_bytes(self.min_bytes, on_host)

    @property
    def drive_settings(self) -> list[str]:
        """The settings of drives that are given."""
        return [name for name in DRIVE_SETTINGS if getattr(self, name) != getattr(OffloadConfig, name)]

    @property
    def directories(self) -> tuple[Path, ...]:
        """The directories to stripe over; empty when none was named."""
        return self.directory or ()  # type: ignore[return-value]  # reading made it a tuple of paths


FIELDS = tuple(field.name for field in dataclasses.fields(OffloadConfig))
DRIVE_SETTINGS = tuple(name for name, form in forms(OffloadConfig).items() if form.scope is Scope.DRIVES)


def with_checked(config: OffloadConfig, **values: Any) -> OffloadConfig:
    """``config`` with other values, which were read before."""
    found = copy.copy(config)
    for name, value in values.items():
        object.__setattr__(found, name, value)
    return found


def smallest_bytes(asked: int | str | None, on_host: bool) -> int:
    """Bytes of the smallest tensor that is moved where ``min_bytes`` is ``asked``."""
    if asked is None:
        return MIN_BYTES if on_host else MIN_BYTES_OF_ACCELERATORS
    return int(asked)


def argument(field: str) -> str:
    """The training argument of a setting: ``argument("directory") == "offload_directory"``. Settings that change the model
    rather than move tensors have the same name in both places.
    """
    if field == "tier":
        return "offload"
    return field if forms(OffloadConfig)[field].scope is Scope.MODEL else f"offload_{field}"
