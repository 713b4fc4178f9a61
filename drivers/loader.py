"""Which shared object to open: the one already in the process first, so that there is never a second runtime."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

from kvferry.drivers.errors import DriverNotFound, ForkedProcess


def mapped_libraries(pattern: str, maps: str = "/proc/self/maps") -> list[str]:
    """Paths of mapped files whose base name matches ``pattern`` (a regular expression), in mapping order, each once.

    An unreadable ``maps`` (a sandbox without /proc) means that nothing is known to be mapped.
    """
    try:
        with open(maps, encoding="utf-8", errors="surrogateescape") as lines:
            fields = [line.rstrip("\n").split(maxsplit=5) for line in lines]
    except OSError:
        return []
    paths = (f[5] for f in fields if len(f) == 6 and f[5].startswith("/"))
    return list(dict.fromkeys(p for p in paths if re.fullmatch(pattern, os.path.basename(p))))


def open_library(ffi: Any, platform: str, pattern: str, names: Iterable[str]) -> tuple[Any, str]:
    """Open the driver library: what ``pattern`` finds mapped, else the first of ``names`` that loads.

    Returns the cffi library and the path or name it was opened by. Raises ``DriverNotFound`` with every candidate and
    its reason.
    """
    tried: dict[str, str] = {}
    for name in [*mapped_libraries(pattern), *names]:
        try:
            lib = ffi.dlopen(name)
            # By a bare name: the path that is mapped now, unless that is one that just failed.
            return lib, [*(path for path in mapped_libraries(pattern) if path not in tried), name][0]
        except OSError as error:
            tried[name] = str(error)
    raise DriverNotFound(platform, tried)


class ForkGuard:
    """Remembers the process that opened a driver. Drivers do not survive fork: the child must not use or free."""

    def __init__(self, what: str) -> None:
        self._what, self._pid = what, os.getpid()

    def in_child(self) -> bool:
        """Whether this is a child of the process that opened the driver."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raise ``ForkedProcess`` in a child."""
        if os.getpid() != self._pid:
            raise ForkedProcess(
                f"{self._what} was opened in process {self._pid} and cannot be used in its forked child {os.getpid()}; "
                "start workers with the 'spawn' method, or open the driver after the fork"
            )
