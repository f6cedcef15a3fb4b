"""MeZO in several processes: the bits of one that averages the same losses, and errors that all of them hear of."""

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import Trainer

from hf_offload import OffloadConfig, OffloadConfigError, OffloadError, OffloadPlugin, OffloadTrainingArguments, attach
from hf_offload.integrations.two_losses import mezo_of
from hf_offload.methods.mezo import LOG_FILE, MeZO, MezoLog, replay
from tests.helpers.gloo_processes import assert_done, run_in_processes
from tests.helpers.tiny_models import ExampleDataset, tiny_batch, tiny_model, weights
from tests.helpers.train import same
from tests.numerics.test_mezo import ReferenceMeZO

TWO = 2
STEPS = 4
RATE, DECAY = 1e-2, 0.1
SETTINGS = {"eps": 1e-2, "seed": 3}
MEZO = {"tier": "none", "memory_mode": "mezo", "memory_mode_kwargs": SETTINGS}


def everyone(value):
    values = [None] * TWO
    dist.all_gather_object(values, value)
    return values


def is_everywhere_the_same(model, optimizer):
    found = everyone((weights(model), dict(model.named_buffers()), str(optimizer.log.rows)))  # NaN is not NaN
    return all(same(found[0][part], found[1][part]) for part in (0, 1)) and found[0][2] == found[1][2]


def deep(seed=0):
    """Six blocks, of which a tier leaves two in memory, with a buffer."""
    config = tiny_model("gpt2").config
    config.num_hidden_layers = 6
    torch.manual_seed(seed)
    model = type(tiny_model("gpt2"))(config)
    model.register_buffer("shift", torch.randn(3))
    return model


def loss_of(model, step, rank):
    return model(**tiny_batch("gpt2", seed=10 * rank + step)).loss


def expected_after(log):
    """One process, an independent MeZO, and the losses of both ranks' batches."""
    model = deep()
    group = {"params": list(model.parameters()), "lr": RATE, "weight_decay": DECAY}
    reference = ReferenceMeZO(model, [group], SETTINGS["eps"])
    for step, row in enumerate(log.rows):
        group["lr"] = RATE / (1 + step)
        mean = lambda model, step=step: loss_of(model, step, 0) / TWO + loss_of(model, step, 1) / TWO  # noqa: E731
        _, gradient = reference.step(row.seed, mean)
        assert gradient == row.gradient
    return weights(model)


def stepped(model, optimizer, rank, first=0, last=STEPS):
    for step in range(first, last):
        for group in optimizer.param_groups:
            group["lr"] = RATE / (1 + step)
        optimizer.step(lambda step=step: loss_of(model, step, rank))


def in_a_loop(rank, folder):
    """What differs at the start becomes that of rank 0."""
    model = deep(seed=rank)
    optimizer = MeZO(model.parameters(), model, lr=RATE, weight_decay=DECAY, **SETTINGS)
    stepped(model, optimizer, rank)
    assert same(weights(model), expected_after(optimizer.log))
    assert is_everywhere_the_same(model, optimizer)
    initial = weights(deep())
    replay(optimizer.log, initial)
    assert same(initial, weights(model))
    optimizer.end_training()


def on_a_tier(rank, folder):
    for tier in ("ssd", "ram"):
        model = deep(seed=rank)
        files = {"directory": folder} if tier == "ssd" else {}
        session = attach(model, OffloadConfig(**MEZO, params=tier, min_bytes=1024, **files))
        optimizer = session.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY))
        stepped(model, optimizer, rank)
        assert session.residency.most_bytes <= session.residency.budget_bytes
        assert same(weights(model), expected_after(optimizer.log))
        assert is_everywhere_the_same(model, optimizer)
        session.detach()


def with_accelerate(rank, folder):
    model = deep(seed=rank)
    accelerator = OffloadPlugin(**MEZO).accelerator(cpu=True)
    made = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    prepared, optimizer = accelerator.prepare(model, made)
    assert prepared is model  # DistributedDataParallel has memory for all gradients
    stepped(model, optimizer, rank)
    assert same(weights(model), expected_after(mezo_of(optimizer).log))
    accelerator.end_training()
    AcceleratorState._reset_state(reset_partial_state=True)


class InOrder(Trainer):
    """Batches in the order of the data, of which each rank has every other one."""

    def get_train_dataloader(self):
        return self.accelerator.prepare(DataLoader(self.train_dataset, self.args.train_batch_size))


def trainer(folder, seed, **others):
    defaults = {
        "output_dir": f"{folder}/trainer",
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 0,
        "save_strategy": "steps",
        "save_steps": 2,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "memory_mode": "mezo",
        "memory_mode_kwargs": SETTINGS,
    }
    args = OffloadTrainingArguments(**defaults | others)
    return InOrder(model=tiny_model("llama", seed=seed), args=args, train_dataset=ExampleDataset("llama", 24))


def in_the_trainer(rank, folder):
    """Micro-batches are those of one process with twice the accumulation, in its order."""
    run = trainer(folder, seed=rank)
    run.train()
    assert not isinstance(run.model_wrapped, DistributedDataParallel)
    optimizer = mezo_of(run.optimizer)
    assert is_everywhere_the_same(run.model, optimizer)
    model, rows = tiny_model("llama", seed=0), ExampleDataset("llama", 24)
    group = {"params": list(model.parameters()), "lr": RATE, "weight_decay": 0.0}
    reference = ReferenceMeZO(model, [group], SETTINGS["eps"])
    losses = []
    for step, row in enumerate(optimizer.log.rows):
        parts = [
            {key: torch.as_tensor(value)[None] for key, value in rows[4 * step + number].items()} for number in range(4)
        ]
        items = sum(int((part["labels"][:, 1:] != -100).sum()) for part in parts)
        total = lambda model, parts=parts, items=items: sum(  # noqa: E731
            model(**part, num_items_in_batch=torch.tensor(items)).loss for part in parts
        )
        loss, gradient = reference.step(row.seed, total)
        assert gradient == row.gradient
        losses.append(loss)
    assert same(weights(run.model), weights(model))
    logged = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert logged == pytest.approx(losses, abs=1e-4)

    again = trainer(folder, seed=5 + rank)
    again.train(resume_from_checkpoint=f"{folder}/trainer/checkpoint-2")
    assert same(weights(again.model), weights(model))
    log = MezoLog.load(f"{folder}/trainer/checkpoint-{STEPS}/{LOG_FILE}")
    assert log.rows == optimizer.log.rows
    AcceleratorState._reset_state(reset_partial_state=True)


class Lost(Exception):
    pass


def is_nearly(model, before):
    """Apart from the rounding errors of going there and back."""
    return all(torch.allclose(one, before[name], rtol=0, atol=1e-5) for name, one in weights(model).items())


def errors_are_those_of_all(rank, folder):
    model = deep(seed=rank)
    optimizer = MeZO(model.parameters(), model, lr=RATE, weight_decay=DECAY, **SETTINGS)
    parameter = next(model.parameters())
    if rank == 1:
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(OffloadError, match="has a gradient, which MeZO does not use"):
        optimizer.step(lambda: loss_of(model, 0, rank))
    parameter.grad = None
    before = weights(deep())  # those of rank 0, however the first step ends
    for failing_call in (1, 2):
        calls = []

        def closure(calls=calls, failing_call=failing_call):
            calls.append(None)
            if rank == 1 and len(calls) == failing_call:
                raise Lost("in a closure")
            return loss_of(model, 0, rank)

        kind, text = (Lost, "in a closure") if rank == 1 else (OffloadError, "Rank 1 .*Lost: in a closure")
        with pytest.raises(kind, match=text):
            optimizer.step(closure)
    with pytest.raises(OffloadError, match="the losses are nan and nan"):
        optimizer.step(lambda: loss_of(model, 0, rank) * (float("nan") if rank else 1.0))
    assert is_nearly(model, before)
    optimizer.param_groups[0]["lr"] = RATE * (1 + rank)
    with pytest.raises(OffloadConfigError, match=r"rank 1 has lr=0\.02, and rank 0 has 0\.01"):
        optimizer.step(lambda: loss_of(model, 0, rank))
    assert is_nearly(model, before)
    optimizer.param_groups[0]["lr"] = RATE
    optimizer.step(lambda: loss_of(model, 0, rank))
    assert not is_nearly(model, before)
    assert is_everywhere_the_same(model, optimizer)
    if rank == 1:
        optimizer.load_state_dict(MeZO(model.parameters(), model, **SETTINGS).state_dict())
    with pytest.raises(OffloadConfigError, match="rank 1 has step=0, and rank 0 has"):
        optimizer.step(lambda: loss_of(model, 0, rank))


def other_models_are_refused(rank, folder):
    model = tiny_model("gpt2" if rank else "llama")
    with pytest.raises(OffloadConfigError, match="rank 1 has weights="):
        MeZO(model.parameters(), model).step(lambda: torch.zeros(()))
    model = nn.Linear(2, 2)
    optimizer = MeZO(model.parameters(), model, eps=1e-3 * (1 + rank))
    with pytest.raises(OffloadConfigError, match=r"rank 1 has eps=0\.002, and rank 0 has 0\.001"):
        optimizer.step(lambda: torch.zeros(()))
    wrapped = DistributedDataParallel(model)
    with pytest.raises(OffloadConfigError, match="DistributedDataParallel has memory for all gradients"):
        MeZO(wrapped.parameters(), wrapped)
    with pytest.raises(OffloadConfigError, match=r"fsdp=.* shards weights"):
        trainer(folder, 0, fsdp="full_shard")


class Stops(Exception):
    """What a loop leaves by, snapshots are kept."""


def snapshots_of_all_ranks(rank, folder):
    """The log is a part of the optimizer's state."""

    def run(seed, stop):
        model = deep(seed)
        session = attach(model, OffloadConfig(**MEZO, snapshot_steps=2))
        made = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
        optimizer = session.prepare_optimizer(made)
        try:
            with session.snapshots(f"{folder}/snapshots", resume=True, optimizer=optimizer) as snapshots:
                begun = snapshots.step
                while snapshots.step < STEPS:
                    stepped(model, optimizer, rank, snapshots.step, snapshots.step + 1)
                    snapshots.end_step()
                    if snapshots.step == stop:
                        raise Stops
        finally:
            session.detach()
        return begun, model, optimizer

    with pytest.raises(Stops):
        run(rank, 3)
    begun, model, optimizer = run(9, None)
    assert begun == 2
    assert same(weights(model), expected_after(optimizer.log))
    assert is_everywhere_the_same(model, optimizer)


WORKS = [
    in_a_loop,
    on_a_tier,
    with_accelerate,
    in_the_trainer,
    errors_are_those_of_all,
    other_models_are_refused,
    snapshots_of_all_ranks,
]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_in_processes(WORKS, TWO, folder)
    return folder


@pytest.mark.parametrize("work", WORKS)
def test_two_processes(work, done):
    assert_done(work, TWO, done)
