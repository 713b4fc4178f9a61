"""Every exception of the project, in one tree.

``KVFerryError`` is the root. What a driver answered becomes a ``DriverError`` with the call, the code, the code's name
and what to do about it; the codes that a caller may want to handle have classes of their own. Everything else is
raised before anything has moved.
"""

from __future__ import annotations

from collections.abc import Mapping


class KVFerryError(Exception):
    """Root of every error that kvferry raises on purpose."""


class LayoutError(KVFerryError, ValueError):
    """The numbers of a layout do not describe a pool."""


class ArgumentError(KVFerryError, ValueError):
    """An argument has the wrong kind, shape or size; nothing has moved."""


class IndexOutOfRange(KVFerryError, IndexError):
    """An index points outside its side of a transfer; nothing was written for that pair.

    ``side`` is ``"source"`` or ``"destination"``, ``position`` the place in the index array, ``value`` what stood
    there, ``limit`` the first index that is too large.
    """

    def __init__(self, side: str, position: int, value: int, limit: int) -> None:
        self.side, self.position, self.value, self.limit = side, position, value, limit
        super().__init__(
            f"{side} index {value} at position {position} is out of range: valid are 0 to {limit - 1}, "
            "and any negative index to skip the pair"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.side, self.position, self.value, self.limit)


class PoolFull(KVFerryError):
    """The pool has fewer free pages than were asked for."""


class PoolClosed(KVFerryError):
    """The pool was closed; its memory is gone."""


class TransferTimeout(KVFerryError, TimeoutError):
    """A transfer did not finish within the time that the caller gave."""


class HostMemoryError(KVFerryError, MemoryError):
    """The operating system did not give the host memory that a pool needs."""


class ForkedProcess(KVFerryError):
    """A driver was used in a child process after fork; drivers do not survive it."""


class DriverNotFound(KVFerryError):
    """No usable driver library; ``tried`` maps each candidate to why it was not taken."""

    def __init__(self, platform: str, tried: Mapping[str, str]) -> None:
        self.platform, self.tried = platform, dict(tried)
        listing = "; ".join(f"{name}: {why}" for name, why in self.tried.items())
        super().__init__(f"no {platform} driver could be opened ({listing})")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.platform, self.tried)


class LauncherNotFound(KVFerryError):
    """The Python package that launches kernels on this platform is not installed."""


class RuntimeConflict(KVFerryError):
    """Two copies of one vendor's runtime are in the process; addresses of one mean nothing to the other."""


class NotSupported(KVFerryError):
    """This driver, device or engine cannot do what was asked; the message says what is missing."""


class ArtefactError(KVFerryError):
    """A shipped kernel binary is missing, altered, or built for another kernel ABI."""


class NoArtefact(ArtefactError):
    """No shipped binary runs on this device; ``rejected`` maps each one to the reason."""

    def __init__(self, target: str, rejected: Mapping[str, str]) -> None:
        self.target, self.rejected = target, dict(rejected)
        listing = "; ".join(f"{file}: {why}" for file, why in self.rejected.items()) or "none is shipped"
        super().__init__(f"no kernel binary for {target} ({listing})")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.target, self.rejected)


class DriverError(KVFerryError):
    """A driver call failed: ``call``, ``code``, ``name`` of the code, and ``advice``."""

    advice = "see the driver's documentation for this code"

    def __init__(self, call: str, code: int, name: str, detail: str = "") -> None:
        self.call, self.code, self.name, self.detail = call, code, name, detail
        where = f" ({detail})" if detail else ""
        super().__init__(f"{call} failed with {code} {name}{where}: {self.advice}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.call, self.code, self.name, self.detail)

    def with_detail(self, detail: str) -> DriverError:
        """The same error, told with other details."""
        return type(self)(self.call, self.code, self.name, detail)


class InvalidValue(DriverError):
    """1: an argument was refused."""

    advice = (
        "the driver refused an argument; for host memory: the address is not registered, or the mapping cannot be "
        "page-locked (a file on disk, a read-only mapping without the read-only flag)"
    )


class OutOfMemory(DriverError):
    """2: no memory for the call."""

    advice = "free memory, ask for a smaller pool, or raise the limit (container memory, RLIMIT_MEMLOCK)"


class NotInitialized(DriverError):
    """3: the driver was not initialised."""

    advice = "the driver was not initialised in this process; open it through kvferry.drivers before use"


class Deinitialized(DriverError):
    """4: the driver is shutting down."""

    advice = "the process is exiting and the driver has gone; close pools before the interpreter ends"


class NoBinaryForDevice(DriverError):
    """209: the binary does not fit the device."""

    advice = "the kernel binary was built for another architecture; `kvferry artefacts` lists what is shipped"


class IllegalAddress(DriverError):
    """700: a kernel touched memory that the device cannot reach."""

    advice = (
        "a kernel used an address that the device cannot reach, and the context is lost; a host address where a "
        "device address belongs is the usual cause"
    )


class AlreadyRegistered(DriverError):
    """712: the range, or a part of it, is registered by somebody else."""

    advice = "somebody in this process already registered a part of this range; they must unregister it first"


class NotRegistered(DriverError):
    """713: the address is not the base of a registered range."""

    advice = "unregister takes exactly the base address that was registered, once"


class LaunchFailure(DriverError):
    """719: a kernel died while it ran."""

    advice = "a kernel died while it ran and the context is lost; restart the process"


class UnsupportedCall(DriverError, NotSupported):
    """801: the driver or the device cannot do this."""

    advice = "this driver or device does not support the call"


class CaptureUnsupported(DriverError, NotSupported):
    """900: the call cannot be captured into a graph."""

    advice = "this operation cannot be part of a stream capture; run it before or after the capture"


# The codes mean the same in CUDA and HIP (both lists are public headers: cuda.h, hip_runtime_api.h).
_BY_CODE: dict[int, type[DriverError]] = {
    1: InvalidValue,
    2: OutOfMemory,
    3: NotInitialized,
    4: Deinitialized,
    209: NoBinaryForDevice,
    700: IllegalAddress,
    712: AlreadyRegistered,
    713: NotRegistered,
    719: LaunchFailure,
    801: UnsupportedCall,
    900: CaptureUnsupported,
}


def driver_error(call: str, code: int, name: str, detail: str = "") -> DriverError:
    """The exception for what a driver call answered; ``detail`` names the values of the call."""
    return _BY_CODE.get(code, DriverError)(call, code, name, detail)
