import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_offload.storage.extents import Extents

GRANULE = 4096
sizes = st.integers(1, 40).map(lambda pages: pages * GRANULE)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("take"), sizes),
        st.tuples(st.just("pieces"), sizes),
        st.tuples(st.just("grow"), sizes),
        st.tuples(st.just("give"), st.integers(0, 10**6)),
    ),
    max_size=80,
)


@given(actions)
@settings(max_examples=200, deadline=None)
def test_ranges_never_overlap_and_nothing_is_lost(actions):
    extents = Extents(8 * GRANULE)
    taken: list[tuple[int, int]] = []
    for action, value in actions:
        if action == "grow":
            extents.grow(value)
        elif action == "give" and taken:
            extents.give(*taken.pop(value % len(taken)))
        elif action == "take":
            free_before = extents.free_bytes
            offset = extents.take(value)
            if offset is not None:
                taken.append((offset, value))
            else:
                assert extents.free_bytes == free_before
        elif action == "pieces":
            wanted = min(value, extents.free_bytes)
            pieces = extents.take_pieces(value)
            assert sum(size for _, size in pieces) == wanted
            taken += pieces
        ends = 0
        for offset, size in sorted(taken):
            assert offset >= ends
            ends = offset + size
        assert ends <= extents.capacity_bytes
        assert extents.used_bytes == sum(size for _, size in taken)
    for piece in taken:
        extents.give(*piece)
    # Everything has grown together again: one range covers the whole space.
    assert extents.take(extents.capacity_bytes) == 0
    assert extents.free_bytes == 0


@given(st.lists(sizes, min_size=1, max_size=30), st.randoms())
@settings(deadline=None)
def test_the_same_sizes_get_the_same_places_every_round(sizes, random):
    extents = Extents(sum(sizes))
    rounds = []
    for _ in range(3):
        offsets = [extents.take(size) for size in sizes]
        assert None not in offsets
        rounds.append(offsets)
        pieces = list(zip(offsets, sizes, strict=True))
        random.shuffle(pieces)
        for piece in pieces:
            extents.give(*piece)
    assert rounds[0] == rounds[1] == rounds[2]


def test_the_tightest_gap_is_taken():
    extents = Extents(10 * GRANULE)
    offsets = [extents.take(size * GRANULE) for size in (3, 1, 1, 1, 4)]
    extents.give(offsets[0], 3 * GRANULE)
    extents.give(offsets[2], GRANULE)
    assert extents.take(GRANULE) == offsets[2]
    assert extents.take(GRANULE) == offsets[0]


def test_growing_extends_the_free_end():
    extents = Extents(4 * GRANULE)
    extents.take(3 * GRANULE)
    assert extents.free_at_end_bytes == GRANULE
    assert extents.take(2 * GRANULE) is None
    extents.grow(GRANULE)
    assert extents.take(2 * GRANULE) == 3 * GRANULE
    assert extents.free_at_end_bytes == 0


@pytest.mark.parametrize("nbytes", [0, -GRANULE, 100])
def test_odd_sizes_are_refused(nbytes):
    extents = Extents(4 * GRANULE)
    for call in (extents.take, extents.grow, lambda size: extents.give(0, size)):
        with pytest.raises(ValueError, match="multiple"):
            call(nbytes)


def test_a_range_from_elsewhere_is_refused():
    with pytest.raises(ValueError, match="outside"):
        Extents(4 * GRANULE).give(4 * GRANULE, GRANULE)
