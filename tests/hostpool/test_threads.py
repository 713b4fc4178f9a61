"""Threads: a fresh one works, several at once do not disturb each other, and none sees another's slot."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvferry.drivers.errors import DriverError, PoolClosed
from kvferry.drivers.protocol import EventHandle, StreamHandle
from kvferry.hostpool import HostPool, KVLayout
from kvferry.hostpool.backend import Backend, stand_in

from support.model import apply, host_pages, scramble_pool
from support.standin import GuardedCache, blocked, new_stream


def test_a_fresh_thread_works(backend: Backend, stream: StreamHandle, layout: KVLayout) -> None:
    """Scenario 31."""
    cache = GuardedCache(backend, layout, 16, seed=1)
    with HostPool(layout, 4, backend=backend) as pool:
        scramble_pool(pool, 2)
        pages, model, kv = host_pages(pool), cache.copy(), cache.pool(pool)

        def work() -> None:
            pool.store(kv, [3, 0], [1, 2], stream=stream).synchronize()
            with pytest.raises(DriverError, match="invalid context"):  # no device is left current
                backend.driver.stream_synchronize(stream)

        with ThreadPoolExecutor(1) as threads:
            threads.submit(work).result()
        apply(storing=True, cache=model, pages=pages, on_device=[3, 0], on_host=[1, 2], unit="page", layers=(0, 1))
        np.testing.assert_array_equal(host_pages(pool), pages)


def test_a_thread_with_another_device_current_keeps_it(layout: KVLayout) -> None:
    """Scenario 31."""
    backend = stand_in(devices=2)
    stream = new_stream(backend, 1)
    with HostPool(layout, 4, backend=backend, devices=[1]) as pool:
        kv = GuardedCache(backend, layout, 16, device=1).pool(pool)
        with backend.driver.context(0):
            pool.store(kv, [3], [0], stream=stream).synchronize()
            mine = backend.driver.device_alloc(64)
        with backend.driver.context(1), pytest.raises(DriverError, match="invalid value"):
            backend.driver.device_free(mine)
        with backend.driver.context(0):
            backend.driver.device_free(mine)


def test_threads_transfer_at_once_each_in_its_own_pages(backend: Backend, layout: KVLayout) -> None:
    threads, rounds = 4, 40
    pages_each = 4
    caches = [GuardedCache(backend, layout, 6 * layout.page_tokens, seed=number) for number in range(threads)]
    streams = [new_stream(backend) for _ in range(threads)]
    start = threading.Barrier(threads)
    with HostPool(layout, threads * pages_each, backend=backend, chunk_nbytes=layout.page_nbytes) as pool:
        pools = [cache.pool(pool) for cache in caches]

        def work(number: int) -> None:
            random = np.random.default_rng(number)
            cache, kv = caches[number], pools[number]
            mine = np.arange(pages_each) + number * pages_each
            start.wait()
            for _ in range(rounds):
                on_device = random.permutation(6)[:pages_each]
                layer = int(random.integers(layout.layers))
                before = [rows[layer].copy() for rows in cache.rows]
                pool.store(kv, on_device, mine, stream=streams[number], layers=layer)
                with backend.driver.context(0):
                    for bases, stride in zip(cache.bases, cache.strides, strict=True):
                        nbytes = cache.tokens * stride
                        backend.driver.memset_async(bases[layer], 0x5A, nbytes, streams[number])  # type: ignore[arg-type]
                pool.load(kv, mine, on_device, stream=streams[number], layers=layer).synchronize()
                for rows, expected in zip(cache.rows, before, strict=True):
                    for page in range(6):
                        where = slice(page * layout.page_tokens, (page + 1) * layout.page_tokens)
                        kept = expected[where] if page in on_device else np.full_like(expected[where], 0x5A)
                        np.testing.assert_array_equal(rows[layer][where], kept)

        with ThreadPoolExecutor(threads) as executor:
            for job in [executor.submit(work, number) for number in range(threads)]:
                job.result()
        assert pool._resources.devices[0].engine.busy() == 0


def test_close_refuses_what_other_threads_give_while_it_waits(
    backend: Backend, stream: StreamHandle, layout: KVLayout
) -> None:
    """A transfer that slipped in behind the wait would run in memory that is given back."""
    pool = HostPool(layout, 4, backend=backend)
    kv = GuardedCache(backend, layout, 16).pool(pool)
    engine = pool._resources.devices[0].engine
    with blocked(backend, stream) as gate, ThreadPoolExecutor(1) as threads:
        pool.store(kv, [0], [0], stream=stream)
        closing = threads.submit(pool.close)
        while engine._accepting:
            assert not closing.done()
        other = new_stream(backend)
        with pytest.raises(PoolClosed):
            pool.store(kv, [1], [1], stream=other)
        gate.set()
        closing.result()
    assert pool.closed
    with backend.driver.context(0):
        backend.driver.stream_synchronize(other)  # no fault


def test_a_slot_that_somebody_waits_for_is_not_used_again(
    backend: Backend, stream: StreamHandle, layout: KVLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else waiting for one transfer would go on to wait for another, maybe for one that waits for the waiter."""
    with HostPool(layout, 4, backend=backend) as pool:
        kv = GuardedCache(backend, layout, 16).pool(pool)
        ticket = pool.store(kv, [0], [0], stream=stream)
        real, other = backend.driver.event_synchronize, new_stream(backend)
        with blocked(backend, other) as gate:

            def reused_meanwhile(event: EventHandle) -> None:
                real(event)
                pool.store(kv, [1], [1], stream=other)  # takes every free slot, and does not run yet
                assert backend.driver.event_query(event)
                real(event)

            monkeypatch.setattr(backend.driver, "event_synchronize", reused_meanwhile)
            ticket.synchronize()
            monkeypatch.undo()
            assert not gate.is_set()
            assert ticket.query()
