"""Load and launch the host build of the kernels on the stand-in device."""

from __future__ import annotations

import os
from typing import Any

from kvferry.drivers.errors import ArtefactError, driver_error
from kvferry.drivers.host import HostDriver
from kvferry.drivers.posix import buffer, memory_file
from kvferry.drivers.protocol import StreamHandle
from kvferry.kernels_cubin._kv_host_ffi import ffi
from kvferry.kernels_cubin.abi import ARGS_NBYTES, KERNEL_ABI, KERNELS, ArgumentBlock
from kvferry.kernels_cubin.manifest import Manifest
from kvferry.kernels_cubin.select import choose


def _open(fd: int) -> Any:
    return ffi.dlopen(f"/proc/self/fd/{fd}")


class HostLauncher:
    """The host build, run by the stand-in's stream threads."""

    warp_lanes = 32

    def __init__(self, driver: HostDriver, device: int, manifest: Manifest) -> None:
        self._driver = driver
        architecture = driver.device_architecture(device)
        self.artefact = choose(manifest.artefacts, driver.platform, architecture, driver.version)[0]
        image = manifest.read(self.artefact)
        # Opened from memory: what was verified is what is loaded.
        fd = memory_file(self.artefact.file, len(image))
        try:
            os.write(fd, image)
            self._lib = _open(fd)
        finally:
            os.close(fd)
        abi = self._lib.kv_host_abi()
        if abi != KERNEL_ABI:
            raise ArtefactError(f"{self.artefact.file} has kernel ABI {abi}, this package needs {KERNEL_ABI}")
        self._numbers = {name: self._lib.kv_host_find(name.encode()) for name in KERNELS}

    def launch(self, kernel: str, ctas: int, block: ArgumentBlock, stream: StreamHandle) -> None:
        """Queue the kernel behind what the stream holds; see ``KernelLauncher``."""
        number = self._numbers[kernel]
        arguments = ffi.new("char[]", bytes(buffer(block.address, ARGS_NBYTES)))
        driver = self._driver
        ranges = driver.current_ranges()

        def run() -> None:
            fault: Any = ffi.new("kv_fault *")
            reachable = ranges()
            table = ffi.new("kv_range[]", reachable)
            code = self._lib.kv_host_launch(number, ctas, arguments, table, len(reachable), fault)
            if code:
                what = "write" if fault.is_write else "read"
                detail = f"{kernel}: {what} of {fault.nbytes} bytes at {fault.address:#x}"
                raise driver_error("stand-in kernel", code, "illegal address", detail)

        driver.submit(stream, run)
