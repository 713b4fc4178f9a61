"""What HIP has that CUDA has not: a current device instead of contexts, a last error, names of architectures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.drivers.errors import DriverError, NotRegistered, NotSupported
from kvferry.drivers.hip import HipDriver
from kvferry.drivers.protocol import HostAddress

from fakes.hip import FakeHip
from fakes.memory import PAGE, Pages
from support.process import run_python


@pytest.fixture
def driver(fake_hip: FakeHip) -> HipDriver:
    return HipDriver()


@pytest.mark.parametrize("name", ["gfx942:sramecc+:xnack-", "gfx1100", "gfx90a:sramecc+:xnack-"])
def test_the_architecture_comes_whole(fake_hip: FakeHip, driver: HipDriver, name: str) -> None:
    fake_hip.set_architecture(name)
    assert driver.device_architecture(0) == name


@pytest.mark.parametrize("name", ["", "\x01\x02", "Radeon"])
def test_a_field_that_is_no_architecture_is_refused(fake_hip: FakeHip, driver: HipDriver, name: str) -> None:
    """Were the layout ever to change under the same symbol, no binary would be chosen by what stands there."""
    fake_hip.set_architecture(name)
    with pytest.raises(NotSupported, match="architecture"):
        driver.device_architecture(0)


def test_before_rocm_6_the_architecture_is_not_known(build_variant: Callable[..., Path]) -> None:
    path = build_variant("hip", "NO_R0600")
    printed = run_python(
        f"""
        from fakes.hip import FakeHip
        from kvferry.drivers.errors import NotSupported
        from kvferry.drivers.hip import HipDriver

        FakeHip({str(path)!r})
        driver = HipDriver()
        print(driver.device_count(), driver.device_name(0))
        try:
            driver.device_architecture(0)
        except NotSupported as error:
            print(error)
        """
    )
    works, refusal = printed.splitlines()
    assert works == "1 Fake MI300X 0"
    assert str(path) in refusal
    assert "hipGetDevicePropertiesR0600" in refusal


def test_read_only_registration_is_refused_before_the_runtime_is_asked(fake_hip: FakeHip, driver: HipDriver) -> None:
    """8 is the flag of CUDA's read-only registration; HIP would take it for coarse-grained memory."""
    pages = Pages(PAGE)
    assert not driver.device_attributes(0).read_only_registration
    with driver.context(0), pytest.raises(NotSupported, match=r"read-only.*coarse-grained"):
        driver.host_register(HostAddress(pages.address), PAGE, read_only=True)
    assert fake_hip.calls("hipHostRegister") == []


def test_the_device_is_set_only_when_another_is_current(fake_hip: FakeHip) -> None:
    fake_hip.set_devices(2)
    driver = HipDriver()
    fake_hip.log()
    with driver.context(0), driver.context(0):
        pass
    assert fake_hip.calls("hipSetDevice") == []
    with driver.context(1), driver.context(1):
        pass
    assert [call.values["ordinal"] for call in fake_hip.calls("hipSetDevice")] == [1, 0]


def test_a_driver_for_device_3_works_on_no_other(fake_hip: FakeHip) -> None:
    """Scenario 32. What device 0 sees is the restored current device, and no call that makes anything there."""
    fake_hip.set_devices(4)
    driver, pages = HipDriver(), Pages(PAGE)
    fake_hip.log()
    with driver.context(3):
        driver.host_register(HostAddress(pages.address), PAGE)
        driver.device_free(driver.device_alloc(64))
        driver.stream_destroy(driver.stream_create())
        driver.host_unregister(HostAddress(pages.address))
    asks = {"hipGetDevice", "hipSetDevice", "hipDeviceGet", "hipGetDeviceCount"}
    worked_on = {call.device for call in fake_hip.log() if call.name not in asks}
    assert worked_on == {3}
    assert fake_hip.current_device() == 0


def test_our_failure_is_not_left_for_the_next_to_find(fake_hip: FakeHip, driver: HipDriver) -> None:
    """torch asks hipGetLastError after its launches and would raise our error as its own."""
    with driver.context(0):
        with pytest.raises(NotRegistered):
            driver.host_unregister(HostAddress(PAGE))
        assert fake_hip.call("hipPeekAtLastError") == 0
        event = driver.event_create()
        fake_hip.fail("hipEventQuery", 600)
        assert driver.event_query(event) is False
        assert fake_hip.call("hipPeekAtLastError") == 0


def test_a_code_without_a_name(fake_hip: FakeHip, driver: HipDriver) -> None:
    fake_hip.fail("hipMalloc", 999_999)
    with driver.context(0), pytest.raises(DriverError, match="999999 hipErrorUnknown"):
        driver.device_alloc(64)


def test_a_word_is_compared_as_an_unsigned_number(fake_hip: FakeHip, driver: HipDriver) -> None:
    with driver.context(0):
        stream, word = driver.stream_create(), driver.device_alloc(4)
        driver.memset_async(word, 0xFF, 4, stream)
        driver.stream_wait_value(stream, word, 2**32 - 1)
        driver.memset_async(word, 0, 4, stream)
        with pytest.raises(DriverError):
            driver.stream_wait_value(stream, word, 2**32 - 1)
