"""The machine as a plan sees it: a few figures, each with its source; and the machines that a user describes in words.

A description is read without torch, which takes seconds to import.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hf_offload.errors import OffloadConfigError
from hf_offload.plan import rules
from hf_offload.plan.cards import CARDS, Card, card_name
from hf_offload.plan.timeline import Channel
from hf_offload.settings.load import choose, collect_errors
from hf_offload.settings.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16")

BUDGET_SHARE = 0.9
"""Of the device's free memory: the rest is left to the allocator's slack and to kernels' workspaces."""

# Of a card's published rates, training reaches about these shares.
_MATMUL_SHARE = 0.5
_MEMORY_SHARE = 0.75
_TIMES_A_LINK = 4
"""An elementwise operation runs again sooner than its result comes back where memory is so much faster than any link: it
reads and writes a few operands.
"""
_ANY_RATE = 1e14
_DEFAULT_SSD = 3e9
_DEFAULT_PCIE = 20e9


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A number and its source: ``"measured"``, ``"given"``, ``"default"``, or what it was taken from, in words."""

    value: float
    source: str


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The figures that a plan needs.

    Attributes:
        name: For people.
        device: Its type, such as ``"cpu"`` or ``"cuda"``.
        memory_bytes: Memory of the device that training may use.
        flops_per_s: Matrix multiplication, per dtype.
        memory_bytes_per_s: Reading and writing in the device's memory, for everything else.
        store_bytes_per_s, load_bytes_per_s: Per tier.
        room_bytes: What each tier has room for.
        both_bytes_per_s: Per tier, storing and loading at once: the sum of the two. Where it is missing, neither
            direction slows the other.
        ring_bytes: The pinned memory between an accelerator and its drives.
        busy_s: Kind of what moves -> seconds for which a byte of it keeps a host busy that computes itself, each way.
        drive_is_named: Whether its drive is one that was asked for, and not just any.
        gpus: How many such devices it has, each of which trains.
        peer_bytes_per_s: Between two of them, in one direction; None for a single one.
    """

    name: str
    device: str
    memory_bytes: Measurement
    flops_per_s: Mapping[str, Measurement]
    memory_bytes_per_s: Measurement
    store_bytes_per_s: Mapping[str, Measurement]
    load_bytes_per_s: Mapping[str, Measurement]
    room_bytes: Mapping[str, Measurement]
    both_bytes_per_s: Mapping[str, Measurement] = dataclasses.field(default_factory=dict)
    ring_bytes: int = rules.RING_BYTES
    busy_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    drive_is_named: bool = True
    gpus: int = 1
    peer_bytes_per_s: Measurement | None = None

    def seconds(self, flops: int, moved_bytes: int, dtype: "torch.dtype") -> float:
        """How long an operation takes that is bound by arithmetic or by memory, whichever is longer."""
        name = str(dtype).removeprefix("torch.")
        rate = self.flops_per_s.get(name) or self.flops_per_s["float32"]
        return max(flops / rate.value, moved_bytes / self.memory_bytes_per_s.value)

    def shared_by(self, processes: int) -> "Hardware":
        """What is left for one of several processes on the machine: its part of drives, RAM, and of a CPU's memory."""

        def part(figures: Mapping[str, Measurement], names: Sequence[str]) -> dict[str, Measurement]:
            return {
                name: dataclasses.replace(figure, value=figure.value / processes) if name in names else figure
                for name, figure in figures.items()
            }

        memory = self.memory_bytes
        if self.device == "cpu":
            memory = dataclasses.replace(memory, value=memory.value / processes)
        return dataclasses.replace(
            self,
            memory_bytes=memory,
            store_bytes_per_s=part(self.store_bytes_per_s, ["ssd"]),
            load_bytes_per_s=part(self.load_bytes_per_s, ["ssd"]),
            both_bytes_per_s=part(self.both_bytes_per_s, ["ssd"]),
            room_bytes=part(self.room_bytes, ["ram", "ssd"]),
        )

    def without(self, tier: str, nbytes: int) -> "Hardware":
        """What is left where others hold that much of a tier."""
        room = dict(self.room_bytes)
        if nbytes and tier in room:
            room[tier] = dataclasses.replace(room[tier], value=max(0, room[tier].value - nbytes))
        return dataclasses.replace(self, room_bytes=room)

    def without_drive(self) -> "Hardware":
        """The same machine, on which nothing may go to a drive."""

        def others(figures: Mapping[str, Measurement]) -> dict[str, Measurement]:
            return {tier: figure for tier, figure in figures.items() if tier != "ssd"}

        return dataclasses.replace(
            self,
            store_bytes_per_s=others(self.store_bytes_per_s),
            load_bytes_per_s=others(self.load_bytes_per_s),
            both_bytes_per_s=others(self.both_bytes_per_s),
            room_bytes=others(self.room_bytes),
        )

    @property
    def channels(self) -> dict[str, Channel]:
        """The tiers as the simulation takes them."""
        channels = {}
        link = self.store_bytes_per_s.get("ram") if self.device != "cpu" else None
        for tier, store in self.store_bytes_per_s.items():
            load, both = self.load_bytes_per_s[tier], self.both_bytes_per_s.get(tier)
            channels[tier] = Channel(
                store.value,
                load.value,
                math.inf if both is None else both.value,
                None if link is None else link.value,
                0 if link is None or tier == "ram" else self.ring_bytes,
                self.busy_s,
            )
        return channels

    @property
    def repeats_elementwise(self) -> bool:
        """Whether a plan that has to save memory lets elementwise operations run again, whatever else it does."""
        rates = [one.value for one in (*self.store_bytes_per_s.values(), *self.load_bytes_per_s.values())]
        return self.memory_bytes_per_s.value >= _TIMES_A_LINK * max(rates, default=0.0)

    @property
    def room(self) -> dict[str, int]:
        """Room per tier."""
        return {tier: int(figure.value) for tier, figure in self.room_bytes.items()}


def describe_hardware(
    gpu: str,
    *,
    tflops: float | None = None,
    memory_bandwidth: str | None = None,
    pcie: str | None = None,
    ssd: str | None = None,
    ram: str | None = None,
    disk: str | None = None,
    gpus: int = 1,
    link: str | None = None,
    needs_times: bool = True,
) -> Hardware:
    """A CUDA machine in words: ``gpu`` is a card's name or a size of memory; the rest replaces the card's figures.

    ``pcie`` and ``ssd`` are bandwidths such as ``"25GB/s"``; two with a slash-free comma, ``"5GB/s,7GB/s"``, are for storing
    and loading. ``tflops`` is what matrix multiplication in 16 bits really reaches. ``link`` is the bandwidth between two of
    its ``gpus``, in one direction. Without ``needs_times``, a size of memory is enough.

    Raises :class:`~hf_offload.errors.OffloadConfigError` that lists all errors.
    """
    with collect_errors("machine description") as check:
        card, memory = None, None
        with check:
            card, memory = _card(gpu)
        with check:
            if tflops is not None and not 0.01 <= tflops <= 100_000:
                raise OffloadConfigError(f"tflops={tflops:g} is not a rate of one device: a GPU reaches 10 to 1000.")
        rates: dict[str, tuple[float, float] | None] = {}
        for name, value in (("pcie", pcie), ("ssd", ssd), ("memory_bandwidth", memory_bandwidth), ("link", link)):
            with check:
                rates[name] = None if value is None else _bandwidths(name, value)
        sizes: dict[str, int | None] = {}
        for name, value in (("ram", ram), ("disk", disk)):
            with check:
                sizes[name] = None if value is None else parse_bytes(value, name)
        with check:
            if card is None and memory is not None and tflops is None and needs_times:
                raise OffloadConfigError(
                    f"gpu={gpu!r} is a size and tells nothing about speed: add --tflops, or name a GPU ({', '.join(CARDS)})."
                )
    assert memory is not None
    if tflops is not None:
        half, single = Measurement(tflops * 1e12, "given"), Measurement(tflops * 0.5e12, "half of the given rate")
    elif card is None:
        half = single = Measurement(_ANY_RATE, "not known")
    else:
        half = _share(_MATMUL_SHARE, card.half_tflops, 1e12, "TFLOP/s")
        single = _share(_MATMUL_SHARE, card.single_tflops, 1e12, "TFLOP/s")
    if rates["memory_bandwidth"] is not None:
        bandwidth = Measurement(rates["memory_bandwidth"][0], "given")
    elif card is not None:
        bandwidth = _share(_MEMORY_SHARE, card.memory_gb_per_s, 1e9, "GB/s")
    else:
        # Cards of one generation have about this many FLOPs per byte.
        bandwidth = Measurement(half.value / 100, "default")
    pcie_rates = rates["pcie"]
    if pcie_rates is not None:
        pcie_figures = Measurement(pcie_rates[0], "given"), Measurement(pcie_rates[1], "given")
    elif card is not None:
        pcie_figures = (_share(_MEMORY_SHARE, card.link_gb_per_s, 1e9, "GB/s"),) * 2
    else:
        pcie_figures = (Measurement(_DEFAULT_PCIE, "default"),) * 2
    link_rates = rates["link"]
    if link_rates is not None:
        peer = Measurement(min(link_rates), "given")
    elif card is not None and card.peer_gb_per_s is not None:
        peer = _share(_MEMORY_SHARE, card.peer_gb_per_s, 1e9, "GB/s")
    else:
        peer = Measurement(min(one.value for one in pcie_figures), "over PCIe")
    drive = rates["ssd"]
    ssd_figures = (
        (Measurement(_DEFAULT_SSD, "default"),) * 2 if drive is None else tuple(Measurement(r, "given") for r in drive)
    )
    # Bytes on their way to the drive go over the link first.
    ssd_figures = tuple(min(a, b, key=lambda f: f.value) for a, b in zip(ssd_figures, pcie_figures, strict=True))
    room = {
        "ram": Measurement(64e9, "default") if sizes["ram"] is None else Measurement(sizes["ram"], "given"),
        "ssd": Measurement(1e12, "default") if sizes["disk"] is None else Measurement(sizes["disk"], "given"),
    }
    return Hardware(
        name=("" if gpus == 1 else f"{gpus} x ")
        + (gpu if card is not None else f"a card with {format_bytes(memory.value)}"),
        device="cuda",
        memory_bytes=memory,
        flops_per_s={"float32": single, "bfloat16": half, "float16": half},
        memory_bytes_per_s=bandwidth,
        store_bytes_per_s={"ram": pcie_figures[0], "ssd": ssd_figures[0]},
        load_bytes_per_s={"ram": pcie_figures[1], "ssd": ssd_figures[1]},
        room_bytes=room,
        both_bytes_per_s={
            # A link carries both ways at once; a drive that is busy both ways moves about as much as one way.
            "ram": Measurement(pcie_figures[0].value + pcie_figures[1].value, "default"),
            "ssd": Measurement(max(ssd_figures[0].value, ssd_figures[1].value), "default"),
        },
        drive_is_named=ssd is not None or disk is not None,
        gpus=gpus,
        peer_bytes_per_s=peer if gpus > 1 else None,
    )


def _share(share: float, rate: float, unit: float, name: str) -> Measurement:
    """The part of a data sheet's rate, in ``unit``, that training reaches."""
    return Measurement(share * rate * unit, f"{share * 100:.0f} % of the data sheet's {rate:g} {name}")


def _card(gpu: str) -> tuple[Card | None, Measurement]:
    name = card_name(gpu)
    if name is not None:
        return CARDS[name], Measurement(CARDS[name].memory_bytes, "its driver")
    key = gpu.strip().lower()
    if re.match(r"[0-9.]", key):
        size = parse_bytes(gpu, "gpu")
        if not 1 << 30 <= size <= 1 << 40:
            raise OffloadConfigError(f"gpu={gpu!r} is not the memory of a GPU: give something like 24GiB.")
        return None, Measurement(size, "given")
    choose("gpu", key, CARDS)
    raise AssertionError


def _bandwidths(name: str, text: str) -> tuple[float, float]:
    parts = [part.strip() for part in text.split(",")]
    if not 1 <= len(parts) <= 2:
        raise OffloadConfigError(f"{name}={text!r}: give one bandwidth, or two for storing and loading: '5GB/s,7GB/s'.")
    rates = []
    for part in parts:
        size = parse_bytes(re.sub(r"\s*/\s*s$", "", part), name)
        if not 1 << 20 <= size <= 1 << 45:
            raise OffloadConfigError(f"{name}={part!r} is not a bandwidth of a machine: give something like 5GB/s.")
        rates.append(float(size))
    return rates[0], rates[-1]
