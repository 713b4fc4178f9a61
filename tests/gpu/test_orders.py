"""Every page order on the GPU, and pages that one rank stored and ranks of another tensor parallelism load."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch

from kvferry.drivers.protocol import StreamHandle
from kvferry.hostpool import DevicePool, HostPool, KVLayout
from kvferry.hostpool.backend import Backend
from kvferry.hostpool.layout import PageOrder

from support.model import host_pages, page_offsets

LAYERS, HEADS, PAGE, PAGES = 5, 8, 16, 12
LAYOUTS = [(order, 1) for order in get_args(PageOrder)] + [("page_unified", 4), ("page_unified", 8)]
orders = pytest.mark.parametrize(("order", "groups"), LAYOUTS)

Cache = dict[str, torch.Tensor]
"""By component: (layer, token, head, byte)."""


def make_layout(order: PageOrder, groups: int, head_nbytes: int) -> KVLayout:
    return KVLayout.mha(
        layers=LAYERS, heads=HEADS, head_size=head_nbytes, v_head_size=head_nbytes // 2, element_nbytes=1,
        page_tokens=PAGE, order=order, head_groups=groups,
    )  # fmt: skip


def make_cache(layout: KVLayout, heads: int) -> Cache:
    return {
        c.name: torch.randint(0, 256, (LAYERS, PAGES * PAGE, heads, c.head_nbytes), dtype=torch.uint8, device="cuda")
        for c in layout.components
    }


def described(pool: HostPool, cache: Cache, heads: range | None = None) -> DevicePool:
    return pool.device_pool({name: list(layers) for name, layers in cache.items()}, heads=heads)


def same(a: Cache, b: Cache) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@orders
@pytest.mark.parametrize("head_nbytes", [256, 144, 66])
def test_pages_hold_what_the_order_says(
    backend: Backend, stream: StreamHandle, order: PageOrder, groups: int, head_nbytes: int
) -> None:
    """Every byte of the pages, against a model of the order; then back, whole and token by token."""
    layout = make_layout(order, groups, head_nbytes)
    cache = make_cache(layout, HEADS)
    back = {name: torch.zeros_like(rows) for name, rows in cache.items()}
    targets = np.random.default_rng(1).permutation(PAGES + 3)[:PAGES]
    torch.cuda.synchronize()
    with HostPool(layout, PAGES + 3, backend=backend, chunk_nbytes=4 * layout.page_nbytes) as pool:
        pool.store(described(pool, cache), range(PAGES), targets, stream=stream).synchronize()
        pages = host_pages(pool)
        for where, component in zip(page_offsets(layout), layout.components, strict=True):
            want = cache[component.name].cpu().numpy().reshape(LAYERS, PAGES, PAGE, component.row_nbytes)
            for number, page in enumerate(targets):
                assert np.array_equal(pages[page][where], want[:, number])
        tokens = (targets[:, None] * PAGE + np.arange(PAGE)).ravel()
        pool.load(described(pool, back), tokens, range(PAGES * PAGE), stream=stream, unit="token").synchronize()
    assert same(cache, back)


@orders
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("head_nbytes", [256, 66])
def test_one_rank_stores_and_others_load(
    backend: Backend, stream: StreamHandle, order: PageOrder, groups: int, ranks: int, head_nbytes: int
) -> None:
    """Pages of 8 heads become heads 2 and 3 of rank 1 of 4, and what that rank stores is in the pages of 8 again."""
    layout, each = make_layout(order, groups, head_nbytes), HEADS // ranks
    cache = make_cache(layout, HEADS)
    with HostPool(layout, PAGES, backend=backend) as pool:
        torch.cuda.synchronize()
        pool.store(described(pool, cache), range(PAGES), range(PAGES), stream=stream).synchronize()
        for rank in range(ranks):
            heads = range(rank * each, (rank + 1) * each)
            mine = make_cache(layout, each)
            torch.cuda.synchronize()
            pool.load(described(pool, mine, heads), range(PAGES), range(PAGES), stream=stream).synchronize()
            assert same(mine, {name: rows[:, :, heads.start : heads.stop] for name, rows in cache.items()})
            if rank == 1:
                for name, rows in mine.items():
                    rows.bitwise_xor_(0x5A)
                    cache[name][:, :, heads.start : heads.stop] = rows
                torch.cuda.synchronize()
                pool.store(described(pool, mine, heads), range(PAGES), range(PAGES), stream=stream).synchronize()
        whole = make_cache(layout, HEADS)
        torch.cuda.synchronize()
        pool.load(described(pool, whole), range(PAGES), range(PAGES), stream=stream).synchronize()
        assert same(whole, cache)
