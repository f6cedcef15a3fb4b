"""Settings as environment variables."""

import dataclasses

import pytest

from hf_offload import OffloadConfig, OffloadConfigError
from hf_offload.settings.environment import FIELDS, is_on, settings_from, settings_with, variable, variables_for

EVERYTHING = {
    "tier": "auto",
    "memory_budget": "20GiB",
    "directory": ["/a", "/b c"],
    "ram_budget": "1GiB",
    "disk_budget": "1e9",
    "min_offload_bytes": "4KiB",
    "keep_last_count": 2,
    "read_ahead_bytes": "1MiB",
    "verify": "checksum",
    "max_disk_write_bytes": "1TiB",
    "at_disk_write_limit": "stop",
    "disk_rated_bytes": "600TB",
    "tiled_loss": "on",
    "tiled_mlp": ["mlp", "h.0.mlp"],
    "tile_bytes": "2MiB",
    "sampled_linear": {"ratio": 0.3, "targets": ["mlp", "q_proj"]},
    "lean_activations": ["norms", "dropout"],
}


def test_every_setting_goes_through_a_variable():
    assert set(EVERYTHING) == set(FIELDS) == {field.name for field in dataclasses.fields(OffloadConfig)}
    variables = variables_for(EVERYTHING)
    assert variables["HF_OFFLOAD_DIRECTORY"] == "/a,/b c"
    for field, value in EVERYTHING.items():
        others = {"tier": "ssd"} if field not in ("tier", "memory_budget") else {"tier": "auto"}
        if field == "tile_bytes":
            others["tiled_loss"] = "on"
        if field == "at_disk_write_limit":
            others["max_disk_write_bytes"] = "1TiB"
        found = settings_from({variable(field): variables[variable(field)]})
        assert set(found) == {field}
        assert OffloadConfig(**others | found) == OffloadConfig(**others | {field: value})


def test_nothing_is_set():
    assert settings_from({"HOME": "/", "HF_OFFLOAD_TIER": " "}) == {}
    assert variables_for({"tier": "ssd", "ram_budget": None}) == {"HF_OFFLOAD_TIER": "ssd"}
    assert settings_from({"HF_OFFLOAD_DISABLE": "0", "HF_OFFLOAD_AUTOLOAD": "1", "HF_OFFLOAD_ALLOCATOR": "glibc"}) == {}


def test_mistakes_come_together():
    environ = {"HF_OFFLOAD_DIRECTROY": "/nvme", "HF_OFFLOAD_KEEP_LAST_COUNT": "two", "HF_OFFLOAD_TIER": "floppy"}
    with pytest.raises(OffloadConfigError, match=r"5 mistakes in the script and the environment") as refused:
        settings_with({"verify": "md5", "tier": "sdd"}, "script", environ)
    for part in (
        "Did you mean 'HF_OFFLOAD_DIRECTORY'?",
        "HF_OFFLOAD_KEEP_LAST_COUNT='two' is not a whole number",
        "HF_OFFLOAD_TIER='floppy' is unknown",  # wrong even where it does not take effect
        "script: tier='sdd' is unknown",
        "script: verify='md5' is unknown",
    ):
        assert part in str(refused.value)


@pytest.mark.parametrize("first", [False, True])
def test_what_the_environment_makes_good_is_no_mistake(first):
    config, found = settings_with(
        {"memory_budget": "1GiB"}, "script", {"HF_OFFLOAD_TIER": "auto"}, environment_first=first
    )
    assert (config.tier, config.memory_budget, found) == ("auto", 2**30, {"tier": "auto"})


@pytest.mark.parametrize("name", ["/a,b", " /a", "/a "])
def test_what_a_variable_cannot_carry_is_refused(name):
    with pytest.raises(OffloadConfigError, match="cannot be handed on as a variable"):
        variables_for({"directory": [name]})


def test_what_yaml_makes_of_an_unquoted_on():
    assert variables_for({"tiled_loss": True, "tiled_mlp": False}) == {
        "HF_OFFLOAD_TILED_LOSS": "on",
        "HF_OFFLOAD_TILED_MLP": "off",
    }


def test_switches():
    assert [is_on("A", {"A": value}) for value in ("1", "true", "YES", "on", "0", "", "off")] == [True] * 4 + [
        False
    ] * 3
    assert not is_on("A", {})
