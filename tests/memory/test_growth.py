"""Training for long: what a session holds after many steps is what it held after a few."""

import collections
import errno
import gc
import os
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from hf_offload import OffloadConfig, OffloadError, offload_activations
from hf_offload.storage import disk_io
from hf_offload.training.gauges import _allocator_counter
from tests.helpers.controlled_tier import wait_for_stores

# What is over is forgotten at the next use, so what the last step left behind is still there: identities of storages that
# are gone. A leak of one object in five steps would be 90.
OBJECT_SLACK = 50
# Malloc's own scraps. A leak of one record's bytes in ten steps would be 720 KiB.
HEAP_SLACK_BYTES = 256 << 10
# Pages that malloc has not given back, of activations of every size. A leak of one record's bytes in a cycle would be more.
RESIDENT_SLACK_BYTES = 4 << 20


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, hidden):
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden


def held(session) -> dict[str, int]:
    """Everything that could grow, counted when nothing is on its way any more."""
    engine = session._engine
    transfer, tier = engine.transfer, engine.transfer.tier
    with tier._quiet:
        assert tier._quiet.wait_for(lambda: not tier._live, timeout=60)
    wait_for_stores(transfer)
    assert transfer._writes.oldest() is None  # it lets go of what is over
    transfer.reap()
    gc.collect()
    kinds = collections.Counter(type(found) for found in gc.get_objects())
    facts = {
        "live records": transfer.live_records,
        "resident bytes": transfer.ledger.resident_bytes,
        "bytes read ahead": transfer.ledger.ahead_bytes,
        "bytes to be written": transfer._writes.nbytes,
        "tier bytes in use": tier.stats.used_bytes,
        "tier bytes occupied": tier.occupied_bytes,
        "file bytes": sum(os.fstat(file._buffered_fd).st_size for file in tier.files),
        "file descriptors": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "threads": threading.active_count(),
        "identities": sum(each() is not None for each in engine._records._identities.values()),
        "learned orders": len(engine.prefetch._learned),
        "records of the tape": len(engine.prefetch.tape.records),
        "consumed copies": len(transfer._consumed),
        "writes in flight": len(transfer._writes._ends),
        "tensors": sum(count for kind, count in kinds.items() if issubclass(kind, torch.Tensor)),
    }
    counter = _allocator_counter()
    facts["heap bytes"] = counter() if counter is not None else 0
    facts["objects"] = sum(kinds.values()) - len(session.stats.steps)
    return facts


# -- a rough life ----------------------------------------------------------------------------------------------------------

# What happens in a cycle: rows of a batch, and what goes wrong in its step.
CYCLE = [
    *((rows, None) for rows in (256, 64, 192, 1, 128)),
    *((128, fault) for fault in ("forward", "interrupt", "backward", "read", "write", "unused", "retained")),
    *((rows, "evaluation") for rows in (256, 32)),
    *((rows, None) for rows in (100, 200, 3, 256, 64, 128)),
]


class Life:
    """Steps of every kind, one cycle like the other."""

    def __init__(self, session, model):
        self.session = session
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self.failed = 0

    def cycle(self):
        for rows, fault in CYCLE:
            try:
                self._step(torch.linspace(-1, 1, rows * 64).reshape(rows, 64), fault)
            except (OffloadError, ZeroDivisionError, KeyboardInterrupt):
                self.failed += 1
            self.optimizer.zero_grad(set_to_none=True)
            self.session.end_step()

    def _step(self, batch, fault):
        model = self.model
        if fault in ("forward", "interrupt"):
            error = ZeroDivisionError if fault == "forward" else KeyboardInterrupt
            handle = model.layers[1].register_forward_pre_hook(lambda module, args: _raise(error))
            try:
                model(batch)
            finally:
                handle.remove()
        if fault == "evaluation":
            model.eval()
            with torch.no_grad():
                model(batch)
            model.train()
        with pytest.MonkeyPatch.context() as patch:
            if fault == "write":
                patch.setattr(disk_io, "write_once", lambda *_: _raise(OSError(errno.EIO, "broken")))
            loss = model(batch).square().mean()
            self.session._engine.transfer._wait_for_writes(0)
            if fault == "unused":
                return
            if fault == "read":
                patch.setattr(disk_io, "read_once", lambda *_: _raise(OSError(errno.EIO, "broken")))
            if fault == "backward":
                loss.register_hook(lambda gradient: _raise(ZeroDivisionError))
            loss.backward(retain_graph=fault == "retained")
            if fault == "retained":
                loss.backward()
        self.optimizer.step()


def _raise(error):
    raise error


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("warm", "steps"), [(100, 300), pytest.param(200, 2000, marks=[pytest.mark.full, pytest.mark.timeout(1800)])]
)
def test_nothing_grows_in_a_rough_life(tmp_path, warm, steps):
    torch.manual_seed(0)
    model = Model()
    config = OffloadConfig(tier="ssd", directory=tmp_path, min_bytes=0, read_ahead_bytes=1)
    with offload_activations(model, config) as session:
        life = Life(session, model)
        for step in range(0, steps, len(CYCLE)):
            if step == warm:
                held(session)  # the first look makes objects of its own
                before, resident = held(session), resident_bytes()
            life.cycle()
        after = held(session)
        grown_bytes = resident_bytes() - resident
    assert session.stats.ended_steps == steps
    assert life.failed == steps // len(CYCLE) * 4, "forward, interrupt, backward, read"
    assert session.stats.total.refused_bytes > 0
    growth = {name: after[name] - before[name] for name in before if after[name] != before[name]}
    print(f"{steps} steps, {life.failed} failed, grown since step {warm}: {growth}, resident {grown_bytes} bytes")  # noqa: T201
    objects, heap_bytes = growth.pop("objects", 0), growth.pop("heap bytes", 0)
    assert growth == {}
    assert objects <= OBJECT_SLACK
    assert heap_bytes <= HEAP_SLACK_BYTES
    assert grown_bytes <= RESIDENT_SLACK_BYTES
