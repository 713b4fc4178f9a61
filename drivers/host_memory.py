"""Memory of the stand-in device: which pages are registered, their second mappings, and what each device may reach."""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from dataclasses import dataclass, field

from kvferry.drivers import posix
from kvferry.drivers.errors import driver_error
from kvferry.drivers.protocol import DeviceAddress, HostAddress


def refuse(call: str, code: int, name: str, detail: str) -> Exception:
    """What a vendor's driver would answer, as an exception."""
    return driver_error(f"stand-in {call}", code, name, detail)


@dataclass
class _Registration:
    """Pages that belong to a memory file, so that they can be mapped again."""

    base: HostAddress
    nbytes: int
    fd: int
    allocated: bool
    aliases: dict[int, DeviceAddress] = field(default_factory=dict)  # by device


class HostMemory:
    """Registrations and allocations of ``devices`` stand-in devices. Thread-safe."""

    def __init__(self, devices: int) -> None:
        self._lock = threading.RLock()
        self._registrations: dict[int, _Registration] = {}
        self._allocated: list[dict[int, int]] = [{} for _ in range(devices)]  # begin -> nbytes
        self._reachable: list[dict[int, int]] = [{} for _ in range(devices)]  # begin -> end

    def register(self, address: HostAddress, nbytes: int) -> None:
        """Make whole pages shareable, in place, with their bytes: private pages have no second mapping."""
        what = f"{nbytes} bytes at {address:#x}"
        if not address or nbytes <= 0 or address % posix.PAGE_NBYTES or nbytes % posix.PAGE_NBYTES:
            detail = f"{what}: only whole pages of {posix.PAGE_NBYTES} bytes can be registered"
            raise refuse("host_register", 1, "invalid value", detail)
        with self._lock:
            for other in self._registrations.values():
                if address < other.base + other.nbytes and other.base < address + nbytes:
                    detail = f"{what} meets {other.nbytes} bytes at {other.base:#x}"
                    raise refuse("host_register", 712, "already registered", detail)
            fd = posix.memory_file("kvferry-stand-in", nbytes)
            try:
                copied = posix.map_file(fd, nbytes)
                posix.copy(copied, address, nbytes)
                posix.unmap(copied, nbytes)
                posix.map_file(fd, nbytes, at=address)
            except BaseException:
                os.close(fd)
                raise
            self._registrations[address] = _Registration(address, nbytes, fd, allocated=False)

    def allocate_host(self, nbytes: int) -> HostAddress:
        """Registered memory of the driver's own."""
        if nbytes <= 0:
            raise refuse("host_alloc", 1, "invalid value", f"{nbytes} bytes")
        whole = -(-nbytes // posix.PAGE_NBYTES) * posix.PAGE_NBYTES
        fd = posix.memory_file("kvferry-stand-in", whole)
        try:
            address = posix.map_file(fd, whole)
        except BaseException:
            os.close(fd)
            raise
        with self._lock:
            self._registrations[address] = _Registration(address, whole, fd, allocated=True)
        return address

    def release(self, address: HostAddress, *, allocated: bool, call: str) -> None:
        """Undo ``register``, or ``allocate_host``: the exact base, once."""
        with self._lock:
            registration = self._registrations.get(address)
            if registration is None or registration.allocated != allocated:
                raise refuse(call, 713, "not registered", f"{address:#x} is not such a base")
            for number, alias in registration.aliases.items():
                del self._reachable[number][alias]
                posix.unmap(HostAddress(alias), registration.nbytes)
            os.close(registration.fd)
            del self._registrations[address]
        if allocated:
            posix.unmap(registration.base, registration.nbytes)

    def device_address(self, device: int, address: HostAddress) -> DeviceAddress:
        """Where ``device`` sees registered memory: a second mapping, made when it is first asked for."""
        with self._lock:
            registration = self._holding(address, "host_device_pointer")
            alias = registration.aliases.get(device)
            if alias is None:
                alias = DeviceAddress(posix.map_file(registration.fd, registration.nbytes))
                registration.aliases[device] = alias
                self._reachable[device][alias] = alias + registration.nbytes
            return DeviceAddress(alias + address - registration.base)

    def check_registered(self, address: HostAddress, call: str) -> None:
        """Raise what a driver answers for memory that is not registered."""
        with self._lock:
            self._holding(address, call)

    def _holding(self, address: int, call: str) -> _Registration:
        for registration in self._registrations.values():
            if registration.base <= address < registration.base + registration.nbytes:
                return registration
        raise refuse(call, 1, "invalid value", f"{address:#x} is not registered")

    def allocate_device(self, device: int, nbytes: int) -> DeviceAddress:
        """Memory that plays the device's own."""
        if nbytes <= 0:
            raise refuse("device_alloc", 1, "invalid value", f"{nbytes} bytes")
        address = DeviceAddress(posix.map_anonymous(nbytes))
        with self._lock:
            self._allocated[device][address] = nbytes
            self._reachable[device][address] = address + nbytes
        return address

    def free_device(self, device: int, address: DeviceAddress) -> None:
        """Give back what ``allocate_device`` gave."""
        with self._lock:
            nbytes = self._allocated[device].pop(address, None)
            if nbytes is None:
                raise refuse("device_free", 1, "invalid value", f"{address:#x} was not allocated")
            del self._reachable[device][address]
        posix.unmap(HostAddress(address), nbytes)

    def reachable(self, device: int) -> list[tuple[int, int]]:
        """What kernels of ``device`` may touch: (begin, end), sorted."""
        with self._lock:
            return sorted(self._reachable[device].items())

    def check_reachable(self, device: int, address: int, nbytes: int, call: str) -> None:
        """Raise what a driver answers for a range that is not ``device``'s."""
        ranges = self.reachable(device)
        at = bisect_right(ranges, (address, 2**64)) - 1
        if at < 0 or address + nbytes > ranges[at][1]:
            raise refuse(call, 1, "invalid value", f"{nbytes} bytes at {address:#x} are not this device's")
