"""Aliases that differ from the host's addresses, strides beyond 32 bits, several devices."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.drivers.errors import ArgumentError
from kvferry.drivers.protocol import StreamHandle
from kvferry.hostpool import Component, DevicePool, HostPool, KVLayout
from kvferry.hostpool.backend import Backend, stand_in
from kvferry.hostpool.plan import ComponentSide, Side, plan_transfer
from kvferry.kernels_cubin.abi import TABLE_BY_LAYER

from support.model import apply, host_pages, scramble_pool
from support.reference import RecordingLauncher
from support.standin import CudaArray, GuardedCache, memory, new_stream

WIDE_STRIDE = 2**32 + 8


def test_every_page_goes_through_its_own_chunks_alias(backend: Backend, stream: StreamHandle) -> None:
    """Scenario 6: five chunks, interior pages included."""
    layout = KVLayout.mla(layers=2, latent_size=300, element_nbytes=2, page_tokens=3)
    cache = GuardedCache(backend, layout, 16 * layout.page_tokens, seed=1)
    with HostPool(layout, 14, backend=backend, chunk_nbytes=3 * layout.page_nbytes) as pool:
        registered = pool._resources.memory.chunks
        domain = pool.domain()
        assert domain.kind == "alias"
        assert len(registered) == len(domain.aliases) == 5
        deltas = [int(alias) - chunk.address for alias, chunk in zip(domain.aliases, registered, strict=True)]
        assert 0 not in deltas
        assert len(set(deltas)) > 1
        scramble_pool(pool, 2)
        pages, model = host_pages(pool), cache.copy()
        on_host, on_device = list(range(14)), list(range(15, 1, -1))
        pool.store(cache.pool(pool), on_device, on_host, stream=stream).synchronize()
        apply(storing=True, cache=model, pages=pages, on_device=on_device, on_host=on_host, unit="page", layers=(0, 1))
        np.testing.assert_array_equal(host_pages(pool), pages)


def test_a_slot_stride_beyond_32_bits_moves_the_right_bytes(backend: Backend, stream: StreamHandle) -> None:
    """Scenarios 11 and 15: three tokens, 4 GiB apart, in memory that is only there where it is touched."""
    layout = KVLayout((Component("latent", 1, 24),), 1, 3)
    nbytes = 2 * WIDE_STRIDE + 24
    with backend.driver.context(0):
        base = backend.driver.device_alloc(nbytes)
    rows = [memory(base + token * WIDE_STRIDE, 24) for token in range(3)]
    low = [memory(base + token * (WIDE_STRIDE - 2**32), 24) for token in range(1, 3)]  # where a cut stride would read
    with HostPool(layout, 2, backend=backend) as pool:
        kv = pool.device_pool({"latent": [CudaArray(base, (3, 24), strides=(WIDE_STRIDE, 1))]})
        content = np.random.default_rng(1).integers(1, 256, (3, 24), np.uint8)
        for row, values in zip(rows, content, strict=True):
            row[:] = values
        for unit in ("page", "token"):
            pool.page_view(1)[:] = 0
            indices = ([0], [1]) if unit == "page" else ([0, 1, 2], [3, 4, 5])
            pool.store(kv, *indices, stream=stream, unit=unit).synchronize()
            np.testing.assert_array_equal(pool.page_view(1).reshape(3, 24), content)
        for row in rows:
            row[:] = 0
        before = [view[8:].copy() for view in low]
        pool.load(kv, [1], [0], stream=stream).synchronize()
        np.testing.assert_array_equal(np.stack(rows), content)
        assert before[1].sum() == 0
        np.testing.assert_array_equal(low[1][8:], before[1])
    with backend.driver.context(0):
        backend.driver.device_free(base)


def test_wide_strides_reach_the_argument_block_whole(backend: Backend) -> None:
    """Scenario 15."""
    component = Component("latent", 2, 8)
    launcher = RecordingLauncher()
    with HostPool(KVLayout((component,), 1, 2), 1, backend=Backend(backend.driver, lambda device: launcher)) as pool:
        engine = pool._resources.devices[0].engine
        table = pool._resources.devices[0].table.entry(0)
        sides = [
            Side(
                (ComponentSide(table, 2**33 + 8 * n, 2**34 + 8, WIDE_STRIDE + 8 * n, 2**35 + 8, 2**36 + 8 * n),),
                TABLE_BY_LAYER,
                6,
                2,
                16,
            )
            for n in (0, 1)
        ]
        plan = plan_transfer((component,), *sides, unit="page", layers=range(1))
        assert plan.word_nbytes == 8
        from kvferry.hostpool.indices import pairs

        engine.submit(plan, pairs([0], [2]), new_stream(backend), None)
    args = launcher.launches[0].args["component"][0]
    for n, side in enumerate((args["src"], args["dst"])):
        values = [int(side[name]) for name in ("offset", "page", "slot", "layer", "head")]
        assert values == [2**33 + 8 * n, 2**34 + 8, WIDE_STRIDE + 8 * n, 2**35 + 8, 2**36 + 8 * n]


def test_two_devices_share_a_pool_each_with_its_own_alias(layout: KVLayout) -> None:
    """Stored from one device, loaded on the other; neither can use the other's addresses."""
    backend = stand_in(devices=2)
    with HostPool(layout, 6, backend=backend, devices=[0, 1], chunk_nbytes=layout.page_nbytes) as pool:
        assert not set(pool.domain(0).aliases) & set(pool.domain(1).aliases)
        caches = [GuardedCache(backend, layout, 24, device=device, seed=device) for device in (0, 1)]
        kv = [cache.pool(pool) for cache in caches]
        streams = [new_stream(backend, device) for device in (0, 1)]
        pool.store(kv[0], [0, 2, 4], [5, 3, 1], stream=streams[0]).synchronize()
        pool.load(kv[1], [5, 3, 1], [0, 2, 4], stream=streams[1]).synchronize()
        for mine, theirs in zip(caches[0].rows, caches[1].rows, strict=True):
            for layer in range(layout.layers):
                for page in (0, 2, 4):
                    rows = slice(page * layout.page_tokens, (page + 1) * layout.page_tokens)
                    np.testing.assert_array_equal(mine[layer][rows], theirs[layer][rows])
        with pytest.raises(ArgumentError, match=r"devices \[0, 1\], not for device 7"):
            pool.domain(7)


def test_a_pool_leaves_no_device_current(backend: Backend, layout: KVLayout, stream: StreamHandle) -> None:
    from kvferry.drivers.errors import DriverError

    with HostPool(layout, 2, backend=backend) as pool:
        pool.store(GuardedCache(backend, layout, 8).pool(pool), [0], [0], stream=stream).synchronize()
    with pytest.raises(DriverError, match="invalid context"):
        backend.driver.stream_create()


def test_a_device_pool_of_another_layout_is_refused(backend: Backend, layout: KVLayout, stream: StreamHandle) -> None:
    other = KVLayout.mla(layers=2, latent_size=8, element_nbytes=2, page_tokens=4)
    cache = GuardedCache(backend, other, 8)
    layers = {"latent": cache.bases[0]}
    kv = DevicePool(backend.driver, other, layers, device=0, tokens=8)
    with HostPool(layout, 2, backend=backend) as pool, pytest.raises(ArgumentError, match="another layout"):
        pool.store(kv, [0], [0], stream=stream)
