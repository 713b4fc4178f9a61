"""Which host ranges this process has page-locked through kvferry, and for whom.

A driver refuses a range that is registered already, mostly: older ROCm accepts it silently, and then the first of two
owners to unregister takes the memory away under the other. The book refuses on every platform, and says who holds it.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort

from kvferry.drivers.errors import driver_error


class RangeBook:
    """Half-open ranges of host addresses, none overlapping another. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begins: list[int] = []
        self._held: dict[int, tuple[int, str]] = {}  # begin -> (end, owner)

    def claim(self, address: int, nbytes: int, owner: str) -> None:
        """Enter a range; ``AlreadyRegistered`` with the owner's name when a part of it is taken."""
        with self._lock:
            at = bisect_right(self._begins, address)
            for begin in self._begins[max(0, at - 1) : at + 1]:
                end, holder = self._held[begin]
                if begin < address + nbytes and address < end:
                    detail = (
                        f"{nbytes} bytes at {address:#x} for {owner} meet {end - begin} bytes at {begin:#x}, which "
                        f"{holder} holds"
                    )
                    raise driver_error("page-locking", 712, "range already held in this process", detail)
            insort(self._begins, address)
            self._held[address] = address + nbytes, owner

    def begins(self, begin: int, end: int) -> list[int]:
        """Where ranges begin from ``begin`` up to, without, ``end``."""
        with self._lock:
            return self._begins[bisect_left(self._begins, begin) : bisect_left(self._begins, end)]

    def release(self, address: int) -> None:
        """Take a range out again, by its base; one that is not in the book is no error."""
        with self._lock:
            if self._held.pop(address, None) is not None:
                self._begins.remove(address)


book = RangeBook()
"""The process's book."""
