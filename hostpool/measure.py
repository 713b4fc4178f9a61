"""What the demo and the measurements share: a KV cache in device memory, and the time that a device takes."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from kvferry.drivers.protocol import DeviceAddress, HostAddress, HostMemoryDriver, StreamHandle
from kvferry.hostpool.layout import KVLayout

_WIPE = 0xA5
REPEATS = 7
"""Repetitions behind a median, unless said otherwise."""


class DeviceCache:
    """A layer-first KV cache of ``tokens`` tokens: one allocation a component and layer, freed by ``stack``.

    All methods [context].
    """

    def __init__(self, driver: HostMemoryDriver, layout: KVLayout, tokens: int, stack: ExitStack) -> None:
        self._driver, self.layers = driver, {component.name: list[int]() for component in layout.components}
        self._blocks: list[tuple[DeviceAddress, int]] = []
        for component in layout.components:
            for _ in range(layout.layers):
                nbytes = tokens * component.row_nbytes
                address = driver.device_alloc(nbytes)
                stack.callback(driver.device_free, address)
                self.layers[component.name].append(address)
                self._blocks.append((address, nbytes))

    @property
    def nbytes(self) -> int:
        """Bytes of all components and layers."""
        return sum(nbytes for _, nbytes in self._blocks)

    def write(self, content: npt.NDArray[np.uint8], stream: StreamHandle) -> None:
        """Fill the cache with ``nbytes`` bytes, component by component and layer by layer; blocks."""
        at = content.ctypes.data
        for address, nbytes in self._blocks:
            self._driver.copy_to_device(address, HostAddress(at), nbytes, stream)
            at += nbytes
        self._driver.stream_synchronize(stream)

    def read(self, stream: StreamHandle) -> npt.NDArray[np.uint8]:
        """All bytes, in the order of ``write``; blocks."""
        content = np.empty(self.nbytes, np.uint8)
        at = content.ctypes.data
        for address, nbytes in self._blocks:
            self._driver.copy_to_host(HostAddress(at), address, nbytes, stream)
            at += nbytes
        self._driver.stream_synchronize(stream)
        return content

    def wipe(self, stream: StreamHandle) -> None:
        """Overwrite every byte; blocks."""
        for address, nbytes in self._blocks:
            self._driver.memset_async(address, _WIPE, nbytes, stream)
        self._driver.stream_synchronize(stream)


def median_s(
    driver: HostMemoryDriver, stream: StreamHandle, work: Callable[[], object], repeats: int = REPEATS
) -> float:
    """[context] Seconds that the device takes for what ``work`` gives to ``stream``; the first time is left out."""
    work()
    driver.stream_synchronize(stream)
    times = []
    for _ in range(repeats):
        start, end = driver.event_create(timing=True), driver.event_create(timing=True)
        driver.event_record(start, stream)
        work()
        driver.event_record(end, stream)
        driver.event_synchronize(end)
        times.append(driver.event_elapsed_ms(start, end) / 1e3)
        driver.event_destroy(start)
        driver.event_destroy(end)
    return statistics.median(times)
