"""Load and launch the code objects through hip-python, on the HIP runtime that ``drivers/hip.py`` has opened.

Left alone, hip-python opens ``libamdhip64.so`` by its bare name, which beside torch's own copy is a second runtime with
devices, streams and memory of its own. So it is pointed at the driver's file before its first call, and if two are in
the process all the same, that is an error here.

A launch passes the argument block through a prebuilt ``extra`` array: 1.9 us a call where the tuple form costs 27.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

from kvferry.drivers.errors import DriverError, LauncherNotFound, NoArtefact, RuntimeConflict, driver_error
from kvferry.drivers.hip import LIBRARY_PATTERN
from kvferry.drivers.loader import mapped_libraries
from kvferry.drivers.protocol import HostMemoryDriver, StreamHandle
from kvferry.kernels_cubin.abi import CTA_THREADS, KERNELS, ArgumentBlock
from kvferry.kernels_cubin.manifest import Artefact, Manifest
from kvferry.kernels_cubin.select import candidates

_READ_AHEAD_NBYTES = 4096  # hipModuleLoadData reads this much of an image whatever its size, and keeps the pointer


def _bindings(library: str) -> Any:
    """hip-python's ``hip`` module, opened on ``library``."""
    path = library.encode()
    try:
        # hip-python 10 asks this function at its first call, and takes bytes.
        paths: Any = importlib.import_module("rocm.bindings.util.paths")
    except ImportError:
        try:
            # hip-python 6 and 7 read this global at their first call.
            importlib.import_module("hip.chip").__dict__["DLL"] = path
            hip = importlib.import_module("hip.hip")
        except ImportError as error:
            raise LauncherNotFound(
                f"hip-python cannot be imported ({error}); install kvferry[rocm], in the version of your ROCm"
            ) from error
    else:
        found = paths.get_library_path
        paths.get_library_path = lambda name, *more: path if name == "amdhip64" else found(name, *more)
        hip = importlib.import_module("rocm.bindings.hip")
    hip.hipRuntimeGetVersion()  # the first call opens the library
    runtimes = mapped_libraries(LIBRARY_PATTERN)
    if len(runtimes) > 1:
        raise RuntimeConflict(
            f"two HIP runtimes are in this process, {' and '.join(runtimes)}: addresses and streams of one mean "
            "nothing to the other; let kvferry start after torch and before anything else that uses hip-python"
        )
    return hip


class HipLauncher:
    """The kernels of the artefact that suits one device. Loaded for the life of the process."""

    def __init__(self, driver: HostMemoryDriver, device: int, manifest: Manifest) -> None:
        self._hip = _bindings(driver.library)
        architecture = driver.device_architecture(device)
        accepted, rejected = candidates(manifest.artefacts, driver.platform, architecture, driver.version)
        with driver.context(device):
            for artefact in accepted:
                try:
                    self._functions = self._load(manifest.read(artefact))
                except DriverError as error:  # the runtime has the last word: take the next best, and say why
                    rejected[artefact.file] = str(error)
                else:
                    self.artefact: Artefact = artefact
                    # What the binary was built for (clang's defaults), whatever the device could do besides.
                    self.warp_lanes = 64 if artefact.target.startswith("gfx9") else 32
                    return
        raise NoArtefact(architecture, rejected)

    def _load(self, image: bytes) -> dict[str, Any]:
        self._image = ctypes.create_string_buffer(image, len(image) + _READ_AHEAD_NBYTES)
        module = self._do("hipModuleLoadData", ctypes.addressof(self._image))
        return {name: self._do("hipModuleGetFunction", module, name.encode()) for name in KERNELS}

    def _do(self, call: str, *arguments: object) -> Any:
        status, *values = getattr(self._hip, call)(*arguments)
        if status.value:
            raise self._error(call, status)
        return values[0] if values else None

    def _error(self, call: str, status: Any, detail: str = "") -> DriverError:
        self._hip.hipGetLastError()  # torch asks for it after its launches
        return driver_error(call, int(status.value), status.name, detail)

    def launch(self, kernel: str, ctas: int, block: ArgumentBlock, stream: StreamHandle) -> None:
        """Launch in stream order; see ``KernelLauncher``."""
        function = self._functions[kernel]
        (status,) = self._hip.hipModuleLaunchKernel(
            function, ctas, 1, 1, CTA_THREADS, 1, 1, 0, stream, None, block.extra
        )
        if status.value:
            raise self._error("hipModuleLaunchKernel", status, f"{kernel} on {ctas} CTAs")
