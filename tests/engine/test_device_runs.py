"""Pages that are copied together."""

from hypothesis import given
from hypothesis import strategies as st

from engine.cuda.runtime.shared_memory import runs

PAIRS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=30)


def test_neighbours_on_both_sides_are_one_copy():
    assert list(runs([4, 5, 6, 9, 8], [1, 2, 3, 5, 4], 9)) == [(4, 1, 3), (8, 4, 2)]


def test_neighbours_on_one_side_only_are_copied_one_by_one():
    assert list(runs([4, 5], [2, 1], 9)) == [(4, 2, 1), (5, 1, 1)]


def test_nothing_is_no_copy():
    assert list(runs([], [], 9)) == []


@given(PAIRS, st.integers(1, 5))
def test_each_page_is_copied_once_to_where_it_goes(pairs: list[tuple[int, int]], longest: int):
    found = list(runs([page for page, _ in pairs], [target for _, target in pairs], longest))
    assert all(1 <= count <= longest for _, _, count in found)
    copied = [(page + k, target + k) for page, target, count in found for k in range(count)]
    assert sorted(copied) == sorted(pairs)
