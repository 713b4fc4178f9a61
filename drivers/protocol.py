"""The verbs that every driver has, and the types that keep host and device addresses apart.

``cuda.py``, ``hip.py`` and the stand-in ``host.py`` implement ``HostMemoryDriver``. A verb is one driver call; it
raises a ``DriverError`` with that call's name and code, and leaves nothing half done.

Verbs marked [context] act on the device whose context is current. Enter it with ``with driver.context(device):`` once
around several of them; on leaving, the process has the current device that it had before.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, NewType, Protocol

HostAddress = NewType("HostAddress", int)
"""An address that the CPU may use."""

DeviceAddress = NewType("DeviceAddress", int)
"""An address that kernels of one device may use."""

StreamHandle = NewType("StreamHandle", int)
"""A stream of the vendor's API as an integer; 0 is the legacy default stream."""

EventHandle = NewType("EventHandle", int)
"""An event of the vendor's API as an integer."""

Platform = Literal["cuda", "rocm", "stand-in"]


@dataclass(frozen=True)
class DeviceAttributes:
    """What a device says of itself that decides how kvferry works with it."""

    host_pointer_is_device_pointer: bool
    """The driver's claim that registered memory keeps its host address. A hint for people: the address is asked."""

    read_only_registration: bool
    """Read-only mappings can be registered with ``read_only=True``."""

    stream_wait_value: bool
    """Streams can wait for a 32-bit word in device memory."""

    integrated: bool
    """The device shares its memory with the CPU."""

    multiprocessors: int
    """Multiprocessors (CUDA) or compute units (ROCm)."""


class HostMemoryDriver(Protocol):
    """One vendor's driver in this process. Safe to use from any thread."""

    platform: Platform
    library: str
    """The shared object in use: a path where one is known, else the name it was opened by."""
    version: int
    """The driver's version as the vendor encodes it (CUDA 13.0 is 13000)."""

    def device_count(self) -> int:
        """Devices that this process may see."""

    def device_name(self, device: int) -> str:
        """The device's marketing name."""

    def device_architecture(self, device: int) -> str:
        """What selects a kernel binary: ``sm_90``, ``gfx942``, ``x86_64``."""

    def device_pci_address(self, device: int) -> str:
        """``domain:bus:device.function`` in lower-case hexadecimal, or ``""`` for a device without one."""

    def device_attributes(self, device: int) -> DeviceAttributes:
        """What the device can do."""

    def context(self, device: int) -> AbstractContextManager[object]:
        """Make ``device`` current for the calling thread and restore what was current before. May be nested."""

    def host_register(self, address: HostAddress, nbytes: int, *, read_only: bool = False) -> None:
        """[context] Page-lock ``nbytes`` at ``address`` and map them for every device."""

    def host_unregister(self, address: HostAddress) -> None:
        """[context] Undo ``host_register``: exactly the base that was registered, once."""

    def host_device_pointer(self, address: HostAddress) -> DeviceAddress:
        """[context] The address under which the current device sees a page-locked host address, also inside a range."""

    def host_flags(self, address: HostAddress) -> int:
        """[context] The flags that page-locked memory was registered or allocated with."""

    def host_alloc(self, nbytes: int) -> HostAddress:
        """[context] Page-locked memory from the driver, mapped for every device."""

    def host_free(self, address: HostAddress) -> None:
        """[context] Give back what ``host_alloc`` gave."""

    def device_alloc(self, nbytes: int) -> DeviceAddress:
        """[context] Memory of the current device."""

    def device_free(self, address: DeviceAddress) -> None:
        """[context] Give back what ``device_alloc`` gave."""

    def copy_to_device(self, dst: DeviceAddress, src: HostAddress, nbytes: int, stream: StreamHandle) -> None:
        """[context] Copy in stream order. Page-locked ``src`` is read when the copy runs, so it must stay as it is."""

    def copy_to_host(self, dst: HostAddress, src: DeviceAddress, nbytes: int, stream: StreamHandle) -> None:
        """[context] Copy in stream order; ``dst`` may be read once the stream has come that far."""

    def memset_async(self, dst: DeviceAddress, value: int, nbytes: int, stream: StreamHandle) -> None:
        """[context] Set every byte to ``value`` (0 to 255) in stream order."""

    def batch_copy_missing(self) -> str | None:
        """``None`` when one call can copy many ranges, else why it cannot."""

    def batch_copy(self, dsts: int, srcs: int, sizes: int, count: int, stream: StreamHandle) -> None:
        """[context] Copy ``count`` ranges in stream order, in one call.

        ``dsts``, ``srcs`` and ``sizes`` are host addresses of arrays of ``count`` unsigned 64-bit numbers, read before
        the call returns. No range may cross from one registration into another. Not on the legacy default stream, and
        not while the stream is captured.
        """

    def stream_create(self) -> StreamHandle:
        """[context] A stream that does not synchronise with the legacy default stream."""

    def stream_destroy(self, stream: StreamHandle) -> None:
        """[context] Let go of a stream; work already in it finishes."""

    def stream_synchronize(self, stream: StreamHandle) -> None:
        """[context] Block the calling thread until the stream is empty."""

    def stream_is_capturing(self, stream: StreamHandle) -> bool:
        """[context] Whether work given to the stream is recorded into a graph instead of run."""

    def stream_wait_event(self, stream: StreamHandle, event: EventHandle) -> None:
        """[context] What follows in ``stream`` runs after what ``event`` recorded."""

    def stream_wait_value(self, stream: StreamHandle, address: DeviceAddress, value: int) -> None:
        """[context] What follows runs once the 32-bit word at ``address`` has reached ``value``.

        CUDA compares cyclically and HIP does not; both agree while the two are less than 2**31 apart and below 2**32.
        """

    def event_create(self, *, timing: bool = False) -> EventHandle:
        """[context] An event; with ``timing`` it can be measured against another."""

    def event_destroy(self, event: EventHandle) -> None:
        """[context] Let go of an event."""

    def event_record(self, event: EventHandle, stream: StreamHandle) -> None:
        """[context] Mark this point of the stream."""

    def event_query(self, event: EventHandle) -> bool:
        """[context] Whether the recorded point has been reached."""

    def event_synchronize(self, event: EventHandle) -> None:
        """[context] Block the calling thread until the recorded point has been reached."""

    def event_elapsed_ms(self, start: EventHandle, end: EventHandle) -> float:
        """[context] Milliseconds between two recorded points that have been reached."""
