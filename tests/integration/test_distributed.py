"""Several processes: the same bits as without offloading, shared budgets, one plan, one summary."""

import functools
import gc
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
from hf_offload.errors import OffloadPlanError, StorageError
from hf_offload.integrations.summary import summary_lines
from hf_offload.plan.hardware import Hardware, Measurement
from hf_offload.planning import ranks as planning_ranks
from hf_offload.settings.sizes import format_bytes
from hf_offload.state import setting as streamed_setting
from hf_offload.state.optimizer import streaming_of
from tests.helpers.activation_heavy_models import batch, build
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

    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        expected = run("none", **options)
        assert expected[2] == 0
        for params in ("none", "ram", "ssd"):
            found = run("ssd", params, **options)
            assert all(torch.equal(found[0][name], value) for name, value in expected[0].items())
            for place, state in expected[1].items():
                assert all(torch.equal(found[1][place][name], value) for name, value in state.items())
            assert found[2] > 0


def sharded(rank, folder):
    from torch.distributed.fsdp import fully_shard

    def run(config, recompute):
        model = tiny_model("llama")
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": recompute == "reentrant"})
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        return trained(model, model, rank, config)

    for recompute in (None, "non-reentrant", "reentrant"):
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


def the_machine_is_shared(rank, folder):
    whole = a_machine()
    planning_ranks.measure_hardware = lambda directories, device, **options: whole
    part = planning_ranks.hardware_of_all(settings(folder), ranks.Ranks(), torch.device("cpu"))
    assert part.store_bytes_per_s["ssd"].value == whole.store_bytes_per_s["ssd"].value / TWO
    assert part.memory_bytes.value == whole.memory_bytes.value / TWO
    assert part.room_bytes["ssd"].value == whole.room_bytes["ssd"].value / TWO


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
    assert all(" written in this run, " in each for each in drives)  # a temporary directory in memory has no drive
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


def a_machine():
    given = {name: Measurement(1e11, "given") for name in ("float32", "bfloat16", "float16")}
    rate = {"ssd": Measurement(1e9, "given")}
    return Hardware(
        "a test",
        "cpu",
        Measurement(4e9, "given"),
        given,
        Measurement(1e10, "given"),
        rate,
        rate,
        {"ssd": Measurement(1e10, "given")},
    )


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


def follows_one_plan(rank, folder, wrap):
    planning_ranks.measure_hardware = lambda directories, device, **options: a_machine()

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


def the_process_that_needs_most_decides_about_the_state(rank, folder):
    found = trains_in_budget(rank, folder, 5.5, own=2 * rank)
    assert found["begins"]


def an_optimizer_that_one_process_cannot_stream_stays_in_all(rank, folder):
    with pytest.raises(OffloadPlanError, match="state on a tier") as refused:
        trains_in_budget(rank, folder, 4.6, change=replace_step if rank == 1 else None)
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


def trains_in_budget(rank, folder, share, own=0, change=None, layers=4):
    """A run within ``share`` times the weights' bytes, of whose parameters the process trains so many more of its own."""
    ranks._TO_ANSWER = ranks._TO_ANSWER.__class__(seconds=20)
    planning_ranks.measure_hardware = lambda directories, device, **options: a_machine()
    torch.manual_seed(0)
    model = build("gpt2", 0.0, layers=layers)
    wrapped = DistributedDataParallel(model)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    mine = [torch.nn.Parameter(torch.zeros(nbytes // 4)) for _ in range(own)]
    optimizer = torch.optim.AdamW([*model.parameters(), *mine], lr=1e-3)
    if change is not None:
        change(optimizer)
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
    planning_ranks.measure_hardware = lambda directories, device, **options: a_machine()
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
    replicated,
    streamed,
    sharded,
    sampled,
    norms_are_shared,
    with_accelerate,
    budgets_are_shared,
    the_machine_is_shared,
    different_settings_are_refused,
    one_summary_for_all,
    an_interrupted_training_waits_for_nobody,
    one_plan_for_all,
    one_plan_for_shards,
    one_place_for_the_state,
    one_place_for_the_state_after_a_step,
    state_that_one_process_cannot_stream_stays_in_all,
    the_process_that_needs_most_decides_about_the_state,
    an_optimizer_that_one_process_cannot_stream_stays_in_all,
    an_error_of_one_process_is_raised_in_all,
    gradients_that_do_not_fit_are_refused,
    weights_leave_where_gradients_stay,
    gone_in_one_of_them,
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
