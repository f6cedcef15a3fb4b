"""Block-wise training with Accelerate, several processes, plans and sampled layers."""

import copy

import pytest
import torch
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel

from hf_offload import OffloadConfig, OffloadConfigError, attach, offload_activations
from hf_offload.methods.blockwise import BlockwiseConfig, BlockwiseOptimizer, release
from tests.helpers.blockwise import badam, lisa
from tests.helpers.gloo_processes import assert_done, run_in_processes
from tests.helpers.tiny_models import tiny_batch, tiny_model, weights
from tests.helpers.train import assert_same

PROCESSES = 2
BADAM = badam(switch_every=1, seed=1)
LISA = lisa(blocks_active=1, switch_every=2, seed=1)


def build(model, config=BADAM, **options):
    return BlockwiseOptimizer(model.parameters(), model, config, **{"lr": 1e-2, **options})


def released(model):
    release(model)
    return model


def train(model, optimizer, steps, batches=1, first=0):
    for step in range(first, first + steps):
        for part in range(batches):
            (model(**tiny_batch("llama", seed=step * batches + part)).loss / batches).backward()
        optimizer.step()
        optimizer.zero_grad()


# -- Accelerate and torch.compile --------------------------------------------------------------------------------------


def test_an_accelerated_loop_steps_once_per_accumulation():
    plain, model = tiny_model("llama", dropout=0.0), tiny_model("llama", dropout=0.0)
    expected = build(plain)
    train(plain, expected, 7, batches=3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    optimizer = build(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    wrapped, accelerated, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for step in range(21):
        with accelerator.accumulate(wrapped):
            accelerator.backward(wrapped(**tiny_batch("llama", seed=step)).loss)
            accelerated.step()
            scheduler.step()
            accelerated.zero_grad()
    assert optimizer.turn == 7
    assert optimizer.active == expected.active
    for name, tensor in weights(model).items():
        torch.testing.assert_close(tensor, weights(plain)[name], rtol=1e-5, atol=1e-6)


def test_a_compiled_model_is_compiled_once_for_each_set_of_blocks():
    def run(backend):
        model = tiny_model("llama", dropout=0.0)
        # With SDPA a compiled model has another mask, and on some CPUs other bits.
        model.set_attn_implementation("eager")
        optimizer = build(model, BlockwiseConfig(order="ascending", outside="never", switch_every=1))
        train(torch.compile(model, backend=backend) if backend else model, optimizer, 6)
        return weights(model)

    torch._dynamo.reset()
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    assert_same(run(backend), run(None))
    assert len(compiled) == 2


# -- offloaded activations and sampled layers -------------------------------------------------------------------------


def test_a_plan_made_while_training_changes_no_bit(tmp_path):
    def run(offload):
        model = tiny_model("llama", dropout=0.0)
        optimizer = build(model, LISA)
        with offload_activations(model, offload) as session:
            for step in range(9):
                train(model, optimizer, 1, first=step)
                session.end_step()
        return model, optimizer, session

    expected, _, _ = run(OffloadConfig(tier="none"))
    model, optimizer, session = run(OffloadConfig(tier="auto", directory=tmp_path, memory_budget="1GiB", min_bytes=0))
    assert_same(weights(model), weights(expected))
    # Two optimizers step, one inside of the other, and hold the same state: it is counted once. The measured step was
    # one of the first turn, and blocks are of one size.
    moments = [t for state in optimizer.state.values() for t in state.values() if t.dim() > 0]
    held = {t.untyped_storage().data_ptr(): t for t in [*model.parameters(), *model.buffers(), *moments]}
    assert session.forecast.fixed_bytes == sum(t.nbytes for t in held.values())


@pytest.mark.parametrize("first", ["sampling", "blocks"])
def test_sampled_layers_sample_whichever_block_trains(first):
    model = tiny_model("llama", dropout=0.0)
    optimizer = build(model, BlockwiseConfig(order="ascending", outside="never", switch_every=1))
    if first == "blocks":
        train(model, optimizer, 2)  # back at the first block: the second one is frozen
    session = attach(model, OffloadConfig(tier="none", sampled_linear={"ratio": 0.25, "min_rows": 1}))
    exact = copy.deepcopy(model)
    for name in session.sampled:
        module = exact.get_submodule(name)
        module.__class__ = torch.nn.Linear
    layers = {name.split(".")[2] for name in session.sampled}
    assert layers == {"0", "1"}
    for step in range(2):
        exact.requires_grad_(True).zero_grad()
        batch = tiny_batch("llama", seed=step)
        loss = model(**batch).loss
        torch.testing.assert_close(loss, exact(**batch).loss)
        loss.backward()
        exact(**batch).loss.backward()
        block = f"model.layers.{step}."
        for name, parameter in model.named_parameters():
            assert (parameter.grad is not None) == name.startswith(block), name
        sampled = model.get_submodule(block + "mlp.up_proj").weight.grad
        assert not torch.allclose(sampled, exact.get_submodule(block + "mlp.up_proj").weight.grad)
        output = model.get_submodule(block + "self_attn.o_proj").weight.grad
        torch.testing.assert_close(output, exact.get_submodule(block + "self_attn.o_proj").weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        exact.load_state_dict(model.state_dict())
    session.detach()


# -- several processes ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    run_in_processes(WORKS, PROCESSES, folder)
    return folder


def expected_weights(config, steps):
    """One process with the whole batch."""
    model = tiny_model("llama", dropout=0.0)
    optimizer = build(model, config, eps=1e-3)
    for step in range(steps):
        model(**tiny_batch("llama", size=4, seed=step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model), optimizer


def train_part(wrapped, optimizer, rank, step):
    whole = tiny_batch("llama", size=4, seed=step)
    loss = wrapped(**{name: value[2 * rank : 2 * rank + 2] for name, value in whole.items()}).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_trained_together(model, optimizer, config, steps):
    expected, other = expected_weights(config, steps)
    assert optimizer.active == other.active
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def _replicated(rank, config, before):
    model = tiny_model("llama", dropout=0.0)
    if before:
        optimizer = build(model, config, eps=1e-3)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    if not before:
        optimizer = build(wrapped, config, eps=1e-3)
    for step in range(9):
        train_part(wrapped, optimizer, rank, step)
        assert all(p.grad is None for p in model.parameters())
    assert_trained_together(model, optimizer, config, 9)


def replicated(rank, folder):
    for config in (BADAM, LISA):
        for before in (True, False):
            _replicated(rank, config, before)


def replicated_without_unused(rank, folder):
    for options in ({}, {"static_graph": True}, {"static_graph": True, "find_unused_parameters": True}):
        model = tiny_model("llama", dropout=0.0)
        optimizer = build(model)
        wrapped = DistributedDataParallel(model, **options)
        with pytest.raises(OffloadConfigError, match="find_unused_parameters=True"):
            train_part(wrapped, optimizer, rank, 0)
    model = tiny_model("llama", dropout=0.0)
    config = lisa(blocks_active=2, switch_every=1)
    optimizer = build(model, config, eps=1e-3)
    wrapped = DistributedDataParallel(model)  # everything trains in every turn: nothing is unused
    for step in range(3):
        train_part(wrapped, optimizer, rank, step)
    assert_trained_together(model, optimizer, config, 3)


def replicated_too_late(rank, folder):
    model = tiny_model("llama", dropout=0.0)
    optimizer = build(model)
    model(**tiny_batch("llama"))
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    with pytest.raises(OffloadConfigError, match="waited when it was built"):
        train_part(wrapped, optimizer, rank, 0)


def sharded(rank, folder):
    from torch.distributed.fsdp import fully_shard

    for config in (BADAM, LISA):
        model = tiny_model("llama", dropout=0.0)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer = build(model, config, eps=1e-3)
        for step in range(9):
            train_part(model, optimizer, rank, step)
            if step == 6:
                states = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        assert_trained_together(model, optimizer, config, 9)
        expected = {name: p.detach().clone() for name, p in model.named_parameters()}
        model.load_state_dict(states[0])
        optimizer = build(released(model), config, eps=1e-3)
        optimizer.load_state_dict(states[1])
        for step in (7, 8):
            train_part(model, optimizer, rank, step)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.to_local(), expected[name].to_local()), name


def sharded_after_the_optimizer(rank, folder):
    """As Accelerate does it: the groups are given the sharded parameters."""
    from torch.distributed.fsdp import fully_shard

    model = tiny_model("llama", dropout=0.0)
    optimizer = build(model, LISA, eps=1e-3)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    for step in range(9):
        train_part(model, optimizer, rank, step)
    assert_trained_together(model, optimizer, LISA, 9)


def accelerated(rank, folder):
    from accelerate.utils import DistributedDataParallelKwargs

    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    model = tiny_model("llama", dropout=0.0)
    optimizer = build(model, LISA, eps=1e-3)
    wrapped, accelerated_optimizer = accelerator.prepare(model, optimizer)
    assert isinstance(wrapped, DistributedDataParallel)
    for step in range(9):
        train_part(wrapped, accelerated_optimizer, rank, step)
    assert_trained_together(model, optimizer, LISA, 9)


WORKS = (
    replicated,
    replicated_without_unused,
    replicated_too_late,
    sharded,
    sharded_after_the_optimizer,
    accelerated,
)


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.__name__)
def test_two_processes(work, folder):
    assert_done(work, PROCESSES, folder)
