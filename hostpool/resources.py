"""All that a pool holds and must give back, apart from the pool itself, so that a finalizer can do it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np

from kvferry.hostpool import domain, tables
from kvferry.hostpool.backend import Backend
from kvferry.hostpool.chunks import Chunking
from kvferry.hostpool.engines.kernel import KernelEngine
from kvferry.hostpool.memory import PinnedMemory
from kvferry.hostpool.plan import ComponentSide, Side
from kvferry.hostpool.registration import Chunk
from kvferry.kernels_cubin.abi import TABLE_BY_PAGE


class DeviceState:
    """A pool as one device sees it: its pointer domain, its page table, and the engine that moves its pages."""

    def __init__(self, backend: Backend, device: int, chunking: Chunking, chunks: Sequence[Chunk]) -> None:
        self.domain = domain.ask(backend.driver, device, chunks)
        self._chunking = chunking
        # Where pages are one run, all components have the page's stride and share the entries.
        strides = list(dict.fromkeys(s.page for s in chunking.strides()))
        self._first_entry = {nbytes: number * chunking.pages for number, nbytes in enumerate(strides)}
        addresses = np.concatenate(
            [
                tables.page_addresses(self.domain.aliases, chunking.pages, chunking.pages_per_chunk, nbytes)
                for nbytes in strides
            ]
        )
        launcher = backend.launcher(device)
        self.table = tables.DeviceTable(backend.driver, device, addresses)
        try:
            self.engine = KernelEngine(backend.driver, launcher, device, chunking.layout.layers)
        except BaseException:
            self.table.release()
            raise

    def side(self, heads: range | None = None) -> Side:
        """The pool's side of a transfer of all heads, or of some; ``LayoutError`` for a bad range."""
        chunking, table = self._chunking, self.table
        return Side(
            tuple(
                ComponentSide(table.entry(self._first_entry[s.page]), s.offset, 0, s.slot, s.layer, s.head)
                for s in chunking.strides(heads)
            ),
            TABLE_BY_PAGE,
            chunking.pages * chunking.layout.page_tokens,
            chunking.layout.page_tokens,
            table.alignment,
        )


class Resources:
    """A pool's memory, and its state on each device."""

    def __init__(self, memory: PinnedMemory) -> None:
        self.memory = memory
        self.devices: dict[int, DeviceState] = {}
        self.pid = os.getpid()

    def release(self, timeout_s: float | None = None) -> None:
        """Wait for what is in flight, then let go of everything, in the order in which it must be.

        Raises ``TransferTimeout`` after ``timeout_s`` seconds, and then nothing was let go of. A forked child has
        nothing to let go of: its parent's driver and memory are not its own.
        """
        if os.getpid() != self.pid:
            return
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            for state in self.devices.values():
                state.engine.accept(False)
            for state in self.devices.values():
                state.engine.drain(deadline_s)
        except BaseException:
            for state in self.devices.values():
                state.engine.accept(True)
            raise
        for state in self.devices.values():
            state.engine.close()
            state.table.release()
        self.devices.clear()
        self.memory.release()
