"""Control of the fake CUDA driver."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

from fakes.build import build_fake
from fakes.library import FakeLibrary


class FakeCuda(FakeLibrary):
    """The fake libcuda.so.1 in this process."""

    @classmethod
    def build(cls, tmp_dir: Path, defines: Sequence[str] = ()) -> FakeCuda:
        """Build it (once a folder), and load it."""
        return cls(build_fake("cuda", tmp_dir, defines))

    def current_device(self) -> int | None:
        """The device of the calling thread's context, if it has one."""
        device = ctypes.c_int(-1)
        return device.value if self.call("cuCtxGetDevice", ctypes.byref(device)) == 0 else None

    def make_current(self, device: int) -> None:
        """What torch does: retain a device's primary context and set it, without a push."""
        context = ctypes.c_void_p()
        assert self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device) == 0
        assert self.call("cuCtxSetCurrent", context) == 0
