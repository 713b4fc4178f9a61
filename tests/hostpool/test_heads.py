"""Pages with all heads, caches with some: what one rank stored, ranks of another tensor parallelism load, and back."""

from __future__ import annotations

from typing import cast, get_args

import numpy as np
import pytest

from kvferry.drivers.errors import ArgumentError, LayoutError
from kvferry.drivers.protocol import StreamHandle
from kvferry.hostpool import Component, DevicePool, HostPool, KVLayout
from kvferry.hostpool.backend import Backend
from kvferry.hostpool.layout import PageOrder
from kvferry.hostpool.plan import Unit

from support.model import apply, host_pages, scramble_pool, spare_bytes
from support.standin import GuardedCache

HEADS = 8
PARTS = (Component("k", HEADS, 48), Component("v", HEADS, 20))
LAYOUTS = [KVLayout(PARTS, 2, 3, order) for order in get_args(PageOrder)]
LAYOUTS += [KVLayout(PARTS, 2, 3, "page_unified", groups) for groups in (2, 4, 8)]

layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: f"{each.order}-{each.head_groups}")
units = pytest.mark.parametrize("unit", get_args(Unit))


def shards(ranks: int) -> list[range]:
    each = HEADS // ranks
    return [range(rank * each, (rank + 1) * each) for rank in range(ranks)]


def places(layout: KVLayout, unit: str, seed: int) -> tuple[list[int], list[int]]:
    """Three pages' worth of (device, host) indices out of four and five."""
    width, random = 1 if unit == "page" else layout.page_tokens, np.random.default_rng(seed)
    on_device, on_host = (random.permutation(count * width)[: 3 * width].tolist() for count in (4, 5))
    return on_device, on_host


@layouts
@units
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("gap", "shift"), [(0, 0), (3, 4)])
@pytest.mark.parametrize("layers", [range(2), range(1, 2)], ids=str)
def test_one_rank_stores_and_several_load(
    backend: Backend,
    stream: StreamHandle,
    layout: KVLayout,
    unit: str,
    ranks: int,
    gap: int,
    shift: int,
    layers: range,
) -> None:
    """Each rank gets its heads of every row, and nothing beside."""
    kind, tokens = cast("Unit", unit), 4 * layout.page_tokens
    with HostPool(layout, 5, backend=backend, chunk_nbytes=2 * layout.page_nbytes) as pool:
        scramble_pool(pool, 1)
        on_device, on_host = places(layout, unit, 2)
        whole = GuardedCache(backend, layout, tokens, seed=3)
        pool.store(whole.pool(pool), on_device, on_host, stream=stream, unit=kind).synchronize()
        pages, spare = host_pages(pool), spare_bytes(pool)
        for rank, heads in enumerate(shards(ranks)):
            shard = GuardedCache(
                backend, layout, tokens, gap_nbytes=gap, shift_nbytes=shift, seed=4 + rank, heads=heads
            )
            model = shard.copy()
            ticket = pool.load(shard.pool(pool), on_host, on_device, stream=stream, unit=kind, layers=layers)
            ticket.synchronize()
            assert ticket.nbytes * ranks == 3 * layout.page_nbytes * len(layers) // layout.layers
            apply(
                storing=False,
                cache=model,
                pages=pages,
                on_device=on_device,
                on_host=on_host,
                unit=unit,
                layers=layers,
            )
            shard.assert_equals(model)
            width = layout.page_tokens if unit == "page" else 1
            for index in on_device:  # without the model: the rows of the rank that stored them, cut to these heads
                for token in range(index * width, (index + 1) * width):
                    for number, part in enumerate(PARTS):
                        for layer in layers:
                            row = whole.rows[number][layer][token].reshape(HEADS, part.head_nbytes)
                            mine = shard.rows[number][layer][token].reshape(len(heads), part.head_nbytes)
                            np.testing.assert_array_equal(mine, row[heads.start : heads.stop])
        np.testing.assert_array_equal(host_pages(pool), pages)
        np.testing.assert_array_equal(spare_bytes(pool), spare)


@layouts
@units
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("layers", [range(2), range(1)], ids=str)
def test_several_ranks_store_and_one_loads(
    backend: Backend, stream: StreamHandle, layout: KVLayout, unit: str, ranks: int, layers: range
) -> None:
    """After each rank's store, every byte of the other heads is what it was."""
    kind, tokens = cast("Unit", unit), 4 * layout.page_tokens
    with HostPool(layout, 5, backend=backend, chunk_nbytes=2 * layout.page_nbytes) as pool:
        scramble_pool(pool, 1)
        pages, spare = host_pages(pool), spare_bytes(pool)
        on_device, on_host = places(layout, unit, 2)
        for rank in np.random.default_rng(5).permutation(ranks):
            shard = GuardedCache(backend, layout, tokens, gap_nbytes=5, seed=10 + rank, heads=shards(ranks)[rank])
            model = shard.copy()
            pool.store(shard.pool(pool), on_device, on_host, stream=stream, unit=kind, layers=layers).synchronize()
            apply(
                storing=True,
                cache=model,
                pages=pages,
                on_device=on_device,
                on_host=on_host,
                unit=unit,
                layers=layers,
            )
            np.testing.assert_array_equal(host_pages(pool), pages)
            np.testing.assert_array_equal(spare_bytes(pool), spare)
            shard.assert_equals(model)
        whole = GuardedCache(backend, layout, tokens, seed=3)
        model = whole.copy()
        pool.load(whole.pool(pool), on_host, on_device, stream=stream, unit=kind).synchronize()
        apply(
            storing=False,
            cache=model,
            pages=pages,
            on_device=on_device,
            on_host=on_host,
            unit=unit,
            layers=range(layout.layers),
        )
        whole.assert_equals(model)


def test_all_heads_as_a_range_is_the_whole_cache(backend: Backend, stream: StreamHandle) -> None:
    """Also for a latent, which has one."""
    for layout in (*LAYOUTS, KVLayout.mla(layers=2, latent_size=24, element_nbytes=2, page_tokens=3)):
        plans = []
        for heads in (None, range(layout.components[0].heads)):
            cache = GuardedCache(backend, layout, 6, heads=heads)
            with HostPool(layout, 2, backend=backend) as pool:
                plans.append(pool.store(cache.pool(pool), [0], [1], stream=stream).plan)
        assert (plans[0].runs, plans[0].word_nbytes) == (plans[1].runs, plans[1].word_nbytes)


def test_a_group_of_its_own_is_one_run_a_layer(backend: Backend, stream: StreamHandle) -> None:
    """What ``page_unified`` is for: TP=4 takes its group as it is, where other orders take it slot by slot."""
    found = {}
    for layout in LAYOUTS:
        cache = GuardedCache(backend, layout, 6, heads=range(2, 4))
        with HostPool(layout, 2, backend=backend) as pool:
            run = pool.store(cache.pool(pool), [0], [1], stream=stream).plan.runs[0]
            found[layout.order, layout.head_groups] = (run.nbytes, run.slots, run.heads)
    assert found == {
        ("page_first_direct", 1): (96, 3, 1),
        ("page_first", 1): (96, 3, 1),
        ("page_head", 1): (48, 3, 2),
        ("page_unified", 1): (96, 3, 1),
        ("layer_first", 1): (96, 3, 1),
        ("page_unified", 2): (96, 3, 1),
        ("page_unified", 4): (288, 1, 1),
        ("page_unified", 8): (48, 3, 2),
    }


def test_a_stride_that_only_layer_0_would_use_does_not_narrow_the_words(backend: Backend, stream: StreamHandle) -> None:
    """Two heads of three, 16 bytes of 24: layers lie 24 bytes apart, pages 48."""
    layout = KVLayout((Component("k", 3, 8),), 2, 1)
    cache = GuardedCache(backend, layout, 2, heads=range(2))
    with HostPool(layout, 2, backend=backend) as pool:
        kv = cache.pool(pool)
        plans = [pool.store(kv, [0], [1], stream=stream, layers=layers).plan for layers in (0, 1, None)]
        assert [plan.word_nbytes for plan in plans] == [16, 8, 8]


def describe(backend: Backend, layout: KVLayout, heads: object) -> DevicePool:
    layers = {part.name: [4096] * layout.layers for part in layout.components}
    with HostPool(layout, 1, backend=backend) as pool:
        return pool.device_pool(layers, tokens=8, heads=heads)  # type: ignore[arg-type]


@layouts
@pytest.mark.parametrize("heads", [range(0), range(3, 3), range(0, 4, 2), range(-1, 1), range(4, 0, -1), 2, (2, 4)])
def test_what_is_no_range_of_heads(backend: Backend, layout: KVLayout, heads: object) -> None:
    with pytest.raises(LayoutError, match="heads must be a non-empty range with step 1"):
        describe(backend, layout, heads)


@layouts
def test_heads_that_a_component_does_not_have(backend: Backend, layout: KVLayout) -> None:
    with pytest.raises(LayoutError, match=r"heads 6 to 8 are outside k: valid are 0 to 7\. Leave heads= out"):
        describe(backend, layout, range(6, 9))


def test_a_latent_and_a_component_with_fewer_heads_are_not_split(backend: Backend) -> None:
    latent = KVLayout.mla(layers=2, latent_size=8, element_nbytes=2, page_tokens=4)
    with pytest.raises(LayoutError, match=r"heads 1 to 1 are outside latent: valid are 0 to 0.* pool of its own"):
        describe(backend, latent, range(1, 2))
    mixed = KVLayout((Component("k", 4, 8), Component("index", 1, 8)), 2, 4)
    with pytest.raises(LayoutError, match="heads 2 to 3 are outside index: valid are 0 to 0"):
        describe(backend, mixed, range(2, 4))


@pytest.mark.parametrize(
    ("groups", "heads", "message"),
    [
        (2, range(2, 6), r"heads 2 to 5 of k cross head groups of 4 without covering them: .* than 2 for head_groups"),
        (2, range(5), "heads 0 to 4 of k cross head groups of 4"),
        (4, range(1, 3), "heads 1 to 2 of k cross head groups of 2"),
        (4, range(3, 8), "heads 3 to 7 of k cross head groups of 2"),
    ],
)
def test_heads_that_cross_head_groups(backend: Backend, groups: int, heads: range, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        describe(backend, KVLayout(PARTS, 2, 3, "page_unified", groups), heads)


def test_groups_of_one_component_may_be_larger_than_anothers(backend: Backend) -> None:
    """Two heads are a group of ``k`` and half of one of ``v``."""
    layout = KVLayout((Component("k", 4, 8), Component("v", 8, 8)), 2, 4, "page_unified", 2)
    assert [(part.heads, part.head_nbytes) for part in describe(backend, layout, range(2)).components] == [
        (1, 16),
        (1, 16),
    ]
    with pytest.raises(LayoutError, match="heads 1 to 2 of k cross head groups of 2"):
        describe(backend, layout, range(1, 3))


def test_rows_are_those_of_the_heads(backend: Backend) -> None:
    """A cache of two heads is refused where all are meant, and the other way round."""
    layout = KVLayout(PARTS[:1], 1, 3)
    cache = GuardedCache(backend, layout, 6, heads=range(2, 4))
    cache.heads = None
    with HostPool(layout, 1, backend=backend) as pool:
        with pytest.raises(ArgumentError, match="layer 0 of k does not consist of rows of 384 bytes"):
            cache.pool(pool)
        cache = GuardedCache(backend, layout, 6)
        cache.heads = range(2, 4)
        with pytest.raises(ArgumentError, match="layer 0 of k does not consist of rows of 96 bytes"):
            cache.pool(pool)


def test_a_layout_of_fewer_heads_is_still_another_layout(backend: Backend, stream: StreamHandle) -> None:
    whole, part = KVLayout(PARTS[:1], 1, 3), KVLayout((Component("k", 2, 48),), 1, 3)
    kv = DevicePool(backend.driver, part, {"k": GuardedCache(backend, part, 6).bases[0]}, device=0, tokens=6)
    with HostPool(whole, 1, backend=backend) as pool, pytest.raises(ArgumentError, match="another layout"):
        pool.load(kv, [0], [0], stream=stream)
