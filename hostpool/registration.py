"""Page-lock host memory in chunks; undo all of it when one fails; let go exactly once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.drivers.errors import DriverError, KVFerryError
from kvferry.drivers.protocol import HostAddress, HostMemoryDriver
from kvferry.hostpool.range_book import book

log = logging.getLogger("kvferry")


@dataclass(frozen=True)
class Chunk:
    """A range that is registered by one call. ``nbytes`` are whole pages of the operating system."""

    address: HostAddress
    nbytes: int


class Registration:
    """Chunks registered for every device of a driver, through ``device``'s context.

    One call for the whole pool would fail on several platforms (above 512 GiB on R580 and later, vllm#51080; above
    2 GiB on some kernels), hence chunks. The driver serialises the calls, so they are made one after the other.
    ``owner`` names the holder in the process's ``RangeBook``, for whoever meets these ranges later.
    """

    def __init__(
        self, driver: HostMemoryDriver, device: int, chunks: Sequence[Chunk], *, owner: str = "somebody"
    ) -> None:
        self._driver, self._device = driver, device
        self._held: list[Chunk] = []
        with driver.context(device):
            for number, chunk in enumerate(chunks):
                try:
                    book.claim(chunk.address, chunk.nbytes, f"chunk {number} of {owner}")
                    try:
                        driver.host_register(chunk.address, chunk.nbytes)
                    except BaseException:
                        book.release(chunk.address)
                        raise
                except BaseException as error:
                    self.release()
                    if not isinstance(error, DriverError):
                        raise
                    where = f"chunk {number} of {len(chunks)}: {error.detail}; the chunks before it were released again"
                    raise error.with_detail(where) from error
                self._held.append(chunk)

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """What is registered now."""
        return tuple(self._held)

    def release(self) -> None:
        """Unregister in reverse order, each base exactly once. Never raises: what the driver refuses is logged."""
        if not self._held:
            return
        try:
            with self._driver.context(self._device):
                while self._held:
                    chunk = self._held.pop()
                    try:
                        self._driver.host_unregister(chunk.address)
                    except DriverError as error:
                        log.error("unregistering %d bytes at %#x failed: %s", chunk.nbytes, chunk.address, error)
                    book.release(chunk.address)
        except KVFerryError as error:  # no context any more: a forked child, or a driver that has shut down
            log.debug("left %d chunks registered: %s", len(self._held), error)
