"""Pools in which byte offsets do not fit 32 bits (scenario 11), on both sides."""

from __future__ import annotations

import numpy as np
import torch

from kvferry.drivers.protocol import StreamHandle
from kvferry.hostpool import HostPool, KVLayout
from kvferry.hostpool.backend import Backend


def test_far_pages_of_both_sides(backend: Backend, stream: StreamHandle) -> None:
    """4.4e9 bytes on each side, as one layer's tensor on the device: first, middle and last pages, and those beside."""
    layout = KVLayout.mla(layers=1, latent_size=16256, element_nbytes=1, page_tokens=64)
    pages = 4230
    assert pages * layout.page_nbytes > 2**32
    rows = torch.zeros((pages * 64, 16256), dtype=torch.uint8, device="cuda")
    chosen = [0, 2063, 2064, 2065, 2066, 4127, 4128, 4129, pages - 1]
    content = torch.randint(1, 256, (len(chosen), 64, 16256), dtype=torch.uint8, device="cuda")
    by_page = rows.view(pages, 64, 16256)
    for number, page in enumerate(chosen):
        by_page[page] = content[number]
    targets = list(reversed(chosen))
    torch.cuda.synchronize()
    with HostPool(layout, pages, backend=backend) as pool:
        kv = pool.device_pool({"latent": [rows]})
        pool.store(kv, chosen, targets, stream=stream).synchronize()
        for number, page in enumerate(targets):
            assert np.array_equal(pool.page_view(page), content[number].cpu().numpy().ravel()), page
        beside = {page + step for page in targets for step in (-1, 1)} - set(targets)
        assert not any(pool.page_view(near).any() for near in beside if 0 <= near < pages)
        rows.zero_()
        torch.cuda.synchronize()
        pool.load(kv, targets, chosen, stream=stream).synchronize()
        for number, page in enumerate(chosen):
            assert torch.equal(by_page[page], content[number]), page
        assert int(torch.count_nonzero(rows.view(pages, -1).any(dim=1))) == len(chosen)


def test_a_page_stride_of_1039680_bytes(backend: Backend, stream: StreamHandle) -> None:
    """The figures of the report: page 2066 of 57 layers, 16 tokens and rows of 1140 bytes lies beyond 2**31."""
    layout = KVLayout.mla(layers=57, latent_size=1140, element_nbytes=1, page_tokens=16)
    assert layout.page_nbytes == 1_039_680
    assert 2066 * layout.page_nbytes > 2**31
    rows = [torch.randint(0, 256, (48, 1140), dtype=torch.uint8, device="cuda") for _ in range(57)]
    want = [layer.clone() for layer in rows]
    torch.cuda.synchronize()
    with HostPool(layout, 2100, backend=backend) as pool:
        kv = pool.device_pool({"latent": rows})
        pool.store(kv, [0, 1, 2], [2066, 2099, 2065], stream=stream).synchronize()
        for device_page, page in ((0, 2066), (1, 2099), (2, 2065)):
            expected = torch.stack([layer[device_page * 16 : device_page * 16 + 16] for layer in want])
            assert np.array_equal(pool.page_view(page), expected.cpu().numpy().ravel())
        for layer in rows:
            layer.zero_()
        torch.cuda.synchronize()
        pool.load(kv, [2066, 2099, 2065], [0, 1, 2], stream=stream).synchronize()
        assert all(torch.equal(a, b) for a, b in zip(rows, want, strict=True))
