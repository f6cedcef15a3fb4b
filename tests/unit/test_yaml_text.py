"""YAML 1.2, core schema: what is read, what is refused, and that nothing else than an error of ours comes out."""

import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hf_offload import OffloadConfigError
from hf_offload.settings.shown import LONGEST
from hf_offload.settings.yaml_text import dump_yaml, parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010", 10),
        ("0o17", 15),
        ("0x1F", 31),
        ("+5", 5),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("0b11", "0b11"),
        ("2001-99-99", "2001-99-99"),
        ("2001-01-01", "2001-01-01"),
        ("5e-4", 5e-4),
        ("1.", 1.0),
        ("-.inf", -math.inf),
        ("1e999", math.inf),
        ("yes", "yes"),
        ("no", "no"),
        ("off", "off"),
        ("y", "y"),
        ("=", "="),
        ("True", True),
        ("~", None),
        ("", None),
        ("null", None),
        ("'<<': 1", {"<<": 1}),
        ("!!str 010", "010"),
        ("!!float 1", 1.0),
    ],
)
def test_the_core_schema(text, value):
    assert parse_yaml(text, "here") == value
    assert type(parse_yaml(text, "here")) is type(value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("9" * 5000, "a number of 5000 digits"),
        ("[" * 20_000, "more than 50 levels"),
        ("!!int foo", "'foo' is not of type int"),
        ("!!float foo", "'foo' is not of type float"),
        ("!!bool foo", "'foo' is not of type bool"),
        ("!!null foo", "'foo' is not of type null"),
        ("!!map foo", "expected a mapping node"),
        ("!!seq foo", "expected a sequence node"),
        ("!!timestamp 2001-01-01", "not part of YAML's core schema"),
        ("!!binary aGk=", "not part of YAML's core schema"),
        ("!!set {a}", "not part of YAML's core schema"),
        ("!!python/object:os.system x", "not part of YAML's core schema"),
        ("a: &a [*a]", "an alias: write out"),
        ("[&a x, *a]", "an alias: write out what it stands for, or name a layer"),
        ("<<: {a: 1}", "merges mappings in YAML 1.1 only"),
        ("{? [a] : b}", "the key ['a'] is not text"),
        ("{a: 1, a: 2}", "the key 'a' is given twice"),
        ("010: 1", "the key 10 is not text"),
        ("a: 1\n---\nb: 2", "another document"),
        ("\0", "unacceptable character"),
        ("*" + "x" * 5000, "an alias: write out"),
        ("? " + "k" * 5000 + "\n: 1\n? " + "k" * 5000 + "\n: 2", "is given twice"),
    ],
)
def test_what_is_refused_and_in_few_words(text, part):
    with pytest.raises(OffloadConfigError, match=r"^here") as refused:
        parse_yaml(text, "here")
    assert part in str(refused.value)
    assert len(str(refused.value)) < 2 * LONGEST + 100


def test_what_is_shared_is_written_out():
    shared = ["x", "y"]
    assert parse_yaml(dump_yaml({"a": shared, "b": shared}), "here") == {"a": shared, "b": shared}


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text):
    try:
        parse_yaml(text, "here")
    except OffloadConfigError as error:
        refused = error
    else:
        return
    assert str(refused).startswith("here")


_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20),
    st.sampled_from(
        ["010", "0o17", "0x1f", "1:30", "no", "1e5", "1_000", "2001-01-01", "~", "", "<<", "=", ".5", "0b1"]
    ),
)


@given(
    st.recursive(
        _SCALARS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab<=01", min_size=1), inner, max_size=3),
        max_leaves=6,
    )
)
def test_what_is_written_is_read_back_by_this_reader_and_by_one_of_version_1_1(content):
    text = dump_yaml(content)
    assert parse_yaml(text, "here") == content
    assert yaml.safe_load(text) == content
