"""A platform to work on: its driver and what launches kernels there. CUDA first, then ROCm, then the stand-in."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvferry.drivers.errors import DriverNotFound, KVFerryError
from kvferry.drivers.protocol import HostMemoryDriver, Platform
from kvferry.kernels_cubin.launcher import KernelLauncher
from kvferry.kernels_cubin.manifest import Manifest

MakeLauncher = Callable[[int], KernelLauncher]


class Backend:
    """A driver, and a launcher a device, each made when it is first asked for."""

    def __init__(self, driver: HostMemoryDriver, make_launcher: MakeLauncher) -> None:
        self.driver, self._make_launcher = driver, make_launcher
        self._launchers: dict[int, KernelLauncher] = {}
        self._lock = threading.Lock()

    def launcher(self, device: int) -> KernelLauncher:
        """The kernels for ``device``; ``NoArtefact`` when none of the shipped ones runs there."""
        with self._lock:
            if device not in self._launchers:
                self._launchers[device] = self._make_launcher(device)
            return self._launchers[device]


def _cuda() -> Backend:
    from kvferry.drivers.cuda import CudaDriver
    from kvferry.kernels_cubin.launch_cuda import CudaLauncher

    driver = CudaDriver()
    return Backend(driver, lambda device: CudaLauncher(driver, device, Manifest.load()))


def _rocm() -> Backend:
    from kvferry.drivers.hip import HipDriver
    from kvferry.kernels_cubin.launch_hip import HipLauncher

    driver = HipDriver()
    return Backend(driver, lambda device: HipLauncher(driver, device, Manifest.load()))


def stand_in(devices: int = 1) -> Backend:
    """A new stand-in with ``devices`` devices of its own."""
    from kvferry.drivers.host import HostDriver
    from kvferry.kernels_cubin.launch_host import HostLauncher

    driver = HostDriver(devices)
    return Backend(driver, lambda device: HostLauncher(driver, device, Manifest.load()))


_OPEN: dict[Platform, Callable[[], Backend]] = {"cuda": _cuda, "rocm": _rocm, "stand-in": stand_in}
_opened: dict[Platform, Backend] = {}
_opening = threading.Lock()


def open_backend(platform: Platform) -> Backend:
    """The process's backend for ``platform``, opened once. Raises what the driver raised, or that it has no device."""
    with _opening:
        if platform not in _opened:
            backend = _OPEN[platform]()
            if backend.driver.device_count() == 0:
                raise DriverNotFound(platform, {backend.driver.library: "it sees no device"})
            _opened[platform] = backend
        return _opened[platform]


def first_backend() -> tuple[Backend, dict[Platform, str]]:
    """The first platform that works here, and why those before it do not. The stand-in works everywhere."""
    passed_over: dict[Platform, str] = {}
    for platform in ("cuda", "rocm"):
        try:
            return open_backend(platform), passed_over
        except KVFerryError as error:
            passed_over[platform] = str(error)
    return open_backend("stand-in"), passed_over
