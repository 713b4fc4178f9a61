"""What the drivers say of their devices, and which device is current: CUDA and HIP alike."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from kvferry.drivers.errors import (
    DriverError,
)
from kvferry.drivers.protocol import (
    DeviceAddress,
    DeviceAttributes,
    HostAddress,
    HostMemoryDriver,
)

from fakes.memory import PAGE, Pages, put_at
from fakes.vendors import Bench
from support.process import run_python

# ---- the devices


def test_devices_are_described(bench: Bench) -> None:
    driver = bench.driver(devices=3)
    assert driver.device_count() == 3
    assert driver.device_name(2) == {"cuda": "Fake H200 2", "hip": "Fake MI300X 2"}[bench.vendor.name]
    bus = {"cuda": 0xA0, "hip": 0xC0}[bench.vendor.name] + 1
    assert driver.device_pci_address(1) == f"0000:{bus:02x}:00.0", "lower case, as in /sys/bus/pci"
    assert driver.library == bench.path
    assert driver.version == {"cuda": 13000, "hip": 70226015}[bench.vendor.name]


def test_attributes_follow_the_device(bench: Bench) -> None:
    integrated, multiprocessors = {"cuda": (18, 16), "hip": (16, 63)}[bench.vendor.name]
    driver = bench.driver()
    before = driver.device_attributes(0)
    assert before == DeviceAttributes(
        host_pointer_is_device_pointer=False,
        read_only_registration=False,
        stream_wait_value=True,
        integrated=False,
        multiprocessors={"cuda": 132, "hip": 304}[bench.vendor.name],
    )
    bench.fake.set_attribute(integrated, 1)
    bench.fake.set_attribute(multiprocessors, 20)
    after = driver.device_attributes(0)
    assert after == replace(before, integrated=True, multiprocessors=20)


@pytest.mark.parametrize("device", [-1, 2, 99])
def test_a_device_that_is_not_there(bench: Bench, device: int) -> None:
    driver = bench.driver(devices=2)
    with pytest.raises(DriverError, match=rf"device {device} of 2") as caught:
        driver.context(device)
    assert caught.value.code == 101
    with pytest.raises(DriverError):
        driver.device_name(device)


def test_no_device_at_all(bench: Bench) -> None:
    bench.fake.set_devices(0)
    with pytest.raises(DriverError) as caught:
        bench.vendor.driver()
    assert (caught.value.call, caught.value.code) == (bench.calls.init, 100)


# ---- threads and the current device


def test_a_fresh_thread_works(driver: HostMemoryDriver) -> None:
    pages = Pages(PAGE)

    def work() -> DeviceAddress:
        with driver.context(0):
            driver.host_register(HostAddress(pages.address), PAGE)
            return driver.host_device_pointer(HostAddress(pages.address))

    with ThreadPoolExecutor(1) as pool:
        alias = pool.submit(work).result()
    put_at(alias, b"thread")
    assert pages.array[:6].tobytes() == b"thread"


def test_a_thread_keeps_the_device_it_had(bench: Bench) -> None:
    """Scenario 31: torch made device 1 current in this thread; device 0 is used; device 1 is current. (cupy#72)"""
    driver = bench.driver(devices=3)

    def work() -> list[int | None]:
        seen = []
        bench.fake.make_current(1)
        with driver.context(0):
            seen.append(bench.fake.current_device())
            with driver.context(2):
                seen.append(bench.fake.current_device())
                with driver.context(2):
                    seen.append(bench.fake.current_device())
                seen.append(bench.fake.current_device())
            seen.append(bench.fake.current_device())
        seen.append(bench.fake.current_device())
        with pytest.raises(KeyError), driver.context(2):
            raise KeyError
        seen.append(bench.fake.current_device())
        with driver.context(2):
            bench.fake.make_current(0)  # somebody changes it in between
        seen.append(bench.fake.current_device())
        return seen

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result() == [0, 2, 2, 2, 0, 1, 1, 1]


def test_two_threads_do_not_see_each_others_device(bench: Bench) -> None:
    """The first enters, the second enters, the first leaves, the second leaves: each gets back what it had."""
    driver, step = bench.driver(devices=4), threading.Barrier(2, timeout=30)

    def work(me: int) -> list[int | None]:
        bench.fake.make_current(2 + me)
        context, seen = driver.context(me), []
        for turn in range(4):
            if turn == me:
                context.__enter__()
            elif turn == 2 + me:
                seen.append(bench.fake.current_device())
                context.__exit__(None, None, None)
                seen.append(bench.fake.current_device())
            step.wait()
        return seen

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, [0, 1])) == [[0, 2], [1, 3]]


# ---- fork


def test_a_forked_child_is_refused_and_cleans_nothing_up(bench: Bench) -> None:
    """Scenario 30: verbs raise a named error in the child, its exit unregisters nothing, the parent goes on."""
    printed = run_python(
        f"""
        import atexit, inspect, os, sys
        from fakes.memory import PAGE, Pages
        from fakes.vendors import VENDORS
        from kvferry.drivers.errors import ForkedProcess
        from kvferry.drivers.protocol import HostMemoryDriver

        vendor = next(v for v in VENDORS if v.name == {bench.vendor.name!r})
        fake = vendor.fake({bench.path!r})
        fake.set_devices(2)
        driver, pages = vendor.driver(), Pages(2 * PAGE)
        # Registered first, so it runs last at exit: after whatever the driver would do there.
        atexit.register(lambda: print("at exit:", [call.name for call in fake.log()], flush=True))
        with driver.context(0):
            stream, event = driver.stream_create(), driver.event_create()
            driver.host_register(pages.address, PAGE)
        fake.log()
        sys.stdout.flush()
        with driver.context(1):
            child = os.fork()
            if child == 0:
                fake.log()
                verbs = [n for n in vars(HostMemoryDriver) if not n.startswith("_") and n != "batch_copy_missing"]
                for name in verbs:
                    verb = getattr(driver, name)
                    required = [p for p in inspect.signature(verb).parameters.values()
                                if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
                    try:
                        entered = verb(*(1 for _ in required))
                        if name == "context":
                            entered.__enter__()
                    except ForkedProcess as error:
                        assert "spawn" in str(error)
                    else:
                        raise AssertionError(f"{{name}} worked in the child")
                print("child refused", len(verbs), "verbs")
        if child == 0:
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0, "leaving the context in the child raises nothing"
        with driver.context(0):
            alias = driver.host_device_pointer(pages.address)
            driver.stream_synchronize(stream)
            driver.host_unregister(pages.address)
        done = [call.values["address"] for call in fake.log() if call.name == vendor.calls.unregister]
        print("parent unregistered once:", done == [pages.address])
        """
    )
    lines = printed.splitlines()
    assert lines[0].startswith("child refused")
    assert int(lines[0].split()[2]) >= 29
    assert lines[1] == "at exit: []"
    assert lines[2:] == ["parent unregistered once: True", "at exit: []"]
