"""The error record of the kernels: one reporter, this transfer's, however often a slot was used."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvferry.drivers.errors import IndexOutOfRange
from kvferry.drivers.protocol import StreamHandle
from kvferry.hostpool import DevicePool, HostPool, KVLayout
from kvferry.hostpool.backend import Backend
from kvferry.hostpool.ticket import Ticket

from support.standin import DeviceValues, GuardedCache, blocked, new_stream


@pytest.fixture
def pool(backend: Backend, layout: KVLayout) -> Iterator[HostPool]:
    with HostPool(layout, 5, backend=backend) as pool:
        yield pool


@pytest.fixture
def kv(backend: Backend, pool: HostPool) -> DevicePool:
    return GuardedCache(backend, pool.layout, 16).pool(pool)


def bad(backend: Backend, pool: HostPool, kv: DevicePool, stream: StreamHandle, position: int, value: int) -> Ticket:
    """Five pairs, of which one source index is out of range."""
    src = [0, 1, 2, 3, -1]
    src[position] = value
    return pool.store(kv, DeviceValues(backend, src), DeviceValues(backend, [0, 1, 2, 3, 4]), stream=stream)


def report(ticket: Ticket) -> tuple[str, int, int]:
    with pytest.raises(IndexOutOfRange) as caught:
        ticket.synchronize(timeout_s=10)
    return caught.value.side, caught.value.position, caught.value.value


def test_a_slot_reports_for_each_of_its_transfers(
    backend: Backend, stream: StreamHandle, pool: HostPool, kv: DevicePool
) -> None:
    slots = set[int]()
    for position, value in ((2, 7), (4, 9), (2, 7), (0, 2**40)):
        with blocked(backend, stream):
            ticket = bad(backend, pool, kv, stream, position, value)
            slots.add(id(ticket.slot))
        assert report(ticket) == ("source", position, value)
        pool.store(kv, [0], [0], stream=stream).synchronize()  # a good one in between reports nothing
    assert len(slots) == 1


def test_transfers_in_flight_together_report_each_its_own(
    backend: Backend, stream: StreamHandle, pool: HostPool, kv: DevicePool
) -> None:
    other = new_stream(backend)
    with blocked(backend, stream), blocked(backend, other):
        tickets = [bad(backend, pool, kv, (stream, other)[n % 2], n, 100 + n) for n in range(5)]
    assert [report(ticket) for ticket in tickets] == [("source", n, 100 + n) for n in range(5)]


def test_position_value_and_side_belong_together(
    backend: Backend, stream: StreamHandle, pool: HostPool, kv: DevicePool
) -> None:
    """Many bad indices, one report: of a pair that was really given, source before destination."""
    src, dst = [9, 0, 10, 1, 11], [0, 20, 21, 1, 22]
    ticket = pool.store(kv, DeviceValues(backend, src), DeviceValues(backend, dst), stream=stream)
    side, position, value = report(ticket)
    assert value == (src if side == "source" else dst)[position]
    assert side == ("destination" if position == 1 else "source")
    assert position != 3


def test_the_epoch_wraps_and_skips_zero(backend: Backend, stream: StreamHandle, pool: HostPool, kv: DevicePool) -> None:
    """Zero is what a new slot's claim holds: a transfer of that number could not report."""
    with blocked(backend, stream):
        first = bad(backend, pool, kv, stream, 1, 50)
        slot = first.slot
        assert slot is not None
    assert report(first) == ("source", 1, 50)
    slot.epoch = 2**32 - 2
    for position, epoch in ((3, 2**32 - 1), (2, 1), (0, 2)):
        with blocked(backend, stream):
            ticket = bad(backend, pool, kv, stream, position, 60)
            assert ticket.slot is slot
            assert slot.epoch == epoch
        assert report(ticket) == ("source", position, 60)
