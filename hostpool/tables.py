"""Pointer tables: built on the host, kept in device memory for the kernels to read."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvferry.drivers.errors import KVFerryError
from kvferry.drivers.protocol import DeviceAddress, HostAddress, HostMemoryDriver

log = logging.getLogger("kvferry")

Addresses = npt.NDArray[np.uint64]


def page_addresses(chunk_addresses: Sequence[int], pages: int, pages_per_chunk: int, page_nbytes: int) -> Addresses:
    """The address of each of ``pages`` pages, from the address (host or device) of each chunk."""
    page = np.arange(pages, dtype=np.uint64)
    in_chunk = page % np.uint64(pages_per_chunk) * np.uint64(page_nbytes)
    addresses: Addresses = np.asarray(chunk_addresses, np.uint64)[page // np.uint64(pages_per_chunk)] + in_chunk
    return addresses


def common_alignment(addresses: Addresses, most: int = 16) -> int:
    """The largest power of two up to ``most`` that divides every address."""
    return math.gcd(most, int(np.gcd.reduce(addresses)))


class DeviceTable:
    """Addresses in device memory, written once. ``release`` may be called any number of times and never raises."""

    def __init__(self, driver: HostMemoryDriver, device: int, addresses: Addresses) -> None:
        self._driver, self._device = driver, device
        self.alignment = common_alignment(addresses)
        values = np.ascontiguousarray(addresses, np.uint64)
        with driver.context(device):
            self.address: DeviceAddress | None = driver.device_alloc(values.nbytes)
            try:
                stream = driver.stream_create()
                try:
                    driver.copy_to_device(self.address, HostAddress(values.ctypes.data), values.nbytes, stream)
                    driver.stream_synchronize(stream)
                finally:
                    driver.stream_destroy(stream)
            except BaseException:
                self.release()
                raise

    def entry(self, number: int) -> DeviceAddress:
        """Device address of entry ``number``."""
        assert self.address is not None, "the table was released"
        return DeviceAddress(self.address + 8 * number)

    def release(self) -> None:
        """Give the device memory back; nothing that reads the table may be in flight."""
        address, self.address = self.address, None
        if address is not None:
            try:
                with self._driver.context(self._device):
                    self._driver.device_free(address)
            except KVFerryError as error:  # a forked child, or a driver that has shut down
                log.debug("a table on device %d was left: %s", self._device, error)
