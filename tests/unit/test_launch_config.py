"""Config files of accelerate with a section of ours: how they are found, read, asked for, and handed on."""

import json
import os
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from typer.testing import CliRunner

from hf_offload import OffloadConfig, OffloadConfigError
from hf_offload.cli.main import app
from hf_offload.integrations import launch as launching
from hf_offload.integrations.launch import (
    SECTION,
    find_config,
    launch,
    read_config,
    shipped_configs,
    take_section,
)


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


def test_all_ways_to_train_are_shipped():
    assert set(shipped_configs()) == {"single", "ddp", "fsdp2", "zero2", "zero3", "context_parallel"}


def test_a_file_that_is_not_there():
    with pytest.raises(OffloadConfigError, match=r"no config file 'fsdp'.*Did you mean 'fsdp2'\?.*Shipped: .*ddp"):
        find_config("fsdp")


@pytest.mark.parametrize(
    ("text", "part"), [("- a\n", "is no mapping"), ("a: [", "not valid YAML"), ("a: 1\na: 2\n", "given twice")]
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


def test_a_variable_goes_before_the_file_and_is_named(caplog):
    config = {SECTION: {"tier": "ssd", "directory": "/a"}}
    assert take_section(config, "c.yaml", {"HF_OFFLOAD_DIRECTORY": "/b"}) == {"HF_OFFLOAD_TIER": "ssd"}
    assert "HF_OFFLOAD_DIRECTORY=['/b'] is used, and not directory=/a of c.yaml." in caplog.text


@pytest.mark.parametrize(
    ("section", "environ", "part"),
    [
        ({"teir": "ssd"}, {}, "unknown key 'teir'. Did you mean 'tier'"),
        ({"tier": "tape"}, {}, "tier='tape' is unknown"),
        ("ssd", {}, "is no mapping"),
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

    def command(arguments):
        config = None if arguments.config_file is None else yaml.safe_load(Path(arguments.config_file).read_text())
        calls.append((arguments, config, dict(os.environ)))

    monkeypatch.setattr("accelerate.commands.launch.launch_command", command)
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
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["launch", *arguments])
    assert result.exit_code == 2
    assert part in " ".join(result.stderr.split())
    assert launched == []


# ---------------------------------------------------------------------------------------------------------------- asking


def ask(tmp_path, *answers):
    target = tmp_path / "made" / "c.yaml"
    command = ["config", "--config_file", str(target)]
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, command, input="\n".join(answers) + "\n")
    return result, target


def test_answers_become_a_file_that_can_be_launched(tmp_path, launched):
    result, target = ask(tmp_path, "fsdp2", "4", "bf16", "auto", str(tmp_path), "20GiB", "64GiB", "on")
    assert result.exit_code == 0, result.output
    assert f"hf-offload launch --config_file {target} train.py" in result.stdout.replace("\n", "")
    launch(["--config_file", str(target), "train.py"])
    _, config, environ = launched[0]
    assert (config["num_processes"], config["fsdp_config"]["fsdp_version"]) == (4, 2)
    expected = {"TIER": "auto", "DIRECTORY": str(tmp_path), "MEMORY_BUDGET": "20GiB", "RAM_BUDGET": "64GiB"}
    assert {name: environ[f"HF_OFFLOAD_{name}"] for name in expected} == expected
    assert environ["HF_OFFLOAD_TILED_LOSS"] == "on"


def test_return_alone_takes_what_is_proposed(tmp_path):
    result, target = ask(tmp_path, *[""] * 8)
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(target.read_text())[SECTION] == {"tier": "auto"}


def test_wrong_answers_are_asked_again_or_refused(tmp_path):
    result, target = ask(tmp_path, "mpi", "single", "n", "no", "auto", "", "a lot", "", "off")
    assert "select one of the available options" in result.stdout
    assert result.exit_code == 2
    assert "memory_budget='a lot' is not a size" in " ".join(result.stderr.split())
    assert not target.exists()


def test_the_path_of_a_shipped_file():
    result = CliRunner().invoke(app, ["config", "--where", "zero3"])
    assert result.stdout.strip() == str(find_config("zero3"))
