"""The stand-in device: host memory plays the device, so that the whole of kvferry runs where there is no GPU.

It keeps the promise that is easiest to break on a machine where host and device addresses happen to be equal: the
device address of registered memory is a second mapping of the same pages at another address, one a device, and
kernels (``kernels_cubin/launch_host.py``) reach device addresses only. Handing one a host address is an illegal
access, and the device stays faulted.

It differs from a GPU in this: the default stream 0 does not synchronise with other streams, streams cannot be
captured, and only whole pages of the operating system can be registered.
"""

from __future__ import annotations

import functools
import itertools
import os
import platform as python_platform
import threading
import time
from collections.abc import Callable

from kvferry.drivers import posix
from kvferry.drivers.host_memory import HostMemory, refuse
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
        self._lock = threading.Lock()
        self._current = threading.local()
        self._memory = HostMemory(devices)
        self._faults = [Fault() for _ in range(devices)]
        self._default_streams: dict[int, Stream] = {}
        self._streams: dict[int, Stream] = {}
        self._events: dict[int, Mark | None] = {}
        self._handles = itertools.count(1)

    def _device(self) -> int:
        """The current device; raises what a missing or lost context raises."""
        self._fork.check()
        stack: list[int] = self._current.__dict__.get("devices", [])
        if not stack:
            raise refuse("call", 201, "invalid context", "enter `with driver.context(device):` first")
        fault = self._faults[stack[-1]].error
        if fault is not None:
            raise fault
        return stack[-1]

    def _known(self, device: int) -> int:
        if not 0 <= device < len(self._faults):
            raise refuse("device", 101, "invalid device", f"device {device} of {len(self._faults)}")
        return device

    def device_count(self) -> int:
        return len(self._faults)

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
        return _Current(self._current, self._known(device), self._fork)

    def host_register(self, address: HostAddress, nbytes: int, *, read_only: bool = False) -> None:
        self._device()
        if read_only:
            raise refuse("host_register", 801, "not supported", "read-only mappings have no second mapping here")
        self._memory.register(address, nbytes)

    def host_unregister(self, address: HostAddress) -> None:
        self._device()
        self._memory.release(address, allocated=False, call="host_unregister")

    def host_device_pointer(self, address: HostAddress) -> DeviceAddress:
        return self._memory.device_address(self._device(), address)

    def host_flags(self, address: HostAddress) -> int:
        self._device()
        self._memory.check_registered(address, "host_flags")
        return _PORTABLE_MAPPED

    def host_alloc(self, nbytes: int) -> HostAddress:
        self._device()
        return self._memory.allocate_host(nbytes)

    def host_free(self, address: HostAddress) -> None:
        self._device()
        self._memory.release(address, allocated=True, call="host_free")

    def device_alloc(self, nbytes: int) -> DeviceAddress:
        return self._memory.allocate_device(self._device(), nbytes)

    def device_free(self, address: DeviceAddress) -> None:
        self._memory.free_device(self._device(), address)

    def copy_to_device(self, dst: DeviceAddress, src: HostAddress, nbytes: int, stream: StreamHandle) -> None:
        self._memory.check_reachable(self._device(), dst, nbytes, "copy_to_device")
        self.submit(stream, lambda: posix.copy(dst, src, nbytes))

    def copy_to_host(self, dst: HostAddress, src: DeviceAddress, nbytes: int, stream: StreamHandle) -> None:
        self._memory.check_reachable(self._device(), src, nbytes, "copy_to_host")
        self.submit(stream, lambda: posix.copy(dst, src, nbytes))

    def memset_async(self, dst: DeviceAddress, value: int, nbytes: int, stream: StreamHandle) -> None:
        self._memory.check_reachable(self._device(), dst, nbytes, "memset_async")
        self.submit(stream, lambda: posix.fill(dst, value, nbytes))

    def batch_copy_missing(self) -> str | None:
        return "the stand-in device has no copy engine"

    def batch_copy(self, dsts: int, srcs: int, sizes: int, count: int, stream: StreamHandle) -> None:
        self._device()
        raise refuse("batch_copy", 801, "not supported", "the stand-in device has no copy engine")

    def stream_create(self) -> StreamHandle:
        stream = Stream(self._faults[self._device()])
        handle = next(self._handles)
        self._streams[handle] = stream
        return StreamHandle(handle)

    def stream_destroy(self, stream: StreamHandle) -> None:
        self._stream(stream)
        self._streams.pop(stream).destroy()

    def stream_synchronize(self, stream: StreamHandle) -> None:
        self._stream(stream).mark().wait()
        self._device()

    def stream_is_capturing(self, stream: StreamHandle) -> bool:
        self._stream(stream)
        return False

    def stream_wait_event(self, stream: StreamHandle, event: EventHandle) -> None:
        mark = self._event(event)
        if mark is not None:
            self.submit(stream, mark.wait)

    def stream_wait_value(self, stream: StreamHandle, address: DeviceAddress, value: int) -> None:
        device = self._device()
        self._memory.check_reachable(device, address, 4, "stream_wait_value")
        word, fault = posix.buffer(address, 4).cast("I"), self._faults[device]

        def wait() -> None:
            while (word[0] - value) & 0x8000_0000 and fault.error is None:
                time.sleep(20e-6)

        self.submit(stream, wait)

    def event_create(self, *, timing: bool = False) -> EventHandle:
        self._device()
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
        self._device()
        return reached

    def event_synchronize(self, event: EventHandle) -> None:
        mark = self._event(event)
        if mark is not None:
            mark.wait()
        self._device()

    def event_elapsed_ms(self, start: EventHandle, end: EventHandle) -> float:
        first, last = self._event(start), self._event(end)
        if first is None or last is None or not (first.is_reached() and last.is_reached()):
            raise refuse("event_elapsed_ms", 600, "not ready", "both events must have been reached")
        return (last.time_s - first.time_s) * 1e3

    def _event(self, event: EventHandle) -> Mark | None:
        self._device()
        if event not in self._events:
            raise refuse("event", 400, "invalid handle", f"event {event}")
        return self._events[event]

    def _stream(self, stream: StreamHandle) -> Stream:
        device = self._device()
        if stream == 0:
            with self._lock:
                if device not in self._default_streams:
                    self._default_streams[device] = Stream(self._faults[device])
                return self._default_streams[device]
        if stream not in self._streams:
            raise refuse("stream", 400, "invalid handle", f"stream {stream}")
        return self._streams[stream]

    def submit(self, stream: StreamHandle, work: Callable[[], object]) -> None:
        """[context] Give work of any kind to a stream: how the stand-in's kernels are launched."""
        self._stream(stream).submit(work)

    def current_ranges(self) -> Callable[[], list[tuple[int, int]]]:
        """[context] A function that lists what kernels may reach here when it is called: sorted (begin, end)."""
        return functools.partial(self._memory.reachable, self._device())
