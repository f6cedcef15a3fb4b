"""Models whose weights cannot leave memory are refused before anything is changed: what, where, what to do."""

import logging

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_offload import OffloadCallback, OffloadConfig, OffloadPlugin, attach
from hf_offload.errors import OffloadConfigError
from hf_offload.session import attached_session
from hf_offload.state.refusals import refuse
from hf_offload.state.registry import parked_of
from hf_offload.state.storages import moves
from hf_offload.state.weights import weights_of
from tests.helpers.parked import parked
from tests.helpers.tiny_models import ExampleDataset, tiny_model
from tests.helpers.train import Run, adamw, mlp, same, train


def with_device_map():
    model = mlp()
    model.hf_device_map = {"0": 0, "2": "cpu"}
    return model


def scripted_in_part():
    model = mlp()
    model[2] = torch.jit.script(model[2])
    return model


def of_zero_3():
    model = mlp()
    model[2].weight.ds_id = 3
    return model


def flat():
    model = mlp()
    kind = type("FlatParameter", (nn.Parameter,), {})
    model[2].weight = kind(model[2].weight.detach())
    return model


def on_meta():
    model = mlp()
    model[2].to("meta")
    return model


MODELS = {
    "hf_device_map": (with_device_map, r"hf_device_map.*load it without"),
    "scripted": (lambda: torch.jit.script(mlp()), r"The model is in TorchScript.*the module that it was made of"),
    "of_zero_3": (of_zero_3, r"2\.weight belongs to DeepSpeed's ZeRO-3.*offload_param"),
    "flat": (flat, r"2\.weight is sharded by FSDP.*CPUOffloadPolicy"),
    "on_meta": (on_meta, r"2\.weight is on the meta device.*load the model first"),
}


def assert_untouched(model):
    assert attached_session(model) is None
    assert weights_of(model) is None
    assert not any(parked_of(p) for p in model.parameters() if moves(p))


READ_UNASKED = {
    "scripted_in_part": scripted_in_part,
    "data_parallel": lambda: nn.Sequential(nn.DataParallel(mlp())),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("kind", READ_UNASKED)
def test_on_a_cpu_code_that_does_not_ask_reads_weights_where_they_are(kind, tmp_path):
    runs = [Run("none", tmp_path), Run("none", tmp_path, params="ssd")]
    for run in runs:
        model = READ_UNASKED[kind]()
        optimizer = adamw(run, model)
        train(run, model, optimizer)
        run.log_all(model, optimizer)
    assert same(runs[0].logged, runs[1].logged)
    assert runs[1].written_bytes() > 0
    runs[1].session.detach()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_is_refused_by_name_and_stays_as_it_is(kind, tmp_path):
    make, message = MODELS[kind]
    model = make()
    with pytest.raises(OffloadConfigError, match=message) as refused:
        attach(model, OffloadConfig(tier="none", params="ssd", directory=tmp_path, min_bytes=1))
    assert "params='none'" in str(refused.value) or kind == "on_meta"
    assert_untouched(model)


def test_a_sharded_parameter_is_refused(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = mlp()
        mesh = init_device_mesh("cpu", (1,))
        model[2].weight = nn.Parameter(distribute_tensor(model[2].weight.detach(), mesh, [Replicate()]))
        with pytest.raises(OffloadConfigError, match=r"2\.weight is sharded by FSDP"):
            attach(model, OffloadConfig(tier="none", params="ssd", directory=tmp_path, min_bytes=1))
        assert_untouched(model)
    finally:
        torch.distributed.destroy_process_group()


def test_a_model_that_is_sharded_later_is_refused_with_its_optimizer(tmp_path):
    model = mlp()
    session = attach(model, OffloadConfig(tier="none", optimizer="ssd", directory=tmp_path, min_bytes=1))
    model[2].weight = flat()[2].weight
    with pytest.raises(OffloadConfigError, match=r"2\.weight is sharded by FSDP.*optimizer='none'"):
        session.prepare_optimizer(torch.optim.AdamW(model.parameters()))


def test_several_processes_are_handed_over():
    with pytest.raises(OffloadConfigError, match=r"2 train together.*--where fsdp2.*--where zero3.*params='none'"):
        refuse(mlp().to("meta"), OffloadConfig(), processes=2)
    refuse(mlp(), OffloadConfig(), processes=2)  # on a CPU, they train


@pytest.mark.parametrize(
    ("kind", "instead"),
    [
        (DistributedType.DEEPSPEED, r"DEEPSPEED.*offload_param_device: cpu.*--where zero3"),
        (DistributedType.FSDP, r"FSDP.*fsdp_offload_params: true.*--where fsdp2"),
        (DistributedType.XLA, r"XLA.*leave that to it"),
    ],
)
def test_weights_of_other_libraries_are_left_to_them(kind, instead, tmp_path, monkeypatch):
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(Accelerator, "distributed_type", kind)
    with pytest.raises(OffloadConfigError, match=instead):
        OffloadPlugin(tier="none", params="ssd", directory=tmp_path).attach(accelerator)


def test_the_trainer_leaves_weights_of_other_libraries_to_them(tmp_path, monkeypatch):
    class Shards(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.FSDP)

    callback = OffloadCallback(OffloadConfig(tier="none", params="ssd", directory=tmp_path, min_bytes=1))
    arguments = TrainingArguments(output_dir=tmp_path / "out", max_steps=1, use_cpu=True, report_to=[])
    model = tiny_model("gpt2")
    trainer = Trainer(model, arguments, train_dataset=ExampleDataset("gpt2", 8), callbacks=[Shards(), callback])
    with pytest.raises(OffloadConfigError, match="fsdp_offload_params"):
        trainer.train()
    assert_untouched(model)


def test_a_compiled_model_that_offloads_takes_rows_of_several_sizes(tmp_path):
    """Where it breaks its graph, what saves tensors for it would be compiled, too, for sizes that are symbols."""
    found = []
    for offloads in (False, True):
        torch._dynamo.reset()
        model = mlp()
        config = OffloadConfig(tier="ssd", params="ssd", directory=tmp_path, min_bytes=1)
        session = attach(model, config) if offloads else None
        called = torch.compile(model, backend="eager")
        for rows in (8, 12, 9):
            called(torch.ones(rows, 96)).sum().backward()
            found.append([p.grad.clone() for p in model.parameters()])
        if session is not None:
            session.detach()
    for expected, other in zip(found[:3], found[3:], strict=True):
        assert all(map(torch.equal, expected, other))


def test_weights_without_room_on_the_drive_stay_in_memory_with_one_warning(tmp_path, caplog):
    expected = mlp()
    model = mlp()
    with caplog.at_level(logging.WARNING):
        session = parked(model, tmp_path, disk_budget="64KiB")
        for _ in range(2):
            assert torch.equal(expected(torch.ones(4, 96)), model(torch.ones(4, 96)))
    said = [record.getMessage() for record in caplog.records if "stays in memory" in record.getMessage()]
    assert len(said) == 1
    assert "weights" in said[0]
    assert "disk_budget" in said[0]
    assert session.residency.store.refusal is not None


@pytest.mark.parametrize(
    ("settings", "frozen", "warns"),
    [({}, False, True), ({}, True, False), ({"optimizer": "ssd"}, False, False)],
    ids=["trained", "adapters", "optimizer_set"],
)
def test_a_warning_says_that_the_optimizer_needs_the_memory_that_weights_leave(
    settings, frozen, warns, tmp_path, caplog
):
    model = mlp()
    model[2].weight.requires_grad_(not frozen)
    model[4].weight.requires_grad_(not frozen)
    session = attach(model, OffloadConfig(tier="none", params="ssd", min_bytes=1, directory=tmp_path, **settings))
    session.residency.limit_bytes = 64 << 10
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for _ in range(2):
        session.prepare_optimizer(optimizer)
    said = [each.getMessage() for each in caplog.records if "trains" in each.getMessage()]
    assert len(said) == warns
    if warns:
        assert "params='ssd' lets 64.00 KiB" in said[0]
        assert "Set optimizer='ssd'" in said[0]


def test_a_model_on_a_tier_is_refused_by_data_parallel_code_that_attaches_it(tmp_path):
    model = mlp()
    parked(model, tmp_path).detach()
    with pytest.raises(OffloadConfigError, match=r"nn\.DataParallel runs forwards in threads"):
        attach(nn.DataParallel(model), OffloadConfig(tier="none", params="ssd", directory=tmp_path, min_bytes=1))
    assert torch.equal(model(torch.ones(1, 96)), mlp()(torch.ones(1, 96)))
