"""The kernel engine when something fails in mid-call: the first error is told, and no slot is used too early."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.drivers.errors import ArgumentError, NotSupported, OutOfMemory, driver_error
from kvferry.drivers.protocol import DeviceAddress, EventHandle, StreamHandle
from kvferry.hostpool import Component, HostPool, KVLayout
from kvferry.hostpool.backend import Backend
from kvferry.hostpool.engines.kernel import KernelEngine
from kvferry.kernels_cubin.abi import ArgumentBlock

from support.standin import GuardedCache, blocked, finish, new_stream


def engine_of(pool: HostPool) -> KernelEngine:
    return pool._resources.devices[0].engine


def refuse_launch(kernel: str, ctas: int, block: ArgumentBlock, stream: StreamHandle) -> None:
    raise driver_error("launch", 2, "out of memory")


def test_a_launch_that_fails_is_told_and_the_next_one_works(
    backend: Backend, stream: StreamHandle, layout: KVLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HostPool(layout, 4, backend=backend) as pool:
        cache = GuardedCache(backend, layout, 16)
        kv = cache.pool(pool)
        with blocked(backend, stream):
            monkeypatch.setattr(engine_of(pool).launcher, "launch", refuse_launch)
            with pytest.raises(OutOfMemory, match="launch failed"):
                pool.store(kv, [0], [0], stream=stream)
            monkeypatch.undo()
            assert engine_of(pool).busy() == 1  # the stream still reads the slot's indices
            ticket = pool.store(kv, [2], [1], stream=stream)
        ticket.synchronize()
        nbytes = cache.rows[0][0][8:12].size
        np.testing.assert_array_equal(pool.page_view(1)[:nbytes], cache.rows[0][0][8:12].ravel())
        assert not pool.page_view(0).any()
        assert engine_of(pool).busy() == 0


def test_the_first_error_is_the_one_that_is_told(
    backend: Backend, stream: StreamHandle, layout: KVLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_record(event: EventHandle, stream: StreamHandle) -> None:
        raise driver_error("record", 1, "invalid value")

    with HostPool(layout, 4, backend=backend) as pool:
        kv = GuardedCache(backend, layout, 16).pool(pool)
        monkeypatch.setattr(engine_of(pool).launcher, "launch", refuse_launch)
        monkeypatch.setattr(backend.driver, "event_record", refuse_record)
        with pytest.raises(OutOfMemory, match="launch failed"):
            pool.store(kv, [0], [0], stream=stream)


def test_a_transfer_whose_event_failed_keeps_its_slot_for_ever(
    backend: Backend, stream: StreamHandle, layout: KVLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can say when it has run. It did: with the indices that it was given, not with those of the next one."""

    def refuse_record(event: EventHandle, stream: StreamHandle) -> None:
        raise driver_error("record", 2, "out of memory")

    with HostPool(layout, 4, backend=backend) as pool:
        cache = GuardedCache(backend, layout, 16)
        kv, other = cache.pool(pool), new_stream(backend)
        with blocked(backend, stream):
            monkeypatch.setattr(backend.driver, "event_record", refuse_record)
            with pytest.raises(OutOfMemory, match="record failed"):
                pool.store(kv, [3], [0], stream=stream)
            monkeypatch.undo()
            pool.store(kv, [1], [1], stream=other).synchronize()
        finish(backend, stream)
        nbytes = cache.rows[0][0][:4].size
        np.testing.assert_array_equal(pool.page_view(0)[:nbytes], cache.rows[0][0][12:16].ravel())


def test_a_captured_stream_is_refused(
    backend: Backend, stream: StreamHandle, layout: KVLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HostPool(layout, 4, backend=backend) as pool:
        kv = GuardedCache(backend, layout, 16).pool(pool)
        monkeypatch.setattr(backend.driver, "stream_is_capturing", lambda stream: True)
        with pytest.raises(NotSupported, match="being captured"):
            pool.store(kv, [0], [0], stream=stream)


def test_too_many_pieces_for_one_launch_are_refused(backend: Backend, stream: StreamHandle) -> None:
    layout = KVLayout((Component("latent", 1, 1),), 1024, 4096, "page_first")
    with backend.driver.context(0):
        base = backend.driver.device_alloc(1 << 20)
    with HostPool(layout, 1, backend=backend) as pool:
        kv = pool.device_pool({"latent": [base] * 1024}, tokens=4096)
        with pytest.raises(ArgumentError, match=r"512 index pairs make 2147483648 pieces, a launch takes 2147483647"):
            pool.store(kv, [0] * 512, [0] * 512, stream=stream)


def test_in_the_steady_state_nothing_is_allocated(
    backend: Backend, stream: StreamHandle, layout: KVLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HostPool(layout, 4, backend=backend) as pool:
        kv = GuardedCache(backend, layout, 16).pool(pool)
        pool.store(kv, [0], [0], stream=stream).synchronize()
        for verb in ("device_alloc", "host_alloc", "event_create", "stream_create"):
            monkeypatch.setattr(backend.driver, verb, lambda *_, verb=verb: pytest.fail(f"{verb} was called"))
        for _ in range(20):
            pool.store(kv, [0], [0], stream=stream).synchronize()
        monkeypatch.undo()


def test_streams_that_are_done_are_forgotten(backend: Backend, layout: KVLayout) -> None:
    with HostPool(layout, 4, backend=backend) as pool:
        kv = GuardedCache(backend, layout, 16).pool(pool)
        for _ in range(20):
            pool.store(kv, [0], [0], stream=new_stream(backend)).synchronize()
        assert engine_of(pool).busy() == 0
        assert not engine_of(pool)._in_flight


def test_a_device_named_twice_is_one_device(
    backend: Backend, layout: KVLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first table would be lost."""
    real_alloc, real_free, held = backend.driver.device_alloc, backend.driver.device_free, set[int]()

    def device_alloc(nbytes: int) -> DeviceAddress:
        address = real_alloc(nbytes)
        held.add(address)
        return address

    def device_free(address: DeviceAddress) -> None:
        held.remove(address)
        real_free(address)

    monkeypatch.setattr(backend.driver, "device_alloc", device_alloc)
    monkeypatch.setattr(backend.driver, "device_free", device_free)
    HostPool(layout, 4, backend=backend, devices=[0, 0]).close()
    assert held == set()
