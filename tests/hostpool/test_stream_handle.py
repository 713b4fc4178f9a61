"""Streams as people have them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kvferry.drivers.errors import ArgumentError
from kvferry.hostpool import HostPool, KVLayout
from kvferry.hostpool.backend import Backend
from kvferry.hostpool.streams import stream_handle

from support.standin import GuardedCache


class Protocol:
    """cuda.core and others."""

    ptr = 5

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 77


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0),
        (2**47 + 5, 2**47 + 5),
        (np.uint64(2**63 + 1), 2**63 + 1),
        (SimpleNamespace(cuda_stream=0x1234), 0x1234),  # torch
        (SimpleNamespace(ptr=0x4321), 0x4321),  # CuPy
        (SimpleNamespace(cuda_stream=0), 0),  # torch's default stream
        (Protocol(), 77),
    ],
)
def test_kinds_that_are_streams(stream: object, handle: int) -> None:
    found = stream_handle(stream)
    assert type(found) is int
    assert found == handle


@pytest.mark.parametrize("stream", [None, True, 1.0, "1", SimpleNamespace(ptr=None), SimpleNamespace(), object()])
def test_kinds_that_are_not(stream: object) -> None:
    with pytest.raises(ArgumentError, match=f"not {type(stream).__name__}"):
        stream_handle(stream)


def test_the_default_stream_and_an_unknown_one(backend: Backend, layout: KVLayout) -> None:
    from kvferry.drivers.errors import DriverError

    with HostPool(layout, 2, backend=backend) as pool:
        cache = GuardedCache(backend, layout, 8)
        kv = cache.pool(pool)
        pool.store(kv, [1], [0], stream=0).synchronize()
        k = pool.page_view(0)[: cache.rows[0][0][4:8].size]
        np.testing.assert_array_equal(k, cache.rows[0][0][4:8].ravel())
        with pytest.raises(DriverError, match="stream 123456"):
            pool.store(kv, [1], [0], stream=123456)
        assert pool._resources.devices[0].engine.busy() == 0
