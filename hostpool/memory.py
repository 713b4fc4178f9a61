"""A pool's page-locked memory in chunks: registered by us, or allocated by the driver."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Literal, Protocol

from kvferry.drivers.errors import DriverError, KVFerryError
from kvferry.drivers.protocol import HostAddress, HostMemoryDriver, Platform
from kvferry.hostpool.mapping import HostMapping, Progress
from kvferry.hostpool.registration import Chunk, Registration

log = logging.getLogger("kvferry")

MemoryKind = Literal["registered", "driver"]
"""``registered``: our own mapping, page-locked in chunks. ``driver``: allocated by the driver, chunk by chunk."""


def default_kind(platform: Platform) -> MemoryKind:
    """What suits a platform: ROCm advises against registering pools of many GB (rocm-systems#11670)."""
    return "driver" if platform == "rocm" else "registered"


class PinnedMemory(Protocol):
    """Page-locked memory of a pool."""

    kind: MemoryKind
    populate_s: float
    """Seconds until every page was present; 0 where the driver does both in one."""
    lock_s: float
    """Seconds to page-lock, or to allocate page-locked."""

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """What is page-locked now, in the order of the pool's pages."""

    def release(self) -> None:
        """Give everything back, once. Never raises."""


class RegisteredMemory:
    """One mapping, made present by many threads and then registered chunk by chunk."""

    kind: MemoryKind = "registered"

    def __init__(
        self,
        driver: HostMemoryDriver,
        device: int,
        spans: Sequence[int],
        *,
        owner: str,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._mapping = HostMapping(sum(spans))
        try:
            self.populate_s = self._mapping.populate(threads=threads, progress=progress)
            chunks, at = [], self._mapping.address
            for span in spans:
                chunks.append(Chunk(at, span))
                at = HostAddress(at + span)
            start = time.perf_counter()
            self._registration = Registration(driver, device, chunks, owner=owner)
            self.lock_s = time.perf_counter() - start
        except BaseException:
            self._mapping.close()
            raise

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return self._registration.chunks

    def release(self) -> None:
        self._registration.release()
        self._mapping.close()


class DriverMemory:
    """Chunks that the driver allocated; each somewhere else, and each perhaps with an alias of its own."""

    kind: MemoryKind = "driver"

    def __init__(
        self, driver: HostMemoryDriver, device: int, spans: Sequence[int], *, progress: Progress | None = None
    ) -> None:
        self._driver, self._device = driver, device
        self._held: list[Chunk] = []
        self.populate_s = 0.0
        start, done = time.perf_counter(), 0
        with driver.context(device):
            for number, span in enumerate(spans):
                try:
                    self._held.append(Chunk(driver.host_alloc(span), span))
                except DriverError as error:
                    self.release()
                    where = f"chunk {number} of {len(spans)}: {error.detail}; the chunks before it were given back"
                    raise error.with_detail(where) from error
                done += span
                if progress is not None:
                    progress(done, sum(spans))
        self.lock_s = time.perf_counter() - start

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return tuple(self._held)

    def release(self) -> None:
        if not self._held:
            return
        try:
            with self._driver.context(self._device):
                while self._held:
                    chunk = self._held.pop()
                    try:
                        self._driver.host_free(chunk.address)
                    except DriverError as error:
                        log.error("giving back %d bytes at %#x failed: %s", chunk.nbytes, chunk.address, error)
        except KVFerryError as error:  # no context any more: a forked child, or a driver that has shut down
            log.debug("left %d chunks allocated: %s", len(self._held), error)
