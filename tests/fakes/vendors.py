"""Two vendors, one list of verbs: what a test needs to run the same on both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from kvferry.drivers.protocol import HostMemoryDriver

from fakes.cuda import FakeCuda
from fakes.hip import FakeHip


@dataclass(frozen=True)
class Calls:
    """The vendor's names of calls, where a test makes one fail or looks for it in the log."""

    init: str
    register: str
    unregister: str
    device_pointer: str
    host_alloc: str
    host_free: str
    device_alloc: str
    device_free: str
    copy_to_device: str
    batch: str
    stream_create: str
    stream_destroy: str
    stream_wait_event: str
    stream_wait_value: str
    event_create: str
    event_destroy: str
    event_query: str
    launch: str


@dataclass(frozen=True)
class Vendor:
    """A vendor's fake, its driver, and its names."""

    name: str
    fake: Callable[[str], FakeCuda | FakeHip]
    module: str
    driver_name: str
    calls: Calls
    wrong_value: str

    def driver(self) -> HostMemoryDriver:
        """The driver under test, on whichever library is loaded."""
        made: HostMemoryDriver = getattr(import_module(self.module), self.driver_name)()
        return made


CUDA = Vendor(
    "cuda",
    FakeCuda,
    "kvferry.drivers.cuda",
    "CudaDriver",
    Calls(
        init="cuInit",
        register="cuMemHostRegister_v2",
        unregister="cuMemHostUnregister",
        device_pointer="cuMemHostGetDevicePointer_v2",
        host_alloc="cuMemHostAlloc",
        host_free="cuMemFreeHost",
        device_alloc="cuMemAlloc_v2",
        device_free="cuMemFree_v2",
        copy_to_device="cuMemcpyHtoDAsync_v2",
        batch="cuMemcpyBatchAsync_v2",
        stream_create="cuStreamCreate",
        stream_destroy="cuStreamDestroy_v2",
        stream_wait_event="cuStreamWaitEvent",
        stream_wait_value="cuStreamWaitValue32_v2",
        event_create="cuEventCreate",
        event_destroy="cuEventDestroy_v2",
        event_query="cuEventQuery",
        launch="cuLaunchKernel",
    ),
    "CUDA_ERROR_INVALID_VALUE",
)

HIP = Vendor(
    "hip",
    FakeHip,
    "kvferry.drivers.hip",
    "HipDriver",
    Calls(
        init="hipInit",
        register="hipHostRegister",
        unregister="hipHostUnregister",
        device_pointer="hipHostGetDevicePointer",
        host_alloc="hipHostMalloc",
        host_free="hipHostFree",
        device_alloc="hipMalloc",
        device_free="hipFree",
        copy_to_device="hipMemcpyHtoDAsync",
        batch="hipMemcpyBatchAsync",
        stream_create="hipStreamCreateWithFlags",
        stream_destroy="hipStreamDestroy",
        stream_wait_event="hipStreamWaitEvent",
        stream_wait_value="hipStreamWaitValue32",
        event_create="hipEventCreateWithFlags",
        event_destroy="hipEventDestroy",
        event_query="hipEventQuery",
        launch="hipModuleLaunchKernel",
    ),
    "hipErrorInvalidValue",
)

VENDORS = (CUDA, HIP)


@dataclass(frozen=True)
class Bench:
    """A vendor with its fake at work."""

    vendor: Vendor
    fake: FakeCuda | FakeHip
    path: str

    @property
    def calls(self) -> Calls:
        return self.vendor.calls

    def driver(self, devices: int = 1) -> HostMemoryDriver:
        """A driver on ``devices`` devices, with an empty log."""
        self.fake.set_devices(devices)
        driver = self.vendor.driver()
        self.fake.log()
        return driver
