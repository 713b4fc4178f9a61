"""Streams and events of the stand-in device: real queues, each worked off by a thread of its own.

Work given to a stream runs later, in order, beside the caller, as on a GPU. So a missing wait, or memory let go too
early, shows on the stand-in too. An exception in a stream is kept as the device's fault, and every later call on that
device raises it, as a GPU's context is lost after a fault.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

Work = Callable[[], object]


class Fault:
    """The first thing that went wrong on a device."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def keep(self, error: BaseException) -> None:
        """Remember ``error`` unless there was one before."""
        with self._lock:
            self.error = self.error or error


class Mark:
    """A point in a stream; reached once the stream's thread has come to it."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self.time_s = 0.0

    def reach(self) -> None:
        """Called by the stream's thread."""
        self.time_s = time.perf_counter()
        self._reached.set()

    def is_reached(self) -> bool:
        """Whether the stream has come this far."""
        return self._reached.is_set()

    def wait(self) -> None:
        """Block until the stream has come this far."""
        self._reached.wait()


class Stream:
    """A queue of work and the thread that does it. After a fault only marks are still reached, so nobody hangs."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._queue: SimpleQueue[tuple[Work, bool] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="kvferry-stand-in-stream", daemon=True).start()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, always = item
            if self._fault.error is not None and not always:
                continue
            try:
                work()
            except Exception as error:  # noqa: BLE001 - kept, and raised by every later call on the device
                self._fault.keep(error)
            del item, work  # what the work kept alive is free as soon as it has run

    def submit(self, work: Work) -> None:
        """Run ``work`` after what the stream holds."""
        self._queue.put((work, False))

    def mark(self) -> Mark:
        """A mark after what the stream holds."""
        mark = Mark()
        self._queue.put((mark.reach, True))
        return mark

    def destroy(self) -> None:
        """Let the thread end once the queue is empty."""
        self._queue.put(None)
