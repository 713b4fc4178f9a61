"""Through the compiled kernel on the stand-in: both sides hold, byte for byte, what the model says."""

from __future__ import annotations

from typing import cast

import numpy as np
from hypothesis import given, settings

from kvferry.drivers.protocol import StreamHandle
from kvferry.hostpool import HostPool
from kvferry.hostpool.backend import Backend
from kvferry.hostpool.plan import Unit

from support.model import apply, host_pages, scramble_pool, spare_bytes
from support.standin import GuardedCache
from support.strategies import Case, cases


@settings(max_examples=150)
@given(cases())
def test_store_then_load_moves_exactly_these_bytes(backend: Backend, stream: StreamHandle, case: Case) -> None:
    dtype = np.int64 if case.wide else np.int32
    on_device, on_host = np.array(case.on_device, dtype), np.array(case.on_host, dtype)
    unit = cast("Unit", case.unit)
    cache = GuardedCache(
        backend,
        case.layout,
        case.tokens,
        gap_nbytes=case.gap_nbytes,
        shift_nbytes=case.shift_nbytes,
        seed=1,
        heads=case.heads,
    )
    with HostPool(case.layout, case.pages, backend=backend, chunk_nbytes=case.chunk_nbytes) as pool:
        scramble_pool(pool, 2)
        pages, model, kv = host_pages(pool), cache.copy(), cache.pool(pool)
        spare = spare_bytes(pool)

        def both(storing: bool) -> None:
            apply(
                storing=storing,
                cache=model,
                pages=pages,
                on_device=case.on_device,
                on_host=case.on_host,
                unit=case.unit,
                layers=case.layers,
            )
            np.testing.assert_array_equal(host_pages(pool), pages)
            np.testing.assert_array_equal(spare_bytes(pool), spare)
            cache.assert_equals(model)

        original = cache.copy()
        pool.store(kv, on_device, on_host, stream=stream, unit=unit, layers=case.layers).synchronize()
        both(storing=True)
        cache.scramble(3)
        model = cache.copy()
        pool.load(kv, on_host, on_device, stream=stream, unit=unit, layers=case.layers).synchronize()
        both(storing=False)
        for index, other in zip(case.on_device, case.on_host, strict=True):  # gather then scatter is the identity
            if index >= 0 and other >= 0:
                width = case.layout.page_tokens if case.unit == "page" else 1
                rows = slice(index * width, (index + 1) * width)
                for before, after in zip(original.rows, cache.rows, strict=True):
                    for layer in case.layers:
                        np.testing.assert_array_equal(before[layer][rows], after[layer][rows])
    cache.free()
