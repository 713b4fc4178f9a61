"""Moves rows between tensors that others own: engines by device, plans by what has been seen before."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry.drivers.errors import ArgumentError, KVFerryError, NotSupported
from kvferry.drivers.protocol import DeviceAddress, HostMemoryDriver, StreamHandle
from kvferry.hostpool import indices
from kvferry.hostpool.backend import Backend, first_backend
from kvferry.hostpool.engines.kernel import KernelEngine
from kvferry.hostpool.layout import Component
from kvferry.hostpool.plan import ComponentSide, Plan, Side, plan_transfer
from kvferry.hostpool.sglang import torch_calls
from kvferry.hostpool.sglang.operands import KVCacheIOError, Operand, on_device
from kvferry.hostpool.sglang.places import Bases, Place, bases, page_entries
from kvferry.hostpool.tables import DeviceTable
from kvferry.kernels_cubin import abi

MAX_PLANS = 4096
"""Plans that are kept, the least recently used goes first: 100 layers times K and V times both directions, and room."""

TABLE_ALIGNMENT = 8
"""What divides the addresses in a caller's table, in bytes, as sgl_kernel has it: they are on the device, unseen."""


@dataclass(frozen=True)
class Rows:
    """What moves of each component: ``heads`` runs of ``head_nbytes`` an index and layer, in ``layers`` layers."""

    head_nbytes: tuple[int, ...]
    heads: int = 1
    layers: int = 1


class _Entry:
    """A plan and the table that it reads, until nothing needs them."""

    def __init__(self, plan: Plan, table: DeviceTable | None) -> None:
        self.plan = plan
        if table is not None:
            weakref.finalize(self, table.release).atexit = False


class Mover:
    """Transfers between any two tensors on the devices of one backend. Safe to use from any thread.

    ``stream`` tells the stream to run on, by device: torch's current one. What was given is kept alive until it has
    run; an index on the device that is out of range does not move, and is logged.
    """

    def __init__(
        self, backend: Backend, stream: Callable[[int], StreamHandle] = torch_calls.current_stream, device: int = 0
    ) -> None:
        self.backend, self._stream, self._device = backend, stream, device
        self._lock = threading.Lock()
        self._engines: dict[int, KernelEngine] = {}
        self._plans: OrderedDict[object, _Entry] = OrderedDict()
        self._finalizer = weakref.finalize(self, _close, self._engines)

    @property
    def driver(self) -> HostMemoryDriver:
        return self.backend.driver

    def device_of(self, *tensors: Operand) -> int:
        """The device that a call is for: that of the first tensor that names one."""
        named = [tensor.device for tensor in tensors if tensor.device is not None]
        if len(set(named)) > 1:
            raise KVCacheIOError(
                "tensors on different devices: "
                + ", ".join(f"{t.what} on {t.device}" for t in tensors if t.device is not None)
            )
        return named[0] if named else self._device

    def move(
        self,
        src: Sequence[Place],
        dst: Sequence[Place],
        rows: Rows,
        src_indices: Any,
        dst_indices: Any,
        *,
        ctas: int | None = None,
    ) -> None:
        """Copy the rows that the index pairs name, on the device's current stream, and return at once."""
        tensors = [t for place in (*src, *dst) for t in (*place.tensors, place.layer_table) if t is not None]
        try:
            pairs = indices.pairs(src_indices, dst_indices)
        except ArgumentError as error:
            raise KVCacheIOError(str(error)) from error
        if not pairs.count:
            return
        given = [on_device("index tensor", array, array.owner) for array in pairs.device or ()]
        device = self.device_of(*given, *tensors)
        with self.driver.context(device):
            where = [[bases(self.driver, place) for place in side] for side in (src, dst)]
        entry = self._entry(device, src, dst, where, rows)
        indices.check_host(pairs, entry.plan.limits)
        self._engine(device).submit(entry.plan, pairs, self._stream(device), (entry, tensors), ctas)

    def _entry(
        self, device: int, src: Sequence[Place], dst: Sequence[Place], where: list[list[Bases]], rows: Rows
    ) -> _Entry:
        key = (device, rows, *((p.strides(), b) for side, found in zip((src, dst), where, strict=True)
                               for p, b in zip(side, found, strict=True)), len(src))  # fmt: skip
        with self._lock:
            entry = self._plans.get(key)
            if entry is None:
                entry = self._plans[key] = self._make(device, (src, dst), where, rows)
                if len(self._plans) > MAX_PLANS:
                    self._plans.popitem(last=False)
            else:
                self._plans.move_to_end(key)
            return entry

    def _make(
        self, device: int, sides: tuple[Sequence[Place], Sequence[Place]], where: list[list[Bases]], rows: Rows
    ) -> _Entry:
        listed = [_entries(side, found) for side, found in zip(sides, where, strict=True)]
        own = np.concatenate([each for entries, _ in listed for each in entries] or [np.zeros(0, np.uint64)])
        table = DeviceTable(self.driver, device, own) if own.size else None
        try:
            made, at = [], 0
            for side, (entries, table_by) in zip(sides, listed, strict=True):
                parts = []
                for place, mine in zip(side, entries, strict=True):
                    if place.layer_table is not None:
                        base = DeviceAddress(place.layer_table.address)
                    else:
                        assert table is not None
                        base, at = table.entry(at), at + mine.size
                    page = 0 if table_by == abi.TABLE_BY_PAGE else place.page_nbytes
                    parts.append(
                        ComponentSide(
                            base, place.offset, page, place.slot_nbytes, place.layer_nbytes, place.head_nbytes
                        )
                    )
                given = any(place.layer_table is not None for place in side)
                alignment = TABLE_ALIGNMENT if given or table is None else table.alignment
                tokens = min(place.rows for place in side)
                made.append(Side(tuple(parts), table_by, tokens, side[0].page_tokens, alignment))
            components = tuple(
                Component(f"part {number}", rows.heads, nbytes) for number, nbytes in enumerate(rows.head_nbytes)
            )
            return _Entry(plan_transfer(components, *made, unit="token", layers=range(rows.layers)), table)
        except BaseException:
            if table is not None:
                table.release()
            raise

    def _engine(self, device: int) -> KernelEngine:
        with self._lock:
            if device not in self._engines:
                launcher = self.backend.launcher(device)
                self._engines[device] = KernelEngine(self.driver, launcher, device, layers=0)
            return self._engines[device]

    def synchronize(self) -> None:
        """Block until all that was given has run."""
        for engine in list(self._engines.values()):
            engine.drain(None)

    def close(self) -> None:
        """Wait for what is in flight, and give everything back."""
        self._finalizer()
        self._plans.clear()


def _entries(side: Sequence[Place], found: Sequence[Bases]) -> tuple[list[np.ndarray[Any, np.dtype[np.uint64]]], int]:
    """The table entries of each component of a side, and by what they are found."""
    if any(place.layer_table is not None for place in side):
        if not all(place.layer_table is not None for place in side):
            raise KVCacheIOError("a side is given by tables or by tensors, not by both")
        return [np.zeros(0, np.uint64) for _ in side], abi.TABLE_BY_LAYER
    if any(each.pieces for each in found):
        parts = [each.pieces or ((0, each.addresses[0]),) for each in found]
        return [page_entries(place, part) for place, part in zip(side, parts, strict=True)], abi.TABLE_BY_PAGE
    by_layer = any(len(place.tensors) > 1 for place in side)
    return [np.array(each.addresses, np.uint64) for each in found], abi.TABLE_BY_LAYER if by_layer else abi.TABLE_ONE


def _close(engines: dict[int, KernelEngine]) -> None:
    for engine in engines.values():
        engine.accept(False)
        with contextlib.suppress(KVFerryError):  # a driver that has shut down: there is nothing to wait for
            engine.drain(None)
        engine.close()
    engines.clear()


_default: Mover | None = None
_making = threading.Lock()


def default_mover() -> Mover:
    """The process's mover, on the GPU that is here. ``NotSupported`` where there is none."""
    global _default
    with _making:
        if _default is None:
            backend, passed_over = first_backend()
            if backend.driver.platform == "stand-in":
                why = "; ".join(f"{platform}: {reason}" for platform, reason in passed_over.items())
                raise NotSupported(f"no GPU to move KV-cache rows on: {why}")
            _default = Mover(backend)
        return _default


@contextlib.contextmanager
def using(mover: Mover) -> Iterator[Mover]:
    """Calls inside the block go to ``mover`` instead; for tests, and for devices that torch does not know."""
    global _default
    before, _default = _default, mover
    try:
        yield mover
    finally:
        _default = before
