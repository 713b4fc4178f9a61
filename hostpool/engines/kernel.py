"""The kernel engine: one launch moves any number of layers; counters tell which layers have arrived."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import defaultdict, deque

import numpy as np

from kvferry.drivers.errors import (
    ArgumentError,
    DriverError,
    IndexOutOfRange,
    InvalidValue,
    KVFerryError,
    NotSupported,
    PoolClosed,
    TransferTimeout,
)
from kvferry.drivers.protocol import DeviceAddress, HostMemoryDriver, StreamHandle
from kvferry.hostpool.indices import Pairs
from kvferry.hostpool.plan import Plan, Side, Unit
from kvferry.hostpool.slots import Slot, SlotArena
from kvferry.hostpool.ticket import Ticket
from kvferry.kernels_cubin import abi
from kvferry.kernels_cubin.launcher import KernelLauncher

log = logging.getLogger("kvferry")

DEFAULT_CTAS = 4
"""CTAs of a transfer. With 4 of them every layout, page size and row of the README's table comes within 5 % of the
best rate that more of them reach on an idle H200; 2 do for long runs only."""


SLOTS_AT_START = 4
"""Slots that exist before the first transfer: making one allocates, which can make the device wait."""


class _Prepared:
    """A plan's argument block with all that does not change from call to call."""

    def __init__(self, plan: Plan, warp_lanes: int) -> None:
        self.tasks_per_pair = [plan.tasks_per_pair(run) for run in plan.runs]
        self.block = abi.ArgumentBlock()
        args = self.block.array
        for number, run in enumerate(plan.runs):
            component = args["component"][number]
            for side, source in (("src", plan.src), ("dst", plan.dst)):
                where = source.components[number]
                # Token indices on a side without gaps between pages count slots: no division in the kernel.
                page = where.slot if plan.unit == "token" and _gapless(source) else where.page
                component[side] = (where.table, where.offset, page, where.slot, where.layer, where.head)
            component["run_words"] = run.nbytes // plan.word_nbytes
            component["segments"] = plan.segments(run)
            component["heads"], component["slots"] = run.heads, run.slots
        for side, source, limit in (("src", plan.src, plan.limits[0]), ("dst", plan.dst, plan.limits[1])):
            args[side] = (0, limit, _split(source, plan.unit), source.table_by, plan.layer_begin)
        args["n_components"], args["n_layers"] = len(plan.runs), plan.n_layers
        args["lanes_log2"], args["narrow"] = plan.lanes.bit_length() - 1, plan.narrow
        args["warps_per_cta"] = abi.CTA_THREADS // warp_lanes
        runs_in_flight = abi.SHORT_RUNS if plan.narrow else abi.LONG_RUNS
        self.cta_tasks = runs_in_flight * abi.CTA_THREADS // plan.lanes
        """Tasks that a CTA has in flight."""


def _gapless(side: Side) -> bool:
    """Whether a page begins where the slots of the one before it end, so that a token's number says where it lies."""
    return side.table_by != abi.TABLE_BY_PAGE and all(c.page == side.page_tokens * c.slot for c in side.components)


def _split(side: Side, unit: Unit) -> int:
    """Indices that share a page on ``side``: 1 where an index is a page, or where pages follow each other gapless."""
    return 1 if unit == "page" or _gapless(side) else side.page_tokens


class KernelEngine:
    """Moves pages with kernels on one device. Safe to use from any thread.

    It counts up to ``layers`` layers of a transfer for ``wait_layer``; with 0 nobody waits for one, and a transfer can
    have any number of them.

    Every transfer in flight has a slot and a ticket here. Slots are taken back when the next transfer is given, when
    a ticket is asked, and on ``close``; in the steady state nothing is allocated.
    """

    def __init__(self, driver: HostMemoryDriver, launcher: KernelLauncher, device: int, layers: int) -> None:
        self.launcher = launcher
        self._driver, self._device = driver, device
        self._lock = threading.RLock()
        self._arena = SlotArena(driver, layers)
        self._in_flight: defaultdict[StreamHandle, deque[Ticket]] = defaultdict(deque)
        self._prepared: weakref.WeakKeyDictionary[Plan, _Prepared] = weakref.WeakKeyDictionary()
        self._wait_value = layers > 0 and driver.device_attributes(device).stream_wait_value
        self._untracked: list[Ticket] = []
        """Transfers without an event that says when they have run: what they use is never used again."""
        self._accepting = True
        with driver.context(device):
            self._arena.prepare(SLOTS_AT_START)

    def submit(self, plan: Plan, given: Pairs, stream: StreamHandle, keep: object, ctas: int | None = None) -> Ticket:
        """Give a transfer to ``stream`` and return at once; ``keep`` lives until the transfer has run.

        Host indices are copied before this returns. Raises ``ArgumentError`` when the transfer is too large for one
        launch and ``NotSupported`` while ``stream`` is being captured; nothing has moved then.
        """
        if given.count == 0:
            return Ticket(None, None, stream, plan, 0, None)
        with self._driver.context(self._device), self._lock:
            if not self._accepting:
                raise PoolClosed("the pool is being closed: it takes no more transfers")
            if self._driver.stream_is_capturing(stream):
                raise NotSupported(f"stream {stream:#x} is being captured; transfers cannot be part of a graph")
            prepared = self._prepared.get(plan)
            if prepared is None:
                prepared = self._prepared[plan] = _Prepared(plan, self.launcher.warp_lanes)
            tasks = [given.count * each for each in prepared.tasks_per_pair]
            total = sum(tasks) * plan.n_layers
            if total > abi.MAX_TASKS:
                raise ArgumentError(
                    f"{given.count} index pairs make {total} pieces, a launch takes {abi.MAX_TASKS}: split the transfer"
                )
            self._reap()
            slot = self._arena.acquire(2 * given.count * given.index_nbytes if given.host is not None else 0)
            ticket = Ticket(self, slot, stream, plan, given.count * plan.pair_nbytes, (keep, given))
            wanted = min(ctas or DEFAULT_CTAS, -(-total // prepared.cta_tasks))
            try:
                self._launch(prepared, plan, given, slot, tasks, wanted, stream)
            except BaseException:
                # What the stream was already given still reads the slot.
                with contextlib.suppress(KVFerryError):  # the first error is the one to tell
                    self._track(ticket, slot)
                raise
            self._track(ticket, slot)
            return ticket

    def _track(self, ticket: Ticket, slot: Slot) -> None:
        """Hold the ticket, and with it the slot, until the stream has come this far."""
        try:
            self._driver.event_record(slot.event, ticket.stream)
        except BaseException:
            self._untracked.append(ticket)
            raise
        self._in_flight[ticket.stream].append(ticket)

    def _launch(
        self,
        prepared: _Prepared,
        plan: Plan,
        given: Pairs,
        slot: Slot,
        tasks: list[int],
        ctas: int,
        stream: StreamHandle,
    ) -> None:
        slot.begin()
        addresses: tuple[int, int]
        if given.host is not None:
            src, dst = given.host
            slot.write_indices(src, dst)
            self._driver.copy_to_device(slot.device_indices, slot.host_indices, src.nbytes + dst.nbytes, stream)
            addresses = slot.device_indices, slot.device_indices + src.nbytes
        else:
            addresses = given.device_addresses()
        args = prepared.block.array
        args["src"]["indices"], args["dst"]["indices"] = addresses
        args["component"]["tasks"][: len(tasks)] = tasks
        args["tasks_per_layer"] = sum(tasks)
        args["layer_done"] = slot.layer_done if self._wait_value else 0
        args["error_record"], args["error_claim"], args["error_epoch"] = slot.error_record, slot.error_claim, slot.epoch
        args["n_warps"] = ctas * int(args["warps_per_cta"])
        name = abi.kernel_name(plan.word_nbytes, given.index_nbytes)
        self.launcher.launch(name, ctas, prepared.block, stream)
        slot.layer_targets[: plan.n_layers] += np.uint32(sum(tasks))
        slot.counted += sum(tasks)

    def _reap(self) -> None:
        """Take back the slots of transfers that have run. In each stream the oldest runs first, so that is asked."""
        for stream, waiting in list(self._in_flight.items()):
            while waiting and self._finished(waiting[0]):
                waiting.popleft()
            if not waiting:
                del self._in_flight[stream]

    def _finished(self, ticket: Ticket) -> bool:
        slot = ticket.slot
        if slot is None:
            return True
        error: KVFerryError | None = None
        try:
            if not self._driver.event_query(slot.event):
                return False
        except DriverError as lost:  # the device is gone, and this transfer with it; its slot is not used again
            error = lost
        else:
            reported = slot.error()
            if reported is not None:
                side, position, value = reported
                error = IndexOutOfRange(abi.SIDES[side], position, value, ticket.plan.limits[side - 1])
            self._arena.give_back(slot)
        if error is not None:
            log.warning("a transfer of %d bytes failed: %s", ticket.nbytes, error)
        ticket.finish(error)
        return True

    def poll(self, ticket: Ticket) -> bool:
        """Whether the transfer has run; if so its slot is free again."""
        with self._driver.context(self._device), self._lock:
            return self._finished(ticket)

    def synchronize(self, ticket: Ticket) -> None:
        """Block until the transfer has run. Others may use the engine meanwhile."""
        with self._driver.context(self._device):
            with self._lock:
                slot = ticket.slot
                if slot is None:
                    return
                slot.waiters += 1
            try:
                self._driver.event_synchronize(slot.event)
            except DriverError as lost:
                log.debug("waiting for a transfer ended with %s", lost)  # `poll` meets it again and keeps it
            finally:
                with self._lock:
                    slot.waiters -= 1
            self.poll(ticket)

    def wait(self, ticket: Ticket, stream: StreamHandle) -> None:
        """Order ``stream`` after the transfer."""
        with self._driver.context(self._device), self._lock:
            if ticket.slot is not None and stream != ticket.stream:
                self._driver.stream_wait_event(stream, ticket.slot.event)

    def wait_layer(self, ticket: Ticket, layer: int, stream: StreamHandle) -> None:
        """Order ``stream`` after one layer of the transfer, or after all of it where streams cannot wait for a word."""
        with self._driver.context(self._device), self._lock:
            slot, number = ticket.slot, layer - ticket.plan.layer_begin
            if slot is None or stream == ticket.stream:
                return
            if not self._wait_value:
                self._driver.stream_wait_event(stream, slot.event)
                return
            counter = DeviceAddress(slot.layer_done + 4 * number)
            try:
                self._driver.stream_wait_value(stream, counter, int(slot.layer_targets[number]))
            except (InvalidValue, NotSupported) as refused:
                # Older ROCm reports that its streams can wait for a word, and then takes no word of ordinary memory.
                log.info("streams of device %d wait for whole transfers: %s", self._device, refused)
                self._wait_value = False
                self._driver.stream_wait_event(stream, slot.event)

    def busy(self) -> int:
        """Transfers that have not run yet."""
        with self._driver.context(self._device), self._lock:
            self._reap()
            return sum(len(waiting) for waiting in self._in_flight.values())

    def accept(self, accepting: bool) -> None:
        """Whether ``submit`` takes transfers, or raises ``PoolClosed``: what is drained must not fill up again."""
        with self._lock:
            self._accepting = accepting

    def drain(self, deadline_s: float | None) -> None:
        """Block until every transfer has run; ``TransferTimeout`` at ``deadline_s`` of ``time.monotonic``."""
        with self._lock:
            tickets = [ticket for waiting in self._in_flight.values() for ticket in waiting]
        for ticket in tickets:
            left = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            try:
                joined = ticket.join(left)
            except KVFerryError as lost:  # the driver has gone, and with it whatever it was doing
                log.debug("a transfer of %d bytes was not waited for: %s", ticket.nbytes, lost)
                continue
            if not joined:
                raise TransferTimeout(f"a transfer of {ticket.nbytes} bytes is still in flight")

    def close(self) -> None:
        """Give the slots back; nothing may be in flight. Never raises."""
        try:
            with self._driver.context(self._device), self._lock:
                self._in_flight.clear()
                for ticket in self._untracked:  # no event of theirs can be waited for
                    with contextlib.suppress(KVFerryError):
                        self._driver.stream_synchronize(ticket.stream)
                self._untracked.clear()
                self._arena.release()
        except KVFerryError as error:  # no context any more: a forked child, or a driver that has shut down
            log.debug("the kernel engine of device %d was left as it is: %s", self._device, error)
