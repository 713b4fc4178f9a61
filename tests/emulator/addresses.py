"""The device's memory: ranges of addresses in this process, each access checked against them."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from emulator.errors import EmulatorError

Bytes = npt.NDArray[np.uint8]
Addresses = npt.NDArray[np.uint64]


class OutOfMemoryRange(EmulatorError):
    """An access that no range holds; whoever knows the instruction turns it into a ``DeviceFault``."""

    def __init__(self, address: int, nbytes: int, is_write: bool) -> None:
        super().__init__(f"{nbytes} bytes at {address:#x}")
        self.address, self.nbytes, self.is_write = address, nbytes, is_write


class Memory:
    """``ranges`` are (begin, end) and do not overlap; ``read_only`` ones are of the same kind.

    An access has to lie in one of them: that two lie next to each other is chance. It need not be aligned (HSA runs
    with unaligned accesses allowed), an atomic one must be.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]], read_only: Sequence[tuple[int, int]] = ()) -> None:
        spans = sorted(
            [(begin, end, True) for begin, end in ranges] + [(begin, end, False) for begin, end in read_only]
        )
        for (_, end, _), (begin, _, _) in pairwise(spans):
            if begin < end:
                raise EmulatorError(f"two ranges of device memory hold {begin:#x}")
        self._spans = spans
        self._begins = [begin for begin, _, _ in spans]
        self._views: dict[int, Bytes] = {}

    def _find(self, first: int, end: int, is_write: bool) -> int | None:
        """The range that holds ``first`` up to ``end``."""
        at = bisect_right(self._begins, first) - 1
        if at < 0 or end > self._spans[at][1] or (is_write and not self._spans[at][2]):
            return None
        return at

    def _view(self, at: int) -> Bytes:
        if at not in self._views:
            begin, end, _ = self._spans[at]
            memory: Any = (ctypes.c_uint8 * (end - begin)).from_address(begin)
            self._views[at] = np.frombuffer(memory, np.uint8)
        return self._views[at]

    def _groups(self, addresses: Addresses, nbytes: int, is_write: bool) -> list[tuple[int, npt.NDArray[np.intp]]]:
        """Which range holds which of the addresses; raises at the first that none holds."""
        first, last = int(addresses.min()), int(addresses.max())
        at = self._find(first, last + nbytes, is_write)
        if at is not None:
            return [(at, np.arange(addresses.size))]
        found: dict[int, list[int]] = {}
        for lane, address in enumerate(addresses.tolist()):
            at = self._find(address, address + nbytes, is_write)
            if at is None:
                raise OutOfMemoryRange(address, nbytes, is_write)
            found.setdefault(at, []).append(lane)
        return [(at, np.array(lanes, np.intp)) for at, lanes in found.items()]

    def _places(self, at: int, addresses: Addresses, nbytes: int) -> tuple[Any, Any]:
        """(array, index) of the accessed bytes, as words where everything is aligned: (address, word or byte)."""
        begin, view = self._begins[at], self._view(at)
        offsets = (addresses - np.uint64(begin)).astype(np.intp)
        if nbytes % 4 == 0 and begin % 4 == 0 and not int(np.bitwise_or.reduce(offsets)) & 3:
            words = view[: view.size & ~3].view(np.uint32)
            return words, (offsets >> 2)[:, None] + np.arange(nbytes // 4)
        return view, offsets[:, None] + np.arange(nbytes)

    def load(self, addresses: Addresses, nbytes: int) -> Bytes:
        """The bytes at each address, as (address, byte)."""
        out = np.empty((addresses.size, nbytes), np.uint8)
        for at, lanes in self._groups(addresses, nbytes, False):
            array, index = self._places(at, addresses[lanes], nbytes)
            out[lanes] = np.ascontiguousarray(array[index]).view(np.uint8).reshape(lanes.size, nbytes)
        return out

    def store(self, addresses: Addresses, data: Bytes) -> None:
        """Write ``data[k]`` at each address; the last one stays where they are equal."""
        nbytes = data.shape[1]
        for at, lanes in self._groups(addresses, nbytes, True):
            array, index = self._places(at, addresses[lanes], nbytes)
            array[index] = np.ascontiguousarray(data[lanes]).view(array.dtype).reshape(index.shape)

    def read(self, address: int, nbytes: int) -> bytes:
        """Bytes for the whole wave."""
        at = self._find(address, address + nbytes, False)
        if at is None:
            raise OutOfMemoryRange(address, nbytes, False)
        return ctypes.string_at(address, nbytes)

    def atomic(self, address: int, nbytes: int) -> Any:
        """The one element at an aligned address, to be read and written."""
        at = self._find(address, address + nbytes, True)
        if at is None or address % nbytes:
            raise OutOfMemoryRange(address, nbytes, True)
        begin = address - self._begins[at]
        return self._view(at)[begin : begin + nbytes].view(np.dtype(f"u{nbytes}"))
