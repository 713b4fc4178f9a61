"""Addresses that are not the device's: the stand-in faults as a GPU would, and stays so. What other tests rest on."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace

import numpy as np
import pytest

from kvferry.drivers.errors import IllegalAddress
from kvferry.drivers.protocol import StreamHandle
from kvferry.hostpool import HostPool, KVLayout
from kvferry.hostpool.backend import Backend, stand_in
from kvferry.hostpool.indices import pairs
from kvferry.hostpool.plan import plan_transfer
from kvferry.hostpool.tables import Addresses, DeviceTable, page_addresses
from kvferry.hostpool.ticket import Ticket

from support.model import apply, host_pages, scramble_pool
from support.standin import GuardedCache, new_stream


def store_through(
    pool: HostPool,
    cache: GuardedCache,
    addresses: Addresses,
    on_device: list[int],
    on_host: list[int],
    stream: StreamHandle,
) -> Ticket:
    """Store whole pages with ``addresses`` as the pool's page table."""
    state = pool._resources.devices[cache.device]
    table = DeviceTable(pool.backend.driver, cache.device, addresses)
    right = state.side()
    components = tuple(replace(component, table=table.entry(0)) for component in right.components)
    side = replace(right, components=components, alignment=table.alignment)
    kv = cache.pool(pool)
    plan = plan_transfer(pool.layout.components, kv.side, side, unit="page", layers=range(pool.layout.layers))
    return state.engine.submit(plan, pairs(on_device, on_host), stream, (kv, table))


def test_a_host_address_is_an_illegal_access_and_the_device_stays_faulted(layout: KVLayout) -> None:
    backend = stand_in(devices=2)
    streams = [new_stream(backend, device) for device in (0, 1)]
    pool = HostPool(layout, 4, backend=backend, devices=[0, 1])
    caches = [GuardedCache(backend, layout, 16, device=device) for device in (0, 1)]
    hosts = np.array([pool.page_address(page) for page in range(4)], np.uint64)
    other = pool.store(caches[1].pool(pool), [0], [1], stream=streams[1])

    ticket = store_through(pool, caches[0], hosts, [0], [2], streams[0])
    with pytest.raises(IllegalAddress, match=r"write of \d+ bytes at 0x") as caught:
        ticket.synchronize()
    (address,) = re.findall(r"bytes at (0x[0-9a-f]+)", str(caught.value))
    assert hosts[2] <= int(address, 16) < int(hosts[2]) + layout.page_nbytes
    assert "a host address where a device address belongs" in str(caught.value)
    assert not pool.page_view(2).any()

    for _ in range(2):  # for good, whatever is asked of the device
        with backend.driver.context(0), pytest.raises(IllegalAddress):
            backend.driver.device_alloc(64)
        with pytest.raises(IllegalAddress):
            pool.store(caches[0].pool(pool), [0], [0], stream=streams[0])
    other.synchronize()  # another device is another matter
    pool.store(caches[1].pool(pool), [0], [0], stream=streams[1]).synchronize()
    assert pool.page_view(0).any()
    pool.close()


def test_a_fault_ends_every_transfer_of_the_device(backend: Backend, stream: StreamHandle, layout: KVLayout) -> None:
    """Nobody hangs: not the transfer behind the fault, not ``close``."""
    pool = HostPool(layout, 4, backend=backend)
    cache = GuardedCache(backend, layout, 16)
    kv = cache.pool(pool)
    hosts = np.array([pool.page_address(page) for page in range(4)], np.uint64)
    tickets = [store_through(pool, cache, hosts, [0], [2], stream)]
    with contextlib.suppress(IllegalAddress):
        tickets.append(pool.store(kv, [0], [0], stream=stream))
    for ticket in tickets:
        with pytest.raises(IllegalAddress):
            ticket.synchronize(timeout_s=10)
    pool.close(timeout_s=10)
    assert pool.closed


def test_the_alias_of_chunk_0_is_not_good_for_the_others(
    backend: Backend, stream: StreamHandle, layout: KVLayout
) -> None:
    """Scenario 6: a table that adds page offsets to the first alias faults or writes where it must not."""
    pool = HostPool(layout, 6, backend=backend, chunk_nbytes=layout.page_nbytes)
    scramble_pool(pool, 1)
    cache = GuardedCache(backend, layout, 24, seed=2)
    pages, model = host_pages(pool), cache.copy()
    aliases = pool.domain().aliases
    span = pool.page_address(1) - pool.page_address(0)
    wrong = np.array([aliases[0] + page * span for page in range(6)], np.uint64)
    right = page_addresses(aliases, 6, 1, layout.page_nbytes)
    assert wrong.tolist() != right.tolist()
    page = next(page for page in range(6) if wrong[page] != right[page])
    apply(storing=True, cache=model, pages=pages, on_device=[5], on_host=[page], unit="page", layers=(0, 1))
    try:
        store_through(pool, cache, wrong, [5], [page], stream).synchronize()
    except IllegalAddress:
        pass
    else:
        assert not np.array_equal(host_pages(pool), pages)
    pool.close()


def test_the_right_table_does_move_the_right_bytes(backend: Backend, stream: StreamHandle, layout: KVLayout) -> None:
    """What the tests above do, with nothing wrong."""
    with HostPool(layout, 6, backend=backend, chunk_nbytes=layout.page_nbytes) as pool:
        cache = GuardedCache(backend, layout, 24, seed=2)
        pages, model = host_pages(pool), cache.copy()
        right = page_addresses(pool.domain().aliases, 6, 1, layout.page_nbytes)
        store_through(pool, cache, right, [5, 4], [0, 3], stream).synchronize()
        apply(storing=True, cache=model, pages=pages, on_device=[5, 4], on_host=[0, 3], unit="page", layers=(0, 1))
        np.testing.assert_array_equal(host_pages(pool), pages)


def test_memory_that_was_freed_is_not_reachable_any_more(
    backend: Backend, stream: StreamHandle, layout: KVLayout
) -> None:
    pool = HostPool(layout, 4, backend=backend)
    cache = GuardedCache(backend, layout, 16)
    kv = cache.pool(pool)
    cache.free()
    with pytest.raises(IllegalAddress, match="read of"):
        pool.store(kv, [0], [0], stream=stream).synchronize()
    pool.close()
