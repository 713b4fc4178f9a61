"""The page allocator: all or none, and no page twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.drivers.errors import ArgumentError, PoolFull
from kvferry.hostpool.pages import PageAllocator


def test_all_or_none() -> None:
    pages = PageAllocator(5)
    first = pages.allocate(3)
    with pytest.raises(PoolFull, match="3 pages were asked for, 2 of 5 are free"):
        pages.allocate(3)
    assert pages.free_count == 2
    assert sorted([*first, *pages.allocate(2)]) == [0, 1, 2, 3, 4]
    assert pages.allocate(0).size == 0


@pytest.mark.parametrize(
    ("given_back", "message"),
    [
        ([1, 3], "page 3 is not taken"),
        ([0, 1, 0], "given twice"),
        ([0, 4], "page 4 is outside the pool: valid are 0 to 3"),
        ([-1], "page -1 is outside"),
        ([0.0], "whole numbers, not float64"),
        ([[0]], r"shape \(1, 1\)"),
        ([True], "bool"),
    ],
)
def test_what_cannot_be_freed_frees_nothing(given_back: list[object], message: str) -> None:
    pages = PageAllocator(4)
    assert sorted(pages.allocate(3)) == [0, 1, 2]
    with pytest.raises(ArgumentError, match=message):
        pages.free(given_back)  # type: ignore[arg-type]
    assert pages.free_count == 1
    pages.free([0, 1, 2])
    assert pages.free_count == 4


def test_freeing_twice_and_negative_counts() -> None:
    pages = PageAllocator(4)
    taken = pages.allocate(2)
    pages.free(taken)
    with pytest.raises(ArgumentError, match=f"page {taken[0]} is not taken"):
        pages.free(taken)
    for count in (-1, True):
        with pytest.raises(ArgumentError, match=f"not {count!r}"):
            pages.allocate(count)
    pages.free([])


def test_the_last_freed_are_given_first() -> None:
    pages = PageAllocator(6)
    a, b = pages.allocate(3), pages.allocate(3)
    pages.free(a)
    pages.free(b)
    np.testing.assert_array_equal(pages.allocate(3), b)
    np.testing.assert_array_equal(pages.allocate(3), a)


@given(st.integers(1, 20), st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=40), st.randoms())
def test_no_page_is_handed_out_twice(total: int, steps: list[tuple[bool, int]], random: object) -> None:
    pages, taken = PageAllocator(total), list[int]()
    for take, count in steps:
        if take:
            try:
                got = pages.allocate(count).tolist()
            except PoolFull:
                assert count > total - len(taken)
                continue
            assert len(got) == count
            assert not set(got) & set(taken)
            taken += got
        else:
            random.shuffle(taken)  # type: ignore[attr-defined]
            back, taken = taken[:count], taken[count:]
            pages.free(back)
        assert len(set(taken)) == len(taken)
        assert all(0 <= page < total for page in taken)
        assert pages.free_count == total - len(taken)
