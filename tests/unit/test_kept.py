"""Bytes of a drive that are kept where they are, and archives that leave them out."""

import copy
import gc
import os
import resource

import pytest
import torch
import xxhash

from hf_offload import OffloadConfig, attach
from hf_offload.snapshots import contents, disk
from hf_offload.snapshots.layout import KeptOnDrives, ranges_of
from hf_offload.snapshots.memory import MemoryFile, damage_of
from hf_offload.storage.disk import DiskTier
from hf_offload.storage.kept import Kept, KeptRange
from hf_offload.storage.service import RunStorage
from tests.helpers.train import Run, copied, mlp, same, stream_in_parts, train

COUNT = 1_000_123
"""No multiple of a block: the ends stay in memory."""


def random_bytes(count, seed):
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def written(tier, content):
    slot = tier.reserve(content.numel())
    tier.write(slot, content).result()
    return slot


def bytes_of(kept, begin=0, end=COUNT):
    return b"".join(
        span.content if span.file is None else os.pread(span.file.descriptor, span.nbytes, span.offset)
        for span in kept.spans(begin, end)
    )


@pytest.fixture
def tier(tmp_path):
    tier = DiskTier(tmp_path)
    yield tier
    tier.close()


def test_what_is_kept_stays_until_it_is_released_once_for_each_that_keeps_it(tier):
    content = random_bytes(COUNT, 1)
    slot = written(tier, content)
    first, second = tier.keep(slot), tier.keep(slot)
    tier.free(slot)
    others = [written(tier, random_bytes(COUNT, seed)) for seed in range(2, 5)]
    first.release()
    first.release()
    others += [written(tier, random_bytes(COUNT, seed)) for seed in range(5, 8)]
    assert bytes_of(second) == content.numpy().tobytes()
    assert bytes_of(second, 3, 500_000) == content[3:500_000].numpy().tobytes()
    taken = {piece for each in others for piece in each.pieces}
    assert not taken & set(slot.pieces)
    second.release()
    assert set(written(tier, content).pieces) == set(slot.pieces)


def test_what_is_kept_and_forgotten_is_free_again(tier):
    slot = written(tier, random_bytes(COUNT, 1))
    kept = tier.keep(slot)
    tier.free(slot)
    del kept
    gc.collect()
    assert set(written(tier, random_bytes(COUNT, 2)).pieces) == set(slot.pieces)


def test_another_tier_in_the_same_files_does_not_get_what_is_kept(tmp_path):
    storage = RunStorage()
    one, other = (DiskTier(tmp_path, storage=storage, account=name) for name in ("one", "other"))
    content = random_bytes(COUNT, 1)
    kept = one.keep(written(one, content))
    one.close()
    for seed in range(2, 6):
        written(other, random_bytes(COUNT, seed))
    assert bytes_of(kept) == content.numpy().tobytes()
    other.close()


def test_nothing_is_kept_of_what_is_not_written(tier):
    assert tier.keep(tier.reserve(COUNT)) is None


@pytest.mark.parametrize("noted", [True, False], ids=["digests", "read"])
def test_an_archive_without_what_is_kept_is_whole_again_and_damage_is_noticed(tier, tmp_path, noted):
    content = random_bytes(COUNT, 1)
    kept_slot = tier.keep(written(tier, content))
    cuts = [(64, 500_000), (500_000, COUNT - 5)]
    digests = [xxhash.xxh3_128_digest(content[begin:end].numpy().tobytes()) if noted else None for begin, end in cuts]
    parts = [KeptRange(kept_slot, *cut, digest) for cut, digest in zip(cuts, digests, strict=True)]
    parts.append(content[COUNT - 5 :].numpy().tobytes())
    state = {"before": torch.arange(5000), "after": torch.ones(3)}
    kept = Kept()
    like = torch.empty(0, dtype=torch.uint8, device="meta")
    left_out = kept.placeholder(like, torch.Size([COUNT - 64]), [kept_slot], parts)
    write = contents.archive({"before": state["before"], "kept": left_out, "after": state["after"]}, kept)
    file = MemoryFile()
    file.write(b"x" * (2 * COUNT))  # what a slot had before
    for _ in range(2):
        file.begin()
        write(file)
        file.end()
    assert os.fstat(file.number).st_blocks * 512 < COUNT / 2
    on_drives = KeptOnDrives()
    noted_places = on_drives.note([file])
    record = {"files": [["optimizer.pt", file.nbytes, file.checksum]], disk.KEPT: noted_places}
    layout = disk.layout_in(record, [file.number, *on_drives.numbers])
    with (tmp_path / "whole").open("wb+") as whole:
        disk.copy_whole(whole.fileno(), file.number, file.nbytes, layout[0], on_drives.sources)
        assert damage_of(whole.fileno(), file.nbytes, file.checksum, ranges_of(layout, 0)) is None
        found = torch.load(tmp_path / "whole", weights_only=True)
        assert torch.equal(found["kept"], content[64:])
        assert all(torch.equal(found[name], state[name]) for name in state)
        for place in (100, 64 + file.nbytes // 2, file.nbytes - 200):
            byte = os.pread(whole.fileno(), 1, place)
            os.pwrite(whole.fileno(), bytes([byte[0] ^ 1]), place)
            assert damage_of(whole.fileno(), file.nbytes, file.checksum, ranges_of(layout, 0)) is not None
            os.pwrite(whole.fileno(), byte, place)
    on_drives.close()
    file.close()


class Wraps(torch.optim.Optimizer):
    """Returns copies of what another optimizer has."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def state_dict(self):
        return copy.deepcopy(self.inner.state_dict())


def copies_states(optimizer, state):
    return copy.deepcopy(state)


def test_copies_of_state_have_no_placeholders(tmp_path):
    model = torch.nn.Linear(100, 100)
    session = attach(model, OffloadConfig(tier="none", optimizer="ssd", directory=str(tmp_path), min_bytes=0))
    optimizer = session.prepare_optimizer(torch.optim.AdamW(model.parameters()))
    model(torch.ones(2, 100)).sum().backward()
    optimizer.step()
    whole = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    assert whole.any()
    kept = Kept()
    wrapped = contents.optimizer_state(Wraps(optimizer), kept)
    assert torch.equal(wrapped["state"][0]["exp_avg"], whole)
    assert kept.rooms == {}
    held = contents.optimizer_state(optimizer, kept)
    assert kept.has(held["state"][0]["exp_avg"])
    assert kept.rooms
    optimizer.register_state_dict_post_hook(copies_states)
    hooked = Kept()
    assert torch.equal(contents.optimizer_state(optimizer, hooked)["state"][0]["exp_avg"], whole)
    assert hooked.rooms == {}
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], whole)
    kept.release()
    session.detach()


def test_steps_in_parts_leave_state_that_is_kept_as_it_is(tmp_path, monkeypatch):
    stream_in_parts(monkeypatch)
    logs, kept = [], Kept()
    for place in ("none", "ssd"):
        run, model = Run(place, tmp_path), mlp()
        optimizer = run.prepare(model, torch.optim.AdamW(model.parameters()))
        train(run, model, optimizer, steps=2)
        before = copied(optimizer.state_dict())
        held = contents.optimizer_state(optimizer, kept)
        train(run, model, optimizer, steps=2, first=2)
        run.log_all(model, optimizer)
        logs.append(run.logged)
    assert same(*logs)
    placeholders = [(number, state["exp_avg"]) for number, state in held["state"].items() if kept.has(state["exp_avg"])]
    assert len(placeholders) == 3
    for number, placeholder in placeholders:
        (part,) = kept.parts_of(placeholder.untyped_storage())
        expected = before["state"][number]["exp_avg"].numpy().tobytes()
        assert bytes_of(part.slot, part.begin, part.end) == expected
    kept.release()


@pytest.mark.parametrize("kept", [False, True], ids=["copied", "kept"])
def test_an_archive_that_memory_has_no_room_for_is_an_error(tier, kept):
    """And not the end of the process, which the writer's destructor would be."""
    slot = tier.keep(written(tier, random_bytes(COUNT, 1)))
    left = Kept()
    content = torch.ones(COUNT, dtype=torch.uint8)
    if kept:
        content = left.placeholder(content, content.shape, [slot], [KeptRange(slot, 0, COUNT, None)])
    file = MemoryFile()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (COUNT // 2, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            contents.archive({"before": torch.ones(5000), "large": content, "after": torch.ones(5000)}, left)(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    file.close()
    left.release()


def test_only_placeholders_have_no_bytes():
    kept = Kept()
    assert kept.parts_of(torch.ones(3).untyped_storage()) is None
    assert not kept.has(torch.ones(3))
