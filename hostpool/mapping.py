"""Get host memory from the operating system. No GPU knowledge here."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed

from kvferry.drivers import posix
from kvferry.drivers.errors import ArgumentError, HostMemoryError
from kvferry.drivers.protocol import HostAddress

log = logging.getLogger("kvferry")

HUGE_PAGE_NBYTES = 2 << 20
"""The transparent huge page of x86-64, and of aarch64 with 4 KiB pages."""

_POPULATE_SLICE_NBYTES = 64 << 20
_MAX_POPULATE_THREADS = 16

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), from the thread that makes the pool."""


class HostMapping:
    """Anonymous private memory, aligned for huge pages. Nothing is touched before ``populate``.

    A kernel that refuses huge pages is no error: the memory then has small ones, and that is logged once here.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        # What is reserved before and behind the aligned part goes back at once; untouched, it never cost memory.
        reserved = posix.map_anonymous(nbytes + HUGE_PAGE_NBYTES)
        self.address = HostAddress(-(-reserved // HUGE_PAGE_NBYTES) * HUGE_PAGE_NBYTES)
        self._mapped_nbytes = -(-nbytes // posix.PAGE_NBYTES) * posix.PAGE_NBYTES
        before, end = self.address - reserved, self.address + self._mapped_nbytes
        if before:
            posix.unmap(reserved, before)
        behind = reserved + -(-(nbytes + HUGE_PAGE_NBYTES) // posix.PAGE_NBYTES) * posix.PAGE_NBYTES - end
        if behind:
            posix.unmap(HostAddress(end), behind)
        self._closed = False
        # A forked child has no business with pinned pages, and copy-on-write would move the parent's away from the GPU.
        posix.advise(self.address, self._mapped_nbytes, "MADV_DONTFORK")
        self.huge_pages = posix.advise(self.address, self._mapped_nbytes, "MADV_HUGEPAGE") == 0
        if not self.huge_pages:
            log.info("the kernel gives no transparent huge pages; a pool of %d bytes starts more slowly", nbytes)

    def populate(self, *, threads: int | None = None, progress: Progress | None = None) -> float:
        """Make every page present, from ``threads`` threads at once; returns the seconds it took.

        ``HostMemoryError`` when the system runs short, before anything is page-locked. Pages touched this way cost
        0.028 to 0.05 s a GiB with 16 threads; left to the registration they cost 0.34 (measured on an H200's host).
        """
        if threads is not None and threads < 1:
            raise ArgumentError(f"populating takes at least 1 thread, not {threads}")
        start = time.perf_counter()
        workers = threads or min(_MAX_POPULATE_THREADS, len(os.sched_getaffinity(0)))
        done = 0
        with ThreadPoolExecutor(workers, "kvferry-populate") as pool:
            jobs = {pool.submit(_populate, at, n): n for at, n in self._slices()}
            try:
                for job in as_completed(jobs):
                    job.result()
                    done += jobs[job]
                    if progress is not None:
                        progress(done, self.nbytes)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        return time.perf_counter() - start

    def _slices(self) -> Iterator[tuple[int, int]]:
        for begin in range(0, self._mapped_nbytes, _POPULATE_SLICE_NBYTES):
            yield self.address + begin, min(_POPULATE_SLICE_NBYTES, self._mapped_nbytes - begin)

    def close(self) -> None:
        """Give the memory back; a second call does nothing. Whoever registered it has unregistered it before."""
        if not self._closed:
            self._closed = True
            posix.unmap(self.address, self._mapped_nbytes)


def _populate(address: int, nbytes: int) -> None:
    """Fault the pages in. The call reports a shortage; a plain touch would end in a kill."""
    while True:
        code = posix.advise(address, nbytes, "MADV_POPULATE_WRITE")
        if code == 0:
            return
        if code == errno.EINVAL:  # Linux before 5.14, and sandboxes that do not know the call
            posix.fill(address, 0, nbytes)
            return
        if code not in (errno.EAGAIN, errno.EINTR):
            raise HostMemoryError(
                f"the system gave no memory for {nbytes} bytes of the pool ({os.strerror(code)}); ask for fewer pages, "
                "or raise the container's memory limit"
            )
