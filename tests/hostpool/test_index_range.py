"""An index that is out of range (scenario 10) moves nothing of its pair, and says where and what it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest

from kvferry.drivers.errors import IndexOutOfRange
from kvferry.drivers.protocol import StreamHandle
from kvferry.hostpool import HostPool, KVLayout
from kvferry.hostpool.backend import Backend
from kvferry.hostpool.plan import Unit

from support.model import apply, host_pages, scramble_pool
from support.standin import DeviceValues, GuardedCache

PAGES = 5
TOKENS = 19  # four pages and three tokens that fill none


@pytest.fixture
def pool(backend: Backend, layout: KVLayout) -> Iterator[HostPool]:
    with HostPool(layout, PAGES, backend=backend) as pool:
        scramble_pool(pool, 1)
        yield pool


@pytest.fixture
def cache(backend: Backend, layout: KVLayout) -> GuardedCache:
    return GuardedCache(backend, layout, TOKENS, seed=2)


LIMITS = {"page": (4, PAGES), "token": (TOKENS, 4 * PAGES)}
"""The first index out of range, on the device and on the host."""


@pytest.mark.parametrize("side", ["source", "destination"])
@pytest.mark.parametrize("unit", ["page", "token"])
@pytest.mark.parametrize("value", ["limit", 2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**62])
def test_host_indices_are_refused_before_anything_moves(
    backend: Backend, stream: StreamHandle, pool: HostPool, cache: GuardedCache, side: str, unit: str, value: object
) -> None:
    before, model, kv = host_pages(pool), cache.copy(), cache.pool(pool)
    at_side = ("source", "destination").index(side)
    limit = LIMITS[unit][at_side]
    index = limit if value == "limit" else cast("int", value)
    indices = [[0, 1, -1, 2], [2, -1, 1, 0]]
    indices[at_side][2] = index
    with pytest.raises(IndexOutOfRange, match=rf"{side} index {index} at position 2 .* 0 to {limit - 1}") as caught:
        pool.store(kv, *indices, stream=stream, unit=cast("Unit", unit))
    error = caught.value
    assert (error.side, error.position, error.value, error.limit) == (side, 2, index, limit)
    np.testing.assert_array_equal(host_pages(pool), before)
    cache.assert_equals(model)


@pytest.mark.parametrize("unit", ["page", "token"])
@pytest.mark.parametrize("side", ["source", "destination"])
@pytest.mark.parametrize(
    ("dtype", "value"),
    [(dtype, value) for dtype in ("<i4", "<i8") for value in ("limit", 2**31 - 1)]
    + [("<i8", value) for value in (2**31, 2**32, 2**32 + 1, 2**62)],
)
def test_device_indices_are_reported_by_the_ticket_and_all_others_move(
    backend: Backend,
    stream: StreamHandle,
    pool: HostPool,
    cache: GuardedCache,
    dtype: str,
    unit: str,
    side: str,
    value: object,
) -> None:
    at_side = ("source", "destination").index(side)
    limit = LIMITS[unit][at_side]
    index = limit if value == "limit" else cast("int", value)
    indices = [[0, 1, 3, 2], [2, 3, 0, 1]]
    indices[at_side][1] = index
    pages, model, kv = host_pages(pool), cache.copy(), cache.pool(pool)
    given = [DeviceValues(backend, values, dtype) for values in indices]
    ticket = pool.store(kv, *given, stream=stream, unit=cast("Unit", unit))
    with pytest.raises(IndexOutOfRange) as caught:
        ticket.synchronize()
    error = caught.value
    assert (error.side, error.position, error.value, error.limit) == (side, 1, index, limit)
    indices[at_side][1] = -1  # the pair that may not move
    apply(storing=True, cache=model, pages=pages, on_device=indices[0], on_host=indices[1], unit=unit, layers=(0, 1))
    np.testing.assert_array_equal(host_pages(pool), pages)

    with pytest.raises(IndexOutOfRange):  # every time it is asked
        ticket.synchronize()
    cache.scramble(5)
    model = cache.copy()
    pool.load(kv, [0], [3], stream=stream).synchronize()  # the pool goes on
    apply(storing=False, cache=model, pages=pages, on_device=[3], on_host=[0], unit="page", layers=(0, 1))
    cache.assert_equals(model)


@pytest.mark.parametrize("dtype", ["<i4", "<i8"])
def test_negative_device_indices_skip_their_pair(
    backend: Backend, stream: StreamHandle, pool: HostPool, cache: GuardedCache, dtype: str
) -> None:
    pages, model, kv = host_pages(pool), cache.copy(), cache.pool(pool)
    on_device, on_host = [3, -1, 0, -(2**31)], [-1, 2**31 - 1, 4, 0]
    given = [DeviceValues(backend, values, dtype) for values in (on_device, on_host)]
    pool.store(kv, *given, stream=stream).synchronize()  # a skipped pair's other index is nobody's business
    apply(storing=True, cache=model, pages=pages, on_device=on_device, on_host=on_host, unit="page", layers=(0, 1))
    np.testing.assert_array_equal(host_pages(pool), pages)
