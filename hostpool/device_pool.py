"""The GPU's half of a transfer: somebody else's layer-first KV cache, described so that a kernel can address it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence

import numpy as np

from kvferry.drivers.errors import ArgumentError
from kvferry.drivers.protocol import HostMemoryDriver
from kvferry.hostpool.arrays import DeviceArray, contiguous_strides, device_array
from kvferry.hostpool.layout import Component, KVLayout
from kvferry.hostpool.plan import ComponentSide, Side
from kvferry.hostpool.tables import DeviceTable
from kvferry.kernels_cubin.abi import TABLE_BY_LAYER

LayerArrays = Mapping[str, Sequence[object]]
"""By component name: one device array, or one device address, a layer."""


class DevicePool:
    """A layer-first KV cache in device memory.

    Each layer of each component is rows of ``row_nbytes``, one a token: an array of shape (tokens, ...) or
    (pages, page tokens, ...) whose last dimensions make up the row without gaps, or a plain device address together
    with ``tokens``. Rows may lie further apart than they are long, by the same stride in every layer of a component.

    An array that does not say by its shape where its rows are is refused, with its strides in the message.
    ``row_strides`` says it instead, in bytes from token to token by component: the first row is then where the array
    or the address begins, and ``tokens`` says how many there are.

    ``heads`` says that the cache holds just these heads of every component, as a rank under tensor parallelism does:
    ``layout`` is then still that of the host pages with all heads, and rows are ``len(heads) * head_nbytes`` long. The
    range must be one for every component, and in ``page_unified`` whole head groups or inside one; ``LayoutError``.

    Page ``p`` is the tokens from ``p * page_tokens`` on. Arrays are kept alive; behind a plain address that is the
    caller's part.
    """

    def __init__(
        self,
        driver: HostMemoryDriver,
        layout: KVLayout,
        layers: LayerArrays,
        *,
        device: int,
        tokens: int | None = None,
        heads: range | None = None,
        row_strides: Mapping[str, int] | None = None,
    ) -> None:
        expected = [component.name for component in layout.components]
        if sorted(layers) != sorted(expected):
            raise ArgumentError(f"components {sorted(layers)} were given, the layout has {sorted(expected)}")
        told = dict(row_strides or {})
        if not told.keys() <= set(expected):
            raise ArgumentError(f"row strides of {sorted(told)} were given, the layout has {sorted(expected)}")
        self.device, self.layout, self.heads = device, layout, heads
        on_host = [layout.strides(number, heads) for number in range(len(layout.components))]
        self.components = tuple(
            Component(component.name, s.heads, s.head_nbytes)
            for component, s in zip(layout.components, on_host, strict=True)
        )
        """What a row holds of each component, by what the host page's head axis counts: heads, or groups of them."""
        addresses: list[int] = []
        strides: list[int] = []
        counts: set[int] = set()
        self._owners: list[object] = []
        for component in self.components:
            given = layers[component.name]
            if len(given) != layout.layers:
                raise ArgumentError(f"{component.name} has {len(given)} layers, the layout {layout.layers}")
            stride = told.get(component.name)
            rows = [self._rows(component, number, array, tokens, stride) for number, array in enumerate(given)]
            found = sorted({stride for _, stride, _ in rows})
            if len(found) != 1:
                raise ArgumentError(f"the layers of {component.name} have different row strides: {found} bytes")
            addresses += [address for address, _, _ in rows]
            strides.append(rows[0][1])
            counts |= {count for _, _, count in rows}
            self._owners.append(given)
        if len(counts) != 1:
            raise ArgumentError(f"layers of different numbers of tokens: {sorted(counts)}")
        (self.tokens,) = counts
        table = DeviceTable(driver, device, np.array(addresses, np.uint64))
        # Not at exit: this would run before the pool's finalizer waits for transfers that read the table.
        weakref.finalize(self, table.release).atexit = False
        self.side = Side(
            tuple(
                ComponentSide(
                    table=table.entry(number * layout.layers),
                    offset=0,
                    page=layout.page_tokens * stride,
                    slot=stride,
                    layer=0,
                    head=component.head_nbytes,
                )
                for number, (component, stride) in enumerate(zip(self.components, strides, strict=True))
            ),
            TABLE_BY_LAYER,
            self.tokens,
            layout.page_tokens,
            table.alignment,
        )

    @staticmethod
    def _rows(
        component: Component, layer: int, given: object, tokens: int | None, stride: int | None
    ) -> tuple[int, int, int]:
        """(address, row stride in bytes, tokens) of one layer."""
        what, row = f"layer {layer} of {component.name}", component.row_nbytes
        if stride is not None and (isinstance(stride, bool) or stride < row):
            raise ArgumentError(f"the rows of {what} overlap: {row} bytes each, and {stride} from one to the next")
        if isinstance(given, (int, np.integer)) and not isinstance(given, bool):
            if tokens is None or tokens < 1:
                raise ArgumentError(f"{what} is a plain address: say how many tokens there are with tokens=")
            if int(given) <= 0:
                raise ArgumentError(f"{what} has device address {int(given):#x}")
            return int(given), stride or row, tokens
        array = device_array(given)
        if array is None:
            raise ArgumentError(f"{what} is {type(given).__name__}, not an array in device memory and not an address")
        if stride is not None:
            if tokens is None or tokens < 1:
                raise ArgumentError(f"the row stride of {what} was given: say how many tokens there are with tokens=")
            need = (tokens - 1) * stride + row
            if need > array.extent_nbytes:
                raise ArgumentError(f"{tokens} rows of {what} take {need} bytes, it has {array.extent_nbytes}")
            return array.address, stride, tokens
        if tokens is not None:
            raise ArgumentError(f"{what} is an array and says itself how many tokens it has: leave tokens= out")
        return array.address, *_row_stride(what, row, array)


def _row_stride(what: str, row_nbytes: int, array: DeviceArray) -> tuple[int, int]:
    """(row stride in bytes, tokens): the last dimensions are one gapless row, the first ones count rows evenly."""
    inner, shown = len(array.shape), f"{array.describe()}; row_strides= says where rows are if the shape does not"
    while inner > 0 and math.prod(array.shape[inner:]) * array.itemsize < row_nbytes:
        inner -= 1
    if math.prod(array.shape[inner:]) * array.itemsize != row_nbytes or inner == 0:
        raise ArgumentError(f"{what} does not consist of rows of {row_nbytes} bytes: {shown}")
    while array.shape[inner - 1] == 1 and inner > 1:
        inner -= 1
    row, outer = array.shape[inner:], array.shape[:inner]
    solid = contiguous_strides(row, array.itemsize)
    if any(n > 1 and have != want for n, have, want in zip(row, array.strides[inner:], solid, strict=True)):
        raise ArgumentError(f"the rows of {what} have gaps: {shown}")
    stride = array.strides[inner - 1] if outer[-1] > 1 else row_nbytes
    for axis in range(inner - 1):
        if array.shape[axis] > 1 and array.strides[axis] != stride * math.prod(array.shape[axis + 1 : inner]):
            raise ArgumentError(f"{what} has no single stride from token to token: {shown}")
    if stride < row_nbytes:
        raise ArgumentError(f"the rows of {what} overlap: {shown}")
    return stride, math.prod(outer)
