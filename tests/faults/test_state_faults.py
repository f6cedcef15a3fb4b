"""A drive that is full, fails or hangs under weights or a streamed optimizer: the bits of the run in memory, or one error."""

import functools

import pytest

from hf_offload.errors import StandstillError, StorageError
from hf_offload.state.optimizer import streaming_of
from tests.faults.failing_calls import ALL, EIO, ENOSPC, Faults, Hang
from tests.faults.numbered_steps import PARKED, STEPS, STREAMED, Training, values_in_memory
from tests.helpers.parked import leave_memory
from tests.helpers.train import same

KINDS = {"streamed": STREAMED, "weights": PARKED, "both": PARKED | {"optimizer": "ssd"}}


@functools.cache
def expected(kind):
    return values_in_memory(functools.partial(Training, **KINDS[kind]))


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if "stays in memory" in record.getMessage()]


def stores_of(made):
    streaming, residency = streaming_of(made.optimizer), made.session.residency
    stores = [] if streaming is None else [streaming.state_store, streaming.gradient_store]
    return stores if residency is None else [*stores, residency.store]


SOME = range(3, 5)


@pytest.mark.parametrize(
    ("kind", "which", "number"),
    [
        ("streamed", ALL, EIO), ("streamed", SOME, ENOSPC), ("weights", ALL, ENOSPC), ("weights", SOME, EIO),
        ("both", ALL, EIO), ("both", SOME, ENOSPC),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_written_stays_in_memory(number, which, kind, tmp_path, monkeypatch, caplog):
    faults = Faults(monkeypatch, "write_once", number, which)
    made = Training(tmp_path, **KINDS[kind])
    assert same(made.run(), expected(kind)[-1])
    assert faults.failed > 0
    stores = stores_of(made)
    for store in stores:
        store.settle()
        store.collect()
    said = warnings_of(caplog)
    assert 1 <= len(said) <= len(stores)  # once an account
    assert all(f"errno {number}" in each for each in said)
    of_weights = [each for each in said if "of the weights" in each]
    assert len(of_weights) == (kind != "streamed") or (kind == "both" and which is not ALL)


LIMITS = {
    "streamed, disk_budget": STREAMED | {"disk_budget": "96KiB"},
    "streamed, write_limit": STREAMED | {"max_disk_write_bytes": "300KiB"},
    "weights, disk_budget": PARKED | {"disk_budget": "32KiB"},
    "weights, write_limit": PARKED | {"max_disk_write_bytes": "100KiB"},
    "weights, ram_budget": PARKED | {"params": "ram", "ram_budget": "32KiB"},
    "weights, ram_and_disk": PARKED | {"ram_budget": "16KiB", "disk_budget": "16KiB"},
}


@pytest.mark.parametrize("limit", LIMITS)
def test_past_a_limit_the_rest_stays_in_memory(limit, tmp_path, caplog):
    settings = LIMITS[limit]
    made = Training(tmp_path, **settings)
    assert same(made.run(), expected(limit.partition(",")[0])[-1])
    storage, said = made.session._storage, warnings_of(caplog)
    if "max_disk_write_bytes" in settings:
        written = sum(tiers["ssd"].written_bytes for tiers in storage.accounts.values())
        assert 0 < written <= made.session.config.max_disk_write_bytes
    if "disk_budget" in settings:
        assert storage.disk.taken_bytes <= storage.disk.limit_bytes
    if "ram_budget" in settings:
        assert 0 < storage.ram.taken_bytes <= storage.ram.limit_bytes
    if "params" not in settings:
        assert said
        return
    assert len(said) == 1
    assert "of the weights" in said[0]
    residency = made.session.residency
    assert residency.store.tier.stats.written_bytes > 0
    assert residency.store.refusal is not None or "max_disk_write_bytes" in settings
    assert storage.accounts["weights"]


@pytest.mark.parametrize(("kind", "limit"), [("streamed", "300KiB"), ("weights", "100KiB")])
def test_a_run_that_is_to_stop_at_its_write_limit_stops_after_a_whole_step(kind, limit, tmp_path):
    made = Training(tmp_path, max_disk_write_bytes=limit, on_disk_write_limit="stop", **KINDS[kind])
    done = 0
    while not made.session.must_stop and done < STEPS:
        made.step(done)
        made.session.end_step()
        done += 1
    assert made.session.must_stop
    assert same(made.values(), expected(kind)[done])


@pytest.mark.parametrize("kind", ["streamed", "both"])
@pytest.mark.parametrize("side", ["write_once", "read_once"])
def test_a_drive_that_hangs_is_an_error_and_the_run_goes_on_if_it_answers(side, kind, tmp_path, monkeypatch):
    made = Training(tmp_path, **KINDS[kind])
    for store in stores_of(made):
        store.window_bytes = 0  # each write is waited for
    made.step(0)
    streaming_of(made.optimizer).finish()
    if made.session.residency is not None:
        leave_memory(made.session)
    hang = Hang(monkeypatch, side)
    try:
        with pytest.raises(StorageError if kind == "streamed" else (StorageError, StandstillError)) as raised:
            made.step(1)
            made.values()
        cause = raised.value
        while cause is not None and not isinstance(cause, StandstillError):
            cause = cause.__cause__
        assert cause is not None
    finally:
        hang.end()
    del raised, cause
    found = made.values()
    done = next(number for number in (1, 2) if same(found, expected(kind)[number]))
    assert same(made.run(done), expected(kind)[-1])
