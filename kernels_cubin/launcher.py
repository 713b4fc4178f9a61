"""What a launcher is, and how its binary is found; the vendors' halves are ``launch_*.py``."""

from __future__ import annotations

from typing import Protocol

from kvferry.drivers.protocol import StreamHandle
from kvferry.kernels_cubin.abi import ArgumentBlock
from kvferry.kernels_cubin.manifest import Artefact


class KernelLauncher(Protocol):
    """The kernels of one artefact, loaded for one device."""

    artefact: Artefact
    warp_lanes: int
    """Threads that run in step: warps of a CTA are ``CTA_THREADS // warp_lanes``."""

    def launch(self, kernel: str, ctas: int, block: ArgumentBlock, stream: StreamHandle) -> None:
        """[context] Run a kernel by its name on ``ctas`` CTAs of ``CTA_THREADS`` threads, in stream order.

        ``block`` is copied before the call returns.
        """
