"""The HIP runtime through cffi. ``cuda.py`` has the same verbs in the same order: a diff of the two is what differs.

Numbers and prototypes are in ``hip.cdef.h``. Constructing ``HipDriver`` opens libamdhip64 (torch's own copy where torch
is loaded) and initialises it. HIP has no contexts: a thread has a current device, and a failed call leaves its code
behind for the thread's next ``hipGetLastError``, which torch asks after its launches. Both are left as they were found.
"""

from __future__ import annotations

import threading
from typing import Any

from kvferry.drivers import _hip_ffi, loader
from kvferry.drivers.errors import DriverError, NotSupported, driver_error
from kvferry.drivers.protocol import (
    DeviceAddress,
    DeviceAttributes,
    EventHandle,
    HostAddress,
    HostMemoryDriver,
    Platform,
    StreamHandle,
)

ffi: Any = _hip_ffi.ffi  # C data has no static types

LIBRARY_PATTERN = r"libamdhip64\.so(\.\d+)*"


class _Current:
    """Makes a device current if it is not, and on the way out the one before, which the thread remembers."""

    def __init__(self, driver: HipDriver, device: int) -> None:
        self._driver, self._device = driver, device

    def __enter__(self) -> None:
        self._driver._before().append(self._driver._switch(self._device))

    def __exit__(self, *exc: object) -> None:
        before = self._driver._before().pop()
        if not self._driver._fork.in_child():
            self._driver._switch(before)


class HipDriver(HostMemoryDriver):
    """libamdhip64 in this process."""

    platform: Platform = "rocm"

    def __init__(self) -> None:
        names = ["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"]
        lib, self.library = loader.open_library(ffi, self.platform, LIBRARY_PATTERN, names)
        self._lib: Any = lib
        self._fork = loader.ForkGuard("the HIP runtime")
        self._current: dict[int, _Current] = {}
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._do("hipInit", 0)
        version = ffi.new("int *")
        self._do("hipDriverGetVersion", version)
        self.version = int(version[0])

    def _do(self, call: str, *arguments: object, detail: str = "") -> None:
        self._fork.check()
        code = self._symbol(call)(*arguments)
        if code:
            raise self._error(call, code, detail)

    def _symbol(self, call: str) -> Any:
        try:
            return getattr(self._lib, call)
        except ffi.error:
            raise NotSupported(f"{self.library} has no {call}; a newer ROCm has it") from None

    def _has(self, call: str) -> bool:
        try:
            self._symbol(call)
        except NotSupported:
            return False
        return True

    def _error(self, call: str, code: int, detail: str) -> DriverError:
        self._lib.hipGetLastError()
        return driver_error(call, code, ffi.string(self._lib.hipGetErrorName(code)).decode(), detail)

    def _before(self) -> list[int]:
        before: list[int] = self._thread.__dict__.setdefault("before", [])
        return before

    def _switch(self, device: int) -> int:
        before = ffi.new("int *")
        self._do("hipGetDevice", before)
        if before[0] != device:
            self._do("hipSetDevice", device, detail=f"device {device}")
        return int(before[0])

    def _device(self, device: int) -> int:
        out = ffi.new("hipDevice_t *")
        self._do("hipDeviceGet", out, device, detail=f"device {device} of {self.device_count()}")
        return int(out[0])

    def _attribute(self, attribute: str, device: int) -> int:
        out = ffi.new("int *")
        number = getattr(self._lib, f"hipDeviceAttribute{attribute}")
        self._do("hipDeviceGetAttribute", out, number, self._device(device), detail=attribute)
        return int(out[0])

    def _text(self, call: str, device: int) -> str:
        out = ffi.new("char[256]")
        self._do(call, out, 256, self._device(device))
        return bytes(ffi.string(out)).decode()

    def device_count(self) -> int:
        out = ffi.new("int *")
        self._do("hipGetDeviceCount", out)
        return int(out[0])

    def device_name(self, device: int) -> str:
        return self._text("hipDeviceGetName", device)

    def device_architecture(self, device: int) -> str:
        out = ffi.new("hipDeviceProp_tR0600 *")
        self._do("hipGetDevicePropertiesR0600", out, self._device(device), detail=f"device {device}")
        name = bytes(ffi.string(out.gcnArchName)).decode(errors="replace")
        if not name.startswith("gfx"):
            raise NotSupported(f"{self.library} keeps the architecture's name elsewhere: {name!r} is none")
        return name

    def device_pci_address(self, device: int) -> str:
        return self._text("hipDeviceGetPCIBusId", device).lower()

    def device_attributes(self, device: int) -> DeviceAttributes:
        return DeviceAttributes(
            host_pointer_is_device_pointer=bool(self._attribute("CanUseHostPointerForRegisteredMem", device)),
            read_only_registration=False,
            stream_wait_value=bool(self._attribute("CanUseStreamWaitValue", device)),
            integrated=bool(self._attribute("Integrated", device)),
            multiprocessors=self._attribute("MultiprocessorCount", device),
        )

    def context(self, device: int) -> _Current:
        current = self._current.get(device)
        if current is None:
            with self._lock:
                current = self._current.get(device)
                if current is None:
                    current = self._current[device] = _Current(self, self._device(device))
        return current

    def host_register(self, address: HostAddress, nbytes: int, *, read_only: bool = False) -> None:
        flags = self._lib.hipHostRegisterPortable | self._lib.hipHostRegisterMapped
        if read_only:
            raise NotSupported("HIP has no read-only registration: its flag 8 asks for coarse-grained memory")
        detail = f"{nbytes} bytes at {address:#x}, flags {flags}"
        self._do("hipHostRegister", ffi.cast("void *", address), nbytes, flags, detail=detail)

    def host_unregister(self, address: HostAddress) -> None:
        self._do("hipHostUnregister", ffi.cast("void *", address), detail=f"{address:#x}")

    def host_device_pointer(self, address: HostAddress) -> DeviceAddress:
        out = ffi.new("hipDeviceptr_t *")
        self._do("hipHostGetDevicePointer", out, ffi.cast("void *", address), 0, detail=f"{address:#x}")
        return DeviceAddress(int(out[0]))

    def host_flags(self, address: HostAddress) -> int:
        out = ffi.new("unsigned int *")
        self._do("hipHostGetFlags", out, ffi.cast("void *", address), detail=f"{address:#x}")
        return int(out[0])

    def host_alloc(self, nbytes: int) -> HostAddress:
        out = ffi.new("void **")
        flags = self._lib.hipHostMallocPortable | self._lib.hipHostMallocMapped
        self._do("hipHostMalloc", out, nbytes, flags, detail=f"{nbytes} bytes, flags {flags}")
        return HostAddress(int(ffi.cast("uintptr_t", out[0])))

    def host_free(self, address: HostAddress) -> None:
        self._do("hipHostFree", ffi.cast("void *", address), detail=f"{address:#x}")

    def device_alloc(self, nbytes: int) -> DeviceAddress:
        out = ffi.new("hipDeviceptr_t *")
        self._do("hipMalloc", out, nbytes, detail=f"{nbytes} bytes of device memory")
        return DeviceAddress(int(out[0]))

    def device_free(self, address: DeviceAddress) -> None:
        self._do("hipFree", address, detail=f"{address:#x}")

    def copy_to_device(self, dst: DeviceAddress, src: HostAddress, nbytes: int, stream: StreamHandle) -> None:
        self._do("hipMemcpyHtoDAsync", dst, ffi.cast("void *", src), nbytes, ffi.cast("hipStream_t", stream))

    def copy_to_host(self, dst: HostAddress, src: DeviceAddress, nbytes: int, stream: StreamHandle) -> None:
        self._do("hipMemcpyDtoHAsync", ffi.cast("void *", dst), src, nbytes, ffi.cast("hipStream_t", stream))

    def memset_async(self, dst: DeviceAddress, value: int, nbytes: int, stream: StreamHandle) -> None:
        self._do("hipMemsetD8Async", dst, value, nbytes, ffi.cast("hipStream_t", stream))

    def batch_copy_missing(self) -> str | None:
        if self._has("hipMemcpyBatchAsync"):
            return None
        return f"{self.library} has no hipMemcpyBatchAsync (ROCm 7.1)"

    def batch_copy(self, dsts: int, srcs: int, sizes: int, count: int, stream: StreamHandle) -> None:
        missing = self.batch_copy_missing()
        if missing:
            raise NotSupported(missing)
        # Attributes are refused. Without them a source is read in stream order, like any other asynchronous copy.
        head = (ffi.cast("void *", dsts), ffi.cast("void *", srcs), ffi.cast("void *", sizes), count)
        every = (ffi.NULL, ffi.NULL, 0)
        failed, on = ffi.new("size_t *"), ffi.cast("hipStream_t", stream)
        self._do("hipMemcpyBatchAsync", *head, *every, failed, on, detail=f"{count} ranges")

    def stream_create(self) -> StreamHandle:
        out = ffi.new("hipStream_t *")
        self._do("hipStreamCreateWithFlags", out, self._lib.hipStreamNonBlocking)
        return StreamHandle(int(ffi.cast("uintptr_t", out[0])))

    def stream_destroy(self, stream: StreamHandle) -> None:
        self._do("hipStreamDestroy", ffi.cast("hipStream_t", stream))

    def stream_synchronize(self, stream: StreamHandle) -> None:
        self._do("hipStreamSynchronize", ffi.cast("hipStream_t", stream))

    def stream_is_capturing(self, stream: StreamHandle) -> bool:
        out = ffi.new("int *")
        self._do("hipStreamIsCapturing", ffi.cast("hipStream_t", stream), out)
        return bool(out[0])

    def stream_wait_event(self, stream: StreamHandle, event: EventHandle) -> None:
        self._do("hipStreamWaitEvent", ffi.cast("hipStream_t", stream), ffi.cast("hipEvent_t", event), 0)

    def stream_wait_value(self, stream: StreamHandle, address: DeviceAddress, value: int) -> None:
        how = self._lib.hipStreamWaitValueGte
        # Not cyclic here: the word as an unsigned number, all 32 bits of it, has to be at least ``value``.
        self._do("hipStreamWaitValue32", ffi.cast("hipStream_t", stream), address, value, how, 0xFFFFFFFF)

    def event_create(self, *, timing: bool = False) -> EventHandle:
        out = ffi.new("hipEvent_t *")
        flags = self._lib.hipEventDefault if timing else self._lib.hipEventDisableTiming
        self._do("hipEventCreateWithFlags", out, flags)
        return EventHandle(int(ffi.cast("uintptr_t", out[0])))

    def event_destroy(self, event: EventHandle) -> None:
        self._do("hipEventDestroy", ffi.cast("hipEvent_t", event))

    def event_record(self, event: EventHandle, stream: StreamHandle) -> None:
        self._do("hipEventRecord", ffi.cast("hipEvent_t", event), ffi.cast("hipStream_t", stream))

    def event_query(self, event: EventHandle) -> bool:
        self._fork.check()
        code = self._lib.hipEventQuery(ffi.cast("hipEvent_t", event))
        if code not in (0, self._lib.hipErrorNotReady):
            raise self._error("hipEventQuery", code, "")
        if code:
            self._lib.hipGetLastError()
        return bool(code == 0)

    def event_synchronize(self, event: EventHandle) -> None:
        self._do("hipEventSynchronize", ffi.cast("hipEvent_t", event))

    def event_elapsed_ms(self, start: EventHandle, end: EventHandle) -> float:
        out = ffi.new("float *")
        self._do("hipEventElapsedTime", out, ffi.cast("hipEvent_t", start), ffi.cast("hipEvent_t", end))
        return float(out[0])
