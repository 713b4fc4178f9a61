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
    device_alloc: str
    copy_to_device: str
    batch: str
    stream_create: str
    event_query: str


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
        device_alloc="cuMemAlloc_v2",
        copy_to_device="cuMemcpyHtoDAsync_v2",
        batch="cuMemcpyBatchAsync_v2",
        stream_create="cuStreamCreate",
        event_query="cuEventQuery",
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
        device_alloc="hipMalloc",
        copy_to_device="hipMemcpyHtoDAsync",
        batch="hipMemcpyBatchAsync",
        stream_create="hipStreamCreateWithFlags",
        event_query="hipEventQuery",
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
