"""What a transfer reads and writes stays until it has run, whoever lets go of it in the meantime."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import numpy as np
import pytest

from kvferry.drivers.errors import PoolClosed, TransferTimeout
from kvferry.drivers.protocol import StreamHandle
from kvferry.hostpool import HostPool, KVLayout
from kvferry.hostpool.backend import Backend

from support.model import apply, host_pages, scramble_pool
from support.process import start_python
from support.standin import DeviceValues, GuardedCache, blocked, finish


def test_each_transfer_uses_the_values_that_it_was_given(
    backend: Backend, stream: StreamHandle, layout: KVLayout
) -> None:
    """Scenario 17: 200 transfers, given while the stream stands still, from one array that changes after each."""
    random = np.random.default_rng(1)
    cache = GuardedCache(backend, layout, 8 * layout.page_tokens, seed=2)
    with HostPool(layout, 200, backend=backend) as pool:
        scramble_pool(pool, 3)
        pages, model, kv = host_pages(pool), cache.copy(), cache.pool(pool)
        on_device, on_host = np.zeros(1, np.int64), np.zeros(1, np.int64)
        with blocked(backend, stream):
            for page in range(200):
                on_device[0], on_host[0] = random.integers(8), page
                apply(
                    storing=True,
                    cache=model,
                    pages=pages,
                    on_device=on_device.tolist(),
                    on_host=[page],
                    unit="page",
                    layers=(0, 1),
                )
                pool.store(kv, on_device, on_host, stream=stream)
                on_device[0] = on_host[0] = 10**6
        finish(backend, stream)
        np.testing.assert_array_equal(host_pages(pool), pages)


@pytest.mark.parametrize("where", ["host", "device"])
def test_dropping_every_reference_in_mid_transfer(
    backend: Backend, stream: StreamHandle, layout: KVLayout, where: str
) -> None:
    """Scenario 18: the device pool with its table, the ticket and the indices are gone before the copy runs."""
    cache = GuardedCache(backend, layout, 16, seed=2)
    with HostPool(layout, 4, backend=backend) as pool:
        scramble_pool(pool, 3)
        pages, model, kv = host_pages(pool), cache.copy(), cache.pool(pool)
        gone = weakref.ref(kv)
        make = (lambda v: DeviceValues(backend, v)) if where == "device" else (lambda v: np.array(v))
        indices = [make([3, 1]), make([0, 2])]
        held = [weakref.ref(array) for array in indices]
        with blocked(backend, stream):
            ticket = pool.load(kv, indices[1], indices[0], stream=stream)
            del kv, ticket, indices
            gc.collect()
            assert gone() is not None
            if where == "device":
                assert all(array() is not None for array in held)
            filler = [GuardedCache(backend, layout, 16, seed=number) for number in range(4)]  # takes freed addresses
        finish(backend, stream)
        apply(storing=False, cache=model, pages=pages, on_device=[3, 1], on_host=[0, 2], unit="page", layers=(0, 1))
        cache.assert_equals(model)
        pool.load(filler[0].pool(pool), [0], [0], stream=stream).synchronize()
        gc.collect()
        assert gone() is None  # and not for ever


def test_dropping_the_pool_itself_in_mid_transfer_waits_for_it(
    backend: Backend, stream: StreamHandle, layout: KVLayout
) -> None:
    cache = GuardedCache(backend, layout, 16, seed=2)
    pool = HostPool(layout, 4, backend=backend)
    scramble_pool(pool, 3)
    pages, model, kv = host_pages(pool), cache.copy(), cache.pool(pool)
    with blocked(backend, stream) as gate:
        pool.load(kv, [0, 2], [3, 1], stream=stream)
        threading.Timer(0.05, gate.set).start()
        del pool, kv
        gc.collect()
        assert gate.is_set()
    finish(backend, stream)  # raises when the kernel met memory that was gone
    apply(storing=False, cache=model, pages=pages, on_device=[3, 1], on_host=[0, 2], unit="page", layers=(0, 1))
    cache.assert_equals(model)


def test_close_waits_for_what_is_in_flight(backend: Backend, stream: StreamHandle, layout: KVLayout) -> None:
    """Scenario 19."""
    cache = GuardedCache(backend, layout, 16, seed=2)
    pool = HostPool(layout, 4, backend=backend)
    scramble_pool(pool, 3)
    pages, model, kv = host_pages(pool), cache.copy(), cache.pool(pool)
    with blocked(backend, stream) as gate:
        ticket = pool.load(kv, [0, 2], [3, 1], stream=stream)
        threading.Timer(0.05, gate.set).start()
        pool.close()
        assert gate.is_set()
    assert ticket.query()
    apply(storing=False, cache=model, pages=pages, on_device=[3, 1], on_host=[0, 2], unit="page", layers=(0, 1))
    cache.assert_equals(model)
    assert pool.closed
    pool.close()


def test_close_with_a_deadline_leaves_the_pool_open_and_usable(
    backend: Backend, stream: StreamHandle, layout: KVLayout
) -> None:
    cache = GuardedCache(backend, layout, 16, seed=2)
    pool = HostPool(layout, 4, backend=backend)
    kv = cache.pool(pool)
    with blocked(backend, stream):
        first = pool.store(kv, [3, 1], [0, 2], stream=stream)
        start = time.monotonic()
        with pytest.raises(TransferTimeout, match=rf"a transfer of {2 * layout.page_nbytes} bytes is still in flight"):
            pool.close(timeout_s=0.02)
        assert 0.02 <= time.monotonic() - start < 2
        assert not pool.closed
        second = pool.store(kv, [0], [1], stream=stream)
    for ticket in (first, second):
        ticket.synchronize()
    assert pool.page_view(1).any()
    pool.close(timeout_s=1)
    assert pool.closed
    with pytest.raises(PoolClosed):
        pool.store(kv, [0], [0], stream=stream)


def test_a_closed_pool_says_so(backend: Backend, stream: StreamHandle, layout: KVLayout) -> None:
    with HostPool(layout, 4, backend=backend) as pool:
        kv = GuardedCache(backend, layout, 16).pool(pool)
    for use in (
        lambda: pool.store(kv, [0], [0], stream=stream),
        lambda: pool.load(kv, [], [], stream=stream),
        lambda: pool.allocate(1),
        lambda: pool.free([0]),
        lambda: pool.page_view(0),
        lambda: pool.page_address(0),
        lambda: pool.domain(),
        lambda: pool.device_pool({}),
        lambda: pool.artefact_file(),
    ):
        with pytest.raises(PoolClosed, match="was closed"):
            use()


AT_EXIT = """
import atexit, threading

def look() -> None:  # registered first, so it runs after every finalizer
    with backend.driver.context(0):
        backend.driver.event_create()  # raises when the device has met a fault
    print("closed, whole" if pool.closed else "open")

atexit.register(look)
from kvferry.hostpool import HostPool, KVLayout
from kvferry.hostpool.backend import stand_in
from support.standin import GuardedCache, host_driver, new_stream

backend = stand_in()
layout = KVLayout.mla(layers=2, latent_size=8, element_nbytes=2, page_tokens=4)
pool = HostPool(layout, 4, backend=backend)
cache = GuardedCache(backend, layout, 16)
kv, stream = cache.pool(pool), new_stream(backend)
gate = threading.Event()
with backend.driver.context(0):
    host_driver(backend).submit(stream, lambda: gate.wait(30))
if IN_FLIGHT:
    late = threading.Timer(0.2, gate.set)
    late.daemon = True  # so that the interpreter does not wait for it, and the pool has to
    late.start()
else:
    gate.set()
ticket = pool.load(kv, [0, 1], [2, 3], stream=stream)
if not IN_FLIGHT:
    ticket.synchronize()
"""


@pytest.mark.parametrize("in_flight", [False, True])
def test_the_interpreter_ends_silently(in_flight: bool) -> None:
    """Scenario 19: closed, without a fault and with nothing on stderr, with a transfer in flight too."""
    done = start_python(f"IN_FLIGHT = {in_flight}\n{AT_EXIT}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed, whole\n", "")
