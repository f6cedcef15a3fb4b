"""The machine as a plan sees it."""

import dataclasses
import mmap

import pytest
import torch

from hf_offload import OffloadConfig
from hf_offload.errors import OffloadConfigError
from hf_offload.plan import rules
from hf_offload.plan.hardware import CARDS, describe_hardware
from hf_offload.planning import hardware
from hf_offload.planning.hardware import measure_hardware
from hf_offload.planning.machine import probe_machine
from hf_offload.planning.ranks import hardware_of_all
from hf_offload.ranks import Ranks


@pytest.mark.parametrize(
    ("card", "mib"),
    [
        ("rtx3090", 24576),
        ("NVIDIA GeForce RTX 4090", 24564),
        ("NVIDIA A100-PCIE-40GB", 40960),
        ("NVIDIA A100 80GB PCIe", 81920),
        ("NVIDIA H100 80GB HBM3", 81559),
        ("NVIDIA RTX 6000 Ada Generation", 49140),
        ("Tesla V100-SXM2-32GB", 32768),
        ("AMD Instinct MI300X", 196592),
        ("AMD Radeon RX 7900 XTX", 24560),
    ],
)
def test_a_card_has_the_memory_that_its_driver_reports_under_the_name_that_it_prints(card, mib):
    found = describe_hardware(card).memory_bytes
    assert (found.value, found.source) == (mib << 20, "its driver")


def test_where_no_time_is_asked_for_the_size_of_the_memory_is_enough():
    found = describe_hardware("24GiB", needs_times=False)
    assert found.memory_bytes.value == 24 << 30
    assert found.flops_per_s["bfloat16"].source == "not known"


@pytest.mark.parametrize(
    ("card", "link", "rate", "source"),
    [
        ("a100-80gb", None, 225e9, "75 % of the data sheet's 300 GB/s"),
        ("rtx4090", None, 24e9, "over PCIe"),
        ("rtx4090", "10GB/s", 10e9, "given"),
    ],
)
def test_several_gpus_are_linked(card, link, rate, source):
    found = describe_hardware(card, gpus=2, link=link)
    assert (found.peer_bytes_per_s.value, found.peer_bytes_per_s.source) == (rate, source)
    assert found.name == f"2 x {card}"
    assert describe_hardware(card, link=link).peer_bytes_per_s is None


def test_a_card_brings_its_figures():
    found = describe_hardware("RTX4090", ssd="4GB/s,6GB/s", ram="64GB")
    assert (found.store_bytes_per_s["ssd"].value, found.load_bytes_per_s["ssd"].value) == (4e9, 6e9)
    assert found.room == {"ram": 64 * 10**9, "ssd": 10**12}
    assert found.room_bytes["ram"].source == "given"
    assert found.room_bytes["ssd"].source == "default"


def test_a_rate_says_which_share_of_the_data_sheet_it_is():
    found = describe_hardware("rtx4090")
    rates = found.flops_per_s["bfloat16"], found.memory_bytes_per_s, found.store_bytes_per_s["ram"]
    assert [(one.value, one.source) for one in rates] == [
        (82.5e12, "50 % of the data sheet's 165 TFLOP/s"),
        (756e9, "75 % of the data sheet's 1008 GB/s"),
        (24e9, "75 % of the data sheet's 32 GB/s"),
    ]


def test_what_is_given_replaces_the_card():
    found = describe_hardware("rtx4090", tflops=80, pcie="12GB/s", memory_bandwidth="500GB/s")
    assert found.flops_per_s["bfloat16"].value == 80e12
    assert found.flops_per_s["float32"].source == "half of the given rate"
    assert found.store_bytes_per_s["ram"].value == 12e9
    assert found.memory_bytes_per_s.value == 500e9


def test_a_drive_is_no_faster_than_the_link_to_it():
    found = describe_hardware("24GB", tflops=80, pcie="4GB/s", ssd="10GB/s")
    assert found.store_bytes_per_s["ssd"].value == 4e9


def test_an_operation_takes_as_long_as_its_bottleneck():
    found = describe_hardware("24GB", tflops=100, memory_bandwidth="1000GB/s")
    assert found.seconds(10**14, 1, torch.bfloat16) == pytest.approx(1.0)
    assert found.seconds(1, 10**12, torch.bfloat16) == pytest.approx(1.0)
    assert found.seconds(10**14, 1, torch.float32) == pytest.approx(2.0)


@pytest.mark.parametrize("card", CARDS)
def test_every_card_is_plausible(card):
    found = describe_hardware(card)
    assert 10e9 < found.memory_bytes.value < 210e9
    assert 1e12 < found.flops_per_s["bfloat16"].value < 1.2e15
    assert found.store_bytes_per_s["ram"].value < found.memory_bytes_per_s.value
    assert found.flops_per_s["float32"].value <= found.flops_per_s["bfloat16"].value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpu": "rtx5090ti"}, "gpu='rtx5090ti' is unknown"),
        ({"gpu": "h100"}, "Did you mean 'h100-80gb'"),
        ({"gpu": "24GB"}, "tells nothing about speed"),
        ({"gpu": "24"}, "is not the memory of a GPU"),
        ({"gpu": "24GB", "tflops": 0.0}, "tflops=0 is not a rate"),
        ({"gpu": "24GB", "tflops": 1e9}, "is not a rate"),
        ({"gpu": "l4", "pcie": "25"}, "pcie='25' is not a bandwidth"),
        ({"gpu": "l4", "ssd": "fast"}, "ssd='fast' is not a size"),
        ({"gpu": "l4", "ssd": "1GB/s,2GB/s,3GB/s"}, "give one bandwidth, or two"),
        ({"gpu": "l4", "ram": "-1GB"}, "ram='-1GB' is negative"),
    ],
)
def test_absurd_descriptions_are_refused(arguments, message):
    with pytest.raises(OffloadConfigError, match=message):
        describe_hardware(**arguments)


def test_all_mistakes_are_reported_at_once():
    with pytest.raises(OffloadConfigError) as refused:
        describe_hardware("24GB", tflops=-1, pcie="25", ram="much")
    assert len(refused.value.problems) == 3


@pytest.fixture
def quick(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(hardware, "_MATMUL_SIZE", 64)
    monkeypatch.setattr(hardware, "_COPY_BYTES", 1 << 16)
    monkeypatch.setitem(probe_machine.__kwdefaults__, "sample_bytes", 1 << 20)
    return tmp_path


def test_this_machine_is_measured_once(quick, monkeypatch):
    first = measure_hardware([quick])
    assert {figure.source for figure in first.flops_per_s.values()} == {"measured"}
    assert first.store_bytes_per_s["ssd"].value > 0
    assert first.both_bytes_per_s["ssd"].source == "measured"
    assert 0 < first.channels["ssd"].shared <= 1
    kept = list((quick / "cache" / "hf_offload").glob("machine-*.json"))
    assert len(kept) == 2, "of the device, and of the drive"
    measured = []

    def counting(kind):
        measure = getattr(hardware, f"_measure_{kind}")
        monkeypatch.setattr(hardware, f"_measure_{kind}", lambda *about: measured.append(kind) or measure(*about))

    counting("device")
    counting("drives")
    again = measure_hardware([quick])
    assert not measured
    assert again.flops_per_s == first.flops_per_s
    measure_hardware([quick], fresh=True)
    assert measured == ["device", "drives"]
    (quick / "other").mkdir()
    other = measure_hardware([quick / "other"])
    assert measured == ["device", "drives", "drives"], "the device is the same for another directory"
    assert other.flops_per_s.keys() == first.flops_per_s.keys()
    assert measure_hardware([]).store_bytes_per_s == {}
    assert len(measured) == 3


def test_a_slow_rate_is_not_measured_seven_times(monkeypatch):
    monkeypatch.setattr(hardware, "_ENOUGH_S", 1e-12)
    done = []
    hardware._median_s(lambda: done.append(1), torch.device("cpu"))
    assert len(done) == 1


def test_measuring_draws_no_random_numbers_of_the_training(quick):
    before = torch.get_rng_state()
    measure_hardware([quick], fresh=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_spoilt_cache_is_measured_again(quick):
    measure_hardware([quick])
    for kept in (quick / "cache" / "hf_offload").glob("machine-*.json"):
        kept.write_text('{"memory": -1.0}')
    assert measure_hardware([quick]).memory_bytes_per_s.value > 0


def test_what_the_process_has_already_is_part_of_what_it_may_use():
    """Else weights that are in RAM when training begins would be counted twice."""

    def own_bytes():
        facts = probe_machine([], sample_bytes=0).device
        return facts.usable_bytes - facts.free_bytes

    before = own_bytes()
    # No memory that the process has freed before, and kept.
    weights = mmap.mmap(-1, 256 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    weights.write(b"1" * len(weights))
    assert own_bytes() - before >= 0.9 * len(weights)


def test_a_directory_that_is_not_there_is_refused(quick):
    with pytest.raises(OffloadConfigError):
        measure_hardware([quick / "nowhere"])


def test_a_drive_is_measured_as_the_run_will_use_it(quick, monkeypatch):
    used = []
    monkeypatch.setattr(
        hardware, "probe_machine", lambda *args, **kwargs: used.append(kwargs) or probe_machine(*args, **kwargs)
    )
    for options in ({"checksum": True}, {"checksum": False}, {"checksum": True}):
        measure_hardware([quick], disk_options=options)
    measured = [about["disk_options"] for about in used if "disk_options" in about]
    assert measured == [{"checksum": True}, {"checksum": False}], "once for each way, and then kept"


def test_only_from_an_accelerator_do_bytes_pass_a_link_and_only_to_a_drive_a_ring():
    card = describe_hardware("rtx4090", ssd="5GB/s")
    ram, ssd = card.channels["ram"], card.channels["ssd"]
    assert ram.link_bytes_per_s == ssd.link_bytes_per_s == ram.store_bytes_per_s
    assert (ram.ring_bytes, ssd.ring_bytes) == (0, rules.RING_BYTES)
    assert dataclasses.replace(card, ring_bytes=1 << 20).channels["ssd"].ring_bytes == 1 << 20
    host = dataclasses.replace(card, device="cpu").channels["ssd"]
    assert (host.link_bytes_per_s, host.ring_bytes) == (None, 0)


def test_a_plan_counts_with_the_ring_that_was_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr("hf_offload.planning.ranks.measure_hardware", lambda *_, **__: describe_hardware("rtx4090"))
    config = OffloadConfig(tier="auto", directory=tmp_path, ring_bytes="2MiB")
    assert hardware_of_all(config, Ranks(), torch.device("cpu")).channels["ssd"].ring_bytes == 2 << 20
