"""Every order of host memory, both ways, by page and by token, all layers and some: every byte, guards included."""

from __future__ import annotations

from typing import cast, get_args

import numpy as np
import pytest

from kvferry.drivers.errors import ArgumentError, LayoutError
from kvferry.drivers.protocol import StreamHandle
from kvferry.hostpool import Component, HostPool, KVLayout
from kvferry.hostpool.backend import Backend
from kvferry.hostpool.layout import PageOrder
from kvferry.hostpool.plan import Unit

from support.model import apply, host_pages, page_places, scramble_pool, spare_bytes
from support.standin import GuardedCache, memory

PARTS = (Component("k", 4, 48), Component("v", 4, 20), Component("scale", 8, 6))
LAYOUTS = [KVLayout(PARTS, 3, 4, order) for order in get_args(PageOrder)]
LAYOUTS += [KVLayout(PARTS, 3, 4, "page_unified", groups) for groups in (2, 4)]

layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: f"{each.order}-{each.head_groups}")
units = pytest.mark.parametrize("unit", get_args(Unit))
LAYER_FIRST = KVLayout(PARTS, 3, 4, "layer_first")


@layouts
@units
@pytest.mark.parametrize("layers", [range(3), range(1, 3), range(1)], ids=str)
@pytest.mark.parametrize(("gap", "shift"), [(0, 0), (4, 8)])
@pytest.mark.parametrize("pages_a_chunk", [1, 3, 7])
def test_store_and_load(
    backend: Backend,
    stream: StreamHandle,
    layout: KVLayout,
    unit: str,
    layers: range,
    gap: int,
    shift: int,
    pages_a_chunk: int,
) -> None:
    """Seven pages: the last chunk of three is not full."""
    cache = GuardedCache(backend, layout, 6 * layout.page_tokens + 1, gap_nbytes=gap, shift_nbytes=shift, seed=1)
    with HostPool(layout, 7, backend=backend, chunk_nbytes=pages_a_chunk * layout.page_nbytes) as pool:
        scramble_pool(pool, 2)
        kv, pages, spare, model = cache.pool(pool), host_pages(pool), spare_bytes(pool), cache.copy()
        width = 1 if unit == "page" else layout.page_tokens
        random = np.random.default_rng(3)
        on_device, on_host = (random.permutation(count * width)[: 5 * width].tolist() for count in (6, 7))
        for storing in (True, False):
            if storing:
                ticket = pool.store(kv, on_device, on_host, stream=stream, unit=cast("Unit", unit), layers=layers)
            else:
                cache.scramble(4)
                model = cache.copy()
                ticket = pool.load(kv, on_host, on_device, stream=stream, unit=cast("Unit", unit), layers=layers)
            ticket.synchronize()
            apply(
                storing=storing,
                cache=model,
                pages=pages,
                on_device=on_device,
                on_host=on_host,
                unit=unit,
                layers=layers,
            )
            np.testing.assert_array_equal(host_pages(pool), pages)
            np.testing.assert_array_equal(spare_bytes(pool), spare)
            cache.assert_equals(model)


@layouts
def test_offsets_lead_to_the_bytes_of_each_head(backend: Backend, stream: StreamHandle, layout: KVLayout) -> None:
    """What ``offset`` says, against what the kernel wrote; in ``layer_first`` from the chunk on."""
    cache = GuardedCache(backend, layout, 5 * layout.page_tokens, seed=1)
    with HostPool(layout, 5, backend=backend, chunk_nbytes=2 * layout.page_nbytes) as pool:
        pool.store(cache.pool(pool), range(5), range(5), stream=stream).synchronize()
        held, each = pool._resources.memory.chunks, pool.pages_per_chunk
        assert (each, len(held)) == (2, 3)
        for page in range(5):
            base = held[page // each].address
            for number, part in enumerate(layout.components):
                for layer, slot, head in np.ndindex(layout.layers, layout.page_tokens, part.heads):
                    at = layout.offset(number, layer, slot, head, page=page % each, chunk_pages=each)
                    if layout.solid_pages:
                        assert base + at == pool.page_address(page) + layout.offset(number, layer, slot, head)
                    row = cache.rows[number][layer][page * layout.page_tokens + slot]
                    expected = row[head * part.head_nbytes : (head + 1) * part.head_nbytes]
                    np.testing.assert_array_equal(memory(base + at, part.head_nbytes), expected)


@layouts
@pytest.mark.parametrize("chunk_pages", [1, 2, 100])
def test_page_runs_are_the_page(backend: Backend, layout: KVLayout, chunk_pages: int) -> None:
    """In the order of components and layers, each run whole."""
    with HostPool(layout, 5, backend=backend, chunk_nbytes=chunk_pages * layout.page_nbytes) as pool:
        places = page_places(pool)
        for page in range(5):
            runs = pool.page_runs(page)
            if layout.order == "layer_first":
                rows = [part.row_nbytes * layout.page_tokens for part in PARTS for _ in range(layout.layers)]
                assert [nbytes for _, nbytes in runs] == rows
            else:
                assert runs == [(pool.page_address(page), layout.page_nbytes)]
            found = np.concatenate([address + np.arange(nbytes) for address, nbytes in runs])
            np.testing.assert_array_equal(found, places[page])
        for page in (-1, 5):
            with pytest.raises(ArgumentError, match=f"page {page} is outside the pool: valid are 0 to 4"):
                pool.page_runs(page)


@pytest.mark.parametrize("chunk_nbytes", [1, 1 << 20])
def test_a_layer_first_page_has_no_address(backend: Backend, chunk_nbytes: int) -> None:
    """Whatever the chunks are, so that callers do not learn it from a larger pool."""
    with HostPool(LAYER_FIRST, 3, backend=backend, chunk_nbytes=chunk_nbytes) as pool:
        for ask in (pool.page_address, pool.page_view):
            with pytest.raises(LayoutError, match=r"page 2 is 9 runs of bytes in order layer_first.* page_runs\(2\)"):
                ask(2)


@pytest.mark.parametrize(
    ("pages", "most", "each", "chunks"), [(7, 3, 3, 3), (9, 4, 3, 3), (5, 100, 5, 1), (3, 1, 1, 3)]
)
def test_layer_first_chunks_are_of_one_size(backend: Backend, pages: int, most: int, each: int, chunks: int) -> None:
    """The number of chunks first, then the pages spread evenly: nine pages are 3 + 3 + 3 and not 4 + 4 + 1."""
    with HostPool(LAYER_FIRST, pages, backend=backend, chunk_nbytes=most * LAYER_FIRST.page_nbytes) as pool:
        spans = [chunk.nbytes for chunk in pool._resources.memory.chunks]
        assert (pool.pages_per_chunk, len(spans), len(set(spans))) == (each, chunks, 1)
        assert each * LAYER_FIRST.page_nbytes <= spans[0] < each * LAYER_FIRST.page_nbytes + 4096
        assert pool.nbytes == pages * LAYER_FIRST.page_nbytes


def test_a_layer_of_a_layer_first_page_is_one_run(backend: Backend, stream: StreamHandle) -> None:
    """As long as in the device pool: what makes the order worth having."""
    cache = GuardedCache(backend, LAYER_FIRST, 8)
    with HostPool(LAYER_FIRST, 2, backend=backend) as pool:
        ticket = pool.store(cache.pool(pool), [0], [1], stream=stream)
        assert [(run.nbytes, run.slots, run.heads) for run in ticket.plan.runs] == [
            (part.row_nbytes * 4, 1, 1) for part in PARTS
        ]


@pytest.mark.parametrize(
    ("order", "groups", "runs"),
    [
        ("page_first_direct", 1, (768, 1, 1)),
        ("page_first", 1, (192, 4, 1)),
        ("page_head", 1, (48, 4, 4)),
        ("page_unified", 1, (768, 1, 1)),
        ("page_unified", 2, (96, 4, 2)),
        ("page_unified", 4, (48, 4, 4)),
    ],
)
def test_runs_are_as_long_as_both_sides_have_them(
    backend: Backend, stream: StreamHandle, order: PageOrder, groups: int, runs: tuple[int, int, int]
) -> None:
    layout = KVLayout((Component("k", 4, 48),), 3, 4, order, groups)
    cache = GuardedCache(backend, layout, 8)
    with HostPool(layout, 2, backend=backend) as pool:
        ticket = pool.store(cache.pool(pool), [0], [1], stream=stream)
        (run,) = ticket.plan.runs
        assert (run.nbytes, run.slots, run.heads) == runs
        assert ticket.plan.word_nbytes == 16


@pytest.mark.parametrize(
    ("order", "groups", "message"),
    [
        ("page_first", 2, "head_groups 2 needs order page_unified; page_first takes 1"),
        ("layer_first", 4, "head_groups 4 needs order page_unified"),
        ("page_unified", 3, "head_groups 3 does not divide the 4 heads of k: take a divisor"),
        ("page_unified", 8, "head_groups 8 does not divide the 4 heads of k"),
        ("page_unified", 0, "head_groups must be a whole number of at least 1, not 0"),
        ("page_unified", True, "head_groups must be .* not True"),
    ],
)
def test_head_groups_that_do_not_fit(order: PageOrder, groups: int, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        KVLayout(PARTS, 3, 4, order, groups)


def test_offsets_outside_of_a_chunk() -> None:
    with pytest.raises(LayoutError, match="page 2 is outside the layout: valid are 0 to 1"):
        LAYER_FIRST.offset(0, 0, 0, 0, page=2, chunk_pages=2)
    with pytest.raises(LayoutError, match=r"chunk_pages must be .* not 0"):
        LAYER_FIRST.offset(0, 0, 0, 0, chunk_pages=0)
