"""Config files of accelerate with a section of ours: how they are found, read, written, and handed on."""

import json
import os
import subprocess
import types
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig

from hf_offload import OffloadConfig, OffloadConfigError
from hf_offload.integrations import launch as launching
from hf_offload.integrations.launch import (
    SECTION,
    find_config,
    launch,
    read_config,
    shipped_configs,
    take_section,
)
from tests.helpers.command_line import command, said


@pytest.fixture(autouse=True)
def script(tmp_path, monkeypatch):
    """A script to launch, in the current directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()


@pytest.fixture
def clean():
    """The environment as it was, whatever a test writes there."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.mark.parametrize("name", shipped_configs())
def test_shipped_files_are_accelerates_own_and_ours(name, tmp_path):
    config = read_config(find_config(name))
    OffloadConfig(**config[SECTION])
    assert take_section(config, name, {})["HF_OFFLOAD_TIER"] == {"single": "auto", "ddp": "auto"}.get(name, "ssd")
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    ClusterConfig.from_yaml_file(tmp_path / "c.yaml")  # raises for unknown keys
    assert f"--config_file {name} " in find_config(name).read_text().replace("\n", " ")


def test_a_script_that_is_not_there_is_one_line():
    for arguments in (["nope.py", "--x"], ["--num_processes", "1", "nope.py"]):
        refused = command("launch", *arguments)
        assert (refused.exit_code, refused.stderr) == (2, "hf-offload launch: no such file: nope.py\n")


def test_a_wrong_option_of_accelerate_is_one_line():
    refused = command("launch", "--num_processes", "x", "train.py")
    assert refused.exit_code == 2
    assert refused.stderr.startswith("hf-offload launch: argument --num_processes/--num-processes: invalid int value")
    assert refused.stderr.count("\n") == 1


def test_all_ways_to_train_are_shipped():
    assert set(shipped_configs()) == {"single", "ddp", "fsdp2", "zero2", "zero3", "context_parallel"}


def test_a_file_that_is_not_there():
    with pytest.raises(OffloadConfigError, match=r"no config file 'fsdp'.*Did you mean 'fsdp2'\?.*Shipped: .*ddp"):
        find_config("fsdp")


@pytest.mark.parametrize(
    ("text", "part"), [("- a\n", "is not a mapping"), ("a: [", "not valid YAML"), ("a: 1\na: 2\n", "given twice")]
)
def test_files_that_cannot_be_read(text, part, tmp_path):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(OffloadConfigError, match=part):
        read_config(tmp_path / "c.yaml")


def test_json_is_read(tmp_path):
    (tmp_path / "c.json").write_text(json.dumps({SECTION: {"tier": "ram"}}))
    assert read_config(tmp_path / "c.json") == {SECTION: {"tier": "ram"}}
    (tmp_path / "c.json").write_text("{")
    with pytest.raises(OffloadConfigError, match=r"The config file .*c.json is not valid JSON"):
        read_config(tmp_path / "c.json")


def test_a_section_becomes_variables():
    config = {"num_processes": 1, SECTION: {"tier": "ssd", "directory": ["/a", "/b"], "tiled_loss": True}}
    found = take_section(config, "c.yaml", {})
    assert found == {"HF_OFFLOAD_TIER": "ssd", "HF_OFFLOAD_DIRECTORY": "/a,/b", "HF_OFFLOAD_TILED_LOSS": "on"}
    assert config == {"num_processes": 1}
    assert take_section(config, "c.yaml", {}) == {}


def test_our_section_is_read_as_a_recipe_is_and_the_rest_as_accelerate_reads_it(tmp_path):
    (tmp_path / "c.yaml").write_text(f"use_cpu: no\n{SECTION}: {{verify: off, sampled_linear: 3e-1}}\n")
    assert read_config(tmp_path / "c.yaml") == {"use_cpu": False, SECTION: {"verify": "off", "sampled_linear": 0.3}}


def test_a_variable_goes_before_the_file_and_is_named(caplog):
    config = {SECTION: {"tier": "ssd", "directory": "/a"}}
    assert take_section(config, "c.yaml", {"HF_OFFLOAD_DIRECTORY": "/b"}) == {"HF_OFFLOAD_TIER": "ssd"}
    assert "HF_OFFLOAD_DIRECTORY=['/b'] is used, and not directory=/a of c.yaml." in caplog.text


@pytest.mark.parametrize(
    ("section", "environ", "part"),
    [
        ({"teir": "ssd"}, {}, "unknown key 'teir'. Did you mean 'tier'"),
        ({"tier": "tape"}, {}, "tier='tape' is unknown"),
        ("ssd", {}, "is not a mapping"),
        ({"directory": "/a"}, {"HF_OFFLOAD_TIER": "ram"}, "writes no files"),
    ],
)
def test_wrong_sections(section, environ, part):
    with pytest.raises(OffloadConfigError, match=part):
        take_section({SECTION: section}, "c.yaml", environ)


# ------------------------------------------------------------------------------------------------------------- launching


@pytest.fixture
def launched(monkeypatch, tmp_path, clean):
    """What accelerate is asked to launch: its arguments, and the config file as it was at that moment."""
    calls = []

    def note(arguments):
        config = None if arguments.config_file is None else yaml.safe_load(Path(arguments.config_file).read_text())
        calls.append((arguments, config, dict(os.environ)))

    monkeypatch.setattr("accelerate.commands.launch.launch_command", note)
    monkeypatch.setattr(launching, "default_config", lambda: tmp_path / "default.yaml")
    return calls


def test_the_script_runs_inside_ours_with_its_arguments(launched):
    launch(["--config_file", "ddp", "--num_processes", "4", "train.py", "--epochs", "3", "--config_file", "mine"])
    ((arguments, config, environ),) = launched
    assert (arguments.training_script, arguments.module, arguments.num_processes) == ("hf_offload.run", True, 4)
    assert arguments.training_script_args == ["train.py", "--epochs", "3", "--config_file", "mine"]
    assert SECTION not in config
    assert config["distributed_type"] == "MULTI_GPU"
    assert environ["HF_OFFLOAD_TIER"] == "auto"
    assert not Path(arguments.config_file).exists()


def test_modules_are_launched_too(launched):
    launch(["-m", "package.train", "--x"])
    assert launched[0][0].training_script_args == ["-m", "package.train", "--x"]
    assert launched[0][1] is None


def test_without_a_file_the_one_that_was_written_is_used(launched, tmp_path):
    (tmp_path / "default.yaml").write_text(f"distributed_type: 'NO'\n{SECTION}: {{tier: ram}}\n")
    launch(["train.py"])
    assert launched[0][2]["HF_OFFLOAD_TIER"] == "ram"


def test_without_either_accelerates_own_file_is_used_as_accelerate_uses_it(launched, tmp_path, monkeypatch):
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(f"distributed_type: 'NO'\n{SECTION}: {{tier: ram}}\n")
    monkeypatch.setattr("accelerate.commands.config.default_config_file", str(theirs))
    launch(["--cpu", "train.py"])
    assert (launched[0][1], launched[0][2].get("HF_OFFLOAD_TIER")) == (None, None)
    launch(["train.py"])
    assert (launched[1][1], launched[1][2]["HF_OFFLOAD_TIER"]) == ({"distributed_type": "NO"}, "ram")


@pytest.mark.parametrize(
    ("arguments", "environ", "part"),
    [
        ([], {}, "name a script"),
        (["--no_python", "train.sh"], {}, "not Python"),
        (["--config_file", "nowhere.yaml", "train.py"], {}, "no config file"),
        (["train.py"], {"HF_OFFLOAD_TIER": "tape"}, "TIER='tape' is unknown"),
        (["train.py"], {"HF_OFFLOAD_TEIR": "ssd"}, "Did you mean 'HF_OFFLOAD_TIER'"),
    ],
)
def test_nothing_is_started_with_wrong_settings(arguments, environ, part, launched, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    result = command("launch", *arguments)
    assert result.exit_code == 2
    assert part in said(result)
    assert launched == []


@pytest.fixture
def started(monkeypatch, clean):
    """The commands and environments that accelerate would start processes with."""
    calls = []

    def process(words, env):
        calls.append((words, env))
        return types.SimpleNamespace(wait=lambda: None, returncode=0)

    fake = types.SimpleNamespace(Popen=process, CalledProcessError=subprocess.CalledProcessError)
    monkeypatch.setattr("accelerate.commands.launch.subprocess", fake)
    monkeypatch.setattr("torch.distributed.run.run", lambda arguments: calls.append((["torchrun"], {})))
    return calls


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("num_procesess: 1", "had unknown keys (['num_procesess'])"),
        ("mixed_precision: fp12", "Unknown mixed_precision mode: fp12."),
        ("compute_environment: moon", ""),
        ("fsdp_config: 2\nmixed_precision: [a]", ""),
    ],
)
def test_what_accelerate_refuses_names_the_users_file(text, part, started, tmp_path):
    Path("mine.yaml").write_text(f"distributed_type: 'NO'\nnum_processes: 1\nuse_cpu: true\n{text}\n")
    with pytest.raises(OffloadConfigError) as refused:
        launch(["--config_file", "mine.yaml", "train.py"])
    assert str(refused.value).startswith("accelerate refuses mine.yaml: ")
    assert part in str(refused.value)
    assert "/proc/self" not in str(refused.value)
    assert not started


@pytest.mark.parametrize(("text", "number"), [("no", "false"), ("off", "false"), ("yes", "true"), ("on", "true")])
def test_what_is_false_in_accelerates_yaml_is_false_here(text, number, launched, tmp_path):
    Path("mine.yaml").write_text(f"distributed_type: 'NO'\nsame_network: {text}\nuse_cpu: {text}\n")
    launch(["--config_file", "mine.yaml", "train.py"])
    ((_, config, _),) = launched
    assert config == {"distributed_type": "NO", "same_network": number == "true", "use_cpu": number == "true"}


# --------------------------------------------------------------------------------------------------------------- writing


def written(tmp_path, *words):
    target = tmp_path / "made" / "c.yaml"
    return command("config", *words, "--config_file", target), target


def test_a_file_with_changes_can_be_launched(tmp_path, launched):
    changes = [
        "offload.tier=auto",
        f"offload.directory={tmp_path}",
        "offload.memory_budget=20GiB",
        "offload.tiled_loss=on",
    ]
    result, target = written(tmp_path, "fsdp2", "num_processes=4", "mixed_precision=bf16", *changes)
    assert result.exit_code == 0, result.output
    assert f"hf-offload launch --config_file {target} train.py" in result.stdout
    launch(["--config_file", str(target), "train.py"])
    _, config, environ = launched[0]
    assert (config["num_processes"], config["mixed_precision"], config["fsdp_config"]["fsdp_version"]) == (4, "bf16", 2)
    expected = {"TIER": "auto", "DIRECTORY": str(tmp_path), "MEMORY_BUDGET": "20GiB", "TILED_LOSS": "on"}
    assert {name: environ[f"HF_OFFLOAD_{name}"] for name in expected} == expected


def test_words_for_true_and_false_are_accelerates(tmp_path):
    result, target = written(tmp_path, "single", "use_cpu=no", "same_network=yes", "mixed_precision=no")
    assert result.exit_code == 0, result.output
    values = yaml.safe_load(target.read_text())
    assert (values["use_cpu"], values["same_network"], values["mixed_precision"]) == (False, True, "no")


def test_without_changes_it_is_the_file_of_the_package(tmp_path):
    result, target = written(tmp_path)
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(target.read_text()) == read_config(find_config("single"))


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["mpi"], "no config file 'mpi'"),
        (["single", "offload.memory_budget=a lot"], "memory_budget='a lot' is not a size"),
        (["single", "offload.teir=ssd"], "unknown key 'teir'"),
        (["single", "num_proceses=2"], "num_proceses"),
        (["single", "compute_environment=moon"], "accelerate refuses the changes"),
        (["single", "tier"], "is not an override"),
    ],
)
def test_wrong_changes_are_refused(tmp_path, words, part):
    result, target = written(tmp_path, *words)
    assert result.exit_code == 2
    assert part in said(result)
    assert not target.exists()


def test_the_path_of_a_shipped_file():
    result = command("config", "--where", "zero3")
    assert result.stdout.strip() == str(find_config("zero3"))
