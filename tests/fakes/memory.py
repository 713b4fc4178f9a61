"""Host memory for tests: whole pages at a known address."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

PAGE = mmap.PAGESIZE


class Pages:
    """``nbytes`` of anonymous memory, private like malloc's or shared, as an ``array`` of bytes with an ``address``."""

    def __init__(self, nbytes: int, *, shared: bool = False) -> None:
        kind = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
        self._mapping = mmap.mmap(-1, nbytes, flags=kind | mmap.MAP_ANONYMOUS)
        self.array: Bytes = np.frombuffer(self._mapping, dtype=np.uint8)
        self.address, self.nbytes = int(self.array.ctypes.data), nbytes


def bytes_at(address: int, nbytes: int) -> bytes:
    """What is at an address, host's or device's: on the fakes both are ordinary memory."""
    return ctypes.string_at(address, nbytes)


def put_at(address: int, data: bytes) -> None:
    """Write to an address as the device (or somebody else) would."""
    ctypes.memmove(address, data, len(data))


def pattern(nbytes: int, seed: int) -> Bytes:
    """Bytes that repeat nowhere within reach of a mistake."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
