"""The tiled loss in two processes: replicated, sharded, and with each sequence split between them."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hf_offload import OffloadConfig, OffloadConfigError, offload_activations
from tests.helpers.gloo_processes import assert_done, run_in_processes
from tests.helpers.tiny_models import VOCABULARY, tiny_batch, tiny_model

PROCESSES = 2
TILED = OffloadConfig(tier="none", tiled_loss="on", tile_bytes=4 * VOCABULARY * 10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    run_in_processes(WORKS, PROCESSES, folder)
    return folder


def expected_gradients(model, batch):
    """Of the mean over both processes' losses, in one process."""
    for rank in range(PROCESSES):
        (model(**_part(batch, rank)).loss / PROCESSES).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _part(batch, rank):
    return {name: value[2 * rank : 2 * rank + 2] for name, value in batch.items()}


def replicated(rank, folder):
    model, batch = tiny_model("llama", dropout=0.0), tiny_batch("llama", size=4)
    expected = expected_gradients(copy.deepcopy(model), batch)
    wrapped = DistributedDataParallel(model)
    with offload_activations(model, TILED):
        wrapped(**_part(batch, rank)).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def unused(rank, folder):
    """Looking for parameters without a gradient, DDP passes every output through a function of its own."""
    model, batch = tiny_model("llama", dropout=0.0), tiny_batch("llama", size=4)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    with offload_activations(model, TILED), pytest.raises(RuntimeError, match="ddp_find_unused_parameters=False"):
        wrapped(**_part(batch, rank)).loss.backward()


def sharded(rank, folder):
    from torch.distributed.fsdp import fully_shard

    model, batch = tiny_model("llama", dropout=0.0), tiny_batch("llama", size=4)
    expected = expected_gradients(copy.deepcopy(model), batch)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    with offload_activations(model, TILED):
        model(**_part(batch, rank)).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), expected[name], rtol=1e-4, atol=1e-6, msg=name)


def sharded_head(rank, folder):
    from torch.distributed.fsdp import fully_shard

    model = tiny_model("llama", dropout=0.0)
    fully_shard(model.lm_head)
    fully_shard(model)
    with pytest.raises(OffloadConfigError, match="unit of its own"):
        offload_activations(model, TILED).__enter__()


def tokens(rank, folder):
    """Sequence parallelism as trainers do it: every process has half of the tokens, and labels that were shifted before."""
    model, batch = tiny_model("llama", dropout=0.0), tiny_batch("llama", size=2)
    labels = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    labels[0, 3] = labels[1, 20] = -100
    reference = copy.deepcopy(model).model(batch["input_ids"]).last_hidden_state.detach()
    hidden = reference.chunk(PROCESSES, dim=1)[rank].clone().requires_grad_()
    mine = labels.chunk(PROCESSES, dim=1)[rank].contiguous()
    items = (labels != -100).sum()
    with offload_activations(model, TILED):
        logits = model.lm_head(hidden)
        options = {"vocab_size": VOCABULARY, "num_items_in_batch": items}
        loss = model.loss_function(logits=logits, labels=None, shift_labels=mine, **options)
        loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    dist.all_reduce(model.lm_head.weight.grad)
    whole = copy.deepcopy(model)
    whole.zero_grad()
    rows = reference.clone().requires_grad_()
    expected = whole.loss_function(logits=whole.lm_head(rows), labels=None, shift_labels=labels, **options)
    expected.backward()
    torch.testing.assert_close(total, expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.lm_head.weight.grad, whole.lm_head.weight.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(hidden.grad, rows.grad.chunk(PROCESSES, dim=1)[rank], rtol=1e-4, atol=1e-6)


WORKS = (replicated, unused, sharded, sharded_head, tokens)


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.__name__)
def test_two_processes(work, folder):
    assert_done(work, PROCESSES, folder)
