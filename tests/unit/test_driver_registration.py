"""Registered memory, its other addresses, and failures on demand: CUDA and HIP alike."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.drivers.errors import (
    AlreadyRegistered,
    InvalidValue,
    NotRegistered,
    NotSupported,
    OutOfMemory,
)
from kvferry.drivers.protocol import (
    HostAddress,
    HostMemoryDriver,
)

from fakes.memory import PAGE, Pages, bytes_at, pattern, put_at
from fakes.vendors import Bench


def registered(driver: HostMemoryDriver, nbytes: int) -> tuple[Pages, HostAddress]:
    """Fresh pages, registered on device 0."""
    pages = Pages(nbytes)
    with driver.context(0):
        driver.host_register(HostAddress(pages.address), nbytes)
    return pages, HostAddress(pages.address)


# ---- registered memory


@pytest.mark.parametrize("shared", [False, True], ids=["private", "shared"])
def test_registered_memory_has_another_address_for_the_device(
    bench: Bench, driver: HostMemoryDriver, shared: bool
) -> None:
    pages = Pages(4 * PAGE, shared=shared)
    content = pattern(pages.nbytes, 1)
    pages.array[:] = content
    with driver.context(0):
        driver.host_register(HostAddress(pages.address), pages.nbytes)
        alias = driver.host_device_pointer(HostAddress(pages.address))
    assert alias != pages.address
    assert np.array_equal(pages.array, content), "registering changes no byte"
    assert bytes_at(alias, pages.nbytes) == content.tobytes(), "the same bytes at the other address"
    put_at(alias + PAGE + 5, b"from the device")
    assert pages.array[PAGE + 5 : PAGE + 20].tobytes() == b"from the device"
    pages.array[3 * PAGE] = 77
    assert bytes_at(alias + 3 * PAGE, 1) == bytes([77]), "one memory, two addresses"


def test_an_address_inside_a_range_is_answered_inside_the_alias(driver: HostMemoryDriver) -> None:
    pages, base = registered(driver, 3 * PAGE)
    with driver.context(0):
        alias = driver.host_device_pointer(base)
        for offset in (1, PAGE - 1, PAGE, 2 * PAGE + 92, 3 * PAGE - 1):
            assert driver.host_device_pointer(HostAddress(base + offset)) == alias + offset
        for outside in (base - 1, base + pages.nbytes):
            with pytest.raises(InvalidValue):
                driver.host_device_pointer(HostAddress(outside))


def test_every_chunk_has_an_alias_of_its_own(driver: HostMemoryDriver) -> None:
    """One mapping registered in three chunks: the difference of the first says nothing about the others."""
    pages = Pages(6 * PAGE)
    pages.array[:] = pattern(pages.nbytes, 2)
    bases = [HostAddress(pages.address + 2 * PAGE * chunk) for chunk in range(3)]
    with driver.context(0):
        for base in bases:
            driver.host_register(base, 2 * PAGE)
        aliases = [driver.host_device_pointer(base) for base in bases]
    assert len({alias - base for alias, base in zip(aliases, bases, strict=True)}) == 3
    for chunk, alias in enumerate(aliases):
        assert bytes_at(alias, 2 * PAGE) == pages.array[2 * PAGE * chunk : 2 * PAGE * (chunk + 1)].tobytes()


def test_every_device_has_an_alias_of_its_own(bench: Bench) -> None:
    driver = bench.driver(devices=3)
    pages, base = registered(driver, PAGE)
    pages.array[:] = pattern(PAGE, 3)
    aliases = []
    for device in range(3):
        with driver.context(device):
            aliases.append(driver.host_device_pointer(base))
    assert len({base, *aliases}) == 4
    assert all(bytes_at(alias, PAGE) == pages.array.tobytes() for alias in aliases)


def test_without_aliases_the_addresses_are_equal(bench: Bench, driver: HostMemoryDriver) -> None:
    bench.fake.set_alias(False)
    _, base = registered(driver, 2 * PAGE)
    with driver.context(0):
        assert driver.host_device_pointer(HostAddress(base + 5)) == base + 5
    assert driver.device_attributes(0).host_pointer_is_device_pointer


def test_the_attribute_says_that_addresses_differ(bench: Bench, driver: HostMemoryDriver) -> None:
    assert not driver.device_attributes(0).host_pointer_is_device_pointer


def test_unregister_takes_exactly_the_registered_base_once(bench: Bench, driver: HostMemoryDriver) -> None:
    _, base = registered(driver, 2 * PAGE)
    with driver.context(0):
        alias = driver.host_device_pointer(base)
        for wrong in (base + PAGE, alias, alias + PAGE):
            with pytest.raises(NotRegistered):
                driver.host_unregister(HostAddress(wrong))
            assert driver.host_device_pointer(base) == alias, "still registered"
        bench.fake.log()
        driver.host_unregister(base)
        with pytest.raises(NotRegistered, match=f"{base:#x}"):
            driver.host_unregister(base)
        with pytest.raises(InvalidValue):
            driver.host_device_pointer(base)
    answers = [(call.values["address"], call.result) for call in bench.fake.calls(bench.calls.unregister)]
    assert answers == [(base, 0), (base, 713)]


def test_unregistering_keeps_the_bytes_and_frees_the_range(driver: HostMemoryDriver) -> None:
    pages, base = registered(driver, 2 * PAGE)
    pages.array[:] = pattern(pages.nbytes, 4)
    before = pages.array.copy()
    with driver.context(0):
        driver.host_unregister(base)
        driver.host_register(base, 2 * PAGE)
        alias = driver.host_device_pointer(base)
    assert np.array_equal(pages.array, before)
    assert bytes_at(alias, 2 * PAGE) == before.tobytes()


@pytest.mark.parametrize(("first_page", "count"), [(0, 2), (1, 2), (0, 4), (1, 1)])
def test_a_range_that_overlaps_is_refused(driver: HostMemoryDriver, first_page: int, count: int) -> None:
    pages = Pages(4 * PAGE)
    with driver.context(0):
        driver.host_register(HostAddress(pages.address), 2 * PAGE)
        alias = driver.host_device_pointer(HostAddress(pages.address))
        at = HostAddress(pages.address + first_page * PAGE)
        with pytest.raises(AlreadyRegistered, match=rf"{count * PAGE} bytes at {at:#x}"):
            driver.host_register(at, count * PAGE)
        assert driver.host_device_pointer(HostAddress(pages.address)) == alias, "the first is as it was"
        driver.host_register(HostAddress(pages.address + 2 * PAGE), 2 * PAGE)


@pytest.mark.parametrize("what", ["null", "empty", "unmapped"])
def test_a_range_that_cannot_be_registered(bench: Bench, driver: HostMemoryDriver, what: str) -> None:
    pages = Pages(PAGE)
    address, nbytes = {"null": (0, PAGE), "empty": (pages.address, 0), "unmapped": (PAGE, PAGE)}[what]
    with driver.context(0), pytest.raises(InvalidValue) as caught:
        driver.host_register(HostAddress(address), nbytes)
    error = caught.value
    assert (error.call, error.code, error.name) == (bench.calls.register, 1, bench.vendor.wrong_value)
    assert f"{nbytes} bytes at {address:#x}" in error.detail


def test_flags_are_portable_and_mapped(bench: Bench, driver: HostMemoryDriver) -> None:
    _, base = registered(driver, PAGE)
    with driver.context(0):
        assert driver.host_flags(HostAddress(base + 7)) == 3
        with pytest.raises(InvalidValue):
            driver.host_flags(HostAddress(base + PAGE))
    assert [call.values["flags"] for call in bench.fake.calls(bench.calls.register)] == [3]


def test_memory_from_the_driver(driver: HostMemoryDriver) -> None:
    with driver.context(0):
        address = driver.host_alloc(PAGE + 100)
        alias = driver.host_device_pointer(address)
        put_at(address, b"kv page")
        assert bytes_at(alias, 7) == b"kv page"
        assert driver.host_flags(address) == 3
        with pytest.raises(NotRegistered):
            driver.host_unregister(address)
        driver.host_free(address)
        with pytest.raises(InvalidValue):
            driver.host_device_pointer(address)
        with pytest.raises(InvalidValue):
            driver.host_free(address)


def test_registered_memory_is_not_freed_as_the_drivers(driver: HostMemoryDriver) -> None:
    pages, base = registered(driver, PAGE)
    pages.array[:] = 9
    with driver.context(0), pytest.raises(InvalidValue):
        driver.host_free(base)
    assert pages.array.sum() == 9 * PAGE


# ---- failures on demand


def test_the_nth_call_fails_and_no_other(bench: Bench, driver: HostMemoryDriver) -> None:
    pages = Pages(4 * PAGE)
    bench.fake.fail(bench.calls.register, 2, nth=3)
    with driver.context(0):
        for page in range(4):
            at = HostAddress(pages.address + page * PAGE)
            if page == 2:
                with pytest.raises(OutOfMemory) as caught:
                    driver.host_register(at, PAGE)
                assert caught.value.call == bench.calls.register
            else:
                driver.host_register(at, PAGE)
    assert [call.result for call in bench.fake.calls(bench.calls.register)] == [0, 0, 2, 0]


def test_every_call_fails_when_asked(bench: Bench, driver: HostMemoryDriver) -> None:
    bench.fake.fail(bench.calls.stream_create, 801, nth=0)
    with driver.context(0):
        for _ in range(3):
            with pytest.raises(NotSupported):
                driver.stream_create()


def test_a_limit_of_one_registration(bench: Bench, driver: HostMemoryDriver) -> None:
    bench.fake.set_register_limit(2 * PAGE, 1)
    pages = Pages(3 * PAGE)
    with driver.context(0):
        with pytest.raises(InvalidValue):
            driver.host_register(HostAddress(pages.address), 3 * PAGE)
        driver.host_register(HostAddress(pages.address), 2 * PAGE)
