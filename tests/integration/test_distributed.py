"""Several processes: the same bits as without offloading, shared budgets, one plan, one summary."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from hf_offload import (
    OffloadCallback,
    OffloadConfig,
    OffloadConfigError,
    OffloadPlugin,
    attach,
    offload_activations,
    ranks,
)
from hf_offload.integrations.summary import summary_lines
from hf_offload.settings.sizes import format_bytes
from hf_offload.state.optimizer import streaming_of
from tests.helpers.gloo_processes import assert_done, run_in_processes
from tests.helpers.snapshot_processes import until
from tests.helpers.tiny_models import ExampleDataset, tiny_batch, tiny_model, weights

TWO, FOUR = 2, 4


def settings(folder, **others):
    return OffloadConfig(tier="ssd", directory=folder, min_bytes=0, **others)


def trained(model, wrapped, rank, config=None, steps=3):
    """Losses and final weights, and how many bytes were moved."""
    torch.manual_seed(rank)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    losses = []
    with offload_activations(model, config or OffloadConfig(tier="none")) as session:
        for step in range(steps):
            loss = wrapped(**tiny_batch("llama", seed=10 * rank + step)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.end_step()
            losses.append(loss.item())
    return losses, [local(parameter) for parameter in wrapped.parameters()], session.stats.total.offloaded_bytes


def local(parameter):
    return parameter.to_local().clone() if hasattr(parameter, "to_local") else parameter.detach().clone()


def assert_same(expected, found):
    assert found[0] == expected[0]
    assert all(torch.equal(one, other) for one, other in zip(found[1], expected[1], strict=True))
    assert expected[2] == 0
    assert found[2] > 0


def replicated(rank, folder):
    def run(config):
        model = tiny_model("llama")
        return trained(model, DistributedDataParallel(model), rank, config)

    assert_same(run(None), run(settings(folder)))


def streamed(rank, folder):
    """Optimizer state and weights on tiers. Gradients stay: they are reduced in memory."""

    def run(place, params="none", **options):
        model = tiny_model("llama")
        wrapped = DistributedDataParallel(model, **options)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
        files = {} if place == "none" else {"directory": folder}
        session = attach(model, OffloadConfig(tier="none", optimizer=place, params=params, min_bytes=0, **files))
        session.prepare_optimizer(optimizer)
        if session.residency is not None:
            session.residency.limit_bytes = 1
        torch.manual_seed(rank)
        for step in range(4):
            wrapped(**tiny_batch("llama", seed=10 * rank + step)).loss.backward()
            session.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        moved = session.stats.accounts.get("optimizer state", {}).get("ssd")
        return weights(model), optimizer.state_dict()["state"], 0 if moved is None else moved.written_bytes

    for options, places in (
        ({}, ("none", "ram", "ssd")),
        ({"gradient_as_bucket_view": True}, ("ssd",)),
        ({"static_graph": True}, ("ssd",)),
    ):
        expected = run("none", **options)
        assert expected[2] == 0
        for params in places:
            found = run("ssd", params, **options)
            assert all(torch.equal(found[0][name], value) for name, value in expected[0].items())
            for place, state in expected[1].items():
                assert all(torch.equal(found[1][place][name], value) for name, value in state.items())
            assert found[2] > 0


def sharded(rank, folder):
    from torch.distributed.fsdp import fully_shard

    def run(config, recompute):
        model = tiny_model("llama")
        model.gradient_checkpointing_enable({"use_reentrant": recompute == "reentrant"})
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        return trained(model, model, rank, config)

    for recompute in ("non-reentrant", "reentrant"):
        assert_same(run(None, recompute), run(settings(folder), recompute))


def sampled(rank, folder):
    """Estimated gradients are averaged as exact ones are: all ranks stay the same, and offloading changes no bit."""
    sampling = {"sampled_linear": {"ratio": 0.25, "min_rows": 1}}

    def run(config):
        model = tiny_model("llama")
        return trained(model, DistributedDataParallel(model), rank, config)

    expected, found = run(OffloadConfig(tier="none", **sampling)), run(settings(folder, **sampling))
    assert_same(expected, found)
    everyone = [None] * TWO
    dist.all_gather_object(everyone, found[1])
    assert all(torch.equal(one, other) for one, other in zip(*everyone, strict=True))
    exact = run(OffloadConfig(tier="none"))
    assert any(not torch.equal(one, other) for one, other in zip(exact[1], found[1], strict=True))


def norms_are_shared(rank, folder):
    """Every process learns what the others have seen of the samples, at the latest when a checkpoint is written."""
    sampling = {"sampled_linear": {"ratio": 0.25, "min_rows": 1, "probabilities": "gradient-cache"}}
    model = tiny_model("llama")
    wrapped = DistributedDataParallel(model)
    session = attach(model, OffloadConfig(tier="none", **sampling))
    examples = ExampleDataset("llama", 7)
    loader = DataLoader([examples[row] for row in range(7)], batch_size=1, sampler=[rank, 2 + rank, 4])
    cache = session.carry_sample_ids(loader)
    cache.norms[5] = 7  # known to all from before
    for step, inputs in enumerate(loader):
        if step == TWO:
            cache.flush()
            own = (cache.norms > 0).any(1).tolist()
            assert own == [rank == 0, rank == 1, rank == 0, rank == 1, False, True, False]
            before = cache.norms.clone()
        wrapped(**inputs).loss.backward()
    cache.share()
    everyone = [None] * TWO
    dist.all_gather_object(everyone, (before, cache.norms))
    assert torch.equal(everyone[0][1], everyone[1][1])
    for row in range(4):
        assert torch.equal(cache.norms[row], everyone[row % 2][0][row])
    assert cache.norms[4].any()  # of the last backward, which was written down for this
    assert (cache.norms[5] == 7).all()
    assert not cache.norms[6].any()
    session.detach()


def with_accelerate(rank, folder):
    from accelerate import Accelerator

    def run(plugin):
        accelerator = Accelerator(cpu=True) if plugin is None else plugin.accelerator(cpu=True)
        model = tiny_model("llama")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        prepared, optimizer = accelerator.prepare(model, optimizer)
        assert isinstance(prepared, DistributedDataParallel)
        losses = []
        torch.manual_seed(rank)
        for step in range(4):
            with accelerator.accumulate(prepared):
                loss = prepared(**tiny_batch("llama", seed=10 * rank + step)).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        accelerator.free_memory()
        return losses, weights(model)

    expected = run(None)
    found = run(OffloadPlugin(tier="ssd", directory=folder, min_bytes=0))
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], tensor) for name, tensor in expected[1].items())


def budgets_are_shared(rank, folder):
    model = tiny_model("gpt2")
    config = settings(folder, ram_budget="1MiB", disk_budget="4MiB", max_disk_write_bytes="8MiB")
    with offload_activations(model, config) as session:
        part = session.config
        assert (part.ram_budget, part.disk_budget, part.max_disk_write_bytes) == (1 << 19, 1 << 21, 1 << 22)
        assert session.ranks.local_count == TWO


def different_settings_are_refused(rank, folder):
    model = tiny_model("gpt2")
    with pytest.raises(OffloadConfigError, match=r"verify='off' on rank 0, 'checksum' on rank 1"):
        offload_activations(model, settings(folder, verify=["off", "checksum"][rank])).__enter__()
    assert not any(module._forward_hooks for module in model.modules())


def state_of_shards(rank, folder):
    """FSDP2's, with its weights in memory or handed to the CPU by its CPUOffloadPolicy."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    def run(place, policy):
        model = tiny_model("llama")
        torch.manual_seed(rank)  # dropout
        options = {} if policy is None else {"offload_policy": policy}
        for layer in model.model.layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        where = {} if place == "none" else {"optimizer": place, "directory": folder, "min_bytes": 1}
        session = attach(model, OffloadConfig(tier="none", **where))
        session.prepare_optimizer(optimizer)
        losses = []
        for step in range(4):
            loss = model(**tiny_batch("llama", seed=step + rank)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step == 2:
                optimizer.load_state_dict(optimizer.state_dict())
        state = [value.to_local().clone() for its in optimizer.state.values() for value in its.values() if value.dim()]
        streaming = streaming_of(optimizer)
        written = 0 if streaming is None else streaming.state_store.tier.stats.written_bytes
        return losses, [local(parameter) for parameter in model.parameters()] + state, written

    for policy in (None, CPUOffloadPolicy(pin_memory=False)):
        assert_same(run("none", policy), run("ssd", policy))


def one_alone_is_refused(rank, folder):
    over = Path(folder, "one_alone_is_over")
    if rank == 1:
        until(over.exists)
        return
    ranks._TO_MEET = ranks._TO_MEET.__class__(seconds=1)
    with pytest.raises(OffloadConfigError, match=r"enable it in all of them"):
        offload_activations(tiny_model("gpt2"), settings(folder)).__enter__()
    over.touch()


def one_summary_for_all(rank, folder):
    model = tiny_model("gpt2")
    with offload_activations(model, settings(folder)) as session:
        for _ in range(1 + rank):  # the second one moves twice as much
            model(**tiny_batch("gpt2")).loss.backward()
        session.end_step()
        line, *drives = summary_lines(session)
        alone, *_ = summary_lines(session, together=False)
    assert all(" written in this run" in each for each in drives)  # a temporary directory in memory has no drive
    mine = session.stats.total.offloaded_bytes
    everyone = [None] * TWO
    dist.all_gather_object(everyone, mine)
    assert f" {format_bytes(sum(everyone))} of activations moved a step by 2 processes" in line
    assert f" {format_bytes(mine)} of activations moved a step," in alone


def an_interrupted_training_waits_for_nobody(rank, folder):
    """One process ends its training early, and alone."""
    from transformers import TrainerControl, TrainerState, TrainingArguments

    ranks._TO_ANSWER = ranks._TO_ANSWER.__class__(seconds=20)
    callback, arguments = OffloadCallback(settings(folder)), TrainingArguments(output_dir=str(folder), use_cpu=True)
    state, control = TrainerState(), TrainerControl()
    state.max_steps, state.global_step = 5, 3 if rank == 0 else 5
    callback.on_train_begin(arguments, state, control, model=tiny_model("gpt2"))
    if rank == 0:
        callback.on_train_end(arguments, state, control)
    dist.barrier()
    callback.session = None


IN_TWO = (
    replicated,
    streamed,
    sharded,
    sampled,
    norms_are_shared,
    with_accelerate,
    budgets_are_shared,
    different_settings_are_refused,
    one_summary_for_all,
    an_interrupted_training_waits_for_nobody,
    state_of_shards,
    one_alone_is_refused,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    run_in_processes(IN_TWO, TWO, folder)
    return folder


@pytest.mark.parametrize("work", IN_TWO, ids=lambda work: work.__name__)
def test_two_processes(work, folder):
    assert_done(work, TWO, folder)


@pytest.mark.full
def test_four_processes(tmp_path):
    run_in_processes([replicated], FOUR, tmp_path)
    assert_done(replicated, FOUR, tmp_path)
