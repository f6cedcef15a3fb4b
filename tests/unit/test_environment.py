"""Settings as environment variables."""

import contextlib

import pytest
import torch
from pydantic import TypeAdapter

from hf_offload import OffloadConfig, OffloadConfigError, OffloadPlugin, offload_activations
from hf_offload.settings.environment import (
    ALLOCATOR_VARIABLE,
    ALLOCATORS,
    FORMS,
    PARENT_VARIABLE,
    check_variables,
    is_on,
    settings_from,
    settings_with,
    variables_for,
)
from hf_offload.settings.recipes import read_recipe
from hf_offload.settings.schema import FIELDS

LIKELY = [
    "/a b", ["mlp", "h.0.mlp"], ["norms", "dropout"], {"ratio": 0.3, "targets": ["mlp", "q_proj"]}, {"rank": 4}, "lora",
]  # fmt: skip
"""Values that are tried where the declaration of a setting does not tell one that it takes."""
NEEDED = {
    "max_step_write_bytes": {"tier": "auto"},
    "update_in_backward": {"optimizer": "ssd"},
    "recompute_blocks": {"tier": "auto"},
    "memory_budget": {"tier": "auto"},
    "tile_bytes": {"tiled_loss": "on"},
    "memory_mode_kwargs": {"memory_mode": "galore"},
    "snapshot_dir": {"snapshot_steps": 3},
    "snapshot_parity": {"snapshot_steps": 3},
    "on_disk_write_limit": {"max_disk_write_bytes": "1TiB"},
}


def words_of(field):
    """What a setting that is one of some words may be."""
    declared = TypeAdapter(OffloadConfig).json_schema()["properties"][field]
    return next((one["enum"] for one in (declared, *declared.get("anyOf", ())) if "enum" in one), ())


def example_of(field, others):
    """A value of ``field`` that is none of its default."""
    form, default = FORMS[field], getattr(OffloadConfig(**others), field)
    known = words_of(field) or ("4MiB",) * (form.unit == "bytes") or {int: (2, 1), float: (0.5,), bool: (not default,)}
    for value in known.get(form.kind, LIKELY) if isinstance(known, dict) else known:
        with contextlib.suppress(OffloadConfigError):
            if getattr(OffloadConfig(**others | {field: value}), field) != default:
                return value
    raise AssertionError(f"LIKELY has no value for {field}")


@pytest.mark.parametrize("field", FIELDS)
def test_every_setting_goes_through_a_variable(field):
    others = {"tier": "ssd"} | NEEDED.get(field, {})
    value = example_of(field, others)
    found = settings_from(variables_for({field: value}))
    assert set(found) == {field}
    config = OffloadConfig(**others | found)
    assert config == OffloadConfig(**others | {field: value})
    assert settings_from(variables_for({field: getattr(config, field)}))[field] is not None
    assert OffloadConfig(**others | settings_from(variables_for({field: getattr(config, field)}))) == config


def test_variables_hold_several_folders():
    assert variables_for({"directory": ["/a", "/b c"]}) == {"HF_OFFLOAD_DIRECTORY": "/a,/b c"}


def test_nothing_is_set():
    assert settings_from({"HOME": "/", "HF_OFFLOAD_TIER": " "}) == {}
    assert variables_for({"tier": "ssd", "ram_budget": None}) == {"HF_OFFLOAD_TIER": "ssd"}
    assert settings_from({"HF_OFFLOAD_DISABLE": "0", "HF_OFFLOAD_AUTOLOAD": "1", "HF_OFFLOAD_ALLOCATOR": "glibc"}) == {}


def test_mistakes_come_together():
    environ = {"HF_OFFLOAD_DIRECTROY": "/nvme", "HF_OFFLOAD_KEEP_LAST_COUNT": "two", "HF_OFFLOAD_TIER": "floppy"}
    with pytest.raises(OffloadConfigError, match=r"4 errors in the script and the environment") as refused:
        settings_with({"verify": "md5", "tier": "sdd"}, "script", environ)
    for part in (
        "Did you mean 'HF_OFFLOAD_DIRECTORY'?",
        "HF_OFFLOAD_KEEP_LAST_COUNT='two' is not a whole number",
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


def test_switches():
    assert [is_on("A", {"A": value}) for value in ("1", "true", "YES", "on", "0", "", "off")] == [True] * 4 + [
        False
    ] * 3
    assert not is_on("A", {})


@pytest.mark.parametrize("value", ["ture", "2", "-1", "enable", "y", "None", "1 1", "x" * 5000])
def test_a_switch_is_on_or_off_and_nothing_else(value):
    with pytest.raises(
        OffloadConfigError, match=r"^A='.*is neither on nor off: set it to 1 or 0, or leave it out\.$"
    ) as refused:
        is_on("A", {"A": value})
    assert len(str(refused.value)) < 400


WRONG_VARIABLES = [
    ("HF_OFFLOAD_TIRE", "ssd", "The variable HF_OFFLOAD_TIRE is not a setting. Did you mean 'HF_OFFLOAD_TIER'?"),
    ("HF_OFFLOAD_AUTOLOAD", "ture", "HF_OFFLOAD_AUTOLOAD='ture' is neither on nor off"),
    ("HF_OFFLOAD_DISABLE", "please", "HF_OFFLOAD_DISABLE='please' is neither on nor off"),
    ("HF_OFFLOAD_ALLOCATOR", "foo", "HF_OFFLOAD_ALLOCATOR='foo' is unknown: choose one of auto, tcmalloc"),
]


def begin_a_session():
    with offload_activations(torch.nn.Linear(2, 2), OffloadConfig(tier="none")):
        pass


CALLS = {
    "plugin": OffloadPlugin,
    "recipe": lambda: read_recipe("gpt/demo"),
    "session": begin_a_session,
    "variables": settings_from,
}


@pytest.mark.parametrize(
    ("reader", "name", "value", "message"),
    [(reader, *wrong) for reader, wrong in zip(CALLS, WRONG_VARIABLES, strict=True)],
)
def test_a_variable_that_says_nothing_is_refused_wherever_settings_come_from(monkeypatch, reader, name, value, message):
    CALLS[reader]()
    monkeypatch.setenv(name, value)
    with pytest.raises(OffloadConfigError) as refused:
        CALLS[reader]()
    assert message in str(refused.value)


def test_variables_of_the_package_are_accepted(monkeypatch):
    monkeypatch.setenv(PARENT_VARIABLE, "1")
    monkeypatch.setenv(ALLOCATOR_VARIABLE, "")  # as not set
    check_variables()
    for allocator in ALLOCATORS:
        monkeypatch.setenv(ALLOCATOR_VARIABLE, allocator)
        check_variables()
