"""Byte-exact round trips on the GPU, with the shipped binaries."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvferry.drivers.protocol import StreamHandle
from kvferry.hostpool import HostPool, KVLayout
from kvferry.hostpool.backend import Backend
from kvferry.hostpool.layout import PageOrder
from kvferry.hostpool.plan import Unit

from support.torch_cache import TorchCache, page_bytes

MakeLayout = Callable[[int, PageOrder], KVLayout]


def mha(page_tokens: int, order: PageOrder) -> KVLayout:
    """Rows of 2048 bytes."""
    return KVLayout.mha(layers=6, heads=8, head_size=128, element_nbytes=2, page_tokens=page_tokens, order=order)


def mla(page_tokens: int, order: PageOrder) -> KVLayout:
    """Rows of 1152 bytes."""
    return KVLayout.mla(layers=7, latent_size=576, element_nbytes=2, page_tokens=page_tokens, order=order)


@pytest.mark.parametrize("order", ["page_first_direct", "page_first"])
@pytest.mark.parametrize("make", [mha, mla])
@pytest.mark.parametrize("page_tokens", [1, 16, 64])
@pytest.mark.parametrize("tokens", [1, 7, 64, 512, 4096])
def test_round_trip(
    backend: Backend, stream: StreamHandle, order: PageOrder, make: MakeLayout, page_tokens: int, tokens: int
) -> None:
    """Pages where the tokens fill pages, single tokens where they do not; random places on both sides."""
    layout = make(page_tokens, order)
    random = np.random.default_rng(tokens)
    unit: Unit = "page" if tokens % page_tokens == 0 else "token"
    per_index = page_tokens if unit == "page" else 1
    pages = -(-tokens // page_tokens) + 3
    cache = TorchCache.random(layout, pages * page_tokens, "cuda", seed=tokens)
    before = cache.host()
    with HostPool(layout, pages + 5, backend=backend, chunk_nbytes=3 * layout.page_nbytes) as pool:
        kv = pool.device_pool(cache.rows)
        count = tokens // per_index
        on_device = random.permutation(pages * page_tokens // per_index)[:count]
        on_host = random.permutation(pool.pages * page_tokens // per_index)[:count]
        for page in range(pool.pages):
            pool.page_view(page)[:] = 0xEE

        torch.cuda.synchronize()
        pool.store(kv, on_device, on_host, stream=stream, unit=unit).synchronize()
        if unit == "page":
            stored = dict(zip(on_host.tolist(), on_device.tolist(), strict=True))
            for page in range(pool.pages):
                if page in stored:
                    assert np.array_equal(pool.page_view(page), page_bytes(layout, before, stored[page]))
                else:
                    assert (pool.page_view(page) == 0xEE).all()

        cache.fill(0x11)
        torch.cuda.synchronize()
        pool.load(kv, on_host, on_device, stream=stream, unit=unit).synchronize()
        after = cache.host()
        rows = (on_device[:, None] * per_index + np.arange(per_index)).ravel()
        untouched = np.setdiff1d(np.arange(pages * page_tokens), rows)
        for name, layers in before.items():
            for want, got in zip(layers, after[name], strict=True):
                assert np.array_equal(got[rows], want[rows])
                assert (got[untouched] == 0x11).all()
    assert cache.guards_intact()


@pytest.mark.parametrize("row_nbytes", [1, 2, 6, 92, 96, 132, 176, 368, 432, 576, 656, 37440])
@pytest.mark.parametrize("order", ["page_first_direct", "page_first"])
def test_odd_rows(backend: Backend, stream: StreamHandle, row_nbytes: int, order: PageOrder) -> None:
    """Scenario 9 on the GPU: words of 1, 4, 8 and 16 bytes, long and short runs."""
    layout = KVLayout.mla(layers=3, latent_size=row_nbytes, element_nbytes=1, page_tokens=16, order=order)
    cache = TorchCache.random(layout, 40 * 16, "cuda", seed=row_nbytes)
    before = cache.host()
    random = np.random.default_rng(row_nbytes)
    with HostPool(layout, 50, backend=backend) as pool:
        kv = pool.device_pool(cache.rows)
        on_device, on_host = random.permutation(40), random.permutation(50)[:40]
        torch.cuda.synchronize()
        pool.store(kv, on_device, on_host, stream=stream).synchronize()
        for there, here in zip(on_host, on_device, strict=True):
            assert np.array_equal(pool.page_view(int(there)), page_bytes(layout, before, int(here)))
        cache.fill(0)
        torch.cuda.synchronize()
        pool.load(kv, on_host, on_device, stream=stream).synchronize()
        after = cache.host()
    assert all(np.array_equal(a, b) for name in before for a, b in zip(before[name], after[name], strict=True))
    assert cache.guards_intact()


def test_layers_of_a_load(backend: Backend, stream: StreamHandle) -> None:
    """A range of layers and a single layer move just those."""
    layout = mha(16, "page_first_direct")
    cache = TorchCache.random(layout, 32 * 16, "cuda")
    before = cache.host()
    with HostPool(layout, 32, backend=backend) as pool:
        kv = pool.device_pool(cache.rows)
        pages = np.arange(32)
        torch.cuda.synchronize()
        pool.store(kv, pages, pages[::-1], stream=stream).synchronize()
        cache.fill(0)
        torch.cuda.synchronize()
        pool.load(kv, pages[::-1], pages, stream=stream, layers=range(1, 3)).synchronize()
        pool.load(kv, pages[::-1], pages, stream=stream, layers=5).synchronize()
        after = cache.host()
    for name, layers in after.items():
        for layer, got in enumerate(layers):
            want = before[name][layer] if layer in (1, 2, 5) else np.zeros_like(got)
            assert np.array_equal(got, want), (name, layer)


def test_more_than_four_gigabytes(backend: Backend, stream: StreamHandle) -> None:
    """Rows beyond 2**32 bytes of one tensor, and beyond 2**31 elements: strides are 64-bit all the way."""
    layout = KVLayout.mla(layers=1, latent_size=37440, element_nbytes=1, page_tokens=1)
    tokens = (2**32 + 2**28) // 37440
    rows = torch.empty((tokens, 37440), dtype=torch.uint8, device="cuda")
    picked = np.array([0, 1, tokens // 2, tokens - 2, tokens - 1])
    want = torch.randint(0, 256, (5, 37440), dtype=torch.uint8)
    rows[torch.from_numpy(picked).cuda()] = want.cuda()
    with HostPool(layout, 8, backend=backend) as pool:
        kv = pool.device_pool({"latent": [rows]})
        torch.cuda.synchronize()
        pool.store(kv, picked, [7, 2, 0, 5, 3], stream=stream).synchronize()
        for row, page in enumerate([7, 2, 0, 5, 3]):
            assert np.array_equal(pool.page_view(page), want[row].numpy())
        rows.zero_()
        torch.cuda.synchronize()
        pool.load(kv, [7, 2, 0, 5, 3], picked, stream=stream).synchronize()
    assert torch.equal(rows[torch.from_numpy(picked).cuda()].cpu(), want)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32], ids=str)
def test_caches_of_any_element_type(backend: Backend, stream: StreamHandle, dtype: torch.dtype) -> None:
    """Tensors as a model has them, one that requires a gradient among them."""
    layout = KVLayout.mla(layers=2, latent_size=576, element_nbytes=dtype.itemsize, page_tokens=16)
    rows = [torch.randn((64, 576), device="cuda").to(dtype) for _ in range(2)]
    if dtype is torch.float32:
        rows[0].requires_grad_()
    want = [layer.detach().view(torch.uint8).cpu() for layer in rows]
    back = [torch.zeros_like(layer.detach()) for layer in rows]
    torch.cuda.synchronize()
    with HostPool(layout, 4, backend=backend) as pool:
        pool.store(pool.device_pool({"latent": rows}), range(4), range(4), stream=stream).synchronize()
        pool.load(pool.device_pool({"latent": back}), range(4), range(4), stream=stream).synchronize()
    assert all(torch.equal(layer.view(torch.uint8).cpu(), bytes_) for layer, bytes_ in zip(back, want, strict=True))
