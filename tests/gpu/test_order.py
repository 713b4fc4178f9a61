"""Streams, tickets, indices on the device: what only a real queue shows."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from kvferry.drivers.errors import IndexOutOfRange, NotSupported
from kvferry.hostpool import HostPool, KVLayout
from kvferry.hostpool.backend import Backend

from support.torch_cache import TorchCache, page_bytes

LAYOUT = KVLayout.mha(layers=8, heads=8, head_size=128, element_nbytes=2, page_tokens=64)
SLEEP_CYCLES = 200_000_000  # a tenth of a second at 2 GHz


def keep_busy(cycles: int) -> None:
    """Occupy the current stream."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def new_stream() -> torch.cuda.Stream:
    """A stream of its own."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def test_store_runs_after_its_stream(backend: Backend) -> None:
    """The producer sleeps on a stream; a store on that stream takes what it wrote, not what was there."""
    cache = TorchCache.random(LAYOUT, 64 * 8, "cuda")
    with HostPool(LAYOUT, 8, backend=backend) as pool:
        kv = pool.device_pool(cache.rows)
        torch.cuda.synchronize()
        stream = new_stream()
        with torch.cuda.stream(stream):
            keep_busy(SLEEP_CYCLES)
            for layers in cache.rows.values():
                for layer in layers:
                    layer.fill_(77)
        ticket = pool.store(kv, np.arange(8), np.arange(8), stream=stream)
        assert not ticket.query()
        ticket.synchronize()
        for page in range(8):
            assert (pool.page_view(page) == 77).all()


@pytest.mark.parametrize("pages", [1, 64])
def test_wait_layer(backend: Backend, pages: int) -> None:
    """A consumer on another stream reads each layer right after waiting for it, many times over the same slot."""
    cache = TorchCache.random(LAYOUT, 64 * pages, "cuda")
    before = cache.host()
    with HostPool(LAYOUT, pages, backend=backend) as pool:
        kv = pool.device_pool(cache.rows)
        every = np.arange(pages)
        torch.cuda.synchronize()
        loader, consumer = new_stream(), new_stream()
        pool.store(kv, every, every, stream=loader).synchronize()
        for round_number in range(5):
            cache.fill(round_number)
            torch.cuda.synchronize()
            with torch.cuda.stream(loader):
                keep_busy(SLEEP_CYCLES // 10)
            ticket = pool.load(kv, every, every, stream=loader)
            copies: dict[str, list[torch.Tensor]] = {name: [] for name in cache.rows}
            with torch.cuda.stream(consumer):
                for layer in range(LAYOUT.layers):
                    ticket.wait_layer(layer, consumer.cuda_stream)
                    for name, rows in cache.rows.items():
                        copies[name].append(rows[layer].clone())
            consumer.synchronize()
            for name, layers in copies.items():
                for layer, got in enumerate(layers):
                    assert np.array_equal(got.cpu().numpy(), before[name][layer]), (round_number, name, layer)
            ticket.synchronize()


def test_dropped_in_mid_transfer(backend: Backend) -> None:
    """Scenario 18: nobody holds the ticket, the device pool or the tensors' list; the bytes arrive all the same."""
    cache = TorchCache.random(LAYOUT, 64 * 64, "cuda")
    before = cache.host()
    with HostPool(LAYOUT, 64, backend=backend) as pool:
        stream = new_stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            keep_busy(SLEEP_CYCLES)
        indices = np.random.default_rng(3).permutation(64)
        pool.store(pool.device_pool(cache.rows), indices, np.arange(64), stream=stream)
        expected = indices.copy()
        indices[:] = 0
        gc.collect()
        stream.synchronize()
        for page in range(64):
            assert np.array_equal(pool.page_view(page), page_bytes(LAYOUT, before, int(expected[page])))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_on_the_device(backend: Backend, dtype: torch.dtype) -> None:
    """Scenarios 10 and 14: right ones move, negative ones are skipped, one out of range is named and moves nothing."""
    cache = TorchCache.random(LAYOUT, 64 * 8, "cuda")
    before = cache.host()
    with HostPool(LAYOUT, 8, backend=backend) as pool:
        kv = pool.device_pool(cache.rows)
        for page in range(8):
            pool.page_view(page)[:] = 0xEE
        src = torch.tensor([0, 1, -1, 3, 4], dtype=dtype, device="cuda")
        dst = torch.tensor([7, 6, 5, 8, -2], dtype=dtype, device="cuda")
        torch.cuda.synchronize()
        stream = new_stream()
        ticket = pool.store(kv, src, dst, stream=stream)
        with pytest.raises(IndexOutOfRange) as caught:
            ticket.synchronize()
        assert (caught.value.side, caught.value.position, caught.value.value) == ("destination", 3, 8)
        assert np.array_equal(pool.page_view(7), page_bytes(LAYOUT, before, 0))
        assert np.array_equal(pool.page_view(6), page_bytes(LAYOUT, before, 1))
        for page in range(6):
            assert (pool.page_view(page) == 0xEE).all()

        largest = torch.iinfo(dtype).max
        src[0] = largest
        torch.cuda.synchronize()
        with pytest.raises(IndexOutOfRange, match=f"source index {largest} at position 0"):
            pool.store(kv, src[:1], dst[:1], stream=stream).synchronize()
        # The context is as good as before.
        pool.store(kv, [2], [2], stream=stream).synchronize()
        assert np.array_equal(pool.page_view(2), page_bytes(LAYOUT, before, 2))


def test_dlpack_and_plain_addresses(backend: Backend) -> None:
    """A device pool from DLPack producers, and from addresses, addresses the same rows."""

    class OnlyDLPack:
        def __init__(self, tensor: torch.Tensor) -> None:
            self._tensor = tensor

        def __dlpack__(self, *, stream: int | None = None) -> object:
            return self._tensor.__dlpack__(stream=stream)

        def __dlpack_device__(self) -> object:
            return self._tensor.__dlpack_device__()

    cache = TorchCache.random(LAYOUT, 64 * 4, "cuda")
    before = cache.host()
    shaped = {name: [t.view(torch.bfloat16).view(4, 64, 8, 128) for t in rows] for name, rows in cache.rows.items()}
    with HostPool(LAYOUT, 12, backend=backend) as pool:
        stream = new_stream()
        torch.cuda.synchronize()
        from_dlpack = pool.device_pool({name: [OnlyDLPack(t) for t in layers] for name, layers in shaped.items()})
        from_addresses = pool.device_pool(
            {name: [t.data_ptr() for t in layers] for name, layers in shaped.items()}, tokens=4 * 64
        )
        from_torch = pool.device_pool(shaped)
        for number, kv in enumerate((from_dlpack, from_addresses, from_torch)):
            pool.store(kv, [0, 1, 2, 3], 4 * number + np.arange(4), stream=stream).synchronize()
        for page in range(12):
            assert np.array_equal(pool.page_view(page), page_bytes(LAYOUT, before, page % 4))


def test_capture_is_refused(backend: Backend) -> None:
    """A transfer in a captured stream raises in the capture instead of leaving a hole in the graph."""
    cache = TorchCache.random(LAYOUT, 64, "cuda")
    with HostPool(LAYOUT, 1, backend=backend) as pool:
        kv = pool.device_pool(cache.rows)
        graph, stream = torch.cuda.CUDAGraph(), new_stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.capture_begin()
            cache.rows["k"][0].add_(1)
            with pytest.raises(NotSupported, match="captured"):
                pool.store(kv, [0], [0], stream=stream)
            graph.capture_end()
        pool.store(kv, [0], [0], stream=stream).synchronize()
