"""Several processes with a budget each: one plan for all, and one place for their state and weights."""

import functools
import gc

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hf_offload import OffloadConfig, OffloadConfigError, attach, offload_activations, ranks
from hf_offload.errors import OffloadPlanError, StorageError
from hf_offload.forecast.sharding import shard, sharding_of
from hf_offload.forecast.workload import Workload, count_workload
from hf_offload.integrations.summary import summary_lines
from hf_offload.plan.hardware import describe_hardware
from hf_offload.planning import ranks as planning_ranks
from hf_offload.state import setting as streamed_setting
from hf_offload.state.optimizer import streaming_of
from tests.helpers.activation_heavy_models import batch, build
from tests.helpers.gloo_processes import assert_done, run_in_processes
from tests.helpers.machines import machine
from tests.helpers.tiny_models import tiny_batch, tiny_model
from tests.integration.test_distributed import local, settings

TWO = 2


def the_machine_is_shared(rank, folder):
    whole = machine(1e9)
    planning_ranks.measure_hardware = lambda directories, device, **options: whole
    part = planning_ranks.hardware_of_all(settings(folder), ranks.Ranks(), torch.device("cpu"))
    assert part.store_bytes_per_s["ssd"].value == whole.store_bytes_per_s["ssd"].value / TWO
    assert part.memory_bytes.value == whole.memory_bytes.value / TWO
    assert part.room_bytes["ssd"].value == whole.room_bytes["ssd"].value / TWO


def one_plan_for_all(rank, folder):
    """Rows of other lengths on each rank, and in each step: what is decided must still be the same."""
    ranks._TO_ANSWER = ranks._TO_ANSWER.__class__(seconds=20)
    follows_one_plan(rank, folder, DistributedDataParallel)


def one_plan_for_shards(rank, folder):
    from torch.distributed.fsdp import fully_shard

    def shard(model):
        for block in model.transformer.h:
            fully_shard(block)
        return fully_shard(model)

    follows_one_plan(rank, folder, shard)


def parts_are_those_that_fsdp2_leaves(rank, folder):
    """Of weights, gradients and optimizer state, as in a plan for two GPUs that are not there."""
    from torch.distributed.fsdp import fully_shard

    model = build("gpt2", 0.1, layers=4)
    workload = Workload(name="gpt2", config=model.config, task="causal-lm", batch=1, sequence=16, dtype=torch.float32)
    two = describe_hardware("24GB", tflops=80, gpus=TWO)
    workload = workload.changed(sharding="fsdp2", min_bytes=1)
    planned = shard(count_workload(workload, two), sharding_of(workload, two))
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(**batch()).loss.backward()
    weights = sum(local(one).nbytes for one in model.parameters())
    gradients = sum(local(one.grad).nbytes for one in model.parameters())
    optimizer.step()
    state = sum(local(one).nbytes for each in optimizer.state.values() for one in each.values() if one.dim())
    assert planned.base_bytes - planned.state_bytes == pytest.approx(weights, rel=0.01)
    assert planned.gradient_bytes == pytest.approx(gradients, rel=0.01)
    assert planned.state_bytes == pytest.approx(state, rel=0.01)


def follows_one_plan(rank, folder, wrap):
    planning_ranks.measure_hardware = lambda directories, device, **options: machine(1e9)

    def run(config):
        torch.manual_seed(0)
        model = build("gpt2", 0.1, layers=4)
        wrapped = wrap(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses, plans = [], []
        with offload_activations(model, config) as session:
            for step in range(8):
                length = 48 + 16 * (step % 3) if rank else 96  # the longest are on the first
                inputs = {name: value[:, :length].contiguous() for name, value in batch().items()}
                loss = wrapped(**inputs).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                session.end_step()
                losses.append(loss.item())
                plans.append(dict(session.plan.placements))
            forecast = session.forecast
        return losses, [local(parameter) for parameter in model.parameters()], plans, forecast

    def auto(budget):
        return OffloadConfig(tier="auto", memory_budget=budget, directory=folder, min_bytes=4096)

    with pytest.raises(OffloadPlanError) as refused:
        run(auto("1MiB"))
    budget = int(1.1 * refused.value.smallest_bytes)
    expected, found = run(OffloadConfig(tier="none")), run(auto(budget))
    assert found[0] == expected[0]
    assert all(torch.equal(one, other) for one, other in zip(found[1], expected[1], strict=True))
    part = sum(parameter.nbytes for parameter in found[1])
    assert found[3].fixed_bytes == pytest.approx(3 * part, rel=0.01)  # weights and two states of AdamW, of this process
    everyone = [None] * TWO
    dist.all_gather_object(everyone, (budget, found[2]))
    assert everyone[0] == everyone[1]
    assert found[2][-1]


def one_place_for_the_state(rank, folder):
    """The first process trains something that the others do not: the state of all leaves memory, before the first step."""
    expected, found = (
        trains_in_budget(rank, folder, None),
        trains_in_budget(rank, folder, 5.5, own=2 if rank == 0 else 0),
    )
    assert_leaves(found, expected)
    assert found["begins"]


def one_place_for_the_state_after_a_step(rank, folder):
    """Activations do not fit beside the state, and the first process has more of them."""
    expected, found = trains_in_budget(rank, folder, None), trains_in_budget(rank, folder, 4.6)
    assert_leaves(found, expected)
    assert not found["begins"]


def state_that_one_process_cannot_stream_stays_in_all(rank, folder):
    """The drive of the second one cannot be used. The budget is too small then, and both processes say so."""
    honest = streamed_setting.open_tier

    def refuse(*arguments, **options):
        raise OffloadConfigError("This drive takes no files.")

    if rank == 1:
        streamed_setting.open_tier = refuse
    try:
        with pytest.raises(OffloadPlanError, match="state on a tier") as refused:
            trains_in_budget(rank, folder, 4.6)  # which does, if the state leaves
    finally:
        streamed_setting.open_tier = honest
    everyone = [None] * TWO
    dist.all_gather_object(everyone, str(refused.value))
    assert everyone[0] == everyone[1]


def replace_step(optimizer):
    optimizer.step = functools.partial(type(optimizer).step, optimizer)


def an_error_of_one_process_is_raised_in_all(rank, folder):
    """One of them prepares an optimizer that cannot be streamed; and in ``auto``, one fails when streaming has begun."""
    model = build("gpt2", 0.0, layers=1)
    session = attach(model, settings(folder, optimizer="ssd"))
    optimizer = torch.optim.AdamW(model.parameters())
    if rank == 1:
        replace_step(optimizer)
    with pytest.raises(OffloadConfigError, match="The step of this AdamW was replaced"):
        session.prepare_optimizer(optimizer)
    session.detach()
    honest = streamed_setting.stream

    def fail(*arguments, **options):
        raise StorageError("This drive has gone.")

    if rank == 1:
        streamed_setting.stream = fail
    try:
        with pytest.raises(StorageError, match="This drive has gone"):
            trains_in_budget(rank, folder, 3)
    finally:
        streamed_setting.stream = honest


def assert_leaves(found, expected):
    assert found["streams"]
    assert not expected["streams"]
    assert found["losses"] == expected["losses"]
    assert all(map(torch.equal, found["weights"], expected["weights"]))
    assert found["held"].keeps_gradients
    everyone = [None] * TWO
    dist.all_gather_object(everyone, (found["begins"], found["held"], found["plans"]))
    assert everyone[0] == everyone[1]


def gradients_that_do_not_fit_are_refused(rank, folder):
    with pytest.raises(OffloadPlanError, match=r"one block of weights, all gradients, and what is on its way"):
        trains_in_budget(rank, folder, 1.5)


def weights_leave_where_gradients_stay(rank, folder):
    expected, found = (trains_in_budget(rank, folder, share, layers=24) for share in (None, 2.5))
    assert_leaves(found, expected)
    assert found["held"].weights == "ssd"


def trains_in_budget(rank, folder, share, own=0, layers=4):
    """A run within ``share`` times the weights' bytes, of whose parameters the process trains so many more of its own."""
    ranks._TO_ANSWER = ranks._TO_ANSWER.__class__(seconds=20)
    planning_ranks.measure_hardware = lambda directories, device, **options: machine(1e9)
    torch.manual_seed(0)
    model = build("gpt2", 0.0, layers=layers)
    wrapped = DistributedDataParallel(model)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    mine = [torch.nn.Parameter(torch.zeros(nbytes // 4)) for _ in range(own)]
    optimizer = torch.optim.AdamW([*model.parameters(), *mine], lr=1e-3)
    given = (
        {"tier": "none"}
        if share is None
        else {"memory_budget": int(share * nbytes), "directory": folder, "min_bytes": 1024}
    )
    session = attach(model, OffloadConfig(**given))
    session.prepare_optimizer(optimizer)
    begins = streaming_of(optimizer) is not None
    losses, plans = [], []
    for step in range(5):
        tokens = torch.randint(
            0, 256, (1, 16 if rank else 32), generator=torch.Generator().manual_seed(10 * rank + step)
        )
        loss = wrapped(input_ids=tokens, labels=tokens).loss
        loss.backward()
        session.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        session.end_step()
        losses.append(loss.item())
        plans.append(dict(session.plan.placements))
    found = {
        "losses": losses, "plans": plans, "begins": begins, "streams": streaming_of(optimizer) is not None,
        "held": None if session.planned is None else session.planned.state_placement,
        "weights": [parameter.detach().clone() for parameter in model.parameters()],
    }  # fmt: skip
    session.detach()
    return found


def gone_in_one_of_them(rank, folder):
    """The garbage collector comes to the first process and not to the second, which waits for the first one's part."""
    (folder / f"gone{rank}").mkdir()
    planning_ranks.measure_hardware = lambda directories, device, **options: machine(1e9)
    model = tiny_model("gpt2")
    config = OffloadConfig(tier="auto", memory_budget="1GiB", directory=folder / f"gone{rank}", min_bytes=0)
    session = attach(model, config)
    for _ in range(2):
        model(**tiny_batch("gpt2")).loss.backward()
        session.optimizer_stepped()
    if rank == 0:
        del model
        gc.collect()
        assert session.model is None
    session.finish()
    assert session.active or session.orphaned
    assert session.stats.ended_steps == 2
    assert "by 2 processes" in summary_lines(session)[0]
    session.detach()


IN_TWO = (
    the_machine_is_shared,
    one_plan_for_all,
    one_plan_for_shards,
    parts_are_those_that_fsdp2_leaves,
    one_place_for_the_state,
    one_place_for_the_state_after_a_step,
    state_that_one_process_cannot_stream_stays_in_all,
    an_error_of_one_process_is_raised_in_all,
    gradients_that_do_not_fit_are_refused,
    weights_leave_where_gradients_stay,
    gone_in_one_of_them,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    run_in_processes(IN_TWO, TWO, folder)
    return folder


@pytest.mark.parametrize("work", IN_TWO, ids=lambda work: work.__name__)
def test_two_processes(work, folder):
    assert_done(work, TWO, folder)
