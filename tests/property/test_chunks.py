"""Pages in registration chunks: none crosses, none overlaps, each has its own chunk's alias."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.drivers import posix
from kvferry.hostpool import Component, HostPool, KVLayout
from kvferry.hostpool.backend import Backend
from kvferry.hostpool.chunks import Chunking
from kvferry.hostpool.tables import common_alignment, page_addresses

from support.strategies import layouts

GRANULE = 4096


def layout_of(page_nbytes: int) -> KVLayout:
    return KVLayout((Component("latent", 1, page_nbytes),), 1, 1)


@given(st.integers(1, 40_000), st.integers(1, 1 << 22), st.integers(1, 300), st.randoms(use_true_random=False))
def test_pages_in_chunks(page_nbytes: int, chunk_nbytes: int, pages: int, random: Random) -> None:
    per_chunk = layout_of(page_nbytes).pages_per_chunk(chunk_nbytes, GRANULE)
    assert per_chunk >= 1
    # About as large as asked: not larger, except for a page that is larger itself.
    assert per_chunk * page_nbytes <= max(chunk_nbytes, page_nbytes)
    chunks = -(-pages // per_chunk)
    span = -(-per_chunk * page_nbytes // GRANULE) * GRANULE
    hosts = [0x7000_0000_0000 + number * span for number in range(chunks)]
    aliases = [random.randrange(1, 1 << 30) * GRANULE for _ in range(chunks)]
    host, alias = (page_addresses(where, pages, per_chunk, page_nbytes).tolist() for where in (hosts, aliases))

    assert all(after - before >= page_nbytes for before, after in itertools.pairwise(host))  # disjoint
    for page in range(pages):
        chunk = page // per_chunk
        assert hosts[chunk] <= host[page] <= hosts[chunk] + span - page_nbytes  # inside what is registered
        assert alias[page] - aliases[chunk] == host[page] - hosts[chunk]


@given(st.integers(1, 40_000), st.integers(1, 1 << 22))
def test_chunks_without_a_gap_where_that_is_possible(page_nbytes: int, chunk_nbytes: int) -> None:
    per_chunk = layout_of(page_nbytes).pages_per_chunk(chunk_nbytes, GRANULE)
    most = max(1, chunk_nbytes // page_nbytes)
    if any(count * page_nbytes % GRANULE == 0 for count in range(1, min(most, GRANULE) + 1)):
        assert per_chunk * page_nbytes % GRANULE == 0


@given(st.lists(st.integers(0, 2**63), min_size=1, max_size=9))
def test_common_alignment_divides_every_address(addresses: list[int]) -> None:
    found = common_alignment(np.array(addresses, np.uint64))
    assert found in (1, 2, 4, 8, 16)
    assert all(address % found == 0 for address in addresses)
    assert found == 16 or any(address % (2 * found) for address in addresses)


def test_a_gigabyte_chunk_rounds_down_to_whole_pages() -> None:
    """Scenario 13, without allocating: 346 pages of 3,098,112 bytes would fit, and end inside a page of the system."""
    layout = layout_of(3_098_112)
    assert (1 << 30) // layout.page_nbytes == 346
    per_chunk = layout.pages_per_chunk(1 << 30, GRANULE)
    assert per_chunk == 344  # 3,098,112 is 512 * 6051: eight pages make whole pages of 4096 bytes
    assert per_chunk * layout.page_nbytes % GRANULE == 0
    assert per_chunk * layout.page_nbytes <= 1 << 30
    addresses = page_addresses([0, 1 << 40], 345, per_chunk, layout.page_nbytes)
    assert (addresses[343], addresses[344]) == (343 * 3_098_112, 1 << 40)


def test_a_page_larger_than_a_chunk_gets_a_chunk_of_its_own() -> None:
    assert layout_of(10_000).pages_per_chunk(4096, GRANULE) == 1


@given(st.integers(1, 9000), st.integers(1, 20), st.integers(1, 30_000))
def test_the_pool_registers_whole_system_pages_that_hold_its_pages(
    backend: Backend, page_nbytes: int, pages: int, chunk_nbytes: int
) -> None:
    with HostPool(layout_of(page_nbytes), pages, backend=backend, chunk_nbytes=chunk_nbytes) as pool:
        chunks = pool._resources.memory.chunks
        spans = [(int(chunk.address), chunk.address + chunk.nbytes) for chunk in chunks]
        assert all(begin % posix.PAGE_NBYTES == end % posix.PAGE_NBYTES == 0 for begin, end in spans)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
        ends = 0
        for page in range(pages):
            at = pool.page_address(page)
            assert at >= ends
            ends = at + page_nbytes
            assert any(begin <= at and ends <= end for begin, end in spans)


@given(layouts(), st.integers(1, 300), st.integers(1, 1 << 16))
def test_layer_first_chunks_waste_less_than_a_page_each(layout: KVLayout, pages: int, chunk_nbytes: int) -> None:
    layout = replace(layout, order="layer_first", head_groups=1)
    chunking = Chunking.choose(layout, pages, chunk_nbytes)
    spans, each = chunking.spans, chunking.pages_per_chunk
    assert len(set(spans)) == 1  # one layer stride is good for all of them
    assert each * layout.page_nbytes <= spans[0] < each * layout.page_nbytes + GRANULE
    assert each * layout.page_nbytes <= max(chunk_nbytes, layout.page_nbytes)
    assert 0 <= len(spans) * each - pages < len(spans)


@given(layouts(), st.integers(1, 12), st.integers(1, 4))
def test_runs_of_all_pages_are_disjoint_and_inside_the_chunks(layout: KVLayout, pages: int, most: int) -> None:
    chunking = Chunking.choose(layout, pages, most * layout.page_nbytes)
    bases = [(number + 1) << 40 for number in range(len(chunking.spans))]
    runs = sorted(run for page in range(pages) for run in chunking.runs(bases, page))
    assert all(before[0] + before[1] <= after[0] for before, after in itertools.pairwise(runs))
    assert sum(nbytes for _, nbytes in runs) == pages * layout.page_nbytes
    ends = dict(zip(bases, chunking.spans, strict=True))
    for address, nbytes in runs:
        base = address >> 40 << 40
        assert address + nbytes <= base + ends[base]
