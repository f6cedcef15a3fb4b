"""Weights that snapshots leave on a drive: those of the moment, whatever becomes of the parameters."""

import os

import pytest
import torch
from torch import nn

from hf_offload import OffloadConfig, attach
from hf_offload.snapshots.weights import left_on_drives
from hf_offload.state.registry import parked_of
from hf_offload.state.units import pinned
from hf_offload.state.weights import weights_of
from hf_offload.storage.kept import Kept
from hf_offload.storage.service import storage_of

SIZE, LAYERS = 64, 6


class Parked:
    """A model whose layers take turns in memory, two at a time."""

    def __init__(self, directory, **settings):
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS)])
        config = {"tier": "none", "params": "ssd", "directory": directory, "min_bytes": 0}
        self.session = attach(self.model, OffloadConfig(**{**config, **settings}))
        self.weights = weights_of(self.model)
        self.use()

    def use(self):
        with torch.no_grad():
            self.model(torch.ones(1, SIZE))

    def values(self):
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    def left(self):
        kept = Kept()
        return kept, left_on_drives(dict(self.model.named_parameters()), kept)

    @property
    def moved(self):
        self.weights.store.settle()
        return self.weights.moved_bytes

    @property
    def in_memory(self):
        return [name for name, each in self.model.named_parameters() if parked_of(each).is_here]


@pytest.fixture
def parked(tmp_path):
    found = Parked(tmp_path)
    yield found
    found.session.detach()


def bytes_of(kept, tensor):
    (part,) = kept.parts_of(tensor.untyped_storage())
    return b"".join(
        span.content if span.file is None else os.pread(span.file.descriptor, span.nbytes, span.offset)
        for span in part.slot.spans(part.begin, part.end)
    )


def check(kept, left, values):
    for name, value in values.items():
        assert kept.has(left[name]), name
        assert left[name].shape == value.shape
        assert left[name].dtype == value.dtype
        assert bytes_of(kept, left[name]) == value.numpy().tobytes(), name


def test_all_weights_are_kept_as_they_are_and_stay_so(parked):
    assert 0 < len(parked.in_memory) < LAYERS
    first = parked.values()
    kept, left = parked.left()
    check(kept, left, first)
    for _ in range(3):
        with torch.no_grad():
            for parameter in parked.model.parameters():
                parameter.add_(1)
        parked.use()
    check(kept, left, first)
    newer = parked.left()
    check(*newer, {name: value + 1 + 1 + 1 for name, value in first.items()})
    kept.release()
    parked.use()
    check(*newer, parked.values())
    newer[0].release()


def test_nothing_is_read_for_them_and_what_has_not_changed_is_not_written_again(parked):
    parked.left()[0].release()
    before = parked.moved
    for _ in range(3):
        parked.left()[0].release()
    assert parked.moved == before
    parked.use()
    written = parked.moved[0]
    parked.left()[0].release()
    assert parked.moved[0] == written == before[0]


@pytest.mark.parametrize("is_used", [False, True])
def test_what_is_kept_stays_whoever_writes_to_a_weight_that_is_away(parked, is_used):
    """The mapping of a slot that is kept is no way to its bytes, also of a weight that came and left unchanged."""
    first = parked.values()
    kept, left = parked.left()
    if is_used:
        parked.use()
    changed = [each for name, each in parked.model.named_parameters() if name not in parked.in_memory]
    for parameter in changed:
        parameter.data.add_(1)
    check(kept, left, first)
    for name, parameter in parked.model.named_parameters():
        first[name] += any(parameter is each for each in changed)
    check(*parked.left(), first)


def test_values_that_are_put_back_without_a_new_version_are_the_ones_that_are_written(parked):
    """An average of weights is tried like that: a weight is overwritten where it is away, comes, and gets its values back."""
    name, parameter = next(
        (name, each) for name, each in parked.model.named_parameters() if name not in parked.in_memory
    )
    values = parked.values()
    parameter.data.copy_(torch.zeros(SIZE, SIZE))
    with pinned([parameter]):
        assert not parameter.any()
        parameter.data.copy_(values[name])
    kept, left = parked.left()
    check(kept, left, values)
    assert torch.equal(parameter, values[name])


@pytest.mark.parametrize("is_away", [False, True])
def test_a_weight_that_others_look_at_is_copied(parked, is_away):
    parked.left()[0].release()
    parked.use()
    in_memory = parked.in_memory
    name, parameter = next(
        (name, each) for name, each in parked.model.named_parameters() if (name not in in_memory) == is_away
    )
    view = parameter.detach().numpy()
    values = parked.values()
    kept, left = parked.left()
    view[3, 5] = 7.0  # no counter shows it
    assert left.pop(name) is parameter
    check(kept, left, {other: value for other, value in values.items() if other != name})
    assert parameter[3, 5] == 7.0
    view[3, 5] = 9.0
    del view
    values[name][3, 5] = 9.0
    check(*parked.left(), values)
    parked.use()
    assert torch.equal(parked.values()[name], values[name])


def test_a_weight_that_is_being_used_is_as_it_is_now_and_later(parked):
    name, parameter = next((name, each) for name, each in parked.model.named_parameters() if name in parked.in_memory)
    values = parked.values()
    with pinned([parameter]):
        check(*parked.left(), values)
        parameter.data.add_(1)
        values[name] += 1
        check(*parked.left(), values)
        parameter.data.add_(1)
        values[name] += 1
    check(*parked.left(), values)
    parked.use()
    assert torch.equal(parked.values()[name], values[name])


def test_what_has_several_names_is_kept_once(parked):
    parameter = next(iter(parked.model.parameters()))
    kept = Kept()
    left = left_on_drives({"one": parameter, "other": parameter}, kept)
    assert left["one"] is left["other"]
    assert set(kept.rooms.values()) == {parameter.nbytes}


def test_frozen_weights_need_no_more_room(parked):
    for parameter in list(parked.model.parameters())[1:]:
        parameter.requires_grad_(False)
    kept, left = parked.left()
    check(kept, left, parked.values())
    assert sum(kept.rooms.values()) == SIZE * SIZE * 4
    room = next(iter(storage_of(parked.model)._rooms.values()))
    used = room.used_bytes
    others = [parked.left()[0] for _ in range(3)]
    assert room.used_bytes == used
    assert all(other.rooms == kept.rooms for other in others)


def test_a_transposed_weight_is_copied(parked):
    name, parameter = next(iter(parked.model.named_parameters()))
    parameter.data = parameter.data.clone().t()
    values = parked.values()
    kept, left = parked.left()
    assert left.pop(name) is parameter
    values.pop(name)
    check(kept, left, values)


def test_weights_in_the_ram_tier_are_copied():
    parked = Parked(None, params="ram")
    before = parked.moved
    kept, left = parked.left()
    assert not any(map(kept.has, left.values()))
    assert parked.moved == before
    parked.session.detach()


def test_a_drive_without_room_refuses(tmp_path):
    weight = SIZE * SIZE * 4
    parked = Parked(tmp_path, disk_budget=LAYERS * weight)
    first = parked.left()[0]
    assert first.refusal is None
    parked.use()
    with torch.no_grad():
        next(each for name, each in parked.model.named_parameters() if name in parked.in_memory).add_(1)
    kept, _ = parked.left()
    assert "No room for" in str(kept.refusal)
    assert parked.left()[0].refusal is not None
    first.release()
    values = parked.values()
    kept, left = parked.left()
    assert kept.refusal is None
    check(kept, left, values)
    parked.session.detach()


def test_what_may_not_be_written_any_more_is_copied(tmp_path):
    weight = SIZE * SIZE * 4
    parked = Parked(tmp_path, max_disk_write_bytes=LAYERS * weight)
    parked.left()[0].release()
    parked.use()
    present = parked.in_memory
    values = parked.values()
    with torch.no_grad():
        parked.model.get_parameter(present[-1]).add_(1)
    kept, left = parked.left()
    assert kept.refusal is None
    assert left.pop(present[-1]) is parked.model.get_parameter(present[-1])
    values.pop(present[-1])
    check(kept, left, values)
    parked.session.detach()
