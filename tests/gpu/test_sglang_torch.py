"""SGLang's functions with torch's own tensors, streams and allocator; beside the real ones where they are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvferry.hostpool.sglang import (
    HostTensorAllocator,
    _cuda_host_unregister,
    alloc_with_host_register,
    kvcacheio,
    make_kernel_ptr_table,
)

LAYERS, TOKENS, ROW = 3, 512, 1152


def indices(count: int, limit: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(limit, generator=generator)[:count].to(dtype).cuda()


def page_locked(shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """A page-first pool of (token, layer, row)."""
    granularity = shape[1] * shape[2] * dtype.itemsize
    found: torch.Tensor = alloc_with_host_register(shape, dtype, "cpu", True, HostTensorAllocator(), granularity)
    return found


@pytest.fixture
def pool() -> Iterator[torch.Tensor]:
    """Random bytes."""
    tensor = alloc_with_host_register(
        (TOKENS, LAYERS, ROW), torch.uint8, "cpu", True, HostTensorAllocator(), ROW * LAYERS
    )
    tensor.random_(0, 256)
    yield tensor
    torch.cuda.synchronize()
    _cuda_host_unregister(tensor)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_there_and_back_on_the_current_stream(pool: torch.Tensor, dtype: torch.dtype) -> None:
    """Work on torch's stream before and after is ordered, without any synchronisation between."""
    cache = torch.zeros((LAYERS, TOKENS, ROW), dtype=torch.uint8, device="cuda")
    host, device = indices(300, TOKENS, dtype, 1), indices(300, TOKENS, dtype, 2)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    before = pool.clone()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        for layer in range(LAYERS):
            kvcacheio.transfer_kv_per_layer_mla_pf_lf(pool, cache[layer], host, device, layer, ROW, ROW * LAYERS)
        loaded = cache.clone()
        cache.bitwise_xor_(0xFF)
        table = make_kernel_ptr_table(list(cache), "cuda", host_memory_registered=True)
        assert table.tolist() == [layer.data_ptr() for layer in cache]
        kvcacheio.transfer_kv_all_layer_mla_lf_pf(table, pool, device, host, ROW, ROW * LAYERS, LAYERS)
    stream.synchronize()
    rows, places = host.long().cpu(), device.long().cpu()
    assert torch.equal(loaded.cpu()[:, places], before[rows].transpose(0, 1))
    expected = before.clone()
    expected[rows] = before[rows] ^ 0xFF
    assert torch.equal(pool, expected)


def test_layers_of_a_host_pool_by_a_table(pool: torch.Tensor) -> None:
    layers = pool.view(LAYERS, TOKENS, ROW)  # the same memory, layer-first
    cache = torch.zeros((LAYERS, TOKENS, ROW), dtype=torch.uint8, device="cuda")
    tables = [make_kernel_ptr_table(list(t), "cuda", host_memory_registered=True) for t in (layers, cache)]
    host, device = indices(100, TOKENS, torch.int64, 3), indices(100, TOKENS, torch.int64, 4)
    kvcacheio.transfer_kv_all_layer_mla(tables[0], tables[1], host, device, ROW, LAYERS)
    torch.cuda.synchronize()
    assert torch.equal(cache.cpu()[:, device.cpu()], layers[:, host.cpu()])
    for layer in (0, LAYERS - 1):
        assert kvcacheio.get_device_accessible_ptr(layers[layer], 0) == tables[0].tolist()[layer]


def test_a_page_first_pool_beyond_32_bits() -> None:
    """More than 2**31 elements and 2**32 bytes in one tensor."""
    tokens, layers, row = 520_000, 2, 2112
    layout_dim = layers * row * 2
    pool = alloc_with_host_register(
        (tokens, layers, row), torch.float16, "cpu", True, HostTensorAllocator(), layout_dim
    )
    assert pool.numel() > 2**31
    assert pool.numel() * 2 > 2**32
    host = torch.tensor([0, 508_400, 508_401, tokens - 1])
    pool[host] = torch.randn((4, layers, row)).half()
    cache = torch.zeros((8, row), dtype=torch.float16, device="cuda")
    kvcacheio.transfer_kv_per_layer_mla_pf_lf(pool, cache, host.cuda(), torch.arange(4).cuda(), 1, row * 2, layout_dim)
    torch.cuda.synchronize()
    assert torch.equal(cache[:4].cpu(), pool[host, 1])
    assert not cache[4:].any()
    _cuda_host_unregister(pool)


@pytest.mark.skipif(importlib.util.find_spec("sgl_kernel") is None, reason="sglang-kernel is not installed")
def test_the_real_functions_move_the_same_bytes(pool: torch.Tensor) -> None:
    real: Any = importlib.import_module("sgl_kernel.kvcacheio")
    assert real is not kvcacheio
    host, device = indices(300, TOKENS, torch.int64, 5), indices(300, TOKENS, torch.int64, 6)
    found = []
    for io in (real, kvcacheio):
        cache = torch.zeros((LAYERS, TOKENS, ROW), dtype=torch.uint8, device="cuda")
        for layer in range(LAYERS):
            io.transfer_kv_per_layer_mla_pf_lf(pool, cache[layer], host, device, layer, ROW, ROW * LAYERS)
        torch.cuda.synchronize()
        found.append(cache)
    assert torch.equal(*found)
