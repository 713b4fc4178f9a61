"""A pool on an emulated AMD GPU: tables, hip-python, the fake HIP, the shipped code object, bytes in the pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest

from kvferry.drivers.errors import IllegalAddress
from kvferry.drivers.hip import HipDriver
from kvferry.drivers.protocol import DeviceAddress, HostAddress, StreamHandle
from kvferry.hostpool import HostPool, KVLayout
from kvferry.hostpool.backend import Backend
from kvferry.kernels_cubin import abi
from kvferry.kernels_cubin.launch_hip import HipLauncher
from kvferry.kernels_cubin.manifest import Manifest

from emulator.device import EmulatedGpu
from emulator.report import has_decoder, shipped
from fakes.hip import FakeHip
from support.model import apply, host_pages, scramble_pool
from support.standin import GuardedCache, new_stream

pytestmark = pytest.mark.emulated

DEVICES = [target for target in shipped() if has_decoder(target) and not target.endswith("-generic")]
DEVICES += ["gfx1102", "gfx1151"]  # these have no code object of their own: the generic one serves
PAGES, TOKENS, CHUNK_NBYTES = 60, 32, 4096

Unit = Literal["page", "token"]
Indices = npt.NDArray[np.int32] | npt.NDArray[np.int64]


@pytest.fixture
def backend(fake_hip: FakeHip, gpu: EmulatedGpu, architecture: str) -> Backend:
    fake_hip.set_architecture(f"{architecture}:sramecc+:xnack-" if architecture.startswith("gfx9") else architecture)
    driver = HipDriver()
    return Backend(driver, lambda device: HipLauncher(driver, device, Manifest.load()))


@pytest.fixture
def stream(backend: Backend) -> StreamHandle:
    return new_stream(backend)


def mha(word_nbytes: int) -> KVLayout:
    """Rows of K and V that differ and that only words of ``word_nbytes`` divide."""
    return KVLayout.mha(
        layers=3, heads=2, head_size=5 * word_nbytes, v_head_size=3 * word_nbytes, element_nbytes=1, page_tokens=4
    )


def mla(word_nbytes: int) -> KVLayout:
    return KVLayout.mla(layers=3, latent_size=13 * word_nbytes, element_nbytes=1, page_tokens=4, order="page_first")


def make_pool(backend: Backend, layout: KVLayout) -> HostPool:
    """Several chunks, the distance between host and device another in each."""
    nbytes = max(CHUNK_NBYTES, 2 * layout.page_nbytes)
    pool = HostPool(layout, PAGES, backend=backend, chunk_nbytes=nbytes, memory="registered")
    chunks, aliases = pool._resources.memory.chunks, pool.domain().aliases
    assert len({alias - chunk.address for chunk, alias in zip(chunks, aliases, strict=True)}) == len(chunks) > 1
    return pool


def make_cache(backend: Backend, layout: KVLayout, word_nbytes: int) -> GuardedCache:
    """Rows with gaps, so that each is a run of its own; bases that only ``word_nbytes`` divides."""
    return GuardedCache(backend, layout, TOKENS, gap_nbytes=word_nbytes, shift_nbytes=word_nbytes)


def indices(unit: Unit, dtype: type[np.generic], seed: int) -> tuple[Indices, Indices]:
    """(on the device, in the pool), each index once."""
    random, each = np.random.default_rng(seed), 4 if unit == "page" else 1
    count = 6 if unit == "page" else 9
    return (
        random.permutation(TOKENS // each)[:count].astype(dtype),
        random.permutation(PAGES * 4 // each)[:count].astype(dtype),
    )


@pytest.mark.parametrize("make_layout", [mha, mla], ids=["mha", "mla"])
@pytest.mark.parametrize("index", [np.int32, np.int64], ids=["i32", "i64"])
@pytest.mark.parametrize("word_nbytes", abi.WORD_NBYTES)
@pytest.mark.parametrize("architecture", DEVICES)
def test_a_pool_stores_and_loads(
    gpu: EmulatedGpu,
    backend: Backend,
    stream: StreamHandle,
    word_nbytes: int,
    index: type[np.generic],
    make_layout: Callable[[int], KVLayout],
) -> None:
    layout = make_layout(word_nbytes)
    unit: Unit = "page" if make_layout is mha else "token"
    with make_pool(backend, layout) as pool:
        cache = make_cache(backend, layout, word_nbytes)
        kv = cache.pool(pool)
        scramble_pool(pool, 1)
        for storing, layers in ((True, range(3)), (False, range(1, 3))):
            cache.scramble(3 if storing else 4)
            model, pages = cache.copy(), host_pages(pool)
            on_device, on_host = indices(unit, index, seed=word_nbytes + storing)
            if storing:
                ticket = pool.store(kv, on_device, on_host, unit=unit, layers=layers, stream=stream)
            else:
                ticket = pool.load(kv, on_host, on_device, unit=unit, layers=layers, stream=stream)
            ticket.synchronize()
            apply(
                storing=storing,
                cache=model,
                pages=pages,
                on_device=on_device.tolist(),
                on_host=on_host.tolist(),
                unit=unit,
                layers=layers,
            )
            cache.assert_equals(model)
            np.testing.assert_array_equal(host_pages(pool), pages)
        assert {launch.kernel for launch in gpu.launches} == {abi.kernel_name(word_nbytes, np.dtype(index).itemsize)}
        assert {f"kv_transfer.{launch.architecture}.hsaco" for launch in gpu.launches} == {pool.artefact_file()}
        cache.free()


@pytest.mark.parametrize("architecture", ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"])
@pytest.mark.parametrize("mistake", ["host addresses", "the first chunk's distance"])
def test_a_wrong_table_does_not_pass(
    gpu: EmulatedGpu,
    backend: Backend,
    stream: StreamHandle,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    mistake: str,
) -> None:
    """Both mistakes that are right where every address has the same distance, 0 on most CUDA machines."""
    layout = mha(16)
    right = HipDriver.host_device_pointer
    first: list[int] = []

    def wrong(driver: HipDriver, address: HostAddress) -> DeviceAddress:
        if mistake == "the first chunk's distance":
            first.append(int(right(driver, address)) - int(address))
            return DeviceAddress(int(address) + first[0])
        return DeviceAddress(int(address))

    with monkeypatch.context() as patch:
        patch.setattr(HipDriver, "host_device_pointer", wrong)
        pool = HostPool(layout, PAGES, backend=backend, chunk_nbytes=CHUNK_NBYTES, memory="registered", devices=[0])
    cache = make_cache(backend, layout, 16)
    kv = cache.pool(pool)
    with pytest.raises(IllegalAddress):
        pool.store(kv, range(8), range(PAGES - 8, PAGES), stream=stream).synchronize()
    assert gpu.fault is not None
    assert gpu.fault.is_write
