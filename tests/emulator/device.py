"""The GPU behind the fake HIP: launches execute the very code object that was loaded."""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import dataclass
from types import TracebackType

from emulator.codeobject import CodeObject, load
from emulator.errors import DeviceFault
from emulator.report import RECORD
from emulator.wave import execute
from fakes.hip import FakeHip

ILLEGAL_ADDRESS, LAUNCH_FAILURE = 700, 719


class _Range(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_uint64), ("end", ctypes.c_uint64))


_EXECUTOR = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,  # image
    ctypes.c_size_t,
    ctypes.c_char_p,  # kernel
    ctypes.c_uint32,  # CTAs
    ctypes.c_uint32,  # threads of each
    ctypes.c_void_p,  # argument block
    ctypes.c_size_t,  # its size, or 0
    ctypes.POINTER(_Range),
    ctypes.c_uint32,
)


@dataclass(frozen=True)
class Launch:
    """A launch as the driver was given it."""

    architecture: str
    kernel: str
    ctas: int
    threads: int
    kernarg: bytes


class EmulatedGpu:
    """Executes the launches of a ``FakeHip`` from now on, until ``detach`` or ``fake.reset()``.

    A memory fault becomes the driver's code for it and is kept as ``fault``. Any other exception makes the launch fail,
    is kept as ``error``, and is raised at the end of a ``with`` block: nothing that the emulator does not know passes.
    """

    def __init__(self, fake: FakeHip) -> None:
        self._fake = fake
        self.coverage: Counter[str] = Counter()
        self.launches: list[Launch] = []
        self.fault: DeviceFault | None = None
        self.error: BaseException | None = None
        self._callback = _EXECUTOR(self._launch)  # the fake has no more than its address
        fake.lib.fake_set_executor.restype = None
        fake.lib.fake_set_executor(self._callback)

    def _launch(
        self,
        image: int,
        image_nbytes: int,
        name: bytes,
        ctas: int,
        threads: int,
        kernarg: int,
        kernarg_nbytes: int,
        ranges: ctypes._Pointer[_Range],
        n_ranges: int,
    ) -> int:
        try:
            code, kernel = load(ctypes.string_at(image, image_nbytes)), name.decode()
            arguments = ctypes.string_at(kernarg, kernarg_nbytes or code.kernel(kernel).kernarg_nbytes)
            self.launches.append(Launch(code.architecture, kernel, ctas, threads, arguments))
            self._execute(code, self.launches[-1], [(ranges[n].begin, ranges[n].end) for n in range(n_ranges)])
        except DeviceFault as fault:
            self.fault = self.fault or fault
            return ILLEGAL_ADDRESS
        except BaseException as error:  # noqa: BLE001 - an exception cannot pass through C: `close` raises it
            self.error = self.error or error
            return LAUNCH_FAILURE
        return 0

    def _execute(self, code: CodeObject, launch: Launch, ranges: list[tuple[int, int]]) -> None:
        counts: Counter[str] = Counter()
        try:
            execute(code, launch.kernel, launch.ctas, launch.threads, launch.kernarg, ranges, counts)
        finally:
            self.coverage.update(counts)
            RECORD.add(code, launch.kernel, counts)

    def detach(self) -> None:
        """Launches go elsewhere again."""
        self._fake.lib.fake_set_executor(None)

    def close(self) -> None:
        """Detach, and raise what went wrong in the emulator; a memory fault is the kernel's and is not raised."""
        self.detach()
        if self.error is not None:
            raise self.error

    def __enter__(self) -> EmulatedGpu:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
