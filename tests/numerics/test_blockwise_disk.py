"""State of blocks that wait, on disk: the bits of state in RAM, none of its bytes in memory, and what a bad disk does."""

import copy
import errno
import gc
import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from hf_offload.errors import OffloadConfigError, StorageError
from hf_offload.optimizers.blockwise import BlockwiseConfig, BlockwiseOptimizer
from hf_offload.storage import disk_io
from hf_offload.storage.wear import drive_of, read_wear
from tests.helpers.tiny_models import tiny_batch, tiny_model, weights
from tests.helpers.train import saved_and_loaded, take_steps

SETTINGS = {"order": "ascending", "outside": "turns", "switch_every": 2}
TURNS = 5  # embeddings, two blocks, norm, head


def config_of(tier, folder=None, **others):
    directory = folder if tier == "ssd" else None
    return BlockwiseConfig(**SETTINGS | others, inactive_state=tier, directory=directory)


def build(config, dtype=torch.float32, kind=torch.optim.AdamW, **options):
    model = tiny_model("llama", dropout=0.0).to(dtype)
    return model, BlockwiseOptimizer(model.parameters(), model, config, kind, **{"lr": 1e-2} | options)


def train(model, optimizer, steps, first=0):
    take_steps(model, optimizer, [tiny_batch("llama", seed=step) for step in range(first, first + steps)])


def tier_of(optimizer):
    return optimizer._parked._tier


def assert_equal(found, expected):
    """Of nested mappings of tensors and other values."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_equal(found[key], value)
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert found.stride() == expected.stride()
        assert torch.equal(found, expected)
    else:
        assert found == expected


# -- the same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "dtype"),
    [
        (torch.optim.AdamW, {}, torch.float32),
        (torch.optim.AdamW, {"amsgrad": True}, torch.bfloat16),
        (torch.optim.SGD, {"momentum": 0.9}, torch.float32),
        (torch.optim.Rprop, {}, torch.float32),
    ],
)
def test_state_on_disk_is_that_in_ram(kind, options, dtype, tmp_path):
    found = {}
    for tier in ("ram", "ssd", "drop"):
        model, optimizer = build(config_of(tier, tmp_path), dtype, kind, **options)
        steps = 2 * (2 * TURNS + 2) + 1
        train(model, optimizer, steps)
        found[tier] = {"weights": weights(model), "state": optimizer.state_dict(), "bytes": optimizer.state_bytes()}
        if tier == "ssd":
            assert tier_of(optimizer).stats.read_bytes > 0
    assert_equal(found["ssd"], found["ram"])
    assert not torch.equal(found["ssd"]["weights"]["lm_head.weight"], found["drop"]["weights"]["lm_head.weight"])


class Strange(torch.optim.Optimizer):
    """Keeps what optimizers may keep: odd strides, no elements, other numbers, and things that are no tensors."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state |= {
                    "across": torch.randn(3, 5).T, "byte": torch.tensor([7], dtype=torch.uint8), "name": "x",
                    "none": None, "nothing": torch.zeros(0, 2), "single": torch.tensor(3.0),
                    "double": torch.randn(4, dtype=torch.float64),
                    "kept": [torch.ones(2)], "complex": torch.randn(3, dtype=torch.complex64).conj(),
                }  # fmt: skip


def test_whatever_a_state_holds_comes_back(tmp_path):
    found = []
    for tier in ("ram", "ssd"):
        torch.manual_seed(0)
        model, optimizer = build(config_of(tier, tmp_path, switch_every=1), kind=Strange)
        train(model, optimizer, 3)
        found.append(optimizer.state_dict())
    for state in (*found[0]["state"].values(), *found[1]["state"].values()):
        assert torch.equal(state["kept"].pop(), torch.ones(2))
    assert_equal(found[1], found[0])
    assert len(found[0]["state"]) > 10


@pytest.mark.parametrize(("before", "after"), [("ssd", "ssd"), ("ssd", "ram"), ("ram", "ssd")])
def test_a_checkpoint_goes_on_wherever_state_is_kept(before, after, tmp_path):
    whole, uninterrupted = build(config_of("ram"))
    train(whole, uninterrupted, 24)
    for stop in (13, 14):  # the middle of a turn, and between two of them
        first, beginning = build(config_of(before, tmp_path))
        train(first, beginning, stop)
        second, rest = build(config_of(after, tmp_path))
        train(second, rest, 5)  # what it had parked is forgotten
        second.load_state_dict(first.state_dict())
        rest.load_state_dict(saved_and_loaded(beginning.state_dict()))
        assert rest.state_bytes() == beginning.state_bytes()
        assert_equal(rest.state_dict(), beginning.state_dict())
        train(second, rest, 24 - stop, first=stop)
        assert_equal(weights(second), weights(whole))


def test_other_settings_are_still_refused(tmp_path):
    _, dropped = build(config_of("drop"))
    model, optimizer = build(config_of("ssd", tmp_path))
    train(model, optimizer, 3)
    before = optimizer.state_dict()
    with pytest.raises(OffloadConfigError, match=r"saved with inactive_state='drop', and the optimizer has .*='ssd'"):
        optimizer.load_state_dict(dropped.state_dict())
    assert_equal(optimizer.state_dict(), before)


# -- where it is ------------------------------------------------------------------------------------------------------


def live_bytes():
    """Of all tensors in memory there are, each storage once."""
    gc.collect()
    plain = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
    tensors = [one for one in plain if one.device.type == "cpu"]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_nothing_that_is_parked_is_in_memory(tmp_path):
    found = {}
    for tier in ("drop", "ssd", "ram"):
        before = live_bytes()
        model, optimizer = build(config_of(tier, tmp_path))
        train(model, optimizer, 2 * TURNS)
        found[tier] = live_bytes() - before
        waiting = [name for name, p in model.named_parameters() if name not in optimizer._trains]
        if tier == "ssd":
            assert set(optimizer._on_disk()) == {name for name, _ in model.named_parameters()}
            slots = [entry.slot for entry in optimizer._parked._entries.values()]
            assert all(slot.image.lead == slot.image.tail == b"" for slot in slots)
            assert tier_of(optimizer).stats.used_bytes == sum(slot.nbytes for slot in slots)
            train(model, optimizer, 1)  # the embedding's is read, and its room free again
            assert set(optimizer._on_disk()) == set(waiting)
            assert tier_of(optimizer).stats.used_bytes < sum(slot.nbytes for slot in slots)
        del model, optimizer
    assert found["ssd"] == found["drop"]
    assert found["ram"] > found["drop"]


def own_files(folder):
    links = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(link.readlink()))
        except FileNotFoundError:  # that of the listing
            continue
    return [link for link in links if link.startswith(str(folder))]


def test_files_have_no_names_and_go_with_the_optimizer(tmp_path):
    model, optimizer = build(config_of("ssd", tmp_path))
    train(model, optimizer, 4)
    optimizer.close()  # until it is opened again: the state is still there
    assert list(tmp_path.iterdir()) == []
    files = own_files(tmp_path)
    assert files
    assert all(link.endswith("(deleted)") for link in files)
    assert all(os.fstat(file._fd).st_mode & 0o777 == 0o600 for file in tier_of(optimizer).files)
    optimizer.open()
    train(model, optimizer, 9, first=4)
    expected, other = build(config_of("ram"))
    train(expected, other, 13)
    assert_equal(weights(model), weights(expected))
    del optimizer
    gc.collect()
    assert own_files(tmp_path) == []


def test_what_is_written_is_counted_for_the_drive(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "count"))
    drive = drive_of(tmp_path)
    if drive is None:
        pytest.skip("the temporary folder lies in memory")
    model, optimizer = build(config_of("ssd", tmp_path))
    train(model, optimizer, 4)
    assert read_wear(drive)[0] == sum(file.written_bytes for file in tier_of(optimizer).files) > 0


def test_the_temporary_folder_is_named_in_the_log(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    _, optimizer = build(config_of("ssd"))
    assert tier_of(optimizer).where == str(tmp_path)
    assert f"it goes to {tmp_path}" in caplog.text


def test_several_directories_are_striped(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    _, optimizer = build(config_of("ssd", folders))
    assert [file.directory for file in tier_of(optimizer).files] == folders


# -- a bad disk -------------------------------------------------------------------------------------------------------


def fail(number):
    def call(*_):
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize(
    ("broken", "number", "word"),
    [("allocate_once", errno.ENOSPC, "No room for"), ("write_once", errno.ENOSPC, "The disk is full"),
     ("write_once", errno.EIO, "another drive")],
)  # fmt: skip
def test_a_full_disk_is_one_clear_error_after_a_whole_step(broken, number, word, tmp_path, monkeypatch):
    expected, other = build(config_of("ram"))
    model, optimizer = build(config_of("ssd", tmp_path))
    train(expected, other, 2)
    train(model, optimizer, 1)
    with monkeypatch.context() as disk:
        disk.setattr(disk_io, broken, fail(number))
        with pytest.raises(StorageError, match=f"Optimizer state of .*cannot go to disk.*last step.*{word}") as error:
            train(model, optimizer, 1, first=1)
        with pytest.raises(StorageError):  # nor at the next forward
            train(model, optimizer, 1, first=2)
    assert str(tmp_path) in str(error.value)
    assert_equal(weights(model), weights(expected))
    assert tier_of(optimizer).stats.used_bytes == 0
    # What is saved now goes on as if nothing had happened, and so does the run itself where there is room again.
    saved, elsewhere = saved_and_loaded(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    train(expected, other, 11, first=2)
    optimizer.zero_grad()
    train(model, optimizer, 11, first=2)
    assert_equal(weights(model), weights(expected))
    model, optimizer = build(config_of("ram"))
    model.load_state_dict(elsewhere)
    optimizer.load_state_dict(saved)
    train(model, optimizer, 11, first=2)
    assert_equal(weights(model), weights(expected))


def test_a_block_that_fits_only_in_part_leaves_nothing_there(tmp_path):
    sizes = sorted(8 * p.numel() for p in tiny_model("llama").model.layers[0].parameters())
    model, optimizer = build(config_of("ssd", tmp_path, outside="never", disk_budget=sizes[-1] + 4096))
    with pytest.raises(StorageError, match=r"the budget of .*Raise disk_budget"):
        train(model, optimizer, 2)
    assert tier_of(optimizer).stats.used_bytes == 0
    assert tier_of(optimizer).stats.written_bytes > 0
    assert len(optimizer.state) == len(list(model.model.layers[0].parameters()))


@pytest.mark.parametrize("how", ["error", "other bytes"])
def test_a_failed_read_changes_no_weight(how, tmp_path, monkeypatch):
    def other_bytes(fd, into, offset):
        count = os.preadv(fd, [into], offset)
        into[0] ^= 1
        return count

    expected, other = build(config_of("ram"))
    model, optimizer = build(config_of("ssd", tmp_path))
    train(expected, other, 2 * TURNS + 3)
    train(model, optimizer, 2 * TURNS)
    before = weights(model)
    with monkeypatch.context() as disk:
        disk.setattr(disk_io, "read_once", other_bytes if how == "other bytes" else fail(errno.EIO))
        with pytest.raises(StorageError, match=r"of model\.embed_tokens\.weight cannot be read back.*No weight was"):
            train(model, optimizer, 1, first=2 * TURNS)
        with pytest.raises(StorageError, match="cannot be read back"):
            optimizer.state_dict()
    assert_equal(weights(model), before)
    optimizer.zero_grad()
    train(model, optimizer, 3, first=2 * TURNS)
    assert_equal(weights(model), weights(expected))


def test_a_state_that_cannot_be_parked_is_not_loaded(tmp_path, monkeypatch):
    first, beginning = build(config_of("ram"))
    train(first, beginning, 5)
    model, optimizer = build(config_of("ssd", tmp_path))
    train(model, optimizer, 3)
    before, used = optimizer.state_dict(), tier_of(optimizer).stats.used_bytes
    with monkeypatch.context() as disk:
        disk.setattr(disk_io, "write_once", fail(errno.ENOSPC))
        with pytest.raises(StorageError, match="cannot go to disk"):
            optimizer.load_state_dict(beginning.state_dict())
    assert_equal(optimizer.state_dict(), before)
    assert tier_of(optimizer).stats.used_bytes == used


def test_an_interruption_while_state_is_written_loses_nothing(tmp_path, monkeypatch):
    left = threading.Event()

    def write(fd, data, offset):
        left.wait(0.2)  # by when the main thread waits, and notices at once
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        assert left.wait(60)
        return os.pwritev(fd, [data], offset)

    expected, other = build(config_of("ram"))
    model, optimizer = build(config_of("ssd", tmp_path))
    train(expected, other, 13)
    train(model, optimizer, 1)
    with monkeypatch.context() as disk:
        disk.setattr(disk_io, "write_once", write)
        with pytest.raises(KeyboardInterrupt):
            train(model, optimizer, 1, first=1)
        left.set()
        tier = tier_of(optimizer)
        tier.wait_for(tier._is_quiet)
    assert tier.stats.used_bytes == 0
    assert list(tmp_path.iterdir()) == []
    optimizer.zero_grad()
    train(model, optimizer, 11, first=2)
    assert_equal(weights(model), weights(expected))


# -- mistakes ---------------------------------------------------------------------------------------------------------


def test_mistakes_are_told_at_once(tmp_path):
    with pytest.raises(OffloadConfigError) as error:
        BlockwiseConfig(inactive_state="ssd", directory=[tmp_path, tmp_path], disk_budget="much", seed=0.5)
    for word in ("3 errors", "the same path twice", "disk_budget='much'", "seed=0.5"):
        assert word in str(error.value), word
    for tier in ("drop", "ram"):
        with pytest.raises(OffloadConfigError, match=f"directory, disk_budget given, but inactive_state='{tier}'"):
            BlockwiseConfig(inactive_state=tier, directory=tmp_path, disk_budget="1GiB")
    model = tiny_model("llama")
    missing = config_of("ssd", tmp_path / "missing", blocks_active=9)
    with pytest.raises(OffloadConfigError, match=r"(?s)blocks_active=9.*missing' does not exist"):
        BlockwiseOptimizer(model.parameters(), model, missing, lr=1)
    assert not model._forward_pre_hooks
