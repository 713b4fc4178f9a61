"""Tickets: when they say that a transfer has run, and what they order after it."""

from __future__ import annotations

import threading
import time

import pytest

from kvferry.drivers.errors import ArgumentError, IndexOutOfRange, TransferTimeout
from kvferry.drivers.protocol import StreamHandle
from kvferry.hostpool import HostPool, KVLayout
from kvferry.hostpool.backend import Backend

from support.standin import DeviceValues, GuardedCache, blocked, finish, host_driver, new_stream


def test_query_and_timeouts(backend: Backend, stream: StreamHandle, layout: KVLayout) -> None:
    with HostPool(layout, 4, backend=backend) as pool:
        kv = GuardedCache(backend, layout, 16).pool(pool)
        with blocked(backend, stream):
            ticket = pool.store(kv, [0, 1], [0, 1], stream=stream)
            assert ticket.nbytes == 2 * layout.page_nbytes
            start = time.monotonic()
            for timeout_s in (0, 0.03):
                with pytest.raises(TransferTimeout, match=f"{ticket.nbytes} bytes has not run after {timeout_s} s"):
                    ticket.synchronize(timeout_s)
                assert not ticket.join(timeout_s)
            assert 0.06 <= time.monotonic() - start < 2
            assert not ticket.query()
        ticket.synchronize(timeout_s=10)
        assert ticket.query()
        for _ in range(2):
            ticket.synchronize()


def test_synchronize_blocks_until_it_has_run(backend: Backend, stream: StreamHandle, layout: KVLayout) -> None:
    with HostPool(layout, 4, backend=backend) as pool:
        cache = GuardedCache(backend, layout, 16)
        kv = cache.pool(pool)
        with blocked(backend, stream) as gate:
            ticket = pool.store(kv, [0], [0], stream=stream)
            threading.Timer(0.05, gate.set).start()
            ticket.synchronize()
            assert gate.is_set()


def test_query_raises_nothing_and_synchronize_does(backend: Backend, stream: StreamHandle, layout: KVLayout) -> None:
    with HostPool(layout, 4, backend=backend) as pool:
        kv = GuardedCache(backend, layout, 16).pool(pool)
        indices = [DeviceValues(backend, values) for values in ([0, 9], [0, 1])]
        ticket = pool.store(kv, *indices, stream=stream)
        while not ticket.query():
            time.sleep(1e-4)
        assert ticket.join()
        with pytest.raises(IndexOutOfRange, match="index 9 at position 1"):
            ticket.synchronize(timeout_s=1)


def test_wait_orders_another_stream(backend: Backend, stream: StreamHandle, layout: KVLayout) -> None:
    with HostPool(layout, 4, backend=backend) as pool:
        cache, seen = GuardedCache(backend, layout, 16), list[bool]()
        kv, other = cache.pool(pool), new_stream(backend)
        row = cache.rows[0][0][0]
        pool.page_view(0)[:] = 7
        row[:] = 1
        with blocked(backend, stream):
            ticket = pool.load(kv, [0], [0], stream=stream)
            ticket.wait(other)
            with backend.driver.context(0):
                host_driver(backend).submit(other, lambda: seen.append(bool((row == 7).all())))
            time.sleep(0.02)
            assert seen == []
        finish(backend, other)
        assert seen == [True]
        ticket.synchronize()
        ticket.wait(other)
        finish(backend, other)


@pytest.mark.parametrize("layer", [-1, 0, 2, 5])
def test_a_layer_that_the_transfer_does_not_have(
    backend: Backend, stream: StreamHandle, layout: KVLayout, layer: int
) -> None:
    with HostPool(layout, 4, backend=backend) as pool:
        kv = GuardedCache(backend, layout, 16).pool(pool)
        ticket = pool.load(kv, [0], [0], stream=stream, layers=1)
        with pytest.raises(ArgumentError, match=rf"layer {layer} is not part .* range\(1, 2\)"):
            ticket.wait_layer(layer, stream)
