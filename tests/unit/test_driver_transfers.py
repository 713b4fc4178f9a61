"""Device memory, copies, batches, streams and events: CUDA and HIP alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvferry.drivers.errors import (
    CaptureUnsupported,
    DriverError,
    IllegalAddress,
    InvalidValue,
    OutOfMemory,
)
from kvferry.drivers.protocol import (
    DeviceAddress,
    EventHandle,
    HostAddress,
    HostMemoryDriver,
    StreamHandle,
)

from fakes.memory import PAGE, Pages, bytes_at, pattern, put_at
from fakes.vendors import Bench
from support.process import run_python

LEGACY = StreamHandle(0)


def registered(driver: HostMemoryDriver, nbytes: int) -> tuple[Pages, HostAddress]:
    """Fresh pages, registered on device 0."""
    pages = Pages(nbytes)
    with driver.context(0):
        driver.host_register(HostAddress(pages.address), nbytes)
    return pages, HostAddress(pages.address)


# ---- device memory and copies


def test_bytes_go_to_the_device_and_back(driver: HostMemoryDriver) -> None:
    pages, base = registered(driver, 2 * PAGE)
    content = pattern(PAGE, 5)
    pages.array[:PAGE] = content
    with driver.context(0):
        stream = driver.stream_create()
        memory = driver.device_alloc(PAGE)
        driver.memset_async(memory, 0xEE, PAGE, stream)
        driver.copy_to_device(DeviceAddress(memory + 8), HostAddress(base + 16), 92, stream)
        driver.copy_to_host(HostAddress(base + PAGE), memory, 200, stream)
        driver.stream_synchronize(stream)
        expected = b"\xee" * 8 + content[16:108].tobytes() + b"\xee" * 100
        assert pages.array[PAGE : PAGE + 200].tobytes() == expected
        assert not pages.array[PAGE + 200 :].any(), "nothing beyond"
        driver.device_free(memory)
        with pytest.raises(InvalidValue):
            driver.copy_to_host(base, memory, 1, stream)


def test_a_range_that_is_not_the_devices_is_refused(driver: HostMemoryDriver) -> None:
    """A host address where a device address belongs: the usual mistake."""
    pages, base = registered(driver, PAGE)
    with driver.context(0):
        memory = driver.device_alloc(100)
        with pytest.raises(InvalidValue):
            driver.copy_to_device(DeviceAddress(base), base, 8, LEGACY)
        with pytest.raises(InvalidValue):
            driver.copy_to_host(base, DeviceAddress(base), 8, LEGACY)
        with pytest.raises(InvalidValue):
            driver.copy_to_device(memory, base, 101, LEGACY)
        with pytest.raises(InvalidValue):
            driver.memset_async(DeviceAddress(memory + 50), 1, 51, LEGACY)
        driver.copy_to_device(memory, base, 100, LEGACY)
    assert not pages.array.any()


def test_memory_belongs_to_the_current_device(bench: Bench) -> None:
    driver = bench.driver(devices=2)
    with driver.context(1):
        memory = driver.device_alloc(64)
        driver.memset_async(memory, 1, 64, LEGACY)
    with driver.context(0), pytest.raises(InvalidValue):
        driver.memset_async(memory, 1, 64, LEGACY)


def test_device_memory_runs_out(bench: Bench, driver: HostMemoryDriver) -> None:
    bench.fake.fail(bench.calls.device_alloc, 2)
    with driver.context(0):
        with pytest.raises(OutOfMemory, match="4096 bytes of device memory"):
            driver.device_alloc(4096)
        assert driver.device_alloc(4096) != 0, "the next one succeeds"


# ---- batches


def _copy_in_batches(driver: HostMemoryDriver, stream: StreamHandle, pages: Pages, memory: DeviceAddress) -> None:
    """Three pieces of the first page, scattered over the device's, and back to the second page in another order."""
    host, pieces = pages.address, [(0, 100, 92), (200, 0, 92), (1000, 500, 1500)]
    for to_device in (True, False):
        device_side = np.array([memory + at for _, at, _ in pieces], dtype=np.uint64)
        host_side = np.array([host + at + (0 if to_device else PAGE) for at, _, _ in pieces], dtype=np.uint64)
        sizes = np.array([nbytes for _, _, nbytes in pieces], dtype=np.uint64)
        dsts, srcs = (device_side, host_side) if to_device else (host_side[::-1].copy(), device_side[::-1].copy())
        sizes = sizes if to_device else sizes[::-1].copy()
        driver.batch_copy(dsts.ctypes.data, srcs.ctypes.data, sizes.ctypes.data, len(pieces), stream)
        for array in (dsts, srcs, sizes):
            array[:] = 0  # read before the call returned
    driver.stream_synchronize(stream)


def test_a_batch_moves_every_range(bench: Bench, driver: HostMemoryDriver) -> None:
    assert driver.batch_copy_missing() is None
    pages, _ = registered(driver, 2 * PAGE)
    content = pattern(PAGE, 6)
    pages.array[:PAGE] = content
    with driver.context(0):
        stream, memory = driver.stream_create(), driver.device_alloc(PAGE)
        driver.memset_async(memory, 0x11, PAGE, stream)
        _copy_in_batches(driver, stream, pages, memory)
        on_device = np.frombuffer(bytes_at(memory, PAGE), dtype=np.uint8)
    expected_device = np.full(PAGE, 0x11, dtype=np.uint8)
    expected_host = np.zeros(PAGE, dtype=np.uint8)
    for at, to, nbytes in [(0, 100, 92), (200, 0, 92), (1000, 500, 1500)]:
        expected_device[to : to + nbytes] = content[at : at + nbytes]
        expected_host[at : at + nbytes] = content[at : at + nbytes]
    assert np.array_equal(on_device, expected_device)
    assert np.array_equal(pages.array[PAGE:], expected_host)
    assert [call.result for call in bench.fake.calls(bench.calls.batch)] == [0, 0]


def test_a_range_of_a_batch_may_not_cross_registrations(driver: HostMemoryDriver) -> None:
    pages = Pages(2 * PAGE)
    with driver.context(0):
        for page in range(2):
            driver.host_register(HostAddress(pages.address + page * PAGE), PAGE)
        stream, memory = driver.stream_create(), driver.device_alloc(2 * PAGE)
        dst, src = np.array([memory], dtype=np.uint64), np.array([pages.address + PAGE - 8], dtype=np.uint64)
        size = np.array([16], dtype=np.uint64)
        with pytest.raises(InvalidValue, match="1 ranges"):
            driver.batch_copy(dst.ctypes.data, src.ctypes.data, size.ctypes.data, 1, stream)


def test_a_batch_is_refused_in_capture(bench: Bench, driver: HostMemoryDriver) -> None:
    pages, _ = registered(driver, 2 * PAGE)
    with driver.context(0):
        stream, memory = driver.stream_create(), driver.device_alloc(PAGE)
        bench.fake.set_capturing(stream, True)
        with pytest.raises(CaptureUnsupported):
            _copy_in_batches(driver, stream, pages, memory)


def test_without_the_symbol_the_rest_works(bench: Bench, build_variant: Callable[..., Path]) -> None:
    """A driver before CUDA 12.8 or ROCm 7.1: no batches, and nothing else is different. (vllm#38919)"""
    path = build_variant(bench.vendor.name, "NO_BATCH")
    printed = run_python(
        f"""
        import numpy as np
        from fakes.memory import PAGE, Pages, bytes_at
        from fakes.vendors import VENDORS
        from kvferry.drivers.errors import NotSupported

        vendor = next(v for v in VENDORS if v.name == {bench.vendor.name!r})
        vendor.fake({str(path)!r})
        driver = vendor.driver()
        print(driver.batch_copy_missing())
        with driver.context(0):
            pages, stream = Pages(PAGE), driver.stream_create()
            pages.array[:] = 5
            driver.host_register(pages.address, PAGE)
            memory = driver.device_alloc(PAGE)
            try:
                driver.batch_copy(0, 0, 0, 0, stream)
            except NotSupported as error:
                print(error)
            driver.copy_to_device(memory, pages.address, PAGE, stream)
            assert bytes_at(memory, PAGE) == bytes([5]) * PAGE
            driver.host_unregister(pages.address)
        """
    )
    reason, refusal = printed.splitlines()
    assert reason == refusal
    assert str(path) in reason
    assert "MemcpyBatchAsync" in reason


# ---- streams and events


def test_a_stream_that_was_destroyed_is_gone(driver: HostMemoryDriver) -> None:
    with driver.context(0):
        stream, other = driver.stream_create(), driver.stream_create()
        assert len({0, stream, other}) == 3
        driver.stream_synchronize(stream)
        driver.stream_destroy(stream)
        with pytest.raises(DriverError) as caught:
            driver.stream_synchronize(stream)
        assert caught.value.code == 400
        driver.stream_synchronize(other)


def test_capture_is_seen(bench: Bench, driver: HostMemoryDriver) -> None:
    with driver.context(0):
        stream, other = driver.stream_create(), driver.stream_create()
        bench.fake.set_capturing(stream, True)
        assert driver.stream_is_capturing(stream)
        assert not driver.stream_is_capturing(other)
        assert not driver.stream_is_capturing(LEGACY)


def test_a_stream_waits_for_a_word(bench: Bench, driver: HostMemoryDriver) -> None:
    with driver.context(0):
        stream, word = driver.stream_create(), driver.device_alloc(8)
        put_at(word + 4, (7).to_bytes(4, "little"))
        for reached in (1, 7):
            driver.stream_wait_value(stream, DeviceAddress(word + 4), reached)
        with pytest.raises(DriverError) as caught:
            driver.stream_wait_value(stream, DeviceAddress(word + 4), 8)
        assert caught.value.code == 600, "the fake has run everything: the word will never get there"
        with pytest.raises(InvalidValue):
            driver.stream_wait_value(stream, DeviceAddress(Pages(PAGE).address), 0)


def test_events_mark_order_and_time(driver: HostMemoryDriver) -> None:
    with driver.context(0):
        stream = driver.stream_create()
        start, end, plain = driver.event_create(timing=True), driver.event_create(timing=True), driver.event_create()
        driver.event_record(start, stream)
        driver.event_record(end, stream)
        driver.event_record(plain, stream)
        driver.stream_wait_event(LEGACY, plain)
        driver.event_synchronize(end)
        assert driver.event_query(end)
        assert 0 <= driver.event_elapsed_ms(start, end) < 10_000
        assert driver.event_elapsed_ms(end, start) <= 0
        with pytest.raises(DriverError):
            driver.event_elapsed_ms(start, plain)
        driver.event_destroy(plain)
        with pytest.raises(DriverError):
            driver.event_record(plain, stream)


def test_an_event_that_is_not_reached_is_an_answer(bench: Bench, driver: HostMemoryDriver) -> None:
    with driver.context(0):
        event = driver.event_create()
        bench.fake.fail(bench.calls.event_query, 600)
        assert driver.event_query(event) is False
        assert driver.event_query(event) is True
        bench.fake.fail(bench.calls.event_query, 700)
        with pytest.raises(IllegalAddress, match=bench.calls.event_query):
            driver.event_query(event)
        with pytest.raises(DriverError):
            driver.event_query(EventHandle(0xDEAD))
