"""Layer counters: exact for every layer, and a consumer's stream goes on when its layer is there and not before."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.drivers.protocol import StreamHandle
from kvferry.hostpool import HostPool, KVLayout
from kvferry.hostpool.backend import Backend
from kvferry.hostpool.slots import Slot
from kvferry.hostpool.ticket import Ticket
from kvferry.kernels_cubin.abi import ArgumentBlock
from kvferry.kernels_cubin.launcher import KernelLauncher

from support.standin import DeviceValues, GuardedCache, blocked, finish, host_driver, memory, new_stream

LAYERS = 5


@pytest.fixture
def layout() -> KVLayout:
    return KVLayout.mha(layers=LAYERS, heads=2, head_size=24, v_head_size=10, element_nbytes=2, page_tokens=4)


@pytest.fixture
def cache(backend: Backend, layout: KVLayout) -> GuardedCache:
    return GuardedCache(backend, layout, 16)


@pytest.fixture
def pool(backend: Backend, layout: KVLayout) -> Iterator[HostPool]:
    with HostPool(layout, 5, backend=backend) as pool:
        for page in range(5):
            pool.page_view(page)[:] = page + 1
        yield pool


def slot_of(ticket: Ticket) -> Slot:
    assert ticket.slot is not None
    return ticket.slot


def counters(slot: Slot) -> list[int]:
    return [int(count) for count in memory(slot.layer_done, 4 * LAYERS).view(np.uint32)]


@pytest.mark.parametrize("layers", [None, 0, range(1, 4), 4])
@pytest.mark.parametrize("count", [1, 3])
def test_every_layer_counts_all_of_its_tasks_once(
    backend: Backend, stream: StreamHandle, pool: HostPool, cache: GuardedCache, layers: range | int | None, count: int
) -> None:
    kv = cache.pool(pool)
    before = [0] * LAYERS
    for unit in ("page", "token"):
        with blocked(backend, stream):
            ticket = pool.load(kv, range(count), range(count), stream=stream, layers=layers, unit=unit)
            slot = slot_of(ticket)
            assert counters(slot) == before
        ticket.synchronize()
        each = count * sum(ticket.plan.tasks_per_pair(run) for run in ticket.plan.runs)
        expected = [was + (each if n < len(ticket.layers) else 0) for n, was in enumerate(before)]
        assert counters(slot) == expected == slot.layer_targets.tolist()
        before = expected


def test_pairs_that_do_not_move_count_too(
    backend: Backend, stream: StreamHandle, pool: HostPool, cache: GuardedCache
) -> None:
    """Else a consumer would wait for ever for a layer of which nothing was to be loaded."""
    with blocked(backend, stream):
        indices = [DeviceValues(backend, values) for values in ([-1, 99, 0], [0, 1, -5])]
        ticket = pool.load(cache.pool(pool), *indices, stream=stream)
        slot = slot_of(ticket)
    ticket.join()
    assert counters(slot) == slot.layer_targets.tolist()
    assert min(counters(slot)) > 0


class Consumer:
    """A stream that waits for a layer and then looks at the first row of that layer of K."""

    def __init__(self, backend: Backend, cache: GuardedCache, ticket: Ticket, layer: int, token: int) -> None:
        self.stream, self.saw = new_stream(backend), list[list[int]]()
        row = cache.rows[0][layer][token]
        ticket.wait_layer(layer, self.stream)
        with backend.driver.context(0):
            host_driver(backend).submit(self.stream, lambda: self.saw.append(sorted(set(row.tolist()))))

    def is_waiting(self) -> bool:
        time.sleep(0.02)
        return not self.saw


def test_a_consumer_waits_for_the_kernel_and_is_released_by_it(
    backend: Backend, stream: StreamHandle, pool: HostPool, cache: GuardedCache
) -> None:
    with blocked(backend, stream):
        ticket = pool.load(cache.pool(pool), [3], [2], stream=stream)
        consumers = [Consumer(backend, cache, ticket, layer, 8) for layer in range(LAYERS)]
        assert all(consumer.is_waiting() for consumer in consumers)
    for consumer in consumers:
        finish(backend, consumer.stream)
        assert consumer.saw == [[4]]


def test_layers_are_counted_by_their_own_number(
    backend: Backend, stream: StreamHandle, pool: HostPool, cache: GuardedCache
) -> None:
    """A transfer of layers 3 and 4 has them in the first two counters."""
    with blocked(backend, stream):
        ticket = pool.load(cache.pool(pool), [3], [2], stream=stream, layers=range(3, 5))
        consumers = [Consumer(backend, cache, ticket, layer, 8) for layer in (3, 4)]
        assert all(consumer.is_waiting() for consumer in consumers)
    for consumer in consumers:
        finish(backend, consumer.stream)
        assert consumer.saw == [[4]]


def test_the_count_of_an_earlier_transfer_releases_nobody(
    backend: Backend, stream: StreamHandle, pool: HostPool, cache: GuardedCache
) -> None:
    kv = cache.pool(pool)
    with blocked(backend, stream):
        first = pool.load(kv, [0, 1, 2], [0, 1, 2], stream=stream)
        slot = slot_of(first)
    first.synchronize()
    assert min(counters(slot)) > 0
    with blocked(backend, stream):
        second = pool.load(kv, [4], [1], stream=stream)  # fewer tasks than the slot has counted already
        assert second.slot is slot
        consumer = Consumer(backend, cache, second, 1, 4)
        assert consumer.is_waiting()
    finish(backend, consumer.stream)
    assert consumer.saw == [[5]]


def test_a_counter_does_not_wrap(backend: Backend, stream: StreamHandle, pool: HostPool, cache: GuardedCache) -> None:
    """HIP compares counter and target as plain numbers: a slot that has counted 2**31 tasks is not used again."""
    kv = cache.pool(pool)
    first = pool.load(kv, [0], [0], stream=stream)
    slot = slot_of(first)
    first.synchronize()
    memory(slot.layer_done, 4 * LAYERS).view(np.uint32)[:] = 2**31 - 1
    slot.layer_targets[:] = 2**31 - 1
    slot.counted = 2**31 - 1
    with blocked(backend, stream):
        last = pool.load(kv, [4], [1], stream=stream)
        assert last.slot is slot  # it may pass the mark once
        consumer = Consumer(backend, cache, last, 1, 4)
        assert consumer.is_waiting()
    finish(backend, consumer.stream)
    assert consumer.saw == [[5]]
    assert counters(slot) == slot.layer_targets.tolist()
    assert max(counters(slot)) > 2**31
    last.synchronize()
    for _ in range(10):
        ticket = pool.load(kv, [4], [1], stream=stream)
        assert ticket.slot is not slot
        ticket.synchronize()


class LayerByLayer:
    """Launches one layer at a time, as a large transfer arrives on a GPU; layer ``n`` waits for ``gates[n]``."""

    def __init__(self, backend: Backend, real: KernelLauncher, gates: list[threading.Event]) -> None:
        self.artefact, self.warp_lanes = real.artefact, real.warp_lanes
        self._backend, self._real, self._gates = backend, real, gates

    def launch(self, kernel: str, ctas: int, block: ArgumentBlock, stream: StreamHandle) -> None:
        for layer, gate in enumerate(self._gates):
            one = ArgumentBlock()
            one.array[...] = block.array
            one.array["n_layers"] = 1
            one.array["layer_done"] += np.uint64(4 * layer)
            for side in ("src", "dst"):
                one.array[side]["layer_begin"] += layer
            host_driver(self._backend).submit(stream, gate.wait)
            self._real.launch(kernel, ctas, one, stream)


def test_a_layer_is_complete_while_the_next_is_still_on_its_way(
    backend: Backend, stream: StreamHandle, layout: KVLayout, cache: GuardedCache
) -> None:
    gates = [threading.Event() for _ in range(LAYERS)]
    slow = Backend(backend.driver, lambda device: LayerByLayer(backend, backend.launcher(device), gates))
    with HostPool(layout, 5, backend=slow) as pool:
        pool.page_view(3)[:] = 4
        ticket = pool.load(cache.pool(pool), [3], [2], stream=stream)
        consumers = [Consumer(backend, cache, ticket, layer, 8) for layer in range(LAYERS)]
        for layer, gate in enumerate(gates):
            assert all(consumer.is_waiting() for consumer in consumers[layer:])
            assert not ticket.query()
            gate.set()
            finish(backend, consumers[layer].stream)
            assert consumers[layer].saw == [[4]]
        ticket.synchronize()


def test_where_streams_cannot_wait_for_a_word_they_wait_for_all(
    backend: Backend, stream: StreamHandle, pool: HostPool, cache: GuardedCache
) -> None:
    engine = pool._resources.devices[0].engine
    engine._wait_value = False
    with blocked(backend, stream):
        ticket = pool.load(cache.pool(pool), [3], [2], stream=stream)
        slot = slot_of(ticket)
        consumer = Consumer(backend, cache, ticket, 0, 8)
        assert consumer.is_waiting()
    finish(backend, consumer.stream)
    assert consumer.saw == [[4]]
    assert counters(slot) == [0] * LAYERS  # nobody counts what nobody waits for
