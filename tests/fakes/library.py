"""What the controls of both fake drivers have in common."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Call:
    """One line of a fake driver's log. ``result`` is the code that the call answered."""

    name: str
    values: dict[str, int | str]
    device: int
    result: int

    @classmethod
    def parse(cls, line: str) -> Call:
        name, *pairs = line.split(" ")
        values: dict[str, int | str] = {}
        for pair in pairs:
            key, _, text = pair.partition("=")
            values[key] = int(text, 0) if text.lstrip("-")[:1].isdigit() else 0 if text == "(nil)" else text
        device, result = values.pop("device"), values.pop("result")
        assert isinstance(device, int), line
        assert isinstance(result, int), line
        return cls(name, values, device, result)


class FakeLibrary:
    """A loaded fake driver. Loading it is enough for ``kvferry.drivers`` to find it: it is mapped."""

    def __init__(self, path: Path | str) -> None:
        self.path = str(path)
        self.lib = ctypes.CDLL(self.path)
        self.lib.fake_log_take.restype = ctypes.c_char_p
        self.lib.fake_image.restype = ctypes.POINTER(ctypes.c_ubyte)
        self.lib.fake_set_register_limit.argtypes = [ctypes.c_uint64, ctypes.c_int]
        self.lib.fake_set_capturing.argtypes = [ctypes.c_void_p, ctypes.c_int]

    def reset(self) -> None:
        """One device, aliases, no registrations, no failures, an empty log; a driver made before does not know it."""
        self.lib.fake_reset()

    def fail(self, call: str, code: int, *, nth: int = 1) -> None:
        """Let the ``nth`` call of that name from now on answer ``code``; with 0 every one."""
        assert self.lib.fake_fail(call.encode(), nth, code) == 0, "too many failures"

    def log(self) -> list[Call]:
        """The calls since the last time, oldest first."""
        return [Call.parse(line) for line in self.lib.fake_log_take().decode().splitlines()]

    def calls(self, *names: str) -> list[Call]:
        """The calls of these names since the last time; the others are dropped from the log too."""
        return [call for call in self.log() if call.name in names]

    def set_alias(self, on: bool) -> None:
        """Whether memory that is registered from now on has device addresses of its own."""
        self.lib.fake_set_alias(int(on))

    def set_devices(self, count: int) -> None:
        """How many devices there are; before memory is registered."""
        assert self.lib.fake_set_devices(count) == 0, "at most 8 devices"

    def set_attribute(self, attribute: int, value: int) -> None:
        """What every device answers for an attribute, by the vendor's number."""
        assert self.lib.fake_set_attribute(attribute, value) == 0, "too many attributes"

    def set_register_limit(self, nbytes: int, code: int) -> None:
        """Let a registration of more than ``nbytes`` bytes answer ``code``; 0 bytes: no limit."""
        self.lib.fake_set_register_limit(nbytes, code)

    def set_capturing(self, stream: int, capturing: bool) -> None:
        """Whether a stream says that it is being captured."""
        assert self.lib.fake_set_capturing(stream, int(capturing)) == 0, "no such stream"

    def set_kernels(self, path: Path | str) -> None:
        """The host build of the kernels, which launches run for real."""
        assert self.lib.fake_set_kernels(str(path).encode()) == 0, f"{path} has no kernels"

    def image(self) -> bytes:
        """The last kernel binary that was loaded."""
        nbytes = ctypes.c_size_t()
        at = self.lib.fake_image(ctypes.byref(nbytes))
        return bytes(at[: nbytes.value])

    def call(self, name: str, *arguments: object) -> int:
        """Call the driver itself, as somebody else in the process would; returns its code."""
        return int(getattr(self.lib, name)(*arguments))
