"""What one transfer in flight needs: pinned room for its indices, an error record, counters of finished layers."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.drivers import posix
from kvferry.drivers.errors import KVFerryError
from kvferry.drivers.protocol import DeviceAddress, EventHandle, HostAddress, HostMemoryDriver
from kvferry.kernels_cubin import abi

log = logging.getLogger("kvferry")

_RECORD_NBYTES = 64  # the error record, and the indices after it on a boundary of their own
_LEAST_INDEX_NBYTES = 4096 - _RECORD_NBYTES


def zero_fill(driver: HostMemoryDriver, address: DeviceAddress, nbytes: int) -> None:
    """[context] Clear device memory and wait for it, on a stream of its own: for memory that was just allocated."""
    stream = driver.stream_create()
    try:
        driver.memset_async(address, 0, nbytes, stream)
        driver.stream_synchronize(stream)
    finally:
        driver.stream_destroy(stream)


class Slot:
    """Memory of one transfer, used by one transfer at a time and then by the next.

    Counters and epoch only ever grow, so a slot is never cleared and a late reader cannot see a stale count as done.
    Before a counter could wrap (HIP compares plainly, CUDA cyclically) the slot is retired.
    """

    def __init__(self, driver: HostMemoryDriver, index_nbytes: int, layers: int) -> None:
        self.index_nbytes = index_nbytes
        self.epoch = 0
        self.waiters = 0
        """Threads that block on ``event``; recorded for another transfer, it would keep them for that one too."""
        self.counted = 0
        """No layer's counter reads more than this."""
        self.layer_targets: npt.NDArray[np.uint32] = np.zeros(layers, np.uint32)
        """What each layer's counter reads once this slot's newest transfer has finished the layer."""
        counters_nbytes = 4 * (layers + 1)
        self._pinned: HostAddress = driver.host_alloc(_RECORD_NBYTES + index_nbytes)
        self._undo: list[tuple[Callable[[Any], None], int]] = [(driver.host_free, self._pinned)]
        try:
            self.error_record = driver.host_device_pointer(self._pinned)
            self.device_indices: DeviceAddress = driver.device_alloc(index_nbytes + counters_nbytes)
            self._undo.append((driver.device_free, self.device_indices))
            self.error_claim = DeviceAddress(self.device_indices + index_nbytes)
            self.layer_done = DeviceAddress(self.error_claim + 4)
            self.event: EventHandle = driver.event_create()
            self._undo.append((driver.event_destroy, self.event))
            zero_fill(driver, self.error_claim, counters_nbytes)
        except BaseException:
            self.release()
            raise
        self.host_indices = HostAddress(self._pinned + _RECORD_NBYTES)
        self._indices = np.frombuffer(posix.buffer(self.host_indices, index_nbytes), np.uint8)
        self._record = np.frombuffer(posix.buffer(self._pinned, abi.ERROR_RECORD.itemsize), abi.ERROR_RECORD)

    def write_indices(self, src: npt.NDArray[np.generic], dst: npt.NDArray[np.generic]) -> None:
        """Copy both index arrays into pinned memory, one behind the other."""
        self._indices[: src.nbytes].view(src.dtype)[:] = src
        self._indices[src.nbytes : src.nbytes + dst.nbytes].view(dst.dtype)[:] = dst

    def begin(self) -> None:
        """Start the next transfer of this slot, with a clean error record."""
        self.epoch = self.epoch % (2**32 - 1) + 1
        self._record["code"] = 0

    def error(self) -> tuple[int, int, int] | None:
        """(side, position, value) of an index that was out of range, once the transfer has finished."""
        record = self._record[0]
        return (int(record["side"]), int(record["position"]), int(record["value"])) if record["code"] else None

    def release(self) -> None:
        """Give everything back; nothing may be in flight. Never raises: what the driver refuses is gone with it."""
        while self._undo:
            let_go, handle = self._undo.pop()
            try:
                let_go(handle)
            except KVFerryError as error:
                log.debug("letting go of %#x failed: %s", handle, error)


class SlotArena:
    """Slots of one device, reused by size. All methods [context] and under the engine's lock."""

    def __init__(self, driver: HostMemoryDriver, layers: int) -> None:
        self._driver, self._layers = driver, layers
        self._free: dict[int, list[Slot]] = defaultdict(list)
        self._all: list[Slot] = []

    def prepare(self, count: int) -> None:
        """Make ``count`` slots of the least size ahead of their use; gives back what it made when one fails."""
        try:
            while len(self._all) < count:
                self._all.append(Slot(self._driver, _LEAST_INDEX_NBYTES, self._layers))
        except BaseException:
            self.release()
            raise
        self._free[_LEAST_INDEX_NBYTES].extend(self._all)

    def acquire(self, index_nbytes: int) -> Slot:
        """A slot with room for ``index_nbytes``; a new one is made only when all of its size are in flight."""
        size = _LEAST_INDEX_NBYTES
        while size < index_nbytes:
            size = 2 * (size + _RECORD_NBYTES) - _RECORD_NBYTES
        free = self._free[size]
        for at in range(len(free) - 1, -1, -1):
            if not free[at].waiters:
                return free.pop(at)
        slot = Slot(self._driver, size, self._layers)
        self._all.append(slot)
        return slot

    def give_back(self, slot: Slot) -> None:
        """The slot's transfer has finished. A slot near the end of its counters is not used again."""
        if slot.counted <= abi.MAX_TASKS:
            self._free[slot.index_nbytes].append(slot)

    def release(self) -> None:
        """Give every slot's memory back; nothing may be in flight."""
        self._free.clear()
        while self._all:
            self._all.pop().release()
