"""Pointer tables in device memory."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.drivers.errors import DriverError, driver_error
from kvferry.drivers.protocol import DeviceAddress, HostAddress, StreamHandle
from kvferry.hostpool.backend import Backend
from kvferry.hostpool.tables import DeviceTable

from support.standin import memory


def test_entries_are_in_device_memory_where_entry_says(backend: Backend) -> None:
    addresses = np.array([2**63 + 8, 24, 40], np.uint64)
    table = DeviceTable(backend.driver, 0, addresses)
    assert table.alignment == 8
    for number, address in enumerate(addresses):
        assert memory(table.entry(number), 8).view(np.uint64)[0] == address


def test_a_view_with_strides_is_copied_right(backend: Backend) -> None:
    table = DeviceTable(backend.driver, 0, np.arange(10, dtype=np.uint64)[::3])
    assert memory(table.entry(0), 32).view(np.uint64).tolist() == [0, 3, 6, 9]


def test_release_frees_once_and_never_raises(backend: Backend) -> None:
    table = DeviceTable(backend.driver, 0, np.arange(1, 3, dtype=np.uint64))
    address = table.entry(0)
    table.release()
    table.release()
    with backend.driver.context(0), pytest.raises(DriverError, match="invalid value"):
        backend.driver.device_free(address)  # it has gone already
    with pytest.raises(AssertionError, match="released"):
        table.entry(0)


def test_a_copy_that_fails_leaves_no_memory(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[DeviceAddress]()

    def refuse(dst: DeviceAddress, src: HostAddress, nbytes: int, stream: StreamHandle) -> None:
        asked.append(dst)
        raise driver_error("copy", 2, "out of memory")

    monkeypatch.setattr(backend.driver, "copy_to_device", refuse)
    with pytest.raises(DriverError, match="out of memory"):
        DeviceTable(backend.driver, 0, np.arange(1, 3, dtype=np.uint64))
    with backend.driver.context(0), pytest.raises(DriverError, match="invalid value"):
        backend.driver.device_free(asked[0])
