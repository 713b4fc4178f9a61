"""The stand-in device: host memory plays the device, so that the whole of kvferry runs where there is no GPU.

It keeps the promise that is easiest to break on a machine where host and device addresses happen to be equal: the
device address of registered memory is a second mapping of the same pages at another address, one a device, and
kernels (``kernels_cubin/launch_host.py``) reach device addresses only. Handing one a host address is an illegal
access, and the device stays faulted.

It differs from a GPU in this: the default stream 0 does not synchronise with other streams, streams cannot be
captured, and only whole pages of the operating system can be registered.
"""

from __future__ import annotations

import itertools
import os
import platform as python_platform
import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.drivers import posix
from kvferry.drivers.errors import driver_error
from kvferry.drivers.host_stream import Fault, Mark, Stream
from kvferry.drivers.loader import ForkGuard
from kvferry.drivers.protocol import (
    DeviceAddress,
    DeviceAttributes,
    EventHandle,
    HostAddress,
    HostMemoryDriver,
    Platform,
    StreamHandle,
)

_VERSION = 1
_PORTABLE_MAPPED = 3  # the flags that CUDA and HIP would report


@dataclass
class _Registration:
    """Pages that belong to a memory file, so that they can be mapped again."""

    base: HostAddress
    nbytes: int
    fd: int
    allocated: bool
    aliases: dict[int, DeviceAddress] = field(default_factory=dict)  # by device


@dataclass
class _Device:
    ranges: dict[int, int] = field(default_factory=dict)  # what kernels may reach: begin -> end
    allocated: dict[int, int] = field(default_factory=dict)  # begin -> nbytes, of device_alloc
    fault: Fault = field(default_factory=Fault)
    default_stream: Stream | None = None

    def reaches(self, address: int, nbytes: int) -> bool:
        begins = sorted(self.ranges)
        at = bisect_right(begins, address) - 1
        return at >= 0 and address + nbytes <= self.ranges[begins[at]]


class _Current:
    """Makes a device current for a thread; nests."""

    def __init__(self, stack: threading.local, device: int, fork: ForkGuard) -> None:
        self._stack, self._device, self._fork = stack, device, fork

    def __enter__(self) -> None:
        self._fork.check()
        self._stack.__dict__.setdefault("devices", []).append(self._device)

    def __exit__(self, *exc: object) -> None:
        self._stack.devices.pop()


class HostDriver(HostMemoryDriver):
    """A driver without a device. ``devices`` of them, each with its own addresses."""

    platform: Platform = "stand-in"

    def __init__(self, devices: int = 1) -> None:
        self.library, self.version = "none: host memory stands in for the device", _VERSION
        self._fork = ForkGuard("the stand-in device")
        self._lock = threading.RLock()
        self._stack = threading.local()
        self._devices = [_Device() for _ in range(devices)]
        self._registrations: dict[int, _Registration] = {}
        self._streams: dict[int, Stream] = {}
        self._events: dict[int, Mark | None] = {}
        self._handles = itertools.count(1)

    def _fail(self, call: str, code: int, name: str, detail: str) -> Exception:
        return driver_error(f"stand-in {call}", code, name, detail)

    def _number(self) -> int:
        """The current device's number; raises what a lost or missing context raises."""
        self._fork.check()
        stack: list[int] = self._stack.__dict__.get("devices", [])
        if not stack:
            raise self._fail("call", 201, "invalid context", "enter `with driver.context(device):` first")
        fault = self._devices[stack[-1]].fault.error
        if fault is not None:
            raise fault
        return stack[-1]

    def _device(self) -> _Device:
        return self._devices[self._number()]

    def _known(self, device: int) -> int:
        if not 0 <= device < len(self._devices):
            raise self._fail("device", 101, "invalid device", f"device {device} of {len(self._devices)}")
        return device

    def device_count(self) -> int:
        return len(self._devices)

    def device_name(self, device: int) -> str:
        return f"stand-in device {self._known(device)} ({python_platform.machine()} host memory)"

    def device_architecture(self, device: int) -> str:
        return python_platform.machine()

    def device_pci_address(self, device: int) -> str:
        return ""

    def device_attributes(self, device: int) -> DeviceAttributes:
        return DeviceAttributes(
            host_pointer_is_device_pointer=False,
            read_only_registration=False,
            stream_wait_value=True,
            integrated=True,
            multiprocessors=os.cpu_count() or 1,
        )

    def context(self, device: int) -> _Current:
        return _Current(self._stack, self._known(device), self._fork)

    def host_register(self, address: HostAddress, nbytes: int, *, read_only: bool = False) -> None:
        self._number()
        what = f"{nbytes} bytes at {address:#x}"
        if not address or nbytes <= 0 or address % posix.PAGE_NBYTES or nbytes % posix.PAGE_NBYTES or read_only:
            detail = f"{what}: whole writable pages of {posix.PAGE_NBYTES} bytes only"
            raise self._fail("host_register", 1, "invalid value", detail)
        with self._lock:
            for other in self._registrations.values():
                if address < other.base + other.nbytes and other.base < address + nbytes:
                    detail = f"{what} meets {other.nbytes} bytes at {other.base:#x}"
                    raise self._fail("host_register", 712, "already registered", detail)
            # Private pages have no second mapping; pages of a memory file do. So the range is moved into one, in place.
            fd = posix.memory_file("kvferry-stand-in", nbytes)
            copied = posix.map_file(fd, nbytes)
            posix.copy(copied, address, nbytes)
            posix.unmap(copied, nbytes)
            posix.map_file(fd, nbytes, at=address)
            self._registrations[address] = _Registration(address, nbytes, fd, allocated=False)

    def host_unregister(self, address: HostAddress) -> None:
        self._number()
        self._release(address, allocated=False, call="host_unregister")

    def _release(self, address: HostAddress, *, allocated: bool, call: str) -> None:
        with self._lock:
            registration = self._registrations.get(address)
            if registration is None or registration.allocated != allocated:
                raise self._fail(call, 713, "not registered", f"{address:#x} is not such a base")
            for number, alias in registration.aliases.items():
                del self._devices[number].ranges[alias]
                posix.unmap(HostAddress(alias), registration.nbytes)
            os.close(registration.fd)
            del self._registrations[address]
        if allocated:
            posix.unmap(registration.base, registration.nbytes)

    def host_device_pointer(self, address: HostAddress) -> DeviceAddress:
        number = self._number()
        with self._lock:
            registration = self._holding(address)
            if registration is None:
                raise self._fail("host_device_pointer", 1, "invalid value", f"{address:#x} is not registered")
            alias = registration.aliases.get(number)
            if alias is None:
                alias = DeviceAddress(posix.map_file(registration.fd, registration.nbytes))
                registration.aliases[number] = alias
                self._devices[number].ranges[alias] = alias + registration.nbytes
            return DeviceAddress(alias + address - registration.base)

    def _holding(self, address: int) -> _Registration | None:
        return next((r for r in self._registrations.values() if r.base <= address < r.base + r.nbytes), None)

    def host_flags(self, address: HostAddress) -> int:
        self._number()
        with self._lock:
            if self._holding(address) is None:
                raise self._fail("host_flags", 1, "invalid value", f"{address:#x} is not registered")
        return _PORTABLE_MAPPED

    def host_alloc(self, nbytes: int) -> HostAddress:
        self._number()
        if nbytes <= 0:
            raise self._fail("host_alloc", 1, "invalid value", f"{nbytes} bytes")
        whole = -(-nbytes // posix.PAGE_NBYTES) * posix.PAGE_NBYTES
        fd = posix.memory_file("kvferry-stand-in", whole)
        address = posix.map_file(fd, whole)
        with self._lock:
            self._registrations[address] = _Registration(address, whole, fd, allocated=True)
        return address

    def host_free(self, address: HostAddress) -> None:
        self._number()
        self._release(address, allocated=True, call="host_free")

    def device_alloc(self, nbytes: int) -> DeviceAddress:
        device = self._device()
        if nbytes <= 0:
            raise self._fail("device_alloc", 1, "invalid value", f"{nbytes} bytes")
        address = DeviceAddress(posix.map_anonymous(nbytes))
        with self._lock:
            device.allocated[address] = nbytes
            device.ranges[address] = address + nbytes
        return address

    def device_free(self, address: DeviceAddress) -> None:
        device = self._device()
        with self._lock:
            nbytes = device.allocated.pop(address, None)
            if nbytes is None:
                raise self._fail("device_free", 1, "invalid value", f"{address:#x} was not allocated")
            del device.ranges[address]
        posix.unmap(HostAddress(address), nbytes)

    def _reachable(self, call: str, address: int, nbytes: int) -> None:
        with self._lock:
            if not self._device().reaches(address, nbytes):
                detail = f"{nbytes} bytes at {address:#x} are not this device's"
                raise self._fail(call, 1, "invalid value", detail)

    def copy_to_device(self, dst: DeviceAddress, src: HostAddress, nbytes: int, stream: StreamHandle) -> None:
        self._reachable("copy_to_device", dst, nbytes)
        self.submit(stream, lambda: posix.copy(dst, src, nbytes))

    def copy_to_host(self, dst: HostAddress, src: DeviceAddress, nbytes: int, stream: StreamHandle) -> None:
        self._reachable("copy_to_host", src, nbytes)
        self.submit(stream, lambda: posix.copy(dst, src, nbytes))

    def memset_async(self, dst: DeviceAddress, value: int, nbytes: int, stream: StreamHandle) -> None:
        self._reachable("memset_async", dst, nbytes)
        self.submit(stream, lambda: posix.fill(dst, value, nbytes))

    def batch_copy_missing(self) -> str | None:
        return "the stand-in device has no copy engine"

    def batch_copy(self, dsts: int, srcs: int, sizes: int, count: int, stream: StreamHandle) -> None:
        self._number()
        raise self._fail("batch_copy", 801, "not supported", "the stand-in device has no copy engine")

    def stream_create(self) -> StreamHandle:
        stream = Stream(self._device().fault)
        handle = next(self._handles)
        self._streams[handle] = stream
        return StreamHandle(handle)

    def stream_destroy(self, stream: StreamHandle) -> None:
        self._stream(stream)
        self._streams.pop(stream).destroy()

    def stream_synchronize(self, stream: StreamHandle) -> None:
        self._stream(stream).mark().wait()
        self._number()

    def stream_is_capturing(self, stream: StreamHandle) -> bool:
        self._stream(stream)
        return False

    def stream_wait_event(self, stream: StreamHandle, event: EventHandle) -> None:
        mark = self._event(event)
        if mark is not None:
            self.submit(stream, mark.wait)

    def stream_wait_value(self, stream: StreamHandle, address: DeviceAddress, value: int) -> None:
        self._reachable("stream_wait_value", address, 4)
        word = posix.buffer(address, 4).cast("I")
        fault = self._device().fault

        def wait() -> None:
            while (word[0] - value) & 0x8000_0000 and fault.error is None:
                time.sleep(20e-6)

        self.submit(stream, wait)

    def event_create(self, *, timing: bool = False) -> EventHandle:
        self._number()
        handle = next(self._handles)
        self._events[handle] = None
        return EventHandle(handle)

    def event_destroy(self, event: EventHandle) -> None:
        self._event(event)
        del self._events[event]

    def event_record(self, event: EventHandle, stream: StreamHandle) -> None:
        self._event(event)
        self._events[event] = self._stream(stream).mark()

    def event_query(self, event: EventHandle) -> bool:
        mark = self._event(event)
        reached = mark is None or mark.is_reached()
        self._number()
        return reached

    def event_synchronize(self, event: EventHandle) -> None:
        mark = self._event(event)
        if mark is not None:
            mark.wait()
        self._number()

    def event_elapsed_ms(self, start: EventHandle, end: EventHandle) -> float:
        first, last = self._event(start), self._event(end)
        if first is None or last is None or not (first.is_reached() and last.is_reached()):
            raise self._fail("event_elapsed_ms", 600, "not ready", "both events must have been reached")
        return (last.time_s - first.time_s) * 1e3

    def _event(self, event: EventHandle) -> Mark | None:
        self._number()
        if event not in self._events:
            raise self._fail("event", 400, "invalid handle", f"event {event}")
        return self._events[event]

    def _stream(self, stream: StreamHandle) -> Stream:
        device = self._device()
        if stream == 0:
            with self._lock:
                device.default_stream = device.default_stream or Stream(device.fault)
                return device.default_stream
        if stream not in self._streams:
            raise self._fail("stream", 400, "invalid handle", f"stream {stream}")
        return self._streams[stream]

    def submit(self, stream: StreamHandle, work: Callable[[], object]) -> None:
        """[context] Give work of any kind to a stream: how the stand-in's kernels are launched."""
        self._stream(stream).submit(work)

    def current_ranges(self) -> Callable[[], list[tuple[int, int]]]:
        """[context] A function that lists what kernels may reach here when it is called: sorted (begin, end)."""
        device = self._device()

        def ranges() -> list[tuple[int, int]]:
            with self._lock:
                return sorted(device.ranges.items())

        return ranges
