"""Indices as people have them (scenario 14): each kind works, or the message says why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from kvferry.drivers.errors import ArgumentError
from kvferry.drivers.protocol import StreamHandle
from kvferry.hostpool import HostPool, KVLayout
from kvferry.hostpool.backend import Backend

from support.model import apply, host_pages, scramble_pool
from support.standin import CudaArray, DeviceValues, GuardedCache

PAGES = [3, 0, 2]

Make = Callable[[Backend, list[int]], object]


def every_other(values: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """The values as an array with others between them."""
    wide = np.full(2 * len(values), 10**9)
    wide[::2] = values
    return wide[::2]


KINDS: dict[str, Make] = {
    "list": lambda backend, values: values,
    "tuple": lambda backend, values: tuple(values),
    "numpy int32": lambda backend, values: np.array(values, np.int32),
    "numpy int64": lambda backend, values: np.array(values, np.int64),
    "numpy uint8": lambda backend, values: np.array(values, np.uint8),
    "numpy big-endian": lambda backend, values: np.array(values, ">i4"),
    "not contiguous": lambda backend, values: every_other(values),
    "backwards": lambda backend, values: np.array(values[::-1])[::-1],
    "torch int64": lambda backend, values: torch.tensor(values),
    "torch int32": lambda backend, values: torch.tensor(values, dtype=torch.int32),
    "torch not contiguous": lambda backend, values: torch.tensor([[value, -5] for value in values])[:, 0],
    "device int32": lambda backend, values: DeviceValues(backend, values, "<i4"),
    "device int64": lambda backend, values: DeviceValues(backend, values, "<i8"),
}


@pytest.fixture
def pool(backend: Backend, layout: KVLayout) -> Iterator[HostPool]:
    with HostPool(layout, 5, backend=backend) as pool:
        scramble_pool(pool, 1)
        yield pool


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_that_work(backend: Backend, stream: StreamHandle, pool: HostPool, kind: str) -> None:
    cache = GuardedCache(backend, pool.layout, 16, seed=2)
    pages, model, kv = host_pages(pool), cache.copy(), cache.pool(pool)
    on_host = [4, 1, 0]
    given = [KINDS[kind](backend, values) for values in (PAGES, on_host)]
    pool.store(kv, *given, stream=stream).synchronize()
    apply(storing=True, cache=model, pages=pages, on_device=PAGES, on_host=on_host, unit="page", layers=(0, 1))
    np.testing.assert_array_equal(host_pages(pool), pages)


def test_int32_and_int64_on_the_host_go_together(backend: Backend, stream: StreamHandle, pool: HostPool) -> None:
    cache = GuardedCache(backend, pool.layout, 16, seed=2)
    pages, model = host_pages(pool), cache.copy()
    sides = np.array(PAGES, np.int32), np.array([4, 1, 0], np.int64)
    pool.store(cache.pool(pool), *sides, stream=stream).synchronize()
    apply(storing=True, cache=model, pages=pages, on_device=PAGES, on_host=[4, 1, 0], unit="page", layers=(0, 1))
    np.testing.assert_array_equal(host_pages(pool), pages)


@pytest.mark.parametrize(
    "nothing",
    [[], (), np.zeros(0, np.int32), np.zeros(0), torch.zeros(0, dtype=torch.int64), CudaArray(0, (0,), "<i8")],
    ids=["list", "tuple", "int32", "float", "torch", "device"],
)
def test_empty_is_a_no_op(backend: Backend, stream: StreamHandle, pool: HostPool, nothing: object) -> None:
    cache = GuardedCache(backend, pool.layout, 16)
    before, model, kv = host_pages(pool), cache.copy(), cache.pool(pool)
    for transfer in (pool.store, pool.load):
        ticket = transfer(kv, nothing, nothing, stream=stream)
        ticket.synchronize(timeout_s=0)
        ticket.wait(stream)
        ticket.wait_layer(1, stream)
        assert (ticket.query(), ticket.nbytes) == (True, 0)
    np.testing.assert_array_equal(host_pages(pool), before)
    cache.assert_equals(model)


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        ([1.0, 2.0], [1, 2], "source indices must be whole numbers, not float64"),
        ([0, 1], [True, False], "destination indices must be whole numbers, not bool"),
        ([[0, 1]], [0, 1], r"source indices must have one dimension, not shape \(1, 2\)"),
        (3, [0], r"source indices must have one dimension, not shape \(\)"),
        ([0, 1], [0], "2 source indices for 1 destination indices"),
        ([], [0], "0 source indices for 1 destination indices"),
        (np.array([2**63], np.uint64), [0], "source index 9223372036854775808 does not fit"),
        ([2**70], [0], "source indices must be whole numbers, not object"),
        (["a"], [0], "source indices must be whole numbers, not <U1"),
        (torch.tensor([0.5]), [0], "source indices must be whole numbers, not float32"),
        (CudaArray(64, (1,), "<i8"), [0], "source indices are on the device and the others are not"),
        ([0], CudaArray(64, (1,), "<i8"), "destination indices are on the device and the others are not"),
        (CudaArray(64, (1,), "<i8"), CudaArray(64, (1,), "<i4"), "have 8 and 4 bytes"),
        (CudaArray(64, (2,), "<i8"), CudaArray(64, (1,), "<i8"), "2 source indices for 1 destination"),
        (CudaArray(64, (1,), "<f4"), CudaArray(64, (1,), "<i4"), "one row of int32 or int64, not shape"),
        (CudaArray(64, (1,), "<i2"), CudaArray(64, (1,), "<i4"), "2-byte elements"),
        (CudaArray(64, (1, 2), "<i8"), CudaArray(64, (2,), "<i8"), r"not shape \(1, 2\), strides \(16, 8\) bytes"),
        (CudaArray(64, (2,), "<i8", (16,)), CudaArray(64, (2,), "<i8"), r"must be contiguous.*strides \(16,\)"),
    ],
)
def test_kinds_that_are_refused(
    backend: Backend, stream: StreamHandle, pool: HostPool, src: object, dst: object, message: str
) -> None:
    cache = GuardedCache(backend, pool.layout, 16)
    before, kv = host_pages(pool), cache.pool(pool)
    with pytest.raises(ArgumentError, match=message):
        pool.store(kv, src, dst, stream=stream)
    np.testing.assert_array_equal(host_pages(pool), before)


@pytest.mark.parametrize("layers", [2, -1, range(0), range(1, 3), range(0, 2, 2), 0.5, True, [0]])
def test_layers_outside_the_layout_are_refused(
    backend: Backend, stream: StreamHandle, pool: HostPool, layers: object
) -> None:
    kv = GuardedCache(backend, pool.layout, 16).pool(pool)
    with pytest.raises(ArgumentError, match="non-empty range inside 0 to 2"):
        pool.load(kv, [0], [0], stream=stream, layers=layers)  # type: ignore[arg-type]


def test_another_unit_is_refused(backend: Backend, stream: StreamHandle, pool: HostPool) -> None:
    kv = GuardedCache(backend, pool.layout, 16).pool(pool)
    with pytest.raises(ArgumentError, match="'page' or 'token', not 'row'"):
        pool.load(kv, [0], [0], stream=stream, unit="row")  # type: ignore[arg-type]
