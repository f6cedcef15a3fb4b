"""Classes of settings: what is derived from a declaration, and how values that are wrong are told."""

import copy
import dataclasses
import pickle
import subprocess
import sys
from typing import Annotated, Any

import pytest
from pydantic import Field, TypeAdapter

from hf_offload import OffloadConfig, OffloadConfigError, SampledLinearConfig
from hf_offload.methods.lora.lora import Lora
from hf_offload.settings.classes import (
    Scope,
    build,
    counted,
    explained_settings,
    forms,
    from_mapping,
    help_of,
    in_section,
    settings,
)
from hf_offload.settings.values import Flag, Number, Text, Whole, folders, mapping, one_of, section, size


@settings(frozen=True, kw_only=True)
class Inner:
    ratio: Annotated[Number, Field(gt=0, le=1)] = 0.5
    word: Annotated[str, one_of(("left", "right"), {"l": "left"})] = "left"


@explained_settings(frozen=True, kw_only=True)
class Outer:
    rows: Annotated[Whole, counted("rows", ge=1, le=8), Scope.MODEL] = 1
    """Of {paths}, in
    two lines."""
    limit: Annotated[int | str | None, size(at_least=4)] = None
    paths: Annotated[str | list[str] | None, folders(), Scope.DRIVES] = None
    inner: Annotated[Inner | dict[str, Any] | None, section(Inner)] = None
    table: Annotated[dict[str, Any], mapping("of numbers")] = dataclasses.field(default_factory=dict)
    on: Flag = False
    name: Text | None = None


def problems(make):
    with pytest.raises(OffloadConfigError) as refused:
        make()
    return list(refused.value.problems or (str(refused.value),))


WRONG = [
    ({"rows": "x"}, "rows='x' is not a whole number of rows."),
    ({"rows": True}, "rows=True is not a whole number of rows."),
    ({"rows": 1.5}, "rows=1.5 is not a whole number of rows."),
    ({"rows": 0}, "rows=0 is too small: give 1 or more."),
    ({"rows": 10**30}, f"rows={10**30} is too large: give 8 or less."),
    ({"limit": "3 apples"}, "limit='3 apples' is not a size: write it as '20GiB', '500MB' or a number of bytes."),
    ({"limit": 3}, "limit=3 is too small: give 4 or more, or leave it out."),
    ({"paths": ["/a", "/a"]}, "paths='/a, /a' names the same path twice."),
    ({"on": 1}, "on=1 is neither true nor false."),
    ({"name": ""}, "name='' is not text."),
    ({"name": "a\0b"}, "name='a\\x00b' holds a NUL character."),
    ({"name": "\udcff"}, "name='\\udcff' is not text."),
    ({"table": {1: 2}}, "table={1: 2} is not a mapping of numbers."),
    ({"inner": {"ratio": 0}}, "inner.ratio=0 is too small: give more than 0."),
    ({"inner": {"ratio": 1.5}}, "inner.ratio=1.5 is too large: give 1 or less."),
    ({"inner": {"ratio": float("nan")}}, "inner.ratio=nan is not a number."),
    ({"inner": {"ratio": "much"}}, "inner.ratio='much' is not a number."),
    ({"inner": {"word": "lft"}}, "inner.word='lft' is unknown: choose one of left, right. Did you mean 'left'?"),
    ({"inner": {"ration": 1}}, "inner: unknown key 'ration'. Did you mean 'ratio'? Known: ratio, word."),
    ({"rwos": 1}, "Outer: unknown key 'rwos'. Did you mean 'rows'? Known: rows, limit, paths, inner, table, on, name."),
]


@pytest.mark.parametrize(("values", "said"), WRONG, ids=str)
def test_a_wrong_value_is_named_with_what_is_right(values, said):
    assert problems(lambda: Outer(**values)) == [said]


def test_all_that_is_wrong_is_told_at_once_by_the_names_it_was_given_with():
    values = {"rows": 0, "limit": "x", "inner": {"ratio": 2, "word": 3}, "on": "yes", "rwos": 1}
    found = problems(lambda: from_mapping(Outer, values, "file", in_section("file")))
    beginnings = [
        "file: unknown key 'rwos'",
        "file.rows=0",
        "file.limit='x'",
        "file.inner.ratio=2",
        "file.inner.word=3",
    ]
    assert [one[: len(begin)] for one, begin in zip(found, [*beginnings, "file.on='yes'"], strict=True)] == [
        *beginnings,
        "file.on='yes'",
    ]
    assert problems(lambda: build(Outer, {"rows": 0}, "options", lambda field: f"--{field}"))[0].startswith("--rows=0")


def test_values_are_what_was_declared():
    made = Outer(rows=3, limit="4KiB", paths="/a", inner={"ratio": 1, "word": "l"})
    assert (made.limit, [str(one) for one in made.paths], made.inner) == (4096, ["/a"], Inner(ratio=1.0, word="left"))
    assert Outer(limit=None, inner=None) == Outer()
    assert [str(Inner(ratio=ratio).ratio) for ratio in (1, 1.0)] == ["1", "1.0"]  # what is saved is what was written


@pytest.mark.parametrize(
    "made", [OffloadConfig(directory="/a", sampled_linear=0.3), SampledLinearConfig(), Lora(rank=4)]
)
def test_settings_are_copied_pickled_and_never_changed(made):
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == dataclasses.replace(made) == made
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, dataclasses.fields(made)[0].name, None)
    with pytest.raises(OffloadConfigError, match="unknown key 'no_such_setting'"):
        type(made)(no_such_setting=1)


def test_forms_are_derived_from_the_declaration():
    found = forms(Outer)
    assert [found[name].kind for name in ("rows", "limit", "on", "name")] == [int, str, bool, str]
    assert [found[name].unit for name in ("rows", "limit", "on")] == ["rows", "bytes", ""]
    assert [found[name].scope for name in ("rows", "paths", "on")] == [Scope.MODEL, Scope.DRIVES, Scope.MOVING]
    assert [name for name in found if found[name].splits] == ["paths"]
    assert help_of(Outer, "rows", lambda field: f"--{field}") == "Of --paths, in two lines."


def test_the_json_schema_says_what_may_be_written():
    found = TypeAdapter(OffloadConfig).json_schema()["properties"]
    assert set(found) == {field.name for field in dataclasses.fields(OffloadConfig)}
    assert found["tier"]["enum"] == ["none", "ram", "ssd", "auto"]
    threads = found["io_threads"]["anyOf"][0]
    assert (threads["type"], threads["minimum"], threads["maximum"]) == ("integer", 1, 256)
    assert all(one["description"] for one in found.values())


def test_the_package_is_imported_without_the_libraries_that_check_settings():
    code = "import sys, hf_offload; print({'torch', 'pydantic', 'transformers', 'yaml'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
