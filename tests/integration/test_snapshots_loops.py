"""Snapshots of loops without a Trainer, their own and accelerate's: they go on to the bits of one that never stopped."""

import contextlib
import logging
import os

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import nn
from transformers import default_data_collator

from hf_offload import OffloadConfig, OffloadConfigError, OffloadError, OffloadPlugin, attach
from hf_offload.errors import SnapshotError
from hf_offload.integrations.accelerate import attached_accelerators
from hf_offload.snapshots import retained
from tests.faults.killed_snapshots import held_by, same
from tests.helpers.snapshot_processes import no_process_is_left  # noqa: F401  a fixture
from tests.helpers.tiny_models import ExampleDataset, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # which peft asks for
EPOCHS = 3
BATCHES = 5
"""In an epoch."""


class Stops(Exception):
    """What a loop leaves when its process is killed, snapshots are left by that, too."""


class Average:
    """A running mean of losses, as users register it."""

    def __init__(self):
        self.value = 0.0

    def add(self, loss):
        self.value = 0.9 * self.value + 0.1 * loss

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


@pytest.fixture(autouse=True)
def own_accelerators():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    for offloaded in attached_accelerators():
        offloaded.detach()
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.set_num_threads(threads)


def made(kind):
    torch.manual_seed(5)
    model = tiny_model("gpt2", dropout=0.1)
    if kind == "lora":
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, EPOCHS * BATCHES)
    # Each epoch in another order, which global generators decide.
    loader = torch.utils.data.DataLoader(
        ExampleDataset("gpt2", 2 * BATCHES), batch_size=2, shuffle=True, collate_fn=default_data_collator
    )
    return model, optimizer, scheduler, loader


def finished(model, optimizer, scheduler, average, losses):
    return {
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
        "optimizer": optimizer.state_dict(),
        "schedule": scheduler.state_dict(),
        "average": average.value,
        "losses": losses,
        "generator": torch.get_rng_state(),
    }


def own_loop(folder, kind=None, stop=None, resume=False, steps=4, **settings):
    """A loop of the user's own; with ``folder``, one that takes snapshots."""
    model, optimizer, scheduler, loader = made(kind)
    average = Average()
    settings = {"tier": "none", **settings}
    if folder is not None:
        settings["snapshot_steps"] = steps
    session = attach(model, OffloadConfig(**settings))
    prepared = session.prepare_optimizer(optimizer)
    losses = []

    def step(batch):
        prepared.zero_grad()
        if kind == "mezo":
            loss = prepared.step(lambda: model(**batch).loss)
        else:
            loss = model(**batch).loss
            loss.backward()
            prepared.step()
        scheduler.step()
        average.add(loss.item())
        return loss.item()

    try:
        if folder is None:
            for _ in range(EPOCHS):
                losses += map(step, loader)
            return finished(model, prepared, scheduler, average, losses)
        things = {"optimizer": prepared, "scheduler": scheduler, "average": average}
        with session.snapshots(folder, resume=resume, **things) as snapshots:
            begun = snapshots.step
            for _ in range(snapshots.epoch, EPOCHS):
                for batch in snapshots.batches(loader):
                    losses.append(step(batch))
                    snapshots.end_step()
                    if snapshots.step == stop:
                        raise Stops
        return begun, finished(model, prepared, scheduler, average, losses)
    finally:
        session.detach()


def accelerated_loop(folder, kind=None, stop=None, resume=False, steps=4, accumulation=1, **settings):
    model, optimizer, scheduler, loader = made(kind)
    average = Average()
    settings = {"tier": "none", **settings}
    if folder is not None:
        settings["snapshot_steps"] = steps
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = OffloadPlugin(**settings).accelerator(
        cpu=True, project_dir=folder, gradient_accumulation_steps=accumulation
    )
    prepared, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    accelerator.register_for_checkpointing(average)
    losses = []

    def step(batch):
        with accelerator.accumulate(prepared):
            loss = prepared(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        average.add(loss.item())
        return loss.item()

    try:
        if folder is None:
            for _ in range(EPOCHS):
                losses += map(step, loader)
            return finished(model, optimizer, scheduler, average, losses)
        with accelerator.snapshots(resume=resume) as snapshots:
            begun = snapshots.step
            for _ in range(snapshots.epoch, EPOCHS):
                for batch in snapshots.batches(loader):
                    losses.append(step(batch))
                    if accelerator.sync_gradients:
                        snapshots.end_step()
                    if snapshots.step == stop:
                        raise Stops
        return begun, finished(model, optimizer, scheduler, average, losses)
    finally:
        accelerator.end_training()


def check(loop, folder, kind=None, stop=9, begun=8, **settings):
    plain = {
        key: value for key, value in settings.items() if key in ("memory_mode", "memory_mode_kwargs", "accumulation")
    }
    expected = loop(None, kind, **plain)
    with pytest.raises(Stops):
        loop(folder, kind, stop=stop, **settings)
    found_begun, found = loop(folder, kind, resume=True, **settings)
    assert found_begun == begun
    expected["losses"] = expected["losses"][-len(found["losses"]) :]
    for name in expected:
        assert same(expected[name], found[name]), name
    retained.release()
    assert held_by(folder) is None


LOOPS = {"own": own_loop, "accelerate": accelerated_loop}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize(
    ("stop", "steps", "begun"), [(9, 4, 8), (7, 3, 6), (13, 5, 10), (3, 4, 0)], ids=["middle", "early", "epoch", "none"]
)
def test_a_loop_goes_on_to_the_same_bits(tmp_path, loop, stop, steps, begun):
    check(loop, tmp_path, stop=stop, steps=steps, begun=begun)


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("where", ["ram", "ssd"])
def test_state_and_weights_on_a_tier(tmp_path, loop, where):
    (tmp_path / "tier").mkdir()
    files = {"directory": tmp_path / "tier"} if where == "ssd" else {}
    check(loop, tmp_path / "run", optimizer=where, params=where, min_bytes=0, **files)
    assert not files or list((tmp_path / "tier").iterdir()) == []


@pytest.mark.parametrize(("share", "why"), [(3.5, "weights, gradients and"), (4.6, "activations do not fit")])
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_what_a_budget_moves(tmp_path, loop, share, why, machine_with_drive, caplog):
    machine_with_drive(1e9)
    (tmp_path / "tier").mkdir()
    weights = sum(p.nbytes for p in tiny_model("gpt2").parameters())
    given = {"tier": "auto", "memory_budget": int(share * weights), "directory": tmp_path / "tier", "min_bytes": 256}
    with caplog.at_level(logging.INFO, "hf_offload"):
        check(loop, tmp_path / "run", **given)
    assert caplog.text.count(f"Gradients and optimizer state go to ssd, for {why}") == 2


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("params", ["none", "ram"])
def test_an_adapter_goes_on_to_the_same_bits_without_a_copy_of_its_base(tmp_path, loop, params):
    with pytest.raises(Stops):
        loop(tmp_path / "sizes", "lora", stop=5, params=params, min_bytes=0)
    (held,) = held_by(tmp_path / "sizes")["snapshots"]
    sizes = {name: nbytes for name, nbytes, _ in held["files"]}
    assert "model.safetensors" not in sizes
    assert sizes["adapter_model.safetensors"] < 20_000
    check(loop, tmp_path / "run", "lora", params=params, min_bytes=0)


def test_mezo_goes_on_to_the_same_bits(tmp_path):
    check(own_loop, tmp_path, "mezo", memory_mode="mezo")


def test_accumulated_steps_of_accelerate_go_on_to_the_same_bits(tmp_path):
    check(accelerated_loop, tmp_path, accumulation=2, stop=5, steps=4, begun=4)


def test_a_checkpoint_of_accelerate_is_what_snapshots_are_on_disk(tmp_path):
    disk = tmp_path / "disk"
    with pytest.raises(Stops):
        accelerated_loop(tmp_path / "run", stop=9, snapshot_dir=str(disk))
    while not (disk / "checkpoint-8").exists():
        pass
    model, optimizer, scheduler, loader = made(None)
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator, average = Accelerator(cpu=True), Average()
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    accelerator.register_for_checkpointing(average)
    accelerator.load_state(disk / "checkpoint-8")
    saved = load_file(disk / "checkpoint-8" / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], value) for name, value in saved.items())
    assert scheduler.state_dict()["last_epoch"] == 8
    assert average.value != 0.0
    assert all(state["step"] == 8 for state in optimizer.state.values())


def test_a_loop_that_does_not_resume_begins_anew(tmp_path, caplog):
    with pytest.raises(Stops):
        own_loop(tmp_path, stop=5)
    with caplog.at_level(logging.WARNING):
        begun, _ = own_loop(tmp_path)
    assert begun == 0
    assert "the snapshots that an earlier one has left in memory, the newest of step 4, are dropped" in caplog.text


def test_snapshots_of_another_model_or_other_objects_are_refused_by_name(tmp_path):
    with pytest.raises(Stops):
        own_loop(tmp_path, stop=5)
    model = tiny_model("llama")
    session = attach(model, OffloadConfig(tier="none", snapshot_steps=4))
    with pytest.raises(SnapshotError, match=r"step 4 in memory is of another model: .*Resume with the model"):
        session.snapshots(tmp_path, resume=True).__enter__()
    session.detach()
    model = made(None)[0]
    session = attach(model, OffloadConfig(tier="none", snapshot_steps=4))
    with pytest.raises(SnapshotError, match="holds average, optimizer, scheduler, and this training has nothing but"):
        session.snapshots(tmp_path, resume=True).__enter__()
    session.detach()
    assert own_loop(tmp_path, resume=True)[0] == 4  # it is still there


def test_a_loop_that_takes_none_although_they_are_set_is_an_error(tmp_path):
    model, optimizer, _, loader = made(None)
    session = attach(model, OffloadConfig(tier="none", snapshot_steps=4))
    with pytest.raises(OffloadConfigError, match="this loop takes no snapshots"):
        model(**next(iter(loader)))
    with pytest.raises(OffloadError, match="inside of their block"):
        session.snapshots(tmp_path, optimizer=optimizer).end_step()
    with pytest.raises(OffloadConfigError, match=r"snapshots\(counter=\.\.\.\) takes what has state_dict"):
        session.snapshots(tmp_path, counter=3)
    session.detach()
    accelerator = OffloadPlugin(tier="none", snapshot_steps=4).accelerator(cpu=True)
    with pytest.raises(OffloadConfigError, match="has prepared no model yet"):
        accelerator.snapshots(str(tmp_path))
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with pytest.raises(OffloadConfigError, match="this loop takes no snapshots"):
        accelerator.backward(prepared(**next(iter(loader))).loss)
    accelerator.register_save_state_pre_hook(lambda *_: None)
    with pytest.raises(OffloadConfigError, match="what hooks of register_save_state_pre_hook"):
        accelerator.snapshots(str(tmp_path))


def test_a_block_is_entered_once_and_takes_the_path_of_a_folder(tmp_path):
    model = nn.Linear(2, 2)
    session = attach(model, OffloadConfig(tier="none", snapshot_steps=4))
    for folder in (None, 3):
        with pytest.raises(OffloadConfigError, match=f"takes the path of a folder, and {folder} is none"):
            session.snapshots(folder)
    block = session.snapshots(tmp_path)
    with block:
        with pytest.raises(OffloadError, match="A block of snapshots is entered once"):
            block.__enter__()
        with pytest.raises(SnapshotError, match=f"This process takes snapshots of the training in {tmp_path} already"):
            session.snapshots(tmp_path).__enter__()
        block.end_step()  # it goes on
    with pytest.raises(OffloadError, match="A block of snapshots is entered once"):
        block.__enter__()
    session.detach()


def test_a_process_with_many_open_files_takes_snapshots(tmp_path, caplog):
    with contextlib.ExitStack() as opened:
        for _ in range(1100):
            opened.enter_context(open(os.devnull))  # noqa: PTH123  it is as good as any
        with pytest.raises(Stops):
            own_loop(tmp_path, stop=5)
        assert own_loop(tmp_path, resume=True)[0] == 4
    assert "snapshot process has ended" not in caplog.text


@pytest.mark.parametrize("loop", [own_loop, accelerated_loop])
def test_parity_of_one_process_is_refused(tmp_path, loop):
    with pytest.raises(OffloadConfigError, match="processes make good what one of them loses, and there is one"):
        loop(tmp_path, snapshot_parity=1)


def test_models_whose_snapshot_would_not_hold_all_are_refused(tmp_path):
    peft = pytest.importorskip("peft")

    def refused(model, reason):
        session = attach(model, OffloadConfig(tier="none", snapshot_steps=4))
        with pytest.raises(OffloadConfigError, match=reason):
            session.snapshots(tmp_path)
        session.detach()

    lora = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    two = peft.get_peft_model(tiny_model("gpt2"), lora)
    two.add_adapter("other", lora)
    refused(two, "The adapters default, other")
    prompt = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    refused(peft.get_peft_model(tiny_model("gpt2"), prompt), "A prompt that peft learns")
    model = tiny_model("gpt2")
    model.add_adapter(lora)
    refused(model, "Adapters that add_adapter")
    normed = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    refused(peft.get_peft_model(normed, peft.LoraConfig(target_modules=["0"])), "The statistics of batch norm")


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return {}

    def set_extra_state(self, state):
        pass


def test_batches_are_those_of_one_loader_which_may_be_a_list(tmp_path):
    model = WithExtraState(2, 2)
    session = attach(model, OffloadConfig(tier="none", snapshot_steps=1))
    with session.snapshots(tmp_path / "run") as snapshots:
        had = []
        for batch in snapshots.batches([1, 2]):
            had.append(batch)
            with pytest.raises(OffloadError, match="in the middle of an epoch"):
                next(snapshots.batches([3]))
        assert had == [1, 2]
        with pytest.raises(SnapshotError, match="_extra_state is a dict"):
            snapshots.end_step()
    session.detach()
