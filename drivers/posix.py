"""Memory calls of the C library, through cffi so that the interpreter is free while they work.

Prototypes and constants are in ``posix.cdef.h``. Addresses and sizes are integers in bytes.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from kvferry.drivers._posix_ffi import ffi
from kvferry.drivers.errors import HostMemoryError
from kvferry.drivers.protocol import HostAddress

PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")
"""The smallest page of this machine."""


@functools.cache
def _libc() -> Any:
    return ffi.dlopen(None)


def _pointer(address: int) -> Any:
    return ffi.cast("void *", address)


def _mapped(result: Any, what: str) -> HostAddress:
    address = int(ffi.cast("uintptr_t", result))
    if address == 2 ** (8 * ffi.sizeof("uintptr_t")) - 1:  # MAP_FAILED
        raise HostMemoryError(f"{what} failed: {os.strerror(ffi.errno)}")
    return HostAddress(address)


def map_anonymous(nbytes: int) -> HostAddress:
    """Fresh zeroed private memory that is not yet there: it takes no room until it is touched."""
    libc = _libc()
    protection, flags = libc.PROT_READ | libc.PROT_WRITE, libc.MAP_PRIVATE | libc.MAP_ANONYMOUS
    return _mapped(libc.mmap(ffi.NULL, nbytes, protection, flags, -1, 0), f"mapping {nbytes} bytes")


def map_file(fd: int, nbytes: int, *, at: HostAddress | None = None) -> HostAddress:
    """Map the first ``nbytes`` of ``fd``, shared; with ``at`` exactly there, in place of what is mapped there."""
    libc = _libc()
    protection, flags = libc.PROT_READ | libc.PROT_WRITE, libc.MAP_SHARED | (libc.MAP_FIXED if at is not None else 0)
    return _mapped(libc.mmap(_pointer(at or 0), nbytes, protection, flags, fd, 0), f"mapping {nbytes} bytes of a file")


def unmap(address: HostAddress, nbytes: int) -> None:
    """Give the range back. A range that is not mapped is no error."""
    if _libc().munmap(_pointer(address), nbytes):
        raise HostMemoryError(f"unmapping {nbytes} bytes at {address:#x} failed: {os.strerror(ffi.errno)}")


def advise(address: int, nbytes: int, advice: str) -> int:
    """``madvise`` with the ``MADV_`` constant named ``advice``; returns 0 or the error number."""
    libc = _libc()
    return int(ffi.errno) if libc.madvise(_pointer(address), nbytes, getattr(libc, advice)) else 0


def memory_file(name: str, nbytes: int) -> int:
    """A file descriptor of ``nbytes`` of memory that has no name in any file system."""
    fd = int(_libc().memfd_create(name.encode(), _libc().MFD_CLOEXEC))
    if fd < 0:
        raise HostMemoryError(f"memfd_create failed: {os.strerror(ffi.errno)}")
    try:
        os.ftruncate(fd, nbytes)
    except OSError as error:
        os.close(fd)
        raise HostMemoryError(f"a memory file of {nbytes} bytes failed: {error.strerror}") from error
    return fd


def copy(dst: int, src: int, nbytes: int) -> None:
    """Copy memory; the ranges may overlap."""
    _libc().memmove(_pointer(dst), _pointer(src), nbytes)


def fill(dst: int, value: int, nbytes: int) -> None:
    """Set every byte to ``value``."""
    _libc().memset(_pointer(dst), value, nbytes)


def buffer(address: int, nbytes: int) -> memoryview:
    """The range as a writable buffer. It does not keep the memory mapped: that is the caller's part."""
    return memoryview(ffi.buffer(_pointer(address), nbytes))
