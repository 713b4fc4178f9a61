"""What CUDA has that HIP has not: contexts, two batch symbols, read-only registration."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvferry.drivers.cuda import CudaDriver
from kvferry.drivers.errors import DriverError, InvalidValue, NotSupported
from kvferry.drivers.protocol import HostAddress, StreamHandle

from fakes.cuda import FakeCuda
from fakes.memory import PAGE, Pages, bytes_at
from support.process import run_python

READ_ONLY_SUPPORTED, CAPABILITY_MAJOR, CAPABILITY_MINOR = 113, 75, 76


@pytest.fixture
def driver(fake_cuda: FakeCuda) -> CudaDriver:
    return CudaDriver()


@pytest.mark.parametrize(
    ("major", "minor", "name"), [(9, 0, "sm_90"), (8, 6, "sm_86"), (10, 0, "sm_100"), (12, 1, "sm_121")]
)
def test_the_architecture(fake_cuda: FakeCuda, driver: CudaDriver, major: int, minor: int, name: str) -> None:
    fake_cuda.set_attribute(CAPABILITY_MAJOR, major)
    fake_cuda.set_attribute(CAPABILITY_MINOR, minor)
    assert driver.device_architecture(0) == name


def test_a_driver_for_device_3_leaves_device_0_without_a_context(fake_cuda: FakeCuda) -> None:
    """Scenario 32: a context on device 0 costs half a gigabyte there. (LMCache#4019)"""
    fake_cuda.set_devices(4)
    driver, pages = CudaDriver(), Pages(PAGE)
    driver.device_attributes(3)
    with driver.context(3):
        driver.host_register(HostAddress(pages.address), PAGE)
        driver.device_free(driver.device_alloc(64))
        driver.host_unregister(HostAddress(pages.address))
    assert [call.values["ordinal"] for call in fake_cuda.calls("cuDevicePrimaryCtxRetain")] == [3]
    assert fake_cuda.current_device() is None


def test_many_threads_retain_a_context_once(
    fake_cuda: FakeCuda, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, ready = driver.device_count, threading.Barrier(8, timeout=30)

    def slow_count() -> int:
        time.sleep(0.2)  # the first is still retaining when the others come
        return count()

    monkeypatch.setattr(driver, "device_count", slow_count)

    def work(_: int) -> int | None:
        ready.wait()
        with driver.context(0):
            return fake_cuda.current_device()

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(work, range(8))) == {0}
    assert len(fake_cuda.calls("cuDevicePrimaryCtxRetain")) == 1


def test_without_a_context_a_call_is_refused(driver: CudaDriver) -> None:
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_CONTEXT") as caught:
        driver.device_alloc(64)
    assert caught.value.code == 201


def test_a_code_without_a_name(fake_cuda: FakeCuda, driver: CudaDriver) -> None:
    fake_cuda.fail("cuMemAlloc_v2", 999_999)
    with driver.context(0), pytest.raises(DriverError, match="999999 unknown code"):
        driver.device_alloc(64)


def _read_only_file(tmp_path: Path) -> mmap.mmap:
    file = tmp_path / "pages"
    file.write_bytes(bytes(range(256)) * (PAGE // 256))
    with file.open("rb") as opened:
        return mmap.mmap(opened.fileno(), PAGE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)


def test_a_read_only_mapping_is_registered_read_only(fake_cuda: FakeCuda, driver: CudaDriver, tmp_path: Path) -> None:
    fake_cuda.set_attribute(READ_ONLY_SUPPORTED, 1)
    assert driver.device_attributes(0).read_only_registration
    mapping = _read_only_file(tmp_path)
    address = HostAddress(np.frombuffer(mapping, dtype=np.uint8).ctypes.data)
    with driver.context(0):
        with pytest.raises(InvalidValue, match="read-only mapping without the read-only flag"):
            driver.host_register(address, PAGE)
        driver.host_register(address, PAGE, read_only=True)
        assert driver.host_flags(address) == 1 | 2 | 8
        assert bytes_at(driver.host_device_pointer(address), 256) == bytes(range(256))
        driver.host_unregister(address)


def test_without_the_attribute_read_only_is_not_supported(fake_cuda: FakeCuda, driver: CudaDriver) -> None:
    assert not driver.device_attributes(0).read_only_registration
    pages = Pages(PAGE)
    with driver.context(0), pytest.raises(NotSupported, match="flags 11"):
        driver.host_register(HostAddress(pages.address), PAGE, read_only=True)


def test_a_word_is_compared_cyclically(fake_cuda: FakeCuda, driver: CudaDriver) -> None:
    """A counter that only grows passes 2**32: 3 is later than 2**32 - 1."""
    with driver.context(0):
        stream, word = driver.stream_create(), driver.device_alloc(4)
        driver.memset_async(word, 0, 4, stream)
        driver.stream_wait_value(stream, word, 2**32 - 1)
        driver.stream_wait_value(stream, word, 0)
        with pytest.raises(DriverError):
            driver.stream_wait_value(stream, word, 1)


def test_stream_wait_value_on_drivers_before_and_after_12(fake_cuda: FakeCuda, driver: CudaDriver) -> None:
    fake_cuda.set_attribute(122, 0)
    assert not driver.device_attributes(0).stream_wait_value
    fake_cuda.set_attribute(92, 1)
    assert driver.device_attributes(0).stream_wait_value


def test_no_batch_on_the_legacy_default_stream(driver: CudaDriver) -> None:
    one = np.ones(1, dtype=np.uint64)
    with driver.context(0):
        memory = driver.device_alloc(64)
        both = np.array([memory], dtype=np.uint64)
        with pytest.raises(InvalidValue):
            driver.batch_copy(both.ctypes.data, both.ctypes.data, one.ctypes.data, 1, StreamHandle(0))


@pytest.mark.parametrize(
    ("define", "symbol"), [("BATCH_V1", "cuMemcpyBatchAsync"), ("BATCH_V2", "cuMemcpyBatchAsync_v2")]
)
def test_both_versions_of_the_batch_copy_move_the_right_bytes(
    build_variant: Callable[..., Path], define: str, symbol: str
) -> None:
    """CUDA 13 dropped an argument and renamed the symbol."""
    printed = run_python(
        f"""
        import numpy as np
        from fakes.cuda import FakeCuda
        from fakes.memory import PAGE, Pages, bytes_at, pattern
        from kvferry.drivers.cuda import CudaDriver
        from kvferry.drivers.errors import InvalidValue

        fake = FakeCuda({str(build_variant("cuda", define))!r})
        driver, pages = CudaDriver(), Pages(2 * PAGE)
        assert driver.batch_copy_missing() is None
        pages.array[:] = pattern(2 * PAGE, 1)
        with driver.context(0):
            driver.host_register(pages.address, 2 * PAGE)
            stream, memory = driver.stream_create(), driver.device_alloc(2 * PAGE)
            dsts = np.array([memory + PAGE, memory], dtype=np.uint64)
            srcs = np.array([pages.address + 7, pages.address + PAGE], dtype=np.uint64)
            sizes = np.array([100, PAGE], dtype=np.uint64)
            driver.batch_copy(dsts.ctypes.data, srcs.ctypes.data, sizes.ctypes.data, 2, stream)
            assert bytes_at(memory + PAGE, 100) == pages.array[7:107].tobytes()
            assert bytes_at(memory, PAGE) == pages.array[PAGE:].tobytes()
            sizes[1] = 2 * PAGE + 1
            try:
                driver.batch_copy(dsts.ctypes.data, srcs.ctypes.data, sizes.ctypes.data, 2, stream)
            except InvalidValue as error:
                print(error.call, error.detail)
        print([(call.name, call.result) for call in fake.log() if "Batch" in call.name])
        """
    )
    assert printed.splitlines() == [f"{symbol} 2 ranges", str([(symbol, 0), (symbol, 1)])]
