"""``HostPool``: page-locked host memory for KV-cache pages, and the transfers between it and GPU pools."""

from __future__ import annotations

import logging
import operator
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import get_args

import numpy as np
import numpy.typing as npt

from kvferry.drivers import posix
from kvferry.drivers.errors import ArgumentError, ForkedProcess, LayoutError, PoolClosed
from kvferry.drivers.protocol import HostAddress, Platform
from kvferry.hostpool import indices
from kvferry.hostpool.backend import Backend, first_backend, open_backend
from kvferry.hostpool.chunks import Chunking
from kvferry.hostpool.device_pool import DevicePool, LayerArrays
from kvferry.hostpool.domain import PointerDomain
from kvferry.hostpool.layout import KVLayout
from kvferry.hostpool.limits import preflight
from kvferry.hostpool.mapping import Progress
from kvferry.hostpool.memory import DriverMemory, MemoryKind, PinnedMemory, RegisteredMemory, default_kind
from kvferry.hostpool.pages import PageAllocator
from kvferry.hostpool.plan import Plan, Unit, layer_range, plan_transfer
from kvferry.hostpool.resources import DeviceState, Resources
from kvferry.hostpool.streams import stream_handle
from kvferry.hostpool.ticket import Ticket

log = logging.getLogger("kvferry")

DEFAULT_CHUNK_NBYTES = 1 << 30
"""Small enough for every platform's limit on one registration, large enough that the calls do not count."""


class HostPool:
    """Page-locked host memory for ``pages`` pages of ``layout``, reachable from every device in ``devices``.

    ``platform`` chooses ``cuda``, ``rocm`` or ``stand-in``; left out, the first that works here is taken.

    ``memory="registered"`` is memory of our own, made present by ``populate_threads`` threads and then page-locked;
    ``memory="driver"`` is allocated by the driver. The second is what ROCm's makers advise for pools of many GB and the
    default there, the first is the default elsewhere. Either way it comes in chunks of at most ``chunk_nbytes`` that
    end on page boundaries (a page that is larger gets a chunk of its own); ``Chunking`` says how pages are spread over
    them. ``progress`` is called with (bytes, bytes in all) while the memory is obtained.

    Raises ``HostMemoryError`` when the system has no memory, before any is taken where a limit shows it, and a
    ``DriverError`` when page-locking fails; either way nothing is left behind. Use it as a context manager, or call
    ``close``.

    Thread-safe. Pages are numbers from 0 on; ``allocate`` and ``free`` keep book of them for callers who want that,
    transfers take any page.
    """

    def __init__(
        self,
        layout: KVLayout,
        pages: int,
        *,
        platform: Platform | None = None,
        backend: Backend | None = None,
        devices: Sequence[int] = (0,),
        memory: MemoryKind | None = None,
        chunk_nbytes: int = DEFAULT_CHUNK_NBYTES,
        populate_threads: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        if isinstance(pages, bool) or not isinstance(pages, (int, np.integer)) or pages < 1:
            raise ArgumentError(f"a pool has at least 1 page, not {pages!r}")
        pages = int(pages)
        if not devices or chunk_nbytes < 1:
            raise ArgumentError(f"a pool needs at least one device and chunks of at least 1 byte, not {chunk_nbytes}")
        if backend is None:
            backend = open_backend(platform) if platform else first_backend()[0]
        kind = memory or default_kind(backend.driver.platform)
        if kind not in get_args(MemoryKind):
            raise ArgumentError(f"memory is one of {', '.join(get_args(MemoryKind))}, not {kind!r}")
        self.layout, self.pages, self.backend = layout, pages, backend
        self._chunking = Chunking.choose(layout, pages, chunk_nbytes)
        self._allocator = PageAllocator(pages)
        self._plans: weakref.WeakKeyDictionary[DevicePool, dict[tuple[bool, Unit, range], Plan]]
        self._plans = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

        spans = self._chunking.spans
        preflight(sum(spans))
        held: PinnedMemory
        if kind == "registered":
            owner = f"a pool of {pages} pages"
            held = RegisteredMemory(
                backend.driver, devices[0], spans, owner=owner, threads=populate_threads, progress=progress
            )
        else:
            held = DriverMemory(backend.driver, devices[0], spans, progress=progress)
        self._resources = Resources(held)
        self._finalizer = weakref.finalize(self, self._resources.release)
        self._bases = [chunk.address for chunk in held.chunks]
        try:
            for device in dict.fromkeys(devices):
                self._resources.devices[device] = DeviceState(backend, device, self._chunking, held.chunks)
        except BaseException:
            self._finalizer()
            raise
        log.info(
            "pool of %d pages, %d bytes in %d chunks, %s: present after %.3f s, page-locked after %.3f s more",
            pages,
            self.nbytes,
            len(spans),
            kind,
            held.populate_s,
            held.lock_s,
        )

    def __enter__(self) -> HostPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.pages * self.layout.page_nbytes

    @property
    def pages_per_chunk(self) -> int:
        """Pages in a registration chunk; the last one may have fewer."""
        return self._chunking.pages_per_chunk

    @property
    def closed(self) -> bool:
        """Whether ``close`` has given the memory back."""
        return not self._finalizer.alive

    @property
    def memory_kind(self) -> MemoryKind:
        """Whether the memory is ours and registered, or the driver's."""
        return self._resources.memory.kind

    @property
    def free_pages(self) -> int:
        """Pages that ``allocate`` can still give."""
        return self._allocator.free_count

    def allocate(self, count: int) -> npt.NDArray[np.int64]:
        """Take ``count`` free pages; ``PoolFull`` takes none."""
        self._open()
        return self._allocator.allocate(count)

    def free(self, pages: npt.ArrayLike) -> None:
        """Give pages back to ``allocate``; ``ArgumentError`` for a page that is not taken, and then none is freed."""
        self._open()
        self._allocator.free(pages)

    def domain(self, device: int = 0) -> PointerDomain:
        """Which addresses ``device`` uses for this pool, and why."""
        return self._state(device).domain

    def artefact_file(self, device: int = 0) -> str:
        """The kernel binary that moves this pool's pages on ``device``."""
        return self._state(device).engine.launcher.artefact.file

    def page_runs(self, page: int) -> list[tuple[HostAddress, int]]:
        """(host address, bytes) of each contiguous run of a page.

        The whole page, or in ``layer_first`` one run a component and layer, in this order.
        """
        self._open()
        if not 0 <= page < self.pages:
            raise ArgumentError(f"page {page} is outside the pool: valid are 0 to {self.pages - 1}")
        return self._chunking.runs(self._bases, operator.index(page))

    def page_address(self, page: int) -> HostAddress:
        """The host address of a page: ``layout.page_nbytes`` bytes from there are the page's.

        Raises ``LayoutError`` in ``layer_first``, where a page is several runs.
        """
        runs = self.page_runs(page)
        if not self.layout.solid_pages:
            raise LayoutError(
                f"page {page} is {len(runs)} runs of bytes in order {self.layout.order}, not one: page_runs({page}) "
                "lists them; a pool of another order has pages of one run"
            )
        return runs[0][0]

    def page_view(self, page: int) -> npt.NDArray[np.uint8]:
        """A page's bytes, writable, without a copy. Not to be used after ``close``, nor while a transfer writes it.

        Raises ``LayoutError`` as ``page_address`` does.
        """
        return np.frombuffer(posix.buffer(self.page_address(page), self.layout.page_nbytes), np.uint8)

    def device_pool(
        self,
        layers: LayerArrays,
        *,
        device: int = 0,
        tokens: int | None = None,
        heads: range | None = None,
        row_strides: Mapping[str, int] | None = None,
    ) -> DevicePool:
        """Describe a layer-first KV cache on ``device`` for transfers with this pool; see ``DevicePool``.

        With ``heads`` the cache holds just these heads of each component, and transfers leave the other heads of the
        pages alone.
        """
        self._state(device)
        return DevicePool(
            self.backend.driver, self.layout, layers, device=device, tokens=tokens, heads=heads, row_strides=row_strides
        )

    def store(
        self,
        device_pool: DevicePool,
        from_device: object,
        to_host: object,
        *,
        stream: object,
        unit: Unit = "page",
        layers: range | int | None = None,
        ctas: int | None = None,
    ) -> Ticket:
        """Back up: copy rows of ``device_pool`` into this pool, in the order of ``stream``, and return at once.

        Indices come in pairs and select pages, or single tokens with ``unit="token"`` (token ``t`` is slot
        ``t % page_tokens`` of page ``t // page_tokens``, on both sides). Lists and CPU arrays are copied before this
        returns; device arrays are read in stream order. A negative index skips its pair. ``layers`` limits the
        transfer to one layer or a range of them. ``stream`` is a handle, or an object of torch, CuPy or cuda.core.
        ``ctas`` is how many CTAs, one a multiprocessor, the kernel may take instead of the default.

        The transfer runs after what ``stream`` holds. Work on other streams is ordered by the caller: the producer of
        the rows before it, by an event; readers after it, by the ticket.

        Raises ``ArgumentError`` and ``IndexOutOfRange`` before anything has moved, for what can be seen on the host;
        an index on the device that is out of range is reported by the ticket, and its pair does not move.
        """
        return self._transfer(True, device_pool, from_device, to_host, stream, unit, layers, ctas)

    def load(
        self,
        device_pool: DevicePool,
        from_host: object,
        to_device: object,
        *,
        stream: object,
        unit: Unit = "page",
        layers: range | int | None = None,
        ctas: int | None = None,
    ) -> Ticket:
        """Copy rows of this pool into ``device_pool``; arguments, order and errors are those of ``store``.

        Layers arrive in rising order: ``ticket.wait_layer`` lets another stream start on each as soon as it is there.
        """
        return self._transfer(False, device_pool, from_host, to_device, stream, unit, layers, ctas)

    def _transfer(
        self,
        storing: bool,
        device_pool: DevicePool,
        src: object,
        dst: object,
        stream: object,
        unit: Unit,
        layers: range | int | None,
        ctas: int | None,
    ) -> Ticket:
        state = self._state(device_pool.device)
        if device_pool.layout != self.layout:
            raise ArgumentError("the device pool was described for another layout")
        key = (storing, unit, layer_range(layers, self.layout.layers))
        plans = self._plans.setdefault(device_pool, {})
        plan = plans.get(key)
        if plan is None:
            if unit not in ("page", "token"):
                raise ArgumentError(f"unit is 'page' or 'token', not {unit!r}")
            ours = state.side(device_pool.heads)
            sides = (device_pool.side, ours) if storing else (ours, device_pool.side)
            plan = plans[key] = plan_transfer(device_pool.components, *sides, unit=unit, layers=key[2])
        if ctas is not None and (isinstance(ctas, bool) or not isinstance(ctas, int) or ctas < 1):
            raise ArgumentError(f"ctas is a number of at least 1, not {ctas!r}")
        pairs = indices.pairs(src, dst)
        indices.check_host(pairs, plan.limits)
        return state.engine.submit(plan, pairs, stream_handle(stream), device_pool, ctas)

    def _open(self) -> None:
        if self.closed:
            raise PoolClosed("the pool was closed: its memory has been given back")
        if os.getpid() != self._resources.pid:
            raise ForkedProcess("the pool belongs to the parent process; make one in the child, after the fork")

    def _state(self, device: int) -> DeviceState:
        self._open()
        state = self._resources.devices.get(device)
        if state is None:
            known = sorted(self._resources.devices)
            raise ArgumentError(f"the pool was made for devices {known}, not for device {device}")
        return state

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for transfers in flight, then unregister and give the memory back. A second call does nothing.

        Raises ``TransferTimeout`` when they have not finished after ``timeout_s`` seconds; the pool then stays open.
        While this waits, other threads' transfers are refused with ``PoolClosed``.
        """
        with self._lock:
            if self.closed:
                return
            self._resources.release(timeout_s)
            self._finalizer.detach()
