"""Snapshots of several processes: one step for all of them, and what one has lost is rebuilt from the others."""

import contextlib
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import ProcessExitedException
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import TrainerCallback, default_data_collator

from hf_offload import OffloadConfig, OffloadConfigError, OffloadPlugin, attach
from hf_offload.errors import SnapshotError
from hf_offload.integrations.accelerate import attached_accelerators
from hf_offload.ranks import Ranks
from hf_offload.snapshots import parity
from hf_offload.snapshots.client import SnapshotClient
from hf_offload.snapshots.contents import MemoryFile
from hf_offload.snapshots.taking import Snapshots
from tests.faults.killed_snapshots import result_of, same, trainer_in
from tests.helpers.gloo_processes import assert_done, run_in_processes
from tests.helpers.snapshot_loops import Holds, Stops
from tests.helpers.snapshot_processes import (  # noqa: F401  a fixture
    address_in,
    end_process,
    held_by,
    no_process_is_left_by_the_file,
    steps_held,
    until,
)
from tests.helpers.tiny_models import ExampleDataset, tiny_model

TWO, THREE = 2, 3
STEPS, EVERY, DIES = 14, 4, 11
LAST = 8
SHORT = {"max_steps": STEPS, "logging_steps": 3, "offload_snapshot_wait_s": 120}


class Draws(TrainerCallback):
    """Each rank has generators of its own; at a step, it stops or is killed."""

    def __init__(self, rank, step=None, kill=None):
        self._rank = rank
        self._step = step
        self._kill = kill
        self.begun = None

    def on_train_begin(self, args, state, control, **kwargs):
        torch.manual_seed(100 + self._rank)
        self.begun = state.global_step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step != self._step:
            return
        if self._kill is None:
            raise Stops
        if self._kill == self._rank:
            end_process(Path(args.output_dir), self._rank)
            os.kill(os.getpid(), signal.SIGKILL)


def trained(rank, folder, snapshots, step=None, kill=None, resume=None, **others):
    draws = Draws(rank, step, kill)
    settings = SHORT if snapshots else {name: value for name, value in SHORT.items() if "offload" not in name}
    trainer = trainer_in(folder, snapshots, [draws], **{**settings, **others})
    trainer.train(resume_from_checkpoint=resume)
    return draws.begun, result_of(trainer)


def whole(rank, folder):
    return trained(rank, folder / "whole", False)[1]


def dies(rank, folder, **others):
    with pytest.raises(Stops):
        trained(rank, folder, True, DIES, **others)
    dist.barrier()


def goes_on(rank, folder, from_step, **others):
    begun, found = trained(rank, folder, True, resume=True, **others)
    assert begun == from_step
    assert_same(whole(rank, folder), found)
    dist.barrier()
    until(lambda: held_by(folder, rank) is None)  # it looks for the other one now and then


def assert_same(expected, found):
    different = [name for name in expected if not same(expected[name], found[name])]
    assert not different, different


def forget_accelerators():
    for offloaded in attached_accelerators():
        offloaded.detach()
    AcceleratorState._reset_state(reset_partial_state=True)


def everyone(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


# -- works of two processes ------------------------------------------------------------------------------------------------


def each_has_its_own(rank, folder):
    folder = folder / "own"
    dies(rank, folder)
    assert steps_held(folder, rank) == [4, 8]
    assert not same(*everyone(whole(rank, folder)["generators"]))
    goes_on(rank, folder, LAST)


def lost_without_parity(rank, folder):
    folder = folder / "lost"
    dies(rank, folder)
    if rank == 1:
        end_process(folder, 1)
    dist.barrier()
    goes_on(rank, folder, 0)


def lost_with_parity(rank, folder):
    folder = folder / "parity"
    dies(rank, folder, offload_snapshot_parity=1)
    if rank == 0:
        end_process(folder, 0)
    dist.barrier()
    with pytest.raises(Stops):  # from step 8, which is rebuilt, to one behind the next snapshot
        trained(rank, folder, True, 13, resume=True, offload_snapshot_parity=1)
    dist.barrier()
    assert 12 in steps_held(folder, rank)
    if rank == 1:
        end_process(folder, 1)
    dist.barrier()
    goes_on(rank, folder, 12, offload_snapshot_parity=1)


def killed_between_the_commits(rank, folder):
    """The first has committed a step that the other has not."""
    folder = folder / "between"
    dies(rank, folder)
    if rank == 1:
        client = SnapshotClient.connect(address_in(folder, rank))
        client.ask("keep", step=4)
        client.close()
        assert steps_held(folder, rank) == [4]
    dist.barrier()
    goes_on(rank, folder, 4)


def damaged_on_one(rank, folder):
    folder = folder / "damaged"
    dies(rank, folder, offload_snapshot_parity=1)
    if rank == 1:
        client = SnapshotClient.connect(address_in(folder, rank))
        number = client.fetch(LAST)[0]
        byte = os.pread(number, 1, 500)
        os.pwrite(number, bytes([byte[0] ^ 1]), 500)
        client.close()
    dist.barrier()
    goes_on(rank, folder, LAST, offload_snapshot_parity=1)


def none_if_one_cannot(rank, folder):
    """One has no room for a snapshot: nobody takes it, and the one before stays."""
    folder, copy = folder / "none", Snapshots._written

    def copies(self, *args):
        if rank == 1 and self._newest is not None:
            raise SnapshotError("There is no room")
        return copy(self, *args)

    Snapshots._written = copies
    try:
        dies(rank, folder)
    finally:
        Snapshots._written = copy
    assert steps_held(folder, rank) == [4]
    goes_on(rank, folder, 4)


def from_disk(rank, folder):
    folder, disk = folder / "written", str(folder / "disk")
    dies(rank, folder, offload_snapshot_dir=disk)
    until(lambda: (Path(disk) / f"checkpoint-{LAST}").exists())
    dist.barrier()
    end_process(folder, rank)
    dist.barrier()
    goes_on(rank, folder, LAST, offload_snapshot_dir=disk)


def accelerated(rank, folder):
    folder = folder / "accelerated"

    def loop(snapshots, stop=None, resume=False):
        forget_accelerators()
        settings = {"snapshot_steps": EVERY, "snapshot_parity": 1} if snapshots else {}
        accelerator = OffloadPlugin(tier="none", **settings).accelerator(cpu=True, project_dir=str(folder))
        torch.manual_seed(rank)
        model, optimizer, loader = made()
        prepared, optimizer = accelerator.prepare(model, optimizer)
        total = Holds(0.0)
        accelerator.register_for_checkpointing(total)
        context = accelerator.snapshots(resume=resume) if snapshots else contextlib.nullcontext()
        with context as taken:
            for _ in range(taken.epoch if snapshots else 0, 2):
                for batch in taken.batches(loader) if snapshots else loader:
                    loss = prepared(**batch).loss
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    total.state += loss.item()
                    if snapshots:
                        taken.end_step()
                        if taken.step == stop:
                            raise Stops
        return taken.resumed_step if snapshots else 0, finished(model, optimizer, total)

    expected = loop(False)[1]
    assert len(set(everyone(expected["total"]))) == TWO
    with pytest.raises(Stops):
        loop(True, stop=7)
    dist.barrier()
    if rank == 1:
        end_process(folder, 1)
    dist.barrier()
    begun, found = loop(True, resume=True)
    assert begun == 4
    assert_same(expected, found)
    forget_accelerators()


def shards_are_refused(rank, folder):
    model = tiny_model("llama")
    fully_shard(model)
    session = attach(model, OffloadConfig(tier="none", snapshot_steps=4))
    with pytest.raises(OffloadConfigError, match="FSDP2"):
        session.snapshots(folder / "shards")
    session.detach()


def left_for_one_process(rank, folder):
    dies(rank, folder / "two")


TWO_WORKS = (
    each_has_its_own,
    lost_without_parity,
    lost_with_parity,
    killed_between_the_commits,
    damaged_on_one,
    none_if_one_cannot,
    from_disk,
    accelerated,
    shards_are_refused,
    left_for_one_process,
)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    run_in_processes(TWO_WORKS, TWO, folder)
    return folder


@pytest.mark.parametrize("work", TWO_WORKS, ids=lambda work: work.__name__)
def test_two_processes(two, work):
    assert_done(work, TWO, two)


def test_another_number_of_processes_is_refused(two):
    with pytest.raises(SnapshotError, match="step 8 is of 2 processes, and 1 train now"):
        trained(0, two / "two", True, resume=True)
    for rank in range(TWO):
        end_process(two / "two", rank)


# -- killed, with three processes ------------------------------------------------------------------------------------------


def made():
    model = tiny_model("gpt2", dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = StatefulDataLoader(
        ExampleDataset("gpt2", 24), batch_size=2, shuffle=True, collate_fn=default_data_collator
    )
    return model, optimizer, loader


def finished(model, optimizer, total):
    return {
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
        "optimizer": optimizer.state_dict(),
        "total": total.state,
        "generator": torch.get_rng_state(),
    }


def loop_of_three(rank, folder, snapshots, killed=None, resume=False):
    torch.manual_seed(rank)
    model, optimizer, _ = made()
    data = ExampleDataset("gpt2", 30)
    loader = StatefulDataLoader(
        data, batch_size=2, sampler=DistributedSampler(data, seed=3), collate_fn=default_data_collator
    )
    # Else gradients are summed in another order in the first step than in later ones.
    wrapped, total = DistributedDataParallel(model, find_unused_parameters=True), Holds(0.0)
    settings = {"snapshot_steps": EVERY, "snapshot_parity": 1, "snapshot_wait_s": 120} if snapshots else {}
    session = attach(model, OffloadConfig(tier="none", **settings))
    context = contextlib.nullcontext()
    if snapshots:
        context = session.snapshots(folder, optimizer=optimizer, total=total, resume=resume)
    with context as taken:
        for epoch in range(taken.epoch if snapshots else 0, 3):
            loader.sampler.set_epoch(epoch)
            for batch in taken.batches(loader) if snapshots else loader:
                loss = wrapped(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                total.state += loss.item()
                if snapshots:
                    taken.end_step()
                    if killed == rank and taken.step == DIES:
                        end_process(folder, rank)
                        os.kill(os.getpid(), signal.SIGKILL)
    session.detach()
    return taken.resumed_step if snapshots else 0, finished(model, optimizer, total)


def killed_with_its_snapshots(rank, folder):
    loop_of_three(rank, folder / "loop", True, killed=1)


def its_snapshot_is_rebuilt(rank, folder):
    expected = loop_of_three(rank, folder, False)[1]
    assert len(set(everyone(expected["total"]))) == THREE
    assert steps_held(folder / "loop", rank) == (None if rank == 1 else [4, 8])
    dist.barrier()
    begun, found = loop_of_three(rank, folder / "loop", True, resume=True)
    assert begun == LAST
    assert_same(expected, found)


def any_lost_rank_is_rebuilt(rank, folder):
    """Files of different lengths, to the last byte."""
    ranks = Ranks()
    random = np.random.default_rng(rank)
    contents = [random.bytes(count) for count in (10_000_000 + 777 * rank, 5, 0)]
    files = [MemoryFile() for _ in contents]
    for file, content in zip(files, contents, strict=True):
        file.write(content)
    peers, row = ranks.gather([[file.nbytes, file.checksum] for file in files]), MemoryFile()
    parity.take(ranks, peers, [file.number for file in files], row)
    assert row.nbytes == -(-max(sum(nbytes for nbytes, _ in each) for each in peers) // (ranks.count - 1))
    for lost in range(THREE):
        made = parity.rebuild(ranks, lost, peers, [] if rank == lost else [file.number for file in (*files, row)])
        assert len(made) == (4 if rank == lost else 0)
        for one, content in zip(made, [*contents, os.pread(row.number, row.nbytes, 0)], strict=False):
            assert os.pread(one.number, 20_000_000, 0) == content
    ranks.close()


def test_the_snapshots_of_a_process_that_is_killed_with_them_are_rebuilt_from_two_others(tmp_path):
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        run_in_processes((killed_with_its_snapshots,), THREE, tmp_path)
    for rank in (0, 2):
        until(lambda: held_by(tmp_path / "loop", rank)["training"] is None)  # noqa: B023
    works = (its_snapshot_is_rebuilt, any_lost_rank_is_rebuilt)
    run_in_processes(works, THREE, tmp_path)
    for work in works:
        assert_done(work, THREE, tmp_path)
    assert [held_by(tmp_path / "loop", rank) for rank in range(THREE)] == [None] * THREE
