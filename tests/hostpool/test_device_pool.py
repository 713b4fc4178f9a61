"""What a layer-first cache may look like, and what is refused, with the value and the limit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from kvferry.drivers.errors import ArgumentError
from kvferry.drivers.protocol import StreamHandle
from kvferry.hostpool import Component, DevicePool, HostPool, KVLayout
from kvferry.hostpool.arrays import contiguous_strides
from kvferry.hostpool.backend import Backend

from support.standin import CudaArray, memory

LAYOUT = KVLayout((Component("latent", 2, 12),), 1, 4)  # rows of 24 bytes


def describe(backend: Backend, array: object, tokens: int | None = None, layout: KVLayout = LAYOUT) -> DevicePool:
    return DevicePool(backend.driver, layout, {"latent": [array]}, device=0, tokens=tokens)


@pytest.mark.parametrize(
    ("shape", "typestr", "strides", "tokens", "stride"),
    [
        ((8, 24), "|u1", None, 8, 24),
        ((8, 2, 12), "|u1", None, 8, 24),
        ((8, 1, 24), "|u1", None, 8, 24),
        ((8, 1, 2, 1, 12), "|u1", None, 8, 24),
        ((8, 2, 6), "<f2", None, 8, 24),
        ((8,), "|V24", None, 8, 24),
        ((2, 4, 24), "|u1", None, 8, 24),  # paged, 3-D
        ((2, 4, 2, 12), "|u1", None, 8, 24),  # paged, 4-D
        ((2, 4, 2, 3), "<f4", None, 8, 24),
        ((8, 24), "|u1", (32, 1), 8, 32),  # padded rows
        ((2, 4, 24), "|u1", (128, 32, 1), 8, 32),
        ((1, 24), "|u1", (999, 1), 1, 24),  # one row has no stride
        ((1, 4, 24), "|u1", (7, 24, 1), 4, 24),  # one page has none either
        ((2, 1, 24), "|u1", (48, 5, 1), 2, 48),
        ((10, 24), "|u1", None, 10, 24),  # two tokens fill no page
    ],
)
def test_shapes_that_are_rows(
    backend: Backend,
    stream: StreamHandle,
    shape: tuple[int, ...],
    typestr: str,
    strides: tuple[int, ...] | None,
    tokens: int,
    stride: int,
) -> None:
    """Each row is stored from where it lies, token by token."""
    with backend.driver.context(0):
        base = backend.driver.device_alloc(4096)
    content = memory(base, 4096)
    content[:] = np.random.default_rng(1).integers(0, 256, 4096, np.uint8)
    kv = describe(backend, CudaArray(base, shape, typestr, strides))
    assert (kv.tokens, kv.side.limit("page"), kv.side.limit("token")) == (tokens, tokens // 4, tokens)
    with HostPool(LAYOUT, 3, backend=backend) as pool:
        pool.store(kv, range(tokens), range(tokens), stream=stream, unit="token").synchronize()
        for token in range(tokens):
            stored = pool.page_view(token // 4)[token % 4 * 24 :][:24]
            np.testing.assert_array_equal(stored, content[token * stride :][:24])


@pytest.mark.parametrize(
    ("shape", "strides", "message"),
    [
        ((8, 23), None, r"latent does not consist of rows of 24 bytes: shape \(8, 23\), strides \(23, 1\)"),
        ((24,), None, r"does not consist of rows of 24 bytes: shape \(24,\)"),
        ((8, 7, 5), None, "does not consist of rows of 24 bytes"),
        ((8, 0), None, "does not consist of rows of 24 bytes"),
        ((), None, "does not consist of rows of 24 bytes"),
        ((8, 24), (48, 2), r"rows of layer 0 of latent have gaps: .* strides \(48, 2\) bytes"),
        ((8, 2, 12), (24, 1, 2), r"have gaps: .* strides \(24, 1, 2\)"),  # heads transposed
        ((8, 24), (1, 8), r"have gaps: .* strides \(1, 8\)"),  # transposed
        ((4, 2, 24), (24, 96, 1), r"no single stride from token to token: .* strides \(24, 96, 1\)"),
        ((2, 4, 24), (120, 24, 1), r"no single stride from token to token: .* strides \(120, 24, 1\)"),
        ((8, 24), (23, 1), r"rows of layer 0 of latent overlap: .* strides \(23, 1\)"),
        ((8, 24), (0, 1), "overlap"),
        ((8, 24), (-24, 1), "overlap"),
    ],
)
def test_shapes_that_are_not(
    backend: Backend, shape: tuple[int, ...], strides: tuple[int, ...] | None, message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        describe(backend, CudaArray(4096, shape, "|u1", strides))


@pytest.mark.parametrize("plain", [False, True])
def test_rows_where_the_caller_says_they_are(backend: Backend, stream: StreamHandle, plain: bool) -> None:
    """An array whose shape is ambiguous, and an address, with the distance from token to token."""
    with backend.driver.context(0):
        base = backend.driver.device_alloc(8 * 40)
    content = memory(base, 8 * 40)
    content[:] = np.random.default_rng(1).integers(0, 256, content.size, np.uint8)
    array = base if plain else CudaArray(base, (5, 64), "|u1")
    with pytest.raises(ArgumentError, match=r"say how many tokens|row_strides="):
        describe(backend, array)
    with HostPool(LAYOUT, 3, backend=backend) as pool:
        kv = pool.device_pool({"latent": [array]}, tokens=8, row_strides={"latent": 40})
        pool.store(kv, range(8), range(4, 12), stream=stream, unit="token").synchronize()
        stored = np.concatenate([pool.page_view(page) for page in (1, 2)]).reshape(8, 24)
        np.testing.assert_array_equal(stored, content.reshape(8, 40)[:, :24])


@pytest.mark.parametrize(
    ("tokens", "strides", "message"),
    [
        (8, {"latent": 23}, "the rows of layer 0 of latent overlap: 24 bytes each, and 23"),
        (8, {"latent": True}, "overlap"),
        (8, {"k": 40}, r"row strides of \['k'\] were given, the layout has \['latent'\]"),
        (None, {"latent": 40}, "the row stride of layer 0 of latent was given: say how many tokens"),
        (9, {"latent": 40}, "9 rows of layer 0 of latent take 344 bytes, it has 320"),
    ],
)
def test_row_strides_that_cannot_be(
    backend: Backend, tokens: int | None, strides: dict[str, int], message: str
) -> None:
    array = CudaArray(4096, (5, 64), "|u1")
    with pytest.raises(ArgumentError, match=message):
        DevicePool(backend.driver, LAYOUT, {"latent": [array]}, device=0, tokens=tokens, row_strides=strides)


@pytest.mark.parametrize(
    ("given", "tokens", "message"),
    [
        (4096, None, "layer 0 of latent is a plain address: say how many tokens"),
        (4096, 0, "say how many tokens"),
        (0, 8, "layer 0 of latent has device address 0x0"),
        (-4096, 8, "device address -0x1000"),
        (True, 8, "layer 0 of latent is bool, not an array in device memory"),
        (np.zeros((8, 24), np.uint8), None, "layer 0 of latent is ndarray, not an array in device memory"),
        (None, 8, "is NoneType"),
    ],
)
def test_what_is_neither_an_array_nor_an_address(
    backend: Backend, given: object, tokens: int | None, message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        describe(backend, given, tokens)


def block(tokens: int = 8, row: int = 24, stride: int | None = None) -> CudaArray:
    return CudaArray(4096, (tokens, row), "|u1", (stride or row, 1))


KV = KVLayout((Component("k", 1, 24), Component("v", 1, 8)), 2, 4)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"k": [block()] * 2}, r"components \['k'\] were given, the layout has \['k', 'v'\]"),
        ({"k": [block()] * 2, "w": []}, r"components \['k', 'w'\]"),
        ({"k": [block()], "v": [block(row=8)] * 2}, "k has 1 layers, the layout 2"),
        ({"k": [block(), block(stride=32)], "v": [block(row=8)] * 2}, r"layers of k .* row strides: \[24, 32\] bytes"),
        ({"k": [block(), block(7)], "v": [block(row=8)] * 2}, r"different numbers of tokens: \[7, 8\]"),
        ({"k": [block()] * 2, "v": [block(9, 8)] * 2}, r"different numbers of tokens: \[8, 9\]"),
    ],
)
def test_layers_that_do_not_fit_together(backend: Backend, layers: dict[str, Sequence[object]], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        DevicePool(backend.driver, KV, layers, device=0)


def test_arrays_are_kept_alive_as_long_as_the_pool(backend: Backend) -> None:
    import gc
    import weakref

    array = CudaArray(4096, (8, 24))
    held = weakref.ref(array)
    kv = describe(backend, array)
    del array
    gc.collect()
    assert held() is not None
    del kv
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("shape", [(2, 4, 24), (8, 2, 12)])
def test_contiguous_arrays_need_no_strides(backend: Backend, shape: tuple[int, ...]) -> None:
    with_strides = describe(backend, CudaArray(4096, shape, "|u1", contiguous_strides(shape, 1)))
    assert with_strides.side.components[0].slot == describe(backend, CudaArray(4096, shape)).side.components[0].slot
    assert with_strides.tokens == math.prod(shape) // 24
