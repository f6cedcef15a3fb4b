import gc
import json

import pytest
import torch
from typer.testing import CliRunner

from hf_offload.bench import overhead
from hf_offload.bench.overhead import Quartiles, measure_overhead
from hf_offload.cli.main import app
from hf_offload.engine.hooks import Engine
from hf_offload.engine.record import PackedView
from hf_offload.state.saved import KeptTensor

KINDS = ["hooks alone", "kept", "weight", "offloaded", "deduplicated"]


def run(*words):
    return CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["bench", "overhead", "--tensors", "5", "--repetitions", "3", *words]
    )


def test_json_is_pure_and_complete():
    result = run("--json")
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    assert (facts["tensors"], facts["repetitions"]) == (5, 3)
    assert [cost["name"] for cost in facts["costs"]] == KINDS
    for cost in facts["costs"]:
        for part in ("pack", "unpack_and_free", "total"):
            assert cost[part]["low_us"] <= cost[part]["median_us"] <= cost[part]["high_us"]
            if cost["name"] != "hooks alone":  # a difference of two measurements
                assert cost[part]["low_us"] > 0


def test_the_table_shows_every_kind():
    result = run()
    assert result.exit_code == 0
    for kind in KINDS:
        assert f"\n  {kind} " in result.stdout
    assert "3 repetitions of 5 tensors" in result.stdout


def test_a_figure_is_the_median_and_the_quartiles_around_it():
    assert Quartiles.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Quartiles(3.0, 2.0, 4.0)


@pytest.mark.parametrize(
    ("measure", "handle", "records"),
    [
        (overhead._kept, KeptTensor, 0),
        (overhead._weight_view, KeptTensor, 0),
        (overhead._offloaded, PackedView, 4),
        (overhead._deduplicated, PackedView, 4),
    ],
)
def test_every_kind_goes_the_way_it_is_named_after(monkeypatch, measure, handle, records):
    packed, unpacked, new = [], [], []
    pack, unpack, new_record = Engine.pack, Engine.unpack, Engine._new_record
    monkeypatch.setattr(Engine, "pack", lambda self, t: packed.append(self) or _kind(handle, pack(self, t)))
    monkeypatch.setattr(Engine, "unpack", lambda self, h: unpacked.append(unpack(self, h).shape))
    monkeypatch.setattr(Engine, "_new_record", lambda self, *a: new.append(1) or new_record(self, *a))
    sample = measure(4)
    assert len(packed) == len(unpacked) == (8 if measure is overhead._deduplicated else 4)
    assert len(new) == records
    assert min(sample) > 0
    engine = packed[0]
    assert engine.transfer.live_records == 0
    total = engine.stats.total
    nbytes = 4 * overhead._SIDE**2 * 4
    assert total.offloaded_bytes == total.loaded_bytes == (nbytes if records else 0)
    assert total.deduplicated_bytes == (nbytes if measure is overhead._deduplicated else 0)
    assert total.kept_bytes == (nbytes if measure is overhead._kept else 0)


def _kind(expected, handle):
    assert type(handle) is expected
    return handle


def test_hooks_alone_measures_operations_that_save_a_tensor_each():
    seen = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: seen.append("pack") or t, lambda t: seen.append("un") or t
    )
    overhead._operations(3, hooks)
    assert seen == ["pack"] * 3 + ["un"] * 3


def test_the_collector_rests_while_the_clock_runs_and_works_again_after(monkeypatch):
    states = []
    monkeypatch.setattr(overhead, "_kept", lambda count: states.append(gc.isenabled()) or (1.0, 1.0))
    measure_overhead(1, 2)
    assert states == [True, False, False]  # the first is not counted
    assert gc.isenabled()
