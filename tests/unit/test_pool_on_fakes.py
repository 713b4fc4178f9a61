"""The whole path on both fake drivers: pool, tables, real cuda-python and hip-python, and the kernels run for real."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from kvferry.drivers.errors import (
    AlreadyRegistered,
    Deinitialized,
    DriverError,
    IndexOutOfRange,
    InvalidValue,
    LaunchFailure,
    NotRegistered,
    NotSupported,
    OutOfMemory,
)
from kvferry.drivers.protocol import HostAddress, StreamHandle
from kvferry.hostpool import DevicePool, HostPool, KVLayout
from kvferry.hostpool.backend import Backend
from kvferry.hostpool.mapping import HostMapping
from kvferry.hostpool.memory import MemoryKind
from kvferry.hostpool.registration import Chunk, Registration

from fakes.cuda import FakeCuda
from fakes.memory import bytes_at, pattern, put_at
from fakes.vendors import Bench
from support.process import run_python

LAYOUT = KVLayout.mha(layers=3, heads=2, head_size=16, element_nbytes=2, page_tokens=8)
PAGES_PER_CHUNK = 8
CHUNK_NBYTES = PAGES_PER_CHUNK * LAYOUT.page_nbytes
PAGES = 3 * PAGES_PER_CHUNK + 2
SHORT_CHUNK_NBYTES = 2 * 4096  # two pages of 3072 bytes, in whole pages of the system
TOKENS = 64
ROW_NBYTES = 64
STREAM_WAIT_VALUE = {"cuda": (92, 122), "hip": (10013,)}  # the attributes that tell


def make_pool(backend: Backend, devices: tuple[int, ...] = (0,), memory: MemoryKind | None = "registered") -> HostPool:
    """Four chunks; the last one is short."""
    return HostPool(LAYOUT, PAGES, backend=backend, chunk_nbytes=CHUNK_NBYTES, devices=devices, memory=memory)


class Cache:
    """A layer-first cache in the fake's device memory."""

    def __init__(self, pool: HostPool, device: int = 0) -> None:
        driver = pool.backend.driver
        with driver.context(device):
            self.layers = {name: [driver.device_alloc(TOKENS * ROW_NBYTES) for _ in range(3)] for name in "kv"}
            self.stream: StreamHandle = driver.stream_create()
        self.content = {}
        for number, (name, layer) in enumerate((name, layer) for name in "kv" for layer in range(3)):
            self.content[name, layer] = pattern(TOKENS * ROW_NBYTES, seed=number).tobytes()
        self.write()
        self.pool: DevicePool = pool.device_pool(self.layers, device=device, tokens=TOKENS)

    def write(self) -> None:
        for (name, layer), data in self.content.items():
            put_at(self.layers[name][layer], data)

    def wipe(self) -> None:
        for name, layer in self.content:
            put_at(self.layers[name][layer], bytes(TOKENS * ROW_NBYTES))

    def is_whole(self) -> bool:
        return all(
            bytes_at(self.layers[name][layer], len(data)) == data for (name, layer), data in self.content.items()
        )

    def page(self, page: int) -> bytes:
        """What a host page holds as a copy of this cache's page: components, then layers, then tokens."""
        at = slice(page * 8 * ROW_NBYTES, (page + 1) * 8 * ROW_NBYTES)
        return b"".join(self.content[name, layer][at] for name in "kv" for layer in range(3))


@pytest.mark.parametrize("memory", ["registered", "driver"])
def test_round_trip_through_an_alias_a_chunk(bench: Bench, backend: Backend, memory: MemoryKind) -> None:
    """Scenario 6: every page uses the alias of its own chunk; host addresses never reach a kernel."""
    with make_pool(backend, memory=memory) as pool:
        assert pool.domain().kind == "alias"
        assert len(set(pool.domain().aliases)) == 4
        cache = Cache(pool)
        host_pages = [0, 7, 8, 15, 16, 23, 24, 25]  # both ends of every chunk
        pool.store(cache.pool, range(8), host_pages, stream=cache.stream).synchronize()
        for device_page, host_page in enumerate(host_pages):
            assert pool.page_view(host_page).tobytes() == cache.page(device_page)
        cache.wipe()
        pool.load(cache.pool, host_pages, range(8), stream=cache.stream).synchronize()
        assert cache.is_whole()
    launches = bench.fake.calls(bench.calls.launch)
    assert [(launch.values["ctas"], launch.values["threads"]) for launch in launches] == [(1, 1024)] * 2


def test_tables_hold_what_the_driver_answers(backend: Backend) -> None:
    """The table in device memory, entry by entry, against the driver's answer for each page."""
    with make_pool(backend) as pool, backend.driver.context(0):
        entries = np.frombuffer(bytes_at(pool._resources.devices[0].table.entry(0), 8 * PAGES), np.uint64)
        answers = [backend.driver.host_device_pointer(pool.page_address(page)) for page in range(PAGES)]
        assert entries.tolist() == answers
        assert not set(answers) & {int(pool.page_address(page)) for page in range(PAGES)}


def test_every_device_has_its_own_table(bench: Bench, backend: Backend) -> None:
    """Scenario 31: one pool, two devices, bytes from one to the other."""
    bench.fake.set_devices(2)
    with make_pool(backend, devices=(0, 1)) as pool:
        assert not set(pool.domain(0).aliases) & set(pool.domain(1).aliases)
        first, second = Cache(pool, 0), Cache(pool, 1)
        second.wipe()
        pool.store(first.pool, range(8), range(8), stream=first.stream).synchronize()
        pool.load(second.pool, range(8), range(8), stream=second.stream).synchronize()
        assert second.is_whole()


@pytest.mark.parametrize(
    ("code", "error"),
    [(1, InvalidValue), (2, OutOfMemory), (4, Deinitialized), (712, AlreadyRegistered), (713, NotRegistered)],
)
@pytest.mark.parametrize("failing", [0, 1, 3])
def test_a_failing_chunk_takes_the_others_back(
    bench: Bench, backend: Backend, code: int, error: type[DriverError], failing: int
) -> None:
    """Scenario 25: chunks k-1 to 0 are unregistered in reverse, the memory is unmapped, the error names the chunk."""
    bench.fake.log()
    bench.fake.fail(bench.calls.register, code, nth=failing + 1)
    nbytes = CHUNK_NBYTES if failing < 3 else SHORT_CHUNK_NBYTES
    with pytest.raises(error, match=f"chunk {failing} of 4: {nbytes} bytes at 0x"):
        make_pool(backend)
    log = bench.fake.log()
    registered = [call.values["address"] for call in log if call.name == bench.calls.register and call.result == 0]
    unregistered = [call.values["address"] for call in log if call.name == bench.calls.unregister]
    assert len(registered) == failing
    assert unregistered == registered[::-1]
    refused = next(call.values["address"] for call in log if call.name == bench.calls.register and call.result)
    assert isinstance(refused, int)
    assert not mapped(refused)
    with make_pool(backend):  # nothing is in the way of the next
        pass


def test_memory_from_the_driver_is_the_default_on_rocm(bench: Bench, backend: Backend) -> None:
    """ROCm's makers advise against registering large pools; each chunk is allocated, and given back, once."""
    with make_pool(backend, memory=None) as pool:
        assert pool.memory_kind == {"cuda": "registered", "hip": "driver"}[bench.vendor.name]
        assert pool.domain().kind == "alias"
    log = bench.fake.log()
    took = [call for call in log if call.name == bench.calls.host_alloc]
    gave = [call for call in log if call.name == bench.calls.host_free]
    assert len(took) == len(gave) == 4 + (4 if bench.vendor.name == "hip" else 0)  # four slots, and the chunks


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_a_failing_allocation_gives_the_others_back(bench: Bench, backend: Backend, failing: int) -> None:
    bench.fake.log()
    bench.fake.fail(bench.calls.host_alloc, 2, nth=failing + 1)
    with pytest.raises(OutOfMemory, match=f"chunk {failing} of 4: "):
        make_pool(backend, memory="driver")
    log = bench.fake.log()
    assert sum(call.name == bench.calls.host_alloc and call.result == 0 for call in log) == failing
    assert sum(call.name == bench.calls.host_free for call in log) == failing


def test_a_range_that_the_process_holds_is_refused_whatever_the_driver_says(bench: Bench, backend: Backend) -> None:
    """Scenario 21: old ROCm accepts a range twice; the book of ranges does not, and names the holder."""
    with make_pool(backend) as pool:
        first = pool._resources.memory.chunks[0]
        bench.fake.log()
        with pytest.raises(AlreadyRegistered, match=f"chunk 0 of a pool of {PAGES} pages holds"):
            Registration(backend.driver, 0, [Chunk(HostAddress(first.address + 4096), 4096)], owner="another")
        assert not bench.fake.calls(bench.calls.register)
    after = HostMapping(4096)
    after.populate()
    Registration(backend.driver, 0, [Chunk(after.address, 4096)]).release()
    after.close()


def mapped(address: int) -> bool:
    """Whether something is mapped at an address of this process."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        assert found is not None
        if int(found[1], 16) <= address < int(found[2], 16):
            return True
    return False


def test_close_unregisters_what_was_registered(bench: Bench, backend: Backend) -> None:
    """Scenario 7: exactly the bases that were registered, each once, also where the device has other addresses."""
    bench.fake.log()
    pool = make_pool(backend)
    cache = Cache(pool)
    pool.store(cache.pool, range(8), range(8), stream=cache.stream).synchronize()
    pool.close()
    pool.close()
    log = bench.fake.log()
    registered = [call.values["address"] for call in log if call.name == bench.calls.register]
    unregistered = [call.values["address"] for call in log if call.name == bench.calls.unregister]
    assert unregistered == registered[::-1]

    def count(name: str) -> int:
        return sum(call.name == name for call in log)

    assert count(bench.calls.host_free) == count(bench.calls.host_alloc)
    in_use = 6 + 1  # the cache's layers, and the table of the device pool, which lives as long as that
    assert count(bench.calls.device_free) == count(bench.calls.device_alloc) - in_use
    assert all(call.result == 0 for call in log)


@pytest.mark.parametrize("verb", ["device_alloc", "device_pointer", "host_alloc", "event_create", "stream_create"])
@pytest.mark.parametrize("nth", [1, 2])
def test_any_failure_leaves_nothing_behind(bench: Bench, backend: Backend, verb: str, nth: int) -> None:
    """Whatever the driver refuses, making a pool and moving a page either works or gives everything back."""
    bench.fake.log()
    bench.fake.fail(getattr(bench.calls, verb), 2, nth=nth)
    pages = KVLayout.mla(layers=1, latent_size=64, element_nbytes=1, page_tokens=8)
    with backend.driver.context(0):
        row = 0
        while not row:  # the cache's own allocation may be the one that is refused
            with suppress(OutOfMemory):
                row = backend.driver.device_alloc(8 * 64)

    def job() -> None:
        with HostPool(pages, 64, backend=backend, chunk_nbytes=4096) as pool:
            pool.store(pool.device_pool({"latent": [row]}, tokens=8), [0], [0], stream=0)

    with suppress(OutOfMemory):
        job()
    log = bench.fake.log()
    for took, gave in (
        (bench.calls.register, bench.calls.unregister),
        (bench.calls.device_alloc, bench.calls.device_free),
        (bench.calls.host_alloc, bench.calls.host_free),
        (bench.calls.event_create, bench.calls.event_destroy),
        (bench.calls.stream_create, bench.calls.stream_destroy),
    ):
        taken = sum(c.name == took and c.result == 0 for c in log) - (took == bench.calls.device_alloc)
        assert sum(c.name == gave for c in log) == taken, (took, gave)


def test_a_launch_that_fails(bench: Bench, backend: Backend) -> None:
    """A typed error, nothing moved, and the pool goes on."""
    with make_pool(backend) as pool:
        cache = Cache(pool)
        pool.page_view(0)[:] = 0xEE
        bench.fake.fail(bench.calls.launch, 719)
        with pytest.raises(LaunchFailure, match="kv_transfer_w16_i64"):
            pool.store(cache.pool, [0], [0], stream=cache.stream)
        assert (pool.page_view(0) == 0xEE).all()
        pool.store(cache.pool, [0], [0], stream=cache.stream).synchronize()
        assert pool.page_view(0).tobytes() == cache.page(0)


def test_device_indices_out_of_range_on_cuda(bench: Bench, backend: Backend) -> None:
    """Scenario 10 through the error record in page-locked memory, which the kernel knows by its alias."""

    class OnDevice:
        def __init__(self, values: list[int]) -> None:
            data = np.array(values, np.int32)
            with backend.driver.context(0):
                address = backend.driver.device_alloc(data.nbytes)
            put_at(address, data.tobytes())
            self.__cuda_array_interface__ = {
                "shape": data.shape,
                "typestr": "<i4",
                "data": (address, False),
                "version": 3,
            }

    with make_pool(backend) as pool:
        cache = Cache(pool)
        ticket = pool.store(cache.pool, OnDevice([0, 8, 2]), OnDevice([5, 6, 7]), stream=cache.stream)
        with pytest.raises(IndexOutOfRange, match="source index 8 at position 1"):
            ticket.synchronize()
        assert pool.page_view(5).tobytes() == cache.page(0)
        assert pool.page_view(6).tobytes() == bytes(LAYOUT.page_nbytes)
        assert pool.page_view(7).tobytes() == cache.page(2)


@pytest.mark.parametrize("supported", [0, 1])
def test_wait_layer_with_and_without_stream_memory_operations(bench: Bench, backend: Backend, supported: int) -> None:
    """Where streams cannot wait for a word, the whole transfer's event orders instead."""
    for attribute in STREAM_WAIT_VALUE[bench.vendor.name]:
        bench.fake.set_attribute(attribute, supported)
    with make_pool(backend) as pool:
        cache = Cache(pool)
        with backend.driver.context(0):
            other = backend.driver.stream_create()
        ticket = pool.load(cache.pool, range(8), range(8), stream=cache.stream)
        bench.fake.log()
        ticket.wait_layer(2, other)
        calls = [call.name for call in bench.fake.calls(bench.calls.stream_wait_value, bench.calls.stream_wait_event)]
        assert calls == ([bench.calls.stream_wait_value] if supported else [bench.calls.stream_wait_event])


def test_wait_layer_when_the_driver_refuses_the_word(bench: Bench, backend: Backend) -> None:
    """Older ROCm says that it can and answers 1: the event orders instead, and the word is not tried again."""
    with make_pool(backend) as pool:
        cache = Cache(pool)
        with backend.driver.context(0):
            other = backend.driver.stream_create()
        bench.fake.fail(bench.calls.stream_wait_value, 1)
        for asked in ([bench.calls.stream_wait_value, bench.calls.stream_wait_event], [bench.calls.stream_wait_event]):
            ticket = pool.load(cache.pool, range(8), range(8), stream=cache.stream)
            bench.fake.log()
            ticket.wait_layer(1, other)
            calls = bench.fake.calls(bench.calls.stream_wait_value, bench.calls.stream_wait_event)
            assert [call.name for call in calls] == asked


def test_a_captured_stream_is_refused(bench: Bench, backend: Backend) -> None:
    with make_pool(backend) as pool:
        cache = Cache(pool)
        bench.fake.set_capturing(cache.stream, True)
        with pytest.raises(NotSupported, match="captured"):
            pool.store(cache.pool, [0], [0], stream=cache.stream)
        bench.fake.set_capturing(cache.stream, False)
        pool.store(cache.pool, [0], [0], stream=cache.stream).synchronize()


def test_no_call_at_import(fakes_dir: Path) -> None:
    """Scenario 30: with a driver already in the process, importing every module calls nothing of it."""
    path = FakeCuda.build(fakes_dir).path
    run_python(
        f"""
        from fakes.cuda import FakeCuda
        fake = FakeCuda({path!r})
        import kvferry.drivers.cuda, kvferry.kernels_cubin.launch_cuda, kvferry.hostpool.cli
        assert fake.log() == []
        """
    )


def test_a_driver_without_batch_copies_moves_pages(build_variant: Callable[..., Path], kernels_library: Path) -> None:
    """Scenario 5: the symbol is missing; that engine is told absent and the pages move by kernel."""
    path = build_variant("cuda", "NO_BATCH")
    printed = run_python(
        f"""
        from fakes.cuda import FakeCuda
        fake = FakeCuda({str(path)!r})
        fake.set_kernels({str(kernels_library)!r})
        from kvferry.hostpool import demo
        from kvferry.hostpool.backend import open_backend
        backend = open_backend("cuda")
        print(backend.driver.batch_copy_missing())
        from kvferry.hostpool import HostPool, KVLayout
        layout = KVLayout.mla(layers=1, latent_size=64, element_nbytes=1, page_tokens=8)
        with HostPool(layout, 4, backend=backend) as pool, backend.driver.context(0):
            row = backend.driver.device_alloc(8 * 64)
            from fakes.memory import bytes_at, pattern, put_at
            put_at(row, pattern(8 * 64, 1).tobytes())
            pool.store(pool.device_pool({{"latent": [row]}}, tokens=8), [0], [3], stream=0).synchronize()
            print(pool.page_view(3).tobytes() == bytes_at(row, 8 * 64))
        """
    )
    missing, moved = printed.splitlines()
    assert "cuMemcpyBatchAsync" in missing
    assert moved == "True"
