"""Old names of settings work for one version, and say what they are called now."""

import copy
import dataclasses
import pickle
import warnings
from pathlib import Path

import pytest
from transformers import HfArgumentParser

from hf_offload import OffloadConfig, OffloadPlugin, OffloadTrainingArguments
from hf_offload.errors import OffloadConfigError
from hf_offload.settings.environment import FIELDS, settings_from
from hf_offload.settings.load import from_mapping
from hf_offload.settings.recipes import load_recipe
from hf_offload.settings.renamed import old_names
from hf_offload.settings.schema import argument

VALUES = {
    "min_offload_bytes": "4KiB",
    "at_disk_write_limit": "keep",
    "disk_rated_bytes": "600TB",
    "lean_activations": "norms",
}
ARGUMENTS = {
    "offload_dir": ("directory", "/tmp"),
    "offload_read_ahead": ("read_ahead_bytes", "8MiB"),
    "offload_max_disk_write": ("max_disk_write_bytes", "1GiB"),
    "offload_at_disk_write_limit": ("on_disk_write_limit", "keep"),
    "offload_disk_rated": ("drive_endurance_bytes", "600TB"),
    "lean_activations": ("recompute_elementwise", "norms"),
}


NEW = {
    "min_offload_bytes": "min_bytes",
    "at_disk_write_limit": "on_disk_write_limit",
    "disk_rated_bytes": "drive_endurance_bytes",
    "lean_activations": "recompute_elementwise",
}


def test_every_old_name_is_tried_here():
    assert old_names(FIELDS) == NEW
    assert VALUES.keys() == NEW.keys()
    assert old_names([argument(field) for field in FIELDS]) == {
        old: argument(field) for old, (field, _) in ARGUMENTS.items()
    }


@pytest.mark.parametrize("old", VALUES)
def test_an_old_keyword_is_the_new_one(old):
    new = NEW[old]
    with pytest.warns(FutureWarning, match=f"{old} is called {new} now") as caught:
        found = OffloadConfig(tier="ssd", **{old: VALUES[old]})
    assert caught[0].filename == __file__
    assert found == OffloadConfig(tier="ssd", **{new: VALUES[old]})


@pytest.mark.parametrize("old", VALUES)
def test_both_names_at_once_are_refused(old):
    new = NEW[old]
    with pytest.raises(OffloadConfigError, match=f"{old} is the old name of {new}"):
        OffloadConfig(**{old: VALUES[old], new: VALUES[old]})


@pytest.mark.parametrize("old", VALUES)
def test_an_old_key_of_a_section_is_the_new_one(old):
    new = NEW[old]
    with pytest.warns(FutureWarning, match=f"section offload: {old} is called {new} now"):
        found = from_mapping(OffloadConfig, {"tier": "ssd", old: VALUES[old]}, "section offload")
    assert found == OffloadConfig(tier="ssd", **{new: VALUES[old]})


@pytest.mark.parametrize("old", VALUES)
def test_an_old_variable_is_the_new_one(old):
    new = NEW[old]
    with pytest.warns(FutureWarning, match=f"HF_OFFLOAD_{old.upper()} is called HF_OFFLOAD_{new.upper()} now"):
        found = settings_from({f"HF_OFFLOAD_{old.upper()}": VALUES[old]})
    assert found == settings_from({f"HF_OFFLOAD_{new.upper()}": VALUES[old]})


@pytest.mark.parametrize("old", VALUES)
def test_an_old_keyword_of_the_plugin_is_the_new_one(old):
    new = NEW[old]
    with pytest.warns(FutureWarning, match=f"{old} is called {new} now"):
        found = OffloadPlugin(tier="ssd", **{old: VALUES[old]})
    assert found.config == OffloadConfig(tier="ssd", **{new: VALUES[old]})


@pytest.mark.parametrize("old", ARGUMENTS)
def test_an_old_training_argument_is_the_new_one(old, tmp_path):
    field, value = ARGUMENTS[old]
    with pytest.warns(FutureWarning, match=f"{old} is called {argument(field)} now"):
        found = OffloadTrainingArguments(output_dir=tmp_path, offload="ssd", report_to=[], **{old: value})
    assert found.offload_config() == OffloadConfig(tier="ssd", **{field: value})
    assert getattr(found, argument(field)) == value


@pytest.mark.parametrize("old", ARGUMENTS)
def test_an_old_attribute_of_training_arguments_is_the_new_one(old, tmp_path):
    field, value = ARGUMENTS[old]
    new = argument(field)
    args = OffloadTrainingArguments(output_dir=tmp_path, offload="ssd", report_to=[])
    with pytest.warns(FutureWarning, match=f"{old} is called {new} now") as caught:
        setattr(args, old, value)
    assert caught[0].filename == __file__
    assert args.offload_config() == OffloadConfig(tier="ssd", **{field: value})
    with pytest.warns(FutureWarning, match=f"{old} is called {new} now") as caught:
        assert getattr(args, old) == value
    assert caught[0].filename == __file__


@pytest.mark.parametrize("again", [copy.deepcopy, lambda args: pickle.loads(pickle.dumps(args))])
def test_old_attributes_are_in_the_way_of_nothing_that_lists_training_arguments(again, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        args = OffloadTrainingArguments(output_dir=tmp_path, offload="ssd", report_to=[], offload_directory="/tmp")
        assert not {**args.to_dict(), **dataclasses.asdict(args)}.keys() - args.__dict__.keys()
        assert again(args) == args
        assert "offload_dir=" not in repr(args)
        assert dataclasses.replace(args, offload_directory="/a").offload_directory == "/a"
        values = {name: args.to_dict()[name] for name in ("output_dir", "offload", "report_to", *ARGUMENTS)}
        assert OffloadTrainingArguments(**values).offload == "ssd"
    with pytest.warns(FutureWarning, match="offload_dir is called offload_directory now"):
        again(args).offload_dir = "/b"
    with pytest.warns(FutureWarning, match="offload_dir is called offload_directory now"):
        assert dataclasses.replace(args, offload_dir="/b").offload_config().directories == (Path("/b"),)
    with pytest.warns(FutureWarning, match="offload_max_disk_write is called offload_max_disk_write_bytes now"):
        assert dataclasses.replace(args, offload_max_disk_write="1GiB").offload_max_disk_write_bytes == "1GiB"


@pytest.mark.parametrize("old", VALUES)
def test_an_old_attribute_of_a_config_is_the_new_one_and_is_replaced(old):
    config = OffloadConfig(tier="ssd", min_bytes=7)
    expected = OffloadConfig(tier="ssd", **{"min_bytes": 7} | {NEW[old]: VALUES[old]})
    with pytest.warns(FutureWarning, match=f"{old} is called {NEW[old]} now"):
        found = dataclasses.replace(config, **{old: VALUES[old]})
    assert found == expected
    with pytest.warns(FutureWarning, match=f"{old} is called {NEW[old]} now"):
        assert dataclasses.replace(found, **{old: VALUES[old]}) == expected
    with pytest.warns(FutureWarning, match=f"OffloadConfig.{old} is called {NEW[old]} now") as caught:
        assert getattr(found, old) == getattr(expected, NEW[old])
    assert caught[0].filename == __file__


def test_an_old_and_a_new_training_argument_at_once_are_refused(tmp_path):
    with pytest.raises(OffloadConfigError, match="offload_dir is the old name of offload_directory"):
        OffloadTrainingArguments(output_dir=tmp_path, offload="ssd", offload_dir="/tmp", offload_directory="/tmp")


def test_a_parser_of_arguments_takes_old_names(tmp_path):
    parser = HfArgumentParser(OffloadTrainingArguments)
    with pytest.warns(FutureWarning, match="offload_dir is called offload_directory now"):
        (found,) = parser.parse_args_into_dataclasses(
            ["--output_dir", str(tmp_path), "--offload", "ssd", "--offload_dir", str(tmp_path)]
        )
    assert found.offload_config().directories == (tmp_path,)


def test_a_recipe_of_before_is_read(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("base: gpt/demo\noffload: {tier: ssd, min_offload_bytes: 4KiB}\n")
    with pytest.warns(FutureWarning, match="min_offload_bytes is called .*min_bytes now"):
        found = load_recipe(recipe)
    assert found.offload.min_bytes == 4096
