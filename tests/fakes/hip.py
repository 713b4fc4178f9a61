"""Control of the fake HIP runtime."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

from fakes.build import build_fake
from fakes.library import FakeLibrary


class FakeHip(FakeLibrary):
    """The fake libamdhip64.so.7 in this process."""

    @classmethod
    def build(cls, tmp_dir: Path, defines: Sequence[str] = ()) -> FakeHip:
        """Build it (once a folder), and load it."""
        return cls(build_fake("hip", tmp_dir, defines))

    def set_architecture(self, name: str) -> None:
        """The devices' gcnArchName; it decides which kernel binaries load."""
        self.lib.fake_set_architecture(name.encode())

    def set_product(self, name: str) -> None:
        """The devices' name; each has its number behind it."""
        self.lib.fake_set_product(name.encode())

    def current_device(self) -> int | None:
        """The calling thread's current device: always one."""
        device = ctypes.c_int(-1)
        assert self.call("hipGetDevice", ctypes.byref(device)) == 0
        return device.value

    def make_current(self, device: int) -> None:
        """What torch does."""
        assert self.call("hipSetDevice", device) == 0
