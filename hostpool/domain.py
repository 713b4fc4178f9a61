"""Which address the GPU must use for each chunk of host memory, by asking its driver."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvferry.drivers.protocol import DeviceAddress, HostMemoryDriver
from kvferry.hostpool.registration import Chunk

log = logging.getLogger("kvferry")


@dataclass(frozen=True)
class PointerDomain:
    """The driver's answer for one device: ``aliases`` has the device address of each chunk, in order.

    ``kind`` is ``host`` when every chunk has its host address, else ``alias``. Nothing is derived from a platform's
    name: under WSL2 the addresses differ on CUDA (sglang#40232), on ROCm they depend on how the kernel registered
    them (sglang#35233).
    """

    device: int
    kind: Literal["host", "alias"]
    reason: str
    aliases: tuple[DeviceAddress, ...]


def ask(driver: HostMemoryDriver, device: int, chunks: Sequence[Chunk]) -> PointerDomain:
    """Ask for every chunk on ``device``. Raises the driver's error when it has no answer."""
    with driver.context(device):
        aliases = tuple(driver.host_device_pointer(chunk.address) for chunk in chunks)
    claim = driver.device_attributes(device).host_pointer_is_device_pointer
    claimed = f"the device {'claims' if claim else 'does not claim'} that they are equal"
    for number, (chunk, alias) in enumerate(zip(chunks, aliases, strict=True)):
        if int(chunk.address) != int(alias):
            reason = (
                f"chunk {number} of {len(chunks)} has host address {chunk.address:#x} and device address {alias:#x}; "
                f"{claimed}"
            )
            domain = PointerDomain(device, "alias", reason, aliases)
            break
    else:
        reason = f"the driver answered the host address for each of {len(chunks)} chunks; {claimed}"
        domain = PointerDomain(device, "host", reason, aliases)
    log.info("device %d: pointer domain %s: %s", device, domain.kind, domain.reason)
    return domain
