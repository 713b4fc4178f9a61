"""Work in flight: when it is done, when a layer of it is, and what it keeps alive until then."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvferry.drivers.errors import ArgumentError, KVFerryError, TransferTimeout
from kvferry.drivers.protocol import StreamHandle

if TYPE_CHECKING:
    from kvferry.hostpool.engines.kernel import KernelEngine
    from kvferry.hostpool.plan import Plan
    from kvferry.hostpool.slots import Slot

_POLL_S = 50e-6


class Ticket:
    """A transfer that was given to a stream.

    The engine holds it until the transfer has run, and with it the pool's memory, the tables and the indices: dropping
    every reference changes nothing. ``wait`` and ``wait_layer`` order other streams and return at once;
    ``synchronize`` blocks the calling thread. All three may be called any number of times, from any thread.
    """

    def __init__(
        self,
        engine: KernelEngine | None,
        slot: Slot | None,
        stream: StreamHandle,
        plan: Plan,
        nbytes: int,
        keep: object,
    ) -> None:
        self.stream, self.plan, self.nbytes, self.slot = stream, plan, nbytes, slot
        self.layers = range(plan.layer_begin, plan.layer_begin + plan.n_layers)
        self._engine, self._keep = engine, keep
        self._error: KVFerryError | None = None

    def query(self) -> bool:
        """Whether the transfer has run. Raises nothing for an index out of range: ``synchronize`` does."""
        engine = self._engine
        return engine is None or engine.poll(self)

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Block until the transfer has run.

        Raises ``IndexOutOfRange`` when an index on the device was (every other pair has moved), ``TransferTimeout``
        after ``timeout_s`` seconds (the transfer goes on), or the driver's error when the device was lost.
        """
        if not self.join(timeout_s):
            raise TransferTimeout(f"a transfer of {self.nbytes} bytes has not run after {timeout_s} s")
        if self._error is not None:
            raise self._error

    def join(self, timeout_s: float | None = None) -> bool:
        """Block until the transfer has run, however it ended; ``False`` when ``timeout_s`` seconds passed first."""
        engine = self._engine
        if engine is None:
            return True
        if timeout_s is None:
            engine.synchronize(self)
            return True
        deadline_s = time.monotonic() + timeout_s
        while not self.query():
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_POLL_S)
        return True

    def wait(self, stream: StreamHandle | int) -> None:
        """What follows in ``stream`` runs after the transfer. Does not block."""
        engine = self._engine
        if engine is not None:
            engine.wait(self, StreamHandle(stream))

    def wait_layer(self, layer: int, stream: StreamHandle | int) -> None:
        """What follows in ``stream`` runs after ``layer`` of the transfer has arrived. Does not block.

        Where a device's streams cannot wait for a counter, this waits for the whole transfer.
        """
        if layer not in self.layers:
            raise ArgumentError(f"layer {layer} is not part of this transfer: it has {self.layers}")
        engine = self._engine
        if engine is not None:
            engine.wait_layer(self, layer, StreamHandle(stream))

    def finish(self, error: KVFerryError | None) -> None:
        """Called once, by the engine: the transfer has run, or its device is lost."""
        self._error = error
        self._engine = self.slot = self._keep = None
