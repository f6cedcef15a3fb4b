"""What messages repeat of values and names."""

import pytest

from hf_offload.settings.shown import LONGEST, listed, shown


class Unprintable:
    def __repr__(self):
        raise ZeroDivisionError


class Long:
    def __repr__(self):
        return "x" * 10_000


def nested():
    value = ["x"] * 9
    for _ in range(40):  # 9**41 items, once they are written out
        value = [value] * 9
    return value


def endless():
    value = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    "value",
    [
        "x" * 10_000,
        10**5000,
        -(10**5000),
        nested(),
        endless(),
        {"x" * 5000: "y" * 5000},
        Unprintable(),
        Long(),
        b"x" * 9999,
    ],
    ids=lambda value: type(value).__name__,
)
def test_few_characters_of_any_value(value):
    assert 3 < len(shown(value)) <= LONGEST


def test_small_values_are_shown_as_they_are():
    for value in ("a b", 3, [1, "x"], {"a": None}, 10**150, (1.5,), "\udcff"):
        assert shown(value) == repr(value)


def test_a_few_names_are_listed_and_of_many_the_nearest():
    assert listed(["a", "b"]) == "a, b"
    assert listed([]) == "none"
    names = [f"family_{n}/recipe" for n in range(50)] + ["gpt/demo"]
    assert listed(names, "gpt/dmeo").startswith("gpt/demo, ")
    assert listed(names, "gpt/dmeo").endswith(" and 46 more")
