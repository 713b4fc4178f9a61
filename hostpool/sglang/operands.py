"""Tensors as addresses, sizes and strides, wherever they are; nothing of torch is imported."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvferry.drivers.errors import ArgumentError
from kvferry.hostpool.arrays import DeviceArray, contiguous_strides, device_array, extent_nbytes


class KVCacheIOError(ArgumentError, RuntimeError):
    """A call that cannot be right; also the ``RuntimeError`` that callers of ``sgl_kernel`` know."""


@dataclass(frozen=True)
class Operand:
    """A tensor. ``strides`` are in bytes; ``device`` is a GPU's number where the tensor tells it."""

    what: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    on_device: bool
    device: int | None
    owner: object

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.itemsize

    @property
    def extent_nbytes(self) -> int:
        """Bytes from the first element's to the last one's end, gaps included."""
        return extent_nbytes(self.shape, self.strides, self.itemsize)

    def describe(self) -> str:
        """For messages."""
        where = "device" if self.on_device else "host"
        return f"{where} memory, shape {self.shape}, strides {self.strides} bytes, {self.itemsize}-byte elements"

    def gapless(self) -> Operand:
        """Itself; refuses a tensor whose elements do not lie one after the other."""
        self._solid_from(0)
        return self

    def rows(self) -> tuple[int, int, int]:
        """(rows, bytes of a row, bytes from row to row): the first dimension counts rows, the others are one row."""
        if not self.shape:
            raise KVCacheIOError(f"{self.what} has no rows: {self.describe()}")
        self._solid_from(1)
        row = math.prod(self.shape[1:]) * self.itemsize
        stride = self.strides[0] if self.shape[0] > 1 else row
        if stride < row:
            raise KVCacheIOError(f"the rows of {self.what} overlap: {self.describe()}")
        return self.shape[0], row, stride

    def _solid_from(self, axis: int) -> None:
        want = contiguous_strides(self.shape[axis:], self.itemsize)
        for n, have, gapless in zip(self.shape[axis:], self.strides[axis:], want, strict=True):
            if n > 1 and have != gapless:
                raise KVCacheIOError(f"{self.what} is not contiguous: {self.describe()}")


def on_device(what: str, found: DeviceArray, owner: object) -> Operand:
    """A tensor that was found to be in device memory; ``owner`` is the tensor itself."""
    index = getattr(getattr(owner, "device", None), "index", None)
    return Operand(what, found.address, found.shape, found.strides, found.itemsize, True, index, owner)


def operand(what: str, tensor: Any) -> Operand:
    """``tensor`` of torch, CuPy, numpy or whoever shows it by protocol; ``KVCacheIOError`` for anything else."""
    found = device_array(tensor)
    if found is not None:
        return on_device(what, found, tensor)
    if all(hasattr(tensor, name) for name in ("data_ptr", "stride", "element_size", "shape")):
        itemsize = int(tensor.element_size())
        strides = tuple(int(stride) * itemsize for stride in tensor.stride())
        shape = tuple(int(n) for n in tensor.shape)
        return Operand(what, int(tensor.data_ptr()), shape, strides, itemsize, False, None, tensor)
    interface = getattr(tensor, "__array_interface__", None)
    if interface is not None:
        shape, itemsize = tuple(interface["shape"]), int(str(interface["typestr"])[2:])
        strides = tuple(interface.get("strides") or contiguous_strides(shape, itemsize))
        return Operand(what, int(interface["data"][0]), shape, strides, itemsize, False, None, tensor)
    raise KVCacheIOError(f"{what} is {type(tensor).__name__}, not a tensor")
