"""Training arguments with those of offloading: how they are parsed, copied and saved, and which settings are refused."""

import copy
import dataclasses
import json
import pickle

import pytest
import torch
from torch import nn
from transformers import HfArgumentParser, TrainingArguments

from hf_offload import (
    OffloadArguments,
    OffloadCallback,
    OffloadConfig,
    OffloadConfigError,
    OffloadSeq2SeqTrainingArguments,
    OffloadTrainingArguments,
    attach,
    offload_activations,
)
from tests.helpers.tiny_models import tiny_model
from tests.helpers.trainers import ALIASES, CHECKPOINTING, QUIET, make_trainer


@pytest.fixture
def plain(tmp_path):
    """Settings of a short training without anything of offloading."""
    return {"output_dir": str(tmp_path / "out"), **QUIET}


@pytest.fixture
def flags(tmp_path):
    """Those that switch offloading on, for every tensor there is."""
    return {"offload": "ssd", "offload_directory": str(tmp_path), "offload_min_bytes": "0"}


@pytest.fixture
def config(tmp_path):
    return OffloadConfig(tier="ssd", directory=tmp_path, min_bytes=0)


def test_arguments_are_replaced(plain, flags):
    args = OffloadTrainingArguments(**plain, **flags)
    assert args.report_to == ["hf_offload"]
    assert dataclasses.replace(args, learning_rate=1.0).report_to == ["hf_offload"]
    assert dataclasses.replace(args, offload="none", offload_directory=None).report_to == []
    with pytest.raises(OffloadConfigError, match="ssd"):
        dataclasses.replace(args, offload="sdd")


def test_arguments_are_written_as_json_pickled_and_copied(plain, flags, tmp_path):
    args = OffloadTrainingArguments(**plain, **flags)
    assert flags.items() <= args.to_dict().items()
    assert json.loads(args.to_json_string())["offload"] == "ssd"
    assert args.to_sanitized_dict()["offload_min_bytes"] == "0"
    again = pickle.loads(pickle.dumps(args))
    assert type(again) is OffloadTrainingArguments
    assert again.to_dict() == args.to_dict()
    assert again.offload_config() == args.offload_config()
    torch.save(args, tmp_path / "training_args.bin")
    assert torch.load(tmp_path / "training_args.bin", weights_only=False).to_dict() == args.to_dict()
    assert copy.deepcopy(args).to_dict() == args.to_dict()


@pytest.mark.parametrize(
    ("arguments", "source"),
    [
        (OffloadTrainingArguments, "command line"),
        (OffloadTrainingArguments, "json"),
        (OffloadSeq2SeqTrainingArguments, "yaml"),
    ],
)
def test_arguments_are_parsed(arguments, source, flags, tmp_path):
    values = {
        "output_dir": str(tmp_path / "out"), **flags, "offload_ram_budget": "20GiB", "offload_disk_budget": "1GB",
        "offload_keep_last_count": 1, "offload_read_ahead_bytes": "1MiB", "offload_verify": "checksum",
        "offload_max_disk_write_bytes": "1TiB", "offload_on_disk_write_limit": "stop",
        "offload_drive_endurance_bytes": "600TB",
        "use_cpu": True, "report_to": "none",
    }  # fmt: skip
    parser = HfArgumentParser(arguments)
    if source == "command line":
        words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
        (args,) = parser.parse_args_into_dataclasses(words)
    else:
        path = tmp_path / f"arguments.{source}"
        path.write_text(json.dumps(values))  # JSON is YAML, too
        (args,) = parser.parse_json_file(path) if source == "json" else parser.parse_yaml_file(path)
    assert type(args) is arguments
    assert args.offload_config() == OffloadConfig(
        tier="ssd", directory=flags["offload_directory"], ram_budget=20 << 30, disk_budget=10**9, min_bytes=0,
        keep_last_count=1, read_ahead_bytes=1 << 20, verify="checksum", max_disk_write_bytes=1 << 40,
        on_disk_write_limit="stop", drive_endurance_bytes=600 * 10**12,
    )  # fmt: skip
    assert args.report_to == ["hf_offload"]


def test_every_flag_has_its_help(capsys):
    with pytest.raises(SystemExit, match="0"):
        HfArgumentParser(OffloadTrainingArguments).parse_args_into_dataclasses(["--help"])
    shown = capsys.readouterr().out
    for field in dataclasses.fields(OffloadArguments):
        assert f"--{field.name}" in shown


@pytest.mark.parametrize("report_to", [["tensorboard", "wandb"], "all"])
def test_arguments_without_offloading_change_nothing(report_to, plain):
    plain["report_to"] = report_to
    expected = TrainingArguments(**plain).to_dict()
    found = OffloadTrainingArguments(**plain).to_dict()
    added = {field.name for field in dataclasses.fields(OffloadArguments)}
    assert {key: value for key, value in found.items() if key not in added} == expected


def test_reporters_stay_behind_ours(plain, flags):
    plain["report_to"] = ["tensorboard", "wandb"]
    assert OffloadTrainingArguments(**plain, **flags).report_to == ["hf_offload", "tensorboard", "wandb"]


# -- refusals --------------------------------------------------------------------------------------------------------------


@ALIASES
def test_trl_offloading_is_refused_by_name(plain, flags):
    trl = pytest.importorskip("trl")

    @dataclasses.dataclass
    class Arguments(OffloadArguments, trl.SFTConfig):
        def __post_init__(self):
            super().__post_init__()

    assert Arguments(**plain, **flags).report_to == ["hf_offload"]
    assert Arguments(**plain, activation_offloading=True).activation_offloading
    with pytest.raises(OffloadConfigError, match="activation_offloading"):
        Arguments(**plain, **flags, activation_offloading=True)


def test_trl_offloading_is_refused_by_the_callback(config, tmp_path):
    trainer = make_trainer(
        tmp_path, tiny_model("gpt2"), name="gpt2", arguments=TrainingArguments, callbacks=[OffloadCallback(config)]
    )
    trainer.args.activation_offloading = True
    with pytest.raises(OffloadConfigError, match="activation_offloading"):
        trainer.train()


@ALIASES
@pytest.mark.parametrize("name", sorted({CHECKPOINTING, "gradient_checkpointing"}))
def test_offloading_of_checkpoints_by_transformers_is_refused(name, plain, flags):
    kwargs = {name: True, f"{name}_kwargs": {"offload": True}}
    OffloadTrainingArguments(**plain, **kwargs)
    with pytest.raises(OffloadConfigError, match="checkpointing_kwargs"):
        OffloadTrainingArguments(**plain, **flags, **kwargs)


def test_data_parallel_is_refused(config):
    with pytest.raises(OffloadConfigError, match=r"DataParallel.*accelerate launch"):
        attach(nn.DataParallel(tiny_model("gpt2")), config)


def test_several_gpus_in_one_process_are_refused(plain, flags, config, monkeypatch, tmp_path):
    callback = OffloadCallback(config)
    trainer = make_trainer(tmp_path, tiny_model("gpt2"), name="gpt2", arguments=TrainingArguments, callbacks=[callback])
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda self: 2))
    OffloadTrainingArguments(**plain, **flags)  # the Trainer may still find that the model is spread over them
    with pytest.raises(OffloadConfigError, match="2 GPUs are visible"):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)


def test_two_surfaces_on_one_model_are_refused(flags, config, tmp_path):
    model = tiny_model("gpt2")
    with pytest.raises(OffloadConfigError, match="already attached to this model"):
        make_trainer(tmp_path, model, name="gpt2", callbacks=[OffloadCallback(config)], **flags).train()
    model = tiny_model("gpt2")
    trainer = make_trainer(tmp_path, model, name="gpt2", **flags)
    with offload_activations(model, config), pytest.raises(OffloadConfigError, match="already attached to this model"):
        trainer.train()
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
    trainer.train()


def test_the_wrong_order_of_bases_is_refused():
    with pytest.raises(OffloadConfigError, match="put OffloadArguments before"):

        class Wrong(TrainingArguments, OffloadArguments):
            pass
