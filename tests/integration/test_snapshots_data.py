"""The order of the data after a resume is that of a run that never stopped, or the loader is refused by name."""

import itertools

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import Trainer, TrainerCallback

from hf_offload import OffloadConfigError, OffloadError, OffloadPlugin
from hf_offload.snapshots.positions import Position
from tests.faults.killed_snapshots import result_of, same, trainer_in
from tests.helpers.snapshot_loops import Stops, batches, trained
from tests.helpers.snapshot_processes import no_process_is_left  # noqa: F401  a fixture

ROWS = 12
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # which torchdata calls


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
        return ROWS

    def __getitem__(self, row):
        return batches()[row] * torch.rand(())


def generator():
    return torch.Generator().manual_seed(3)


def seeded_by_accelerate():
    """As ``accelerator.prepare`` makes it with ``use_seedable_sampler=True``."""
    loader = DataLoader(torch.cat(batches()), batch_size=2, shuffle=True)
    return prepare_data_loader(loader, use_seedable_sampler=True, put_on_device=False)


LOADERS = {
    "list": batches,
    "in order": lambda: DataLoader(batches(), batch_size=None),
    "shuffled": lambda: DataLoader(batches(), batch_size=None, shuffle=True),
    "shuffled by a generator": lambda: DataLoader(batches(), batch_size=None, shuffle=True, generator=generator()),
    "batches": lambda: DataLoader(torch.cat(batches()), batch_size=2, shuffle=True),
    "weighted": lambda: DataLoader(
        batches(), batch_size=None, sampler=WeightedRandomSampler(torch.ones(ROWS), ROWS, generator=generator())
    ),
    "subset": lambda: DataLoader(batches(), batch_size=None, sampler=SubsetRandomSampler(range(ROWS))),
    "distributed": lambda: DataLoader(
        batches(), batch_size=None, sampler=DistributedSampler(range(ROWS), num_replicas=1, rank=0)
    ),
    "seedable": seeded_by_accelerate,
    "stateful": lambda: StatefulDataLoader(batches(), batch_size=None, shuffle=True),
    "stateful, in batches": lambda: StatefulDataLoader(torch.cat(batches()), batch_size=2, shuffle=True),
    "stateful, a stream": lambda: StatefulDataLoader(Stream(), batch_size=None),
    "stateful, augmented": lambda: StatefulDataLoader(Augmented(), batch_size=None, shuffle=True),
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


def test_a_loop_that_calls_set_epoch_goes_on_with_the_next_epoch():
    def order(position, loader):
        loader.sampler.set_epoch(position.epoch)
        return [batch.sum().item() for batch in position.of(loader)]

    make, position = LOADERS["distributed"], Position()
    loader = make()
    first, state = order(position, loader), position.state()
    expected = [order(position, loader) for _ in range(2)]
    assert first not in expected
    resumed, loader = Position(), make()
    resumed.restore(state)
    assert [order(resumed, loader) for _ in range(2)] == expected


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_the_order_of_a_training_with_snapshots_is_that_of_one_without(make):
    def order(of, state):
        torch.manual_seed(0)
        loader, found = make(), []
        for _ in range(2):
            for batch in of(loader):
                found.append(batch.sum().item())
                state()
        return found, torch.rand(1).item()

    position = Position()
    assert order(position.of, position.state) == order(iter, lambda: None)


class Own(Sampler):
    """Says nothing of its order."""

    def __init__(self, *args):
        pass

    def __len__(self):
        return ROWS

    def __iter__(self):
        return iter(torch.randperm(ROWS).tolist())


class Plain(IterableDataset):
    def __iter__(self):
        return iter(batches())


REFUSED = {
    "stateful, by a generator": (
        lambda: StatefulDataLoader(batches(), batch_size=None, shuffle=True, generator=generator()),
        "a StatefulDataLoader does not find its place in a generator of its own",
    ),
    "own": (lambda: DataLoader(batches(), sampler=Own()), "the sampler Own does not say what decides its order"),
    "iterator": (lambda: DataLoader(batches(), sampler=iter(range(ROWS))), "the sampler range_iterator does not say"),
    "subclass": (
        lambda: DataLoader(batches(), sampler=type("Mine", (RandomSampler,), {})(range(ROWS))),
        "the sampler Mine does not say",
    ),
    "stream": (lambda: DataLoader(Plain(), batch_size=None), "the Plain has no order that is known"),
    "function": (lambda: itertools.chain(batches()), r"a chain has no state_dict\(\)"),
    "workers": (
        lambda: DataLoader(batches(), num_workers=1, persistent_workers=True),
        "persistent workers draw random numbers",
    ),
}


@pytest.mark.parametrize(("make", "reason"), REFUSED.values(), ids=REFUSED)
def test_loaders_whose_order_is_not_known_are_refused_by_name(tmp_path, make, reason):
    expected = f"A resume could not find its place in the data: {reason}.*Give snapshots.batches.. a StatefulDataLoader"
    with pytest.raises(OffloadError, match=expected):
        trained(tmp_path, loader=make())


def test_accelerate_s_stateful_loaders_are_refused(tmp_path):
    plugin = OffloadPlugin(tier="none", snapshot_steps=1)
    accelerator = plugin.accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    _, loader = accelerator.prepare(torch.nn.Linear(4, 1), DataLoader(torch.cat(batches())))
    with (
        pytest.raises(OffloadError, match="set use_seedable_sampler=True instead"),
        accelerator.snapshots(str(tmp_path)) as snapshots,
    ):
        next(snapshots.batches(loader))
    accelerator.end_training()


def test_a_loader_is_none_of_the_objects(tmp_path):
    with pytest.raises(OffloadConfigError, match=r"takes no loader: iterate over snapshots\.batches\(data\)"):
        trained(tmp_path, objects={"data": StatefulDataLoader(batches())})


# -- of a Trainer ----------------------------------------------------------------------------------------------------------


class Sampled(Trainer):
    """A Trainer with a sampler of its own."""

    sampler = None

    def _get_train_sampler(self, *args, **kwargs):
        return type(self).sampler()


class ByEpoch(Sampler):
    """Shuffles by the number of the epoch."""

    def __init__(self):
        self.epoch = 0

    def __len__(self):
        return 50

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(torch.randperm(50, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class Dies(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 31:
            raise Stops


def trainer_with(sampler, folder, snapshots=True, callbacks=()):
    kind = type("Sampled", (Sampled,), {"sampler": staticmethod(sampler)})
    return trainer_in(folder, snapshots, callbacks, kind=kind, max_steps=40)


@pytest.mark.parametrize(
    ("sampler", "name"),
    [(lambda: WeightedRandomSampler(torch.ones(50), 50), "WeightedRandomSampler"), (Own, "Own")],
)
def test_a_trainer_refuses_samplers_that_the_number_of_an_epoch_does_not_decide(tmp_path, sampler, name):
    with pytest.raises(
        OffloadConfigError, match=rf"cannot be used here: the sampler {name} does not say what decides its order"
    ):
        trainer_with(sampler, tmp_path).train()


def test_a_trainer_with_a_sampler_of_its_own_goes_on_to_the_same_bits(tmp_path):
    whole = trainer_with(ByEpoch, tmp_path / "whole", False)
    whole.train()
    with pytest.raises(Stops):
        trainer_with(ByEpoch, tmp_path / "run", callbacks=[Dies()]).train()
    found = trainer_with(ByEpoch, tmp_path / "run")
    found.train(resume_from_checkpoint=True)
    assert same(result_of(whole), result_of(found))
