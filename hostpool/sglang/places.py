"""One component on one side of a transfer: whose memory, and where a row lies in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.drivers.errors import DriverError
from kvferry.drivers.protocol import HostAddress, HostMemoryDriver
from kvferry.hostpool.range_book import book
from kvferry.hostpool.sglang.operands import KVCacheIOError, Operand, operand
from kvferry.kernels_cubin import abi

Addresses = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Place:
    """Rows at ``base + offset + page*P + slot*S + layer*L + head*H``, in bytes.

    The base is the first byte of the one tensor there is, of the layer's tensor where there are several, or what
    ``layer_table`` (uint64 addresses in device memory, one a layer) says. An index is a token: page and slot come of
    dividing it by ``page_tokens``. ``rows`` is the first index out of range; it is only left out with a table.
    """

    tensors: Sequence[Operand] = ()
    layer_table: Operand | None = None
    page_nbytes: int = 0
    slot_nbytes: int = 0
    layer_nbytes: int = 0
    head_nbytes: int = 0
    offset: int = 0
    page_tokens: int = 1
    rows: int = abi.MAX_INDEX_LIMIT

    def strides(self) -> tuple[int, ...]:
        """All numbers, to tell one place from another."""
        return (
            self.page_nbytes, self.slot_nbytes, self.layer_nbytes, self.head_nbytes,
            self.offset, self.page_tokens, self.rows,
        )  # fmt: skip


@dataclass(frozen=True)
class Bases:
    """A place as one device sees it. ``pieces`` are (offset in the tensor, device address) where that takes several."""

    addresses: tuple[int, ...]
    pieces: tuple[tuple[int, int], ...] = field(default=())


def layer_table(what: str, tensor: Any, layers: int, *, exact: bool) -> Operand:
    """A table of ``layers`` addresses, checked; unless ``exact`` it may have more."""
    table = operand(what, tensor).gapless()
    if not table.on_device or table.itemsize != 8 or len(table.shape) != 1:
        raise KVCacheIOError(f"{what} must be one row of uint64 on the device, not {table.describe()}")
    if table.shape[0] < layers or (exact and table.shape[0] != layers):
        raise KVCacheIOError(f"{what} has {table.shape[0]} addresses for {layers} layers")
    return table


def bases(driver: HostMemoryDriver, place: Place) -> Bases:
    """[context] Ask the driver where the device sees each tensor.

    A tensor of host memory can lie in several registrations, whose device addresses need not be one after the other
    (sglang#37596); kvferry knows those that it made.
    """
    if place.layer_table is not None:
        return Bases((place.layer_table.address,))
    found = [pieces(driver, tensor) for tensor in place.tensors]
    if all(len(each) == 1 for each in found):
        return Bases(tuple(each[0][1] for each in found))
    if len(found) > 1:
        several = next(t for t, each in zip(place.tensors, found, strict=True) if len(each) > 1)
        raise KVCacheIOError(
            f"{several.what} lies in several registrations with device addresses of their own: register each layer's "
            f"tensor in one piece"
        )
    return Bases((), tuple(found[0]))


def pieces(driver: HostMemoryDriver, tensor: Operand) -> list[tuple[int, int]]:
    """[context] (offset, device address) of each part of ``tensor`` that has addresses one after the other."""
    if tensor.on_device or not tensor.nbytes:
        return [(0, tensor.address)]
    extent = tensor.extent_nbytes
    last = extent - 1
    try:
        found = [(0, int(driver.host_device_pointer(HostAddress(tensor.address))))]
        for begin in book.begins(tensor.address + 1, tensor.address + extent):
            offset, alias = begin - tensor.address, int(driver.host_device_pointer(HostAddress(begin)))
            if alias - found[-1][1] != offset - found[-1][0]:
                found.append((offset, alias))
        end = int(driver.host_device_pointer(HostAddress(tensor.address + last)))
    except DriverError as error:
        where = f"{tensor.what}: {extent} bytes at {tensor.address:#x} are not page-locked for this device"
        raise error.with_detail(where) from error
    if end - found[-1][1] != last - found[-1][0]:
        raise KVCacheIOError(
            f"{tensor.what}: byte 0 has device address {found[0][1]:#x} and byte {last} has {end:#x}: it lies in "
            f"registrations that kvferry does not know; register it with kvferry or in one piece"
        )
    return found


def page_entries(place: Place, parts: Sequence[tuple[int, int]]) -> Addresses:
    """The device address of each page (or row, where a page is one token) of a tensor in several pieces."""
    (tensor,) = place.tensors
    begins = np.arange(-(-place.rows // place.page_tokens), dtype=np.int64) * place.page_nbytes
    offsets = np.array([offset for offset, _ in parts], np.int64)
    aliases = np.array([alias for _, alias in parts], np.uint64)
    at = np.searchsorted(offsets, begins, side="right") - 1
    ends = np.append(offsets[1:], tensor.nbytes)
    crossing = np.flatnonzero(begins + place.page_nbytes > ends[at])
    if crossing.size:
        page = int(crossing[0])
        raise KVCacheIOError(
            f"{tensor.what}: {place.page_nbytes} bytes from byte {int(begins[page])} on cross a boundary between two "
            f"registrations: register it in multiples of that size (registration_granularity_bytes)"
        )
    entries: Addresses = aliases[at] + (begins - offsets[at]).astype(np.uint64)
    return entries
