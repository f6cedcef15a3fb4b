from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_offload import OffloadConfig, OffloadConfigError, OffloadError, OffloadTrainingArguments
from hf_offload.settings.environment import FORMS
from hf_offload.settings.load import choose, collect_errors, nearest
from hf_offload.settings.memory_modes import memory_mode
from hf_offload.settings.schema import DRIVE_SETTINGS
from hf_offload.settings.sizes import format_bytes, parse_bytes
from hf_offload.storage.opening import drives_for


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("20GiB", 20 * 2**30),
        ("20gib", 20 * 2**30),
        ("20G", 20 * 2**30),
        ("20GB", 20 * 10**9),
        ("512 MB", 512 * 10**6),
        ("0.5KiB", 512),
        (".5k", 512),
        ("1e9", 10**9),
        (" 7 ", 7),
        ("7b", 7),
        ("3TiB", 3 * 2**40),
        (4096, 4096),
        (0, 0),
    ],
)
def test_sizes_as_people_write_them(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("wrong", ["", "GiB", "20 apples", "-5", "1.2.3GB", "20GiB!", -1, 1.5, True, None, [1]])
def test_what_is_no_size_is_refused_and_named(wrong):
    with pytest.raises(OffloadConfigError, match="ram_budget="):
        parse_bytes(wrong, "ram_budget")


@pytest.mark.parametrize("wrong", [-1, "-1", "-5GiB", -5.0])
def test_a_size_below_zero_is_called_negative_however_it_is_written(wrong):
    with pytest.raises(OffloadConfigError, match=r"ram_budget=.* is negative"):
        parse_bytes(wrong, "ram_budget")


def test_a_memory_budget_of_nothing_is_refused():
    with pytest.raises(OffloadConfigError, match="memory_budget=0 is too small"):
        OffloadConfig(tier="auto", memory_budget=0)


@pytest.mark.parametrize("wrong", ["1.5", "0.5", ".5b", "20.5 B", 1.5, 0.25])
def test_a_fraction_of_a_byte_is_refused(wrong):
    """It is most likely a size whose unit was forgotten."""
    with pytest.raises(OffloadConfigError, match=r"ram_budget=.* whole number of bytes"):
        parse_bytes(wrong, "ram_budget")
    assert parse_bytes("1.5KiB") == 1536
    assert parse_bytes("7.0") == parse_bytes(7.0) == 7


@given(st.integers(min_value=0, max_value=2**53))
def test_a_number_is_its_own_size(number):
    assert parse_bytes(number) == parse_bytes(str(number)) == number


@given(st.integers(min_value=0, max_value=2**50))
def test_formatting_can_be_read_back(size):
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.005)


def test_config_holds_bytes_and_paths():
    config = OffloadConfig(tier="nvme", directory="/a", ram_budget="1GiB", min_bytes="4KiB")
    assert config.tier == "ssd"
    assert [str(path) for path in config.directories] == ["/a"]
    assert (config.ram_budget, config.min_bytes) == (2**30, 4096)
    assert OffloadConfig().directories == ()


def test_without_settings_only_what_a_budget_needs_is_moved_and_more_on_a_host():
    assert OffloadConfig().tier == "auto"
    assert OffloadConfig().smallest_bytes(on_host=True) == 256 << 10
    assert OffloadConfig().smallest_bytes(on_host=False) == 2 << 20
    for on_host in (True, False):
        assert OffloadConfig(min_bytes="1KiB").smallest_bytes(on_host) == 1024


@pytest.mark.parametrize(
    ("on_host", "settings", "drives"),
    [
        (False, {}, ()),
        (False, {"tier": "ram"}, ()),
        (False, {"ram_budget": "1GiB"}, ()),
        (False, {"directory": "/nvme"}, ("/nvme",)),
        (False, {"tier": "ssd"}, ("/tmp",)),
        (False, {"ram_budget": 0}, ("/tmp",)),
        (False, {"disk_budget": "1GiB"}, ("/tmp",)),
        (False, {"max_disk_write_bytes": "1GiB"}, ("/tmp",)),
        (False, {"drive_endurance_bytes": "600TB"}, ("/tmp",)),
        (True, {}, ("/tmp",)),
        (True, {"tier": "ram"}, ()),
    ],
    ids=str,
)
def test_an_accelerators_run_writes_to_a_drive_only_where_one_is_meant(on_host, settings, drives, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    assert drives_for(OffloadConfig(**settings), on_host) == tuple(map(Path, drives))


def test_all_mistakes_of_a_config_come_at_once():
    with pytest.raises(OffloadConfigError) as caught:
        OffloadConfig(
            tier="sdd", directory=["/a", "/a"], ram_budget="lots", disk_budget=-1, keep_last_count=-2, verify="md5"
        )
    message = str(caught.value)
    assert message.startswith("6 errors")
    assert "Did you mean 'ssd'?" in message
    for part in ("tier='sdd'", "same path twice", "ram_budget='lots'", "disk_budget=-1", "keep_last_count=-2", "'md5'"):
        assert part in message


@pytest.mark.parametrize("tier", ["none", "ram"])
def test_a_directory_needs_a_tier_that_writes_files(tier):
    with pytest.raises(OffloadConfigError, match=r"directory (is )?given"):
        OffloadConfig(tier=tier, directory="/a")


def test_a_configuration_error_is_also_an_offload_error_and_a_value_error():
    assert issubclass(OffloadConfigError, OffloadError)
    assert issubclass(OffloadConfigError, ValueError)


def test_other_errors_are_not_collected():
    with pytest.raises(KeyError), collect_errors("x") as check, check:
        raise KeyError("a defect")


def test_an_error_outside_a_check_wins_over_collected_ones():
    def collect_and_fail():
        with collect_errors("x") as check:
            with check:
                raise OffloadConfigError("mistake")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        collect_and_fail()


def test_nearest_name():
    assert nearest("recompte", ["keep", "recompute"]) == " Did you mean 'recompute'?"
    assert nearest("zzz", ["keep", "recompute"]) == ""
    with pytest.raises(OffloadConfigError, match=r"'w7x' is unknown: choose one of w7.* and 45 more\. Did you mean"):
        choose("name", "w7x", [f"w{n}" for n in range(50)])
    with pytest.raises(OffloadConfigError, match="choose one of a, b"):
        choose("letter", "c", ["a", "b"])


@pytest.mark.parametrize("name", sorted(set(DRIVE_SETTINGS) - {"on_disk_write_limit"}))
def test_what_is_for_files_is_refused_with_the_ram_tier(name):
    value = 1 if FORMS[name].kind is int else "1GiB"
    with pytest.raises(OffloadConfigError, match=f"{name} given, but tier='ram'"):
        OffloadConfig(tier="ram", **{name: value})


def test_lists_of_mistakes_are_joined_into_one():
    with pytest.raises(OffloadConfigError) as raised, collect_errors("outer") as check:
        with check:
            OffloadConfig(tier="sdd", verify="chek")
        with check:
            raise OffloadConfigError("one more")
    assert str(raised.value).startswith("3 errors in the outer:")
    assert str(raised.value).count("errors") == 1


def test_training_arguments_are_refused_by_their_own_names(tmp_path):
    with pytest.raises(OffloadConfigError) as refused:
        OffloadTrainingArguments(str(tmp_path), offload="sdd", offload_ram_budget="lots", offload_memory_budget="20GiB")
    assert str(refused.value).splitlines()[1:] == [
        "  - offload='sdd' is unknown: choose one of none, ram, ssd, auto. Did you mean 'ssd'?",
        "  - offload_ram_budget='lots' is not a size: write it as '20GiB', '500MB' or a number of bytes.",
    ]
    with pytest.raises(OffloadConfigError, match="offload_memory_budget is given, but offload='ssd' does not use it"):
        OffloadTrainingArguments(str(tmp_path), offload="ssd", offload_memory_budget="20GiB")


def test_a_limit_of_a_planned_step_needs_a_plan():
    assert OffloadConfig(max_step_write_bytes="1GiB").max_step_write_bytes == 2**30
    with pytest.raises(OffloadConfigError, match="max_step_write_bytes is given, but tier='ssd' plans nothing"):
        OffloadConfig(tier="ssd", max_step_write_bytes="1GiB")


def test_adapters_have_the_names_that_peft_gives_their_settings():
    theirs = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": "all-linear"}
    ours = {"rank": 4, "alpha": 8, "dropout": 0.1, "targets": "all"}
    assert memory_mode("lora", theirs) == memory_mode("lora", ours)
    with pytest.raises(OffloadConfigError, match="r and rank are the same setting"):
        memory_mode("lora", {"r": 4, "rank": 4})
    with pytest.raises(OffloadConfigError, match="has no setting 'r'"):
        memory_mode("galore", {"r": 4})
