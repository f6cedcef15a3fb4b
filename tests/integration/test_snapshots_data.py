"""The order of the data after a resume is that of a run that never stopped, or the sampler is refused by its name."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler, WeightedRandomSampler
from transformers import Trainer, TrainerCallback

from hf_offload import OffloadConfigError, OffloadError
from hf_offload.snapshots.positions import Position
from tests.faults.killed_snapshots import result_of, same, trainer_in
from tests.helpers.snapshot_loops import Stops, batches, trained
from tests.helpers.snapshot_processes import no_process_is_left  # noqa: F401  a fixture

ROWS = 12
HIDDEN = random.Random(4)


class Own(Sampler):
    """Draws its order from a generator of its own."""

    def __init__(self, generator):
        self.generator = None
        self.draws = generator

    def __len__(self):
        return ROWS

    def __iter__(self):
        if isinstance(self.draws, torch.Generator):
            return iter(torch.randperm(ROWS, generator=self.draws).tolist())
        order = list(range(ROWS))
        self.draws.shuffle(order)
        return iter(order)


class Later(Own):
    """Draws item by item."""

    def __iter__(self):
        for _ in range(ROWS):
            yield int(torch.randint(ROWS, (), generator=self.draws))


class Counts(Own):
    """Seeds itself by a count of its own."""

    def __init__(self):
        super().__init__(None)
        self.rounds = 0

    def __iter__(self):
        self.rounds += 1
        return iter(torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.rounds)).tolist())


class OfItsModule(Own):
    def __init__(self):
        super().__init__(HIDDEN)
        del self.draws

    def __iter__(self):
        order = list(range(ROWS))
        HIDDEN.shuffle(order)
        return iter(order)


class InPlace(Own):
    """Shuffles again what it has shuffled."""

    def __init__(self):
        super().__init__(random.Random(1))
        self.order = list(range(ROWS))

    def __iter__(self):
        self.draws.shuffle(self.order)
        return iter(list(self.order))


class Wraps(Own):
    """Has the order of another one."""

    def __iter__(self):
        return iter(self.draws)


class Steps(Own):
    """Is always the same."""

    def __init__(self):
        super().__init__(None)

    def __iter__(self):
        return iter(range(ROWS - 1, -1, -1))


FOUND = {
    "torch": lambda: Own(torch.Generator().manual_seed(3)),
    "numpy": lambda: Own(np.random.default_rng(3)),
    "other numpy": lambda: Own(np.random.Generator(np.random.SFC64(3))),
    "old numpy": lambda: Own(np.random.RandomState(3)),
    "python": lambda: Own(random.Random(3)),
    "item by item": lambda: Later(torch.Generator().manual_seed(3)),
    "count": Counts,
    "inside": lambda: Wraps(Own(random.Random(3))),
    "same": Steps,
    "weights": lambda: WeightedRandomSampler(torch.rand(ROWS, generator=torch.Generator().manual_seed(5)), ROWS),
}


def loader_of(sampler, **others):
    return DataLoader(batches(), sampler=sampler, batch_size=None, **others)


@pytest.mark.parametrize("sampler", FOUND.values(), ids=FOUND)
@pytest.mark.parametrize("stop", [5, 17])
def test_samplers_whose_generators_are_seen_go_on_to_the_same_bits(tmp_path, sampler, stop):
    torch.manual_seed(0)
    expected = trained(tmp_path / "whole", loader=loader_of(sampler()), epochs=2)[1]
    torch.manual_seed(0)
    with pytest.raises(Stops):
        trained(tmp_path / "run", stop, loader=loader_of(sampler()), epochs=2)
    begun, found = trained(tmp_path / "run", loader=loader_of(sampler()), epochs=2, resume=True)
    assert begun == stop - 1
    assert same(expected, found)


@pytest.mark.parametrize("sampler", FOUND.values(), ids=FOUND)
def test_the_order_of_a_training_with_snapshots_is_that_of_one_without(sampler):
    """Trying out a sampler leaves it as it was, and what the process draws from."""

    def order(of):
        torch.manual_seed(0)
        loader = loader_of(sampler())
        return [batch.sum().item() for _ in range(3) for batch in of(loader)], torch.rand(1).item()

    assert order(Position().of) == order(iter)


class Duck:
    """A loader takes it, though it is no Sampler."""

    def __init__(self):
        self.order = list(range(ROWS))

    def __len__(self):
        return ROWS

    def __iter__(self):
        HIDDEN.shuffle(self.order)
        return iter(list(self.order))


class Slots(Duck):
    __slots__ = ("rounds",)

    def __iter__(self):
        self.rounds = getattr(self, "rounds", 0) + 1
        return iter(torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.rounds)).tolist())


REFUSED = {
    "no sampler": (Duck, "Duck has another order each time"),
    "slots": (Slots, "Slots has another order each time"),
    "iterator": (lambda: iter(range(ROWS)), "range_iterator is an iterator"),
    "of its module": (OfItsModule, "OfItsModule has another order each time"),
    "in place": (InPlace, "InPlace has another order each time"),
    "of the process": (lambda: Later(None), "Later draws from the generators of the process, item by item"),
}


@pytest.mark.parametrize(("sampler", "reason"), REFUSED.values(), ids=REFUSED)
def test_samplers_whose_order_cannot_be_repeated_are_refused_by_name(tmp_path, sampler, reason):
    with pytest.raises(OffloadError, match=f"A resume could not find its place in the data: the sampler {reason}"):
        trained(tmp_path, loader=loader_of(sampler()))


class Mines(Own):
    """Takes the rows first whose losses were high."""

    def __init__(self, make):
        super().__init__(None)
        self.losses = make([0.0] * ROWS)

    def __iter__(self):
        return iter(sorted(range(ROWS), key=lambda row: -float(self.losses[row])))


@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
def test_an_order_that_the_training_changes_is_refused_when_it_has_changed(make):
    position, sampler = Position(), Mines(make)
    loader = loader_of(sampler)
    for _ in range(2):
        assert len(list(position.of(loader))) == ROWS
    sampler.losses[3] = 1.0
    with pytest.raises(OffloadError, match="losses of the sampler Mines has changed since the last epoch"):
        next(position.of(loader))


def test_a_sampler_of_batches_is_refused_as_one_of_rows_is(tmp_path):
    loader = DataLoader(batches(), batch_sampler=BatchSampler(OfItsModule(), 1, False), collate_fn=lambda rows: rows[0])
    with pytest.raises(OffloadError, match="OfItsModule has another order each time"):
        trained(tmp_path, loader=loader)


def test_steps_between_two_epochs_go_on_to_the_same_bits(tmp_path):
    """A snapshot of the end of an epoch has the generators with which the next one begins."""

    def order(position, loader):
        return [batch.sum().item() for batch in position.of(loader)]

    position, loader = Position(), loader_of(FOUND["python"]())
    order(position, loader)
    state = position.state()
    expected = order(position, loader)
    resumed = Position()
    resumed.restore(state)
    assert resumed.epoch == 1
    assert order(resumed, loader_of(FOUND["python"]())) == expected


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


TRAINERS = {
    "weights": (lambda: WeightedRandomSampler(torch.ones(50), 50), "WeightedRandomSampler"),
    "generator": (
        lambda: WeightedRandomSampler(torch.ones(50), 50, generator=torch.Generator()),
        "WeightedRandomSampler",
    ),
    "of its module": (OfItsModule, "OfItsModule"),
    "no sampler": (Duck, "Duck"),
    "count": (Counts, "Counts"),
}


@pytest.mark.parametrize(("sampler", "name"), TRAINERS.values(), ids=TRAINERS)
def test_a_trainer_refuses_samplers_that_the_number_of_an_epoch_does_not_decide(tmp_path, sampler, name):
    with pytest.raises(
        OffloadConfigError, match=rf"cannot be used here: the sampler {name} has another order each time"
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
