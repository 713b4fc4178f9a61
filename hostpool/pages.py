"""Which pages of a pool are taken."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from kvferry.drivers.errors import ArgumentError, PoolFull


class PageAllocator:
    """Hands out page numbers. Thread-safe; the pages freed last are given first, while they are warm in the cache."""

    def __init__(self, pages: int) -> None:
        self._lock = threading.Lock()
        self._taken = np.zeros(pages, np.bool_)
        self._stack = np.arange(pages - 1, -1, -1, dtype=np.int64)  # free pages, the next one last
        self.free_count = pages

    def allocate(self, count: int) -> npt.NDArray[np.int64]:
        """``count`` pages, or ``PoolFull`` and none."""
        if isinstance(count, bool) or count < 0:
            raise ArgumentError(f"a number of pages is at least 0, not {count!r}")
        with self._lock:
            if count > self.free_count:
                raise PoolFull(f"{count} pages were asked for, {self.free_count} of {self._taken.size} are free")
            left = self.free_count - count
            pages = self._stack[left : self.free_count][::-1].copy()
            self.free_count = left
            self._taken[pages] = True
            return pages

    def free(self, pages: npt.ArrayLike) -> None:
        """Give pages back, all or none."""
        array = np.asarray(pages)
        if array.size == 0:
            return
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ArgumentError(f"pages must be one row of whole numbers, not {array.dtype} of shape {array.shape}")
        with self._lock:
            outside = array[(array < 0) | (array >= self._taken.size)]
            if outside.size:
                raise ArgumentError(f"page {outside[0]} is outside the pool: valid are 0 to {self._taken.size - 1}")
            if np.unique(array).size != array.size:
                raise ArgumentError("a page was given twice in one call")
            untaken = array[~self._taken[array]]
            if untaken.size:
                raise ArgumentError(f"page {untaken[0]} is not taken")
            self._taken[array] = False
            self._stack[self.free_count : self.free_count + array.size] = array[::-1]
            self.free_count += array.size
