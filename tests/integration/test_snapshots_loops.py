"""Snapshots of loops without a Trainer, their own and accelerate's: they go on to the bits of one that never stopped."""

import collections
import contextlib
import os

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import default_data_collator

from hf_offload import OffloadConfig, OffloadConfigError, OffloadError, OffloadPlugin, attach
from hf_offload.errors import SnapshotError
from hf_offload.integrations.accelerate import attached_accelerators
from hf_offload.snapshots.loops import Position
from hf_offload.snapshots.restoring import LINKS
from tests.faults.killed_snapshots import same
from tests.helpers.snapshot_loops import Holds, Stops, batches, in_order, net, trained
from tests.helpers.snapshot_processes import end_process, held_by, no_process_is_left, steps_held, until  # noqa: F401  a fixture
from tests.helpers.tiny_models import ExampleDataset, tiny_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # which peft asks for
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # which torchdata calls
]
EPOCHS = 3
BATCHES = 5
"""In an epoch."""


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
    data = ExampleDataset("gpt2", 2 * BATCHES)  # each epoch in another order
    loader = StatefulDataLoader(data, batch_size=2, shuffle=True, collate_fn=default_data_collator)
    return model, optimizer, scheduler, loader


def run_loop(loader, epochs, step, block, stop):
    """With ``block``, one that takes snapshots. Returns the step where it began, and losses."""
    losses = []
    if block is None:
        for _ in range(epochs):
            losses += map(step, loader)
        return 0, losses
    with block as snapshots:
        begun = snapshots.step
        for _ in range(snapshots.epoch, epochs):
            for batch in snapshots.batches(loader):
                losses.append(step(batch))
                snapshots.end_step()
                if snapshots.step == stop:
                    raise Stops
    return begun, losses


def own_loop(folder, kind=None, stop=None, resume=False, steps=4, **settings):
    """A loop of the user's own; with ``folder``, one that takes snapshots."""
    model, optimizer, scheduler, loader = made(kind)
    average = Holds({"value": 0.0})
    settings = {"tier": "none", "snapshot_steps": None if folder is None else steps, **settings}
    session = attach(model, OffloadConfig(**settings))
    prepared = session.prepare_optimizer(optimizer)

    def step(batch):
        prepared.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        prepared.step()
        scheduler.step()
        average.state = {"value": 0.9 * average.state["value"] + 0.1 * loss.item()}
        return loss.item()

    things = {"optimizer": prepared, "scheduler": scheduler, "average": average}
    try:
        block = None if folder is None else session.snapshots(folder, resume=resume, **things)
        begun, losses = run_loop(loader, EPOCHS, step, block, stop)
        return begun, finished(model, prepared, scheduler, average, losses)
    finally:
        session.detach()


def accelerated_loop(folder, kind=None, stop=None, resume=False, steps=4, **settings):
    model, optimizer, scheduler, loader = made(kind)
    average = Holds({"value": 0.0})
    settings = {"tier": "none", "snapshot_steps": None if folder is None else steps, **settings}
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = OffloadPlugin(**settings).accelerator(cpu=True, project_dir=folder)
    prepared, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerator.register_for_checkpointing(average)

    def step(batch):
        loss = prepared(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        average.state = {"value": 0.9 * average.state["value"] + 0.1 * loss.item()}
        return loss.item()

    try:
        block = None if folder is None else accelerator.snapshots(resume=resume)
        begun, losses = run_loop(loader, EPOCHS, step, block, stop)
        return begun, finished(model, optimizer, scheduler, average, losses)
    finally:
        accelerator.end_training()


def finished(model, optimizer, scheduler, average, losses):
    return {
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
        "optimizer": optimizer.state_dict(),
        "schedule": scheduler.state_dict(),
        "average": average.state,
        "losses": losses,
        "generator": torch.get_rng_state(),
    }


def check(loop, folder, kind=None, stop=9, begun=8, **settings):
    expected = loop(None, kind)[1]
    with pytest.raises(Stops):
        loop(folder, kind, stop=stop, **settings)
    found_begun, found = loop(folder, kind, resume=True, **settings)
    assert found_begun == begun
    expected["losses"] = expected["losses"][-len(found["losses"]) :]
    for name in expected:
        assert same(expected[name], found[name]), name
    assert held_by(folder) is None


LOOPS = {"own": own_loop, "accelerate": accelerated_loop}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize(
    ("stop", "steps", "begun"), [(9, 4, 8), (13, 5, 10), (3, 4, 0)], ids=["middle", "epoch", "none"]
)
def test_a_loop_goes_on_to_the_same_bits(tmp_path, loop, stop, steps, begun):
    check(loop, tmp_path, stop=stop, steps=steps, begun=begun)


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_state_and_weights_on_a_drive(tmp_path, loop):
    (tmp_path / "tier").mkdir()
    check(loop, tmp_path / "run", optimizer="ssd", params="ssd", min_bytes=0, directory=tmp_path / "tier")
    assert list((tmp_path / "tier").iterdir()) == []


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_an_adapter_goes_on_to_the_same_bits_without_a_copy_of_its_base(tmp_path, loop):
    with pytest.raises(Stops):
        loop(tmp_path / "sizes", "lora", stop=5, params="ram", min_bytes=0)
    (held,) = held_by(tmp_path / "sizes")["snapshots"]
    sizes = {name: nbytes for name, nbytes, _ in held["files"]}
    assert sizes["model.safetensors"] < 20_000
    check(loop, tmp_path / "run", "lora", params="ram", min_bytes=0)


class Counting(nn.Module):
    """A model with a buffer that each forward changes, and a weight with two names."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(4)
        self.inner = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.inner.weight

    def forward(self, batch):
        return self.head(self.inner(self.norm(batch)))


def test_buffers_and_tied_weights(tmp_path):
    expected = trained(tmp_path / "whole", model=Counting())[1]
    with pytest.raises(Stops):
        trained(tmp_path / "run", 7, model=Counting())
    begun, found = trained(tmp_path / "run", resume=True, model=Counting())
    assert begun == 6
    assert same(expected, found)


# -- objects ---------------------------------------------------------------------------------------------------------------


class Own:
    pass


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"best": np.float64(1.5)}, "numpy"),
        ({"a": [1, {"b": (2, Own())}]}, "Own"),
        ({"last": collections.deque([1])}, "deque"),
        ({"f": lambda: 0}, "lambda"),
    ],
)
def test_what_cannot_be_loaded_is_an_error_at_the_first_snapshot(tmp_path, state, named):
    with pytest.raises(
        SnapshotError, match=rf"^thing\.state_dict\(\) holds what torch\.load.* does not load.*({named}).*: let"
    ):
        trained(tmp_path, objects={"thing": Holds(state)})


def test_what_can_be_loaded_is_held(tmp_path):
    state = {
        "set": {1}, "counter": collections.Counter("ab"), "ordered": collections.OrderedDict(a=torch.ones(2)), "none": None,
        "shape": torch.Size([2]), "kind": torch.bfloat16, 3: (True, 0.5, b"x", torch.nn.Parameter(torch.ones(1))),
    }  # fmt: skip
    with pytest.raises(Stops):
        trained(tmp_path, 4, objects={"thing": Holds(state)})
    empty = Holds({})
    assert trained(tmp_path, resume=True, objects={"thing": empty})[0] == 4
    assert repr(empty.state) == repr(state)


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_hundreds_of_objects_are_held_and_take_few_descriptors(tmp_path, place):
    settings = {"snapshot_dir": str(tmp_path / "disk")}
    states = [{"average": torch.arange(400_000.0)}, *({"number": number} for number in range(300))]
    objects = {f"n{number}": Holds(state) for number, state in enumerate(states)}
    with pytest.raises(Stops):
        trained(tmp_path / "run", 5, objects=objects, **settings)
    assert len(held_by(tmp_path / "run")["snapshots"][0]["files"]) == 3  # weights, optimizer, and the rest
    if place == "disk":
        until(lambda: (tmp_path / "disk" / "checkpoint-4").exists())
        end_process(tmp_path / "run")
    found = {name: Holds({}) for name in objects}
    assert trained(tmp_path / "run", resume=True, objects=found, **settings)[0] == 4
    assert same(states, [each.state for each in found.values()])
    assert not (tmp_path / "run" / LINKS).exists()


def test_what_cannot_be_loaded_later_is_a_warning_and_the_snapshot_before_stays(tmp_path, caplog):
    counted = Holds({"best": 0.0})

    class Turns(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            counted.count = getattr(counted, "count", 0) + 1
            if counted.count == 5:
                counted.state = {"best": np.float64(0.5)}

    model = net()
    with pytest.raises(Stops):
        trained(tmp_path, 9, model=model, optimizer=Turns(model.parameters(), lr=0.1), objects={"thing": counted})
    assert caplog.text.count("A snapshot was not taken: thing.state_dict() holds what torch.load") == 2
    assert steps_held(tmp_path) == [2, 4]


def test_snapshots_of_another_model_or_other_objects_are_refused_by_name(tmp_path):
    with pytest.raises(Stops):
        own_loop(tmp_path, stop=5)
    with pytest.raises(SnapshotError, match=r"step 4 in memory is of another model: .*Resume with the model"):
        trained(tmp_path, resume=True)
    with pytest.raises(
        SnapshotError, match="holds average, optimizer, scheduler, and this training has optimizer: resume"
    ):
        trained(tmp_path, resume=True, model=made(None)[0])
    assert own_loop(tmp_path, resume=True)[0] == 4  # it is still there


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return {}

    def set_extra_state(self, state):
        pass


def test_extra_state_is_refused_by_name(tmp_path):
    with pytest.raises(SnapshotError, match="_extra_state is a dict"):
        trained(tmp_path, model=WithExtraState(4, 3))


def test_a_loop_that_takes_none_although_they_are_set_is_an_error(tmp_path):
    model, optimizer, _, loader = made(None)
    session = attach(model, OffloadConfig(tier="none", snapshot_steps=4))
    with pytest.raises(OffloadConfigError, match="this loop takes no snapshots"):
        model(**next(iter(loader)))
    with pytest.raises(OffloadError, match="inside of their block"):
        session.snapshots(tmp_path, optimizer=optimizer).end_step()
    with pytest.raises(OffloadConfigError, match=r"snapshots\(counter=\.\.\.\) takes what has state_dict"):
        session.snapshots(tmp_path, counter=3)
    with pytest.raises(OffloadConfigError, match=r"takes no loader: iterate over snapshots\.batches\(data\)"):
        session.snapshots(tmp_path, data=loader)
    for folder in (None, 3):
        with pytest.raises(OffloadConfigError, match=f"takes the path of a folder, and {folder} is none"):
            session.snapshots(folder)
    session.detach()
    accelerator = OffloadPlugin(tier="none", snapshot_steps=4).accelerator(cpu=True)
    with pytest.raises(OffloadConfigError, match="has prepared no model yet"):
        accelerator.snapshots(str(tmp_path))
    prepared, optimizer = accelerator.prepare(model, optimizer)
    with pytest.raises(OffloadConfigError, match="this loop takes no snapshots"):
        accelerator.backward(prepared(**next(iter(loader))).loss)


def test_a_block_is_entered_once(tmp_path):
    model = nn.Linear(2, 2)
    session = attach(model, OffloadConfig(tier="none", snapshot_steps=4))
    block = session.snapshots(tmp_path)
    with block:
        with pytest.raises(OffloadError, match="A block of snapshots is entered once"):
            block.__enter__()
        with pytest.raises(SnapshotError, match=f"Process {os.getpid()} trains already with {tmp_path}"):
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
            trained(tmp_path, stop=5)
        assert trained(tmp_path, resume=True)[0] == 4
    assert "snapshot process has ended" not in caplog.text


# -- the place in the data -------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    """Rows that nothing counts, which can go on where they were."""

    def __init__(self):
        self.had = 0

    def __iter__(self):
        for row in batches()[self.had :]:
            self.had += 1
            yield row
        self.had = 0

    def state_dict(self):
        return {"had": self.had}

    def load_state_dict(self, state):
        self.had = state["had"]


class Augmented:
    """Rows that the process's generator changes."""

    def __len__(self):
        return len(batches())

    def __getitem__(self, row):
        return batches()[row] * torch.rand(())


LOADERS = {
    "shuffled": lambda: StatefulDataLoader(batches(), batch_size=None, shuffle=True),
    "in batches": lambda: StatefulDataLoader(torch.cat(batches()), batch_size=2, shuffle=True),
    "a stream": lambda: StatefulDataLoader(Stream(), batch_size=None),
    "augmented": lambda: StatefulDataLoader(Augmented(), batch_size=None, shuffle=True),
}


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize("stop", [5, 13, 17], ids=["first epoch", "its end", "second epoch"])
def test_a_loop_goes_on_in_the_order_that_it_had(tmp_path, make, stop):
    torch.manual_seed(0)
    expected = trained(tmp_path / "whole", loader=make(), epochs=2)[1]
    torch.manual_seed(0)
    with pytest.raises(Stops):
        trained(tmp_path / "run", stop, loader=make(), epochs=2)
    torch.manual_seed(9)  # the next process is another one
    begun, found = trained(tmp_path / "run", loader=make(), epochs=2, resume=True)
    assert begun == stop - 1
    assert same(expected, found)


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_a_snapshot_between_two_epochs_goes_on_with_the_next(make):
    """As one of a loop that ends a step of accumulated gradients after its data."""

    def order(position, loader):
        return [batch.sum().item() for batch in position.of(loader)], torch.rand(()).item()

    torch.manual_seed(0)
    position, loader = Position(), make()
    order(position, loader)
    state, now = position.state(), torch.get_rng_state()
    expected = [order(position, loader) for _ in range(2)]
    torch.manual_seed(9)
    resumed, loader = Position(), make()
    resumed.restore(state)
    torch.set_rng_state(now)
    assert resumed.epoch == 1
    assert [order(resumed, loader) for _ in range(2)] == expected


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (batches, r"a list has no state_dict\(\)"),
        (lambda: DataLoader(batches(), shuffle=True), r"a DataLoader has no state_dict\(\)"),
        (lambda: StatefulDataLoader(batches(), generator=torch.Generator()), "in a generator of its own"),
    ],
    ids=["list", "DataLoader", "generator"],
)
def test_loaders_that_do_not_know_their_place_are_refused(tmp_path, make, reason):
    expected = (
        f"A resume could not find its place in the data: .*{reason}.*Give snapshots.batches.. a StatefulDataLoader"
    )
    with pytest.raises(OffloadError, match=expected):
        trained(tmp_path, loader=make())


def test_loaders_of_accelerate_are_refused(tmp_path):
    accelerator = OffloadPlugin(tier="none", snapshot_steps=1).accelerator(cpu=True)
    _, loader = accelerator.prepare(torch.nn.Linear(4, 1), DataLoader(torch.cat(batches())))
    with (
        pytest.raises(OffloadError, match=r"a DataLoaderShard has no state_dict\(\) of its place in an epoch"),
        accelerator.snapshots(str(tmp_path)) as snapshots,
    ):
        next(snapshots.batches(loader))
    accelerator.end_training()


def test_batches_are_those_of_one_loader():
    position = Position()
    for _ in position.of(in_order()):
        with pytest.raises(OffloadError, match="in the middle of an epoch"):
            next(position.of(in_order()))


def test_snapshots_that_grow_take_all_of_their_bytes_from_the_budget(tmp_path):
    """As do those of optimizers that train other weights after some steps."""
    grows = Holds(torch.zeros(1))
    model = net()
    session = attach(model, OffloadConfig(tier="none", snapshot_steps=1, ram_budget="1GiB"))
    with session.snapshots(tmp_path / "run", grows=grows) as snapshots:
        for count in range(1, 7):
            grows.state = torch.zeros(count << 18)
            snapshots.end_step()
        taking = snapshots.taking
        held = sum(file.nbytes for files in [*taking._free, *taking._files.values()] for file in files)
        assert held > 11 << 20
        assert session._storage.ram.taken_bytes >= held
    session.detach()
