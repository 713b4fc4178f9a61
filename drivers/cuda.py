"""The CUDA driver through cffi. ``hip.py`` has the same verbs in the same order: a diff of the two is what differs.

Numbers and prototypes are in ``cuda.cdef.h``. Constructing ``CudaDriver`` opens libcuda and initialises it; contexts
are the devices' primary contexts, the ones that the CUDA runtime and torch use, retained at first use and kept for the
life of the process.
"""

from __future__ import annotations

import threading
from typing import Any

from kvferry.drivers import _cuda_ffi, loader
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

ffi: Any = _cuda_ffi.ffi  # C data has no static types

LIBRARY_PATTERN = r"libcuda\.so(\.\d+)*"


class _Current:
    """Makes a device current: pushes its primary context, pops it on the way out. Holds no state of its own."""

    def __init__(self, driver: CudaDriver, context: Any) -> None:
        self._driver, self._context = driver, context

    def __enter__(self) -> None:
        self._driver._do("cuCtxPushCurrent_v2", self._context)

    def __exit__(self, *exc: object) -> None:
        if not self._driver._fork.in_child():
            self._driver._do("cuCtxPopCurrent_v2", ffi.new("CUcontext *"))


class CudaDriver(HostMemoryDriver):
    """libcuda in this process."""

    platform: Platform = "cuda"

    def __init__(self) -> None:
        lib, self.library = loader.open_library(ffi, self.platform, LIBRARY_PATTERN, ["libcuda.so.1"])
        self._lib: Any = lib
        self._fork = loader.ForkGuard("the CUDA driver")
        self._current: dict[int, _Current] = {}
        self._lock = threading.Lock()
        self._do("cuInit", 0)
        version = ffi.new("int *")
        self._do("cuDriverGetVersion", version)
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
            raise NotSupported(f"{self.library} has no {call}; a newer driver has it") from None

    def _has(self, call: str) -> bool:
        try:
            self._symbol(call)
        except NotSupported:
            return False
        return True

    def _error(self, call: str, code: int, detail: str) -> DriverError:
        name = ffi.new("const char **")
        known = self._lib.cuGetErrorName(code, name) == 0
        return driver_error(call, code, ffi.string(name[0]).decode() if known else "unknown code", detail)

    def _device(self, device: int) -> int:
        out = ffi.new("CUdevice *")
        self._do("cuDeviceGet", out, device, detail=f"device {device} of {self.device_count()}")
        return int(out[0])

    def _attribute(self, attribute: str, device: int) -> int:
        out = ffi.new("int *")
        number = getattr(self._lib, f"CU_DEVICE_ATTRIBUTE_{attribute}")
        self._do("cuDeviceGetAttribute", out, number, self._device(device), detail=attribute)
        return int(out[0])

    def _text(self, call: str, device: int) -> str:
        out = ffi.new("char[256]")
        self._do(call, out, 256, self._device(device))
        return bytes(ffi.string(out)).decode()

    def device_count(self) -> int:
        out = ffi.new("int *")
        self._do("cuDeviceGetCount", out)
        return int(out[0])

    def device_name(self, device: int) -> str:
        return self._text("cuDeviceGetName", device)

    def device_architecture(self, device: int) -> str:
        major = self._attribute("COMPUTE_CAPABILITY_MAJOR", device)
        return f"sm_{major}{self._attribute('COMPUTE_CAPABILITY_MINOR', device)}"

    def device_pci_address(self, device: int) -> str:
        return self._text("cuDeviceGetPCIBusId", device).lower()

    def device_attributes(self, device: int) -> DeviceAttributes:
        return DeviceAttributes(
            host_pointer_is_device_pointer=bool(self._attribute("CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM", device)),
            read_only_registration=bool(self._attribute("READ_ONLY_HOST_REGISTER_SUPPORTED", device)),
            # Drivers before 12.0 answer the first, drivers from 12.0 on also the second.
            stream_wait_value=bool(
                self._attribute("CAN_USE_STREAM_MEM_OPS_V1", device)
                or self._attribute("CAN_USE_64_BIT_STREAM_MEM_OPS", device)
            ),
            integrated=bool(self._attribute("INTEGRATED", device)),
            multiprocessors=self._attribute("MULTIPROCESSOR_COUNT", device),
        )

    def context(self, device: int) -> _Current:
        current = self._current.get(device)
        if current is None:
            with self._lock:
                current = self._current.get(device)
                if current is None:
                    out = ffi.new("CUcontext *")
                    self._do("cuDevicePrimaryCtxRetain", out, self._device(device), detail=f"device {device}")
                    current = self._current[device] = _Current(self, out[0])
        return current

    def host_register(self, address: HostAddress, nbytes: int, *, read_only: bool = False) -> None:
        flags = self._lib.CU_MEMHOSTREGISTER_PORTABLE | self._lib.CU_MEMHOSTREGISTER_DEVICEMAP
        if read_only:
            flags |= self._lib.CU_MEMHOSTREGISTER_READ_ONLY
        detail = f"{nbytes} bytes at {address:#x}, flags {flags}"
        self._do("cuMemHostRegister_v2", ffi.cast("void *", address), nbytes, flags, detail=detail)

    def host_unregister(self, address: HostAddress) -> None:
        self._do("cuMemHostUnregister", ffi.cast("void *", address), detail=f"{address:#x}")

    def host_device_pointer(self, address: HostAddress) -> DeviceAddress:
        out = ffi.new("CUdeviceptr *")
        self._do("cuMemHostGetDevicePointer_v2", out, ffi.cast("void *", address), 0, detail=f"{address:#x}")
        return DeviceAddress(int(out[0]))

    def host_flags(self, address: HostAddress) -> int:
        out = ffi.new("unsigned int *")
        self._do("cuMemHostGetFlags", out, ffi.cast("void *", address), detail=f"{address:#x}")
        return int(out[0])

    def host_alloc(self, nbytes: int) -> HostAddress:
        out = ffi.new("void **")
        flags = self._lib.CU_MEMHOSTALLOC_PORTABLE | self._lib.CU_MEMHOSTALLOC_DEVICEMAP
        self._do("cuMemHostAlloc", out, nbytes, flags, detail=f"{nbytes} bytes, flags {flags}")
        return HostAddress(int(ffi.cast("uintptr_t", out[0])))

    def host_free(self, address: HostAddress) -> None:
        self._do("cuMemFreeHost", ffi.cast("void *", address), detail=f"{address:#x}")

    def device_alloc(self, nbytes: int) -> DeviceAddress:
        out = ffi.new("CUdeviceptr *")
        self._do("cuMemAlloc_v2", out, nbytes, detail=f"{nbytes} bytes of device memory")
        return DeviceAddress(int(out[0]))

    def device_free(self, address: DeviceAddress) -> None:
        self._do("cuMemFree_v2", address, detail=f"{address:#x}")

    def copy_to_device(self, dst: DeviceAddress, src: HostAddress, nbytes: int, stream: StreamHandle) -> None:
        self._do("cuMemcpyHtoDAsync_v2", dst, ffi.cast("void *", src), nbytes, ffi.cast("CUstream", stream))

    def copy_to_host(self, dst: HostAddress, src: DeviceAddress, nbytes: int, stream: StreamHandle) -> None:
        self._do("cuMemcpyDtoHAsync_v2", ffi.cast("void *", dst), src, nbytes, ffi.cast("CUstream", stream))

    def memset_async(self, dst: DeviceAddress, value: int, nbytes: int, stream: StreamHandle) -> None:
        self._do("cuMemsetD8Async", dst, value, nbytes, ffi.cast("CUstream", stream))

    def batch_copy_missing(self) -> str | None:
        if self._has("cuMemcpyBatchAsync_v2") or self._has("cuMemcpyBatchAsync"):
            return None
        return f"{self.library} has neither cuMemcpyBatchAsync_v2 (CUDA 13) nor cuMemcpyBatchAsync (CUDA 12.8)"

    def batch_copy(self, dsts: int, srcs: int, sizes: int, count: int, stream: StreamHandle) -> None:
        missing = self.batch_copy_missing()
        if missing:
            raise NotSupported(missing)
        # A source is read in stream order: nobody promises that the CPU leaves a pool page alone until then.
        attributes = ffi.new("CUmemcpyAttributes *", {"srcAccessOrder": self._lib.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM})
        head = (ffi.cast("void *", dsts), ffi.cast("void *", srcs), ffi.cast("void *", sizes), count)
        every = (attributes, ffi.new("size_t *", 0), 1)
        failed, on = ffi.new("size_t *"), ffi.cast("CUstream", stream)
        if self._has("cuMemcpyBatchAsync_v2"):
            self._do("cuMemcpyBatchAsync_v2", *head, *every, on, detail=f"{count} ranges")
        else:
            self._do("cuMemcpyBatchAsync", *head, *every, failed, on, detail=f"{count} ranges")

    def stream_create(self) -> StreamHandle:
        out = ffi.new("CUstream *")
        self._do("cuStreamCreate", out, self._lib.CU_STREAM_NON_BLOCKING)
        return StreamHandle(int(ffi.cast("uintptr_t", out[0])))

    def stream_destroy(self, stream: StreamHandle) -> None:
        self._do("cuStreamDestroy_v2", ffi.cast("CUstream", stream))

    def stream_synchronize(self, stream: StreamHandle) -> None:
        self._do("cuStreamSynchronize", ffi.cast("CUstream", stream))

    def stream_is_capturing(self, stream: StreamHandle) -> bool:
        out = ffi.new("int *")
        self._do("cuStreamIsCapturing", ffi.cast("CUstream", stream), out)
        return bool(out[0])

    def stream_wait_event(self, stream: StreamHandle, event: EventHandle) -> None:
        self._do("cuStreamWaitEvent", ffi.cast("CUstream", stream), ffi.cast("CUevent", event), 0)

    def stream_wait_value(self, stream: StreamHandle, address: DeviceAddress, value: int) -> None:
        how = self._lib.CU_STREAM_WAIT_VALUE_GEQ
        self._do("cuStreamWaitValue32_v2", ffi.cast("CUstream", stream), address, value, how)

    def event_create(self, *, timing: bool = False) -> EventHandle:
        out = ffi.new("CUevent *")
        flags = self._lib.CU_EVENT_DEFAULT if timing else self._lib.CU_EVENT_DISABLE_TIMING
        self._do("cuEventCreate", out, flags)
        return EventHandle(int(ffi.cast("uintptr_t", out[0])))

    def event_destroy(self, event: EventHandle) -> None:
        self._do("cuEventDestroy_v2", ffi.cast("CUevent", event))

    def event_record(self, event: EventHandle, stream: StreamHandle) -> None:
        self._do("cuEventRecord", ffi.cast("CUevent", event), ffi.cast("CUstream", stream))

    def event_query(self, event: EventHandle) -> bool:
        self._fork.check()
        code = self._lib.cuEventQuery(ffi.cast("CUevent", event))
        if code not in (0, self._lib.CUDA_ERROR_NOT_READY):
            raise self._error("cuEventQuery", code, "")
        return bool(code == 0)

    def event_synchronize(self, event: EventHandle) -> None:
        self._do("cuEventSynchronize", ffi.cast("CUevent", event))

    def event_elapsed_ms(self, start: EventHandle, end: EventHandle) -> float:
        out = ffi.new("float *")
        self._do("cuEventElapsedTime", out, ffi.cast("CUevent", start), ffi.cast("CUevent", end))
        return float(out[0])
