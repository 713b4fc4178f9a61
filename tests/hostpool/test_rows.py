"""Row sizes that servers have, each compared byte for byte, in both directions."""

from __future__ import annotations

from typing import cast, get_args

import numpy as np
import pytest

from kvferry.drivers.protocol import StreamHandle
from kvferry.hostpool import Component, HostPool, KVLayout
from kvferry.hostpool.backend import Backend
from kvferry.hostpool.layout import PageOrder
from kvferry.hostpool.plan import Unit

from support.model import apply, host_pages, scramble_pool
from support.standin import GuardedCache

ROW_NBYTES = (1, 2, 6, 92, 96, 132, 176, 368, 432, 576, 656, 1152, 37440)

orders = pytest.mark.parametrize("order", get_args(PageOrder))
units = pytest.mark.parametrize("unit", get_args(Unit))


def round_trip(
    backend: Backend, stream: StreamHandle, layout: KVLayout, unit: str, gap: int = 0, shift: int = 0
) -> None:
    """Store, compare everything, wipe, load elsewhere, compare everything."""
    cache = GuardedCache(backend, layout, 5 * layout.page_tokens, gap_nbytes=gap, shift_nbytes=shift, seed=1)
    with HostPool(layout, 6, backend=backend, chunk_nbytes=2 * layout.page_nbytes) as pool:
        scramble_pool(pool, 2)
        kv, model, pages = cache.pool(pool), cache.copy(), host_pages(pool)
        width = 1 if unit == "page" else layout.page_tokens
        random = np.random.default_rng(3)
        count = 5 * width
        places = [random.permutation(limit * width)[:count].tolist() for limit in (5, 6, 5)]
        for storing, on_device in ((True, places[0]), (False, places[2])):
            if storing:
                ticket = pool.store(kv, on_device, places[1], stream=stream, unit=cast("Unit", unit))
            else:
                cache.scramble(4)
                model = cache.copy()
                ticket = pool.load(kv, places[1], on_device, stream=stream, unit=cast("Unit", unit))
            ticket.synchronize()
            apply(
                storing=storing,
                cache=model,
                pages=pages,
                on_device=on_device,
                on_host=places[1],
                unit=unit,
                layers=range(layout.layers),
            )
            np.testing.assert_array_equal(host_pages(pool), pages)
            cache.assert_equals(model)


@pytest.mark.parametrize("row_nbytes", ROW_NBYTES)
@orders
@units
def test_every_row_size(backend: Backend, stream: StreamHandle, row_nbytes: int, order: PageOrder, unit: str) -> None:
    """Scenario 9."""
    round_trip(backend, stream, KVLayout((Component("latent", 1, row_nbytes),), 2, 3, order), unit)


@pytest.mark.parametrize(("row_nbytes", "gap", "shift"), [(92, 0, 0), (96, 1, 0), (96, 0, 4), (176, 8, 8), (656, 3, 1)])
@orders
@units
def test_odd_strides_and_misaligned_bases(
    backend: Backend, stream: StreamHandle, row_nbytes: int, gap: int, shift: int, order: PageOrder, unit: str
) -> None:
    """Scenario 8: the bytes between rows and around them stay, whatever one side's alignment is."""
    round_trip(backend, stream, KVLayout((Component("latent", 1, row_nbytes),), 2, 3, order), unit, gap, shift)


@orders
@units
def test_k_and_v_of_different_size_with_an_indexer_and_scales(
    backend: Backend, stream: StreamHandle, order: PageOrder, unit: str
) -> None:
    """Scenario 12."""
    components = (Component("k", 2, 96), Component("v", 2, 64), Component("index", 1, 132), Component("scale", 1, 6))
    round_trip(backend, stream, KVLayout(components, 3, 4, order), unit)
