"""Index arrays of a transfer: from whatever the caller has to what a kernel reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.drivers.errors import ArgumentError, IndexOutOfRange
from kvferry.hostpool.arrays import DeviceArray, device_array

HostIndices = npt.NDArray[np.int32] | npt.NDArray[np.int64]


@dataclass(frozen=True)
class Pairs:
    """The index pairs of one transfer, both sides of the same width and in the same kind of memory.

    ``host`` are two arrays that are read before the transfer call returns; ``device`` are two arrays that the kernel
    reads where they are, in stream order.
    """

    count: int
    index_nbytes: int
    host: tuple[HostIndices, HostIndices] | None
    device: tuple[DeviceArray, DeviceArray] | None

    def device_addresses(self) -> tuple[int, int]:
        """Where the kernel finds indices that are on the device already."""
        assert self.device is not None
        return self.device[0].address, self.device[1].address


def _host(what: str, indices: object) -> HostIndices:
    try:
        array = np.asarray(indices)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{what} indices cannot be read as an array: {error}") from error
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1:
        raise ArgumentError(f"{what} indices must have one dimension, not shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise ArgumentError(f"{what} indices must be whole numbers, not {array.dtype}")
    if array.dtype.kind == "u" and array.dtype.itemsize == 8 and int(array.max()) > np.iinfo(np.int64).max:
        raise ArgumentError(f"{what} index {array.max()} does not fit 64 signed bits")
    return array if array.dtype == np.int32 else array.astype(np.int64, copy=False)


def _device(what: str, array: DeviceArray) -> DeviceArray:
    if len(array.shape) != 1 or array.kind != "i" or array.itemsize not in (4, 8):
        raise ArgumentError(f"{what} indices on the device must be one row of int32 or int64, not {array.describe()}")
    if array.shape[0] > 1 and array.strides[0] != array.itemsize:
        raise ArgumentError(f"{what} indices on the device must be contiguous, not {array.describe()}")
    return array


def pairs(src: object, dst: object) -> Pairs:
    """Pair two index arrays: lists, numpy or torch CPU arrays, or one-dimensional device arrays.

    Both in the same kind of memory; on the device both of the same width. Raises ``ArgumentError``.
    """
    on_device = {what: device_array(side) for what, side in (("source", src), ("destination", dst))}
    found = {what: _device(what, array) for what, array in on_device.items() if array is not None}
    if len(found) == 1:
        (where,) = found
        raise ArgumentError(f"{where} indices are on the device and the others are not: bring both to one place")
    if found:
        a, b = found["source"], found["destination"]
        if a.itemsize != b.itemsize:
            raise ArgumentError(f"indices on the device have {a.itemsize} and {b.itemsize} bytes: make them the same")
        _same_count(a.shape[0], b.shape[0])
        return Pairs(a.shape[0], a.itemsize, None, (a, b))
    left, right = _host("source", src), _host("destination", dst)
    _same_count(left.size, right.size)
    if left.dtype != right.dtype:
        left, right = left.astype(np.int64, copy=False), right.astype(np.int64, copy=False)
    return Pairs(left.size, left.dtype.itemsize, (left, right), None)


def _same_count(sources: int, destinations: int) -> None:
    if sources != destinations:
        raise ArgumentError(f"{sources} source indices for {destinations} destination indices: they are taken in pairs")


def check_host(given: Pairs, limits: tuple[int, int]) -> None:
    """Raise ``IndexOutOfRange`` for the first host index at or above its side's limit; negative ones are fine."""
    if given.host is None or not given.count:
        return
    for side, array, limit in zip(("source", "destination"), given.host, limits, strict=True):
        if int(array.max()) >= limit:
            position = int(np.argmax(array >= limit))
            raise IndexOutOfRange(side, position, int(array[position]), limit)
