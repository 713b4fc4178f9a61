"""Merging, words and tasks never change what a transfer means: every byte of it moves once, to its place."""

from __future__ import annotations

from typing import cast

import numpy as np
from hypothesis import given, settings

from kvferry.drivers.protocol import StreamHandle
from kvferry.hostpool import HostPool
from kvferry.hostpool.backend import Backend
from kvferry.hostpool.plan import Unit

from support.model import page_offsets, page_places, tokens_of
from support.reference import Addresses, RecordingLauncher, moved_bytes, moved_words
from support.standin import GuardedCache
from support.strategies import Case, cases


def expected(case: Case, cache: GuardedCache, aliases: Addresses) -> tuple[Addresses, Addresses]:
    """The (device, host) address of every byte that a transfer moves; ``aliases`` are those of (page, byte)."""
    offsets = page_offsets(case.layout)
    device, host = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for device_index, host_index in zip(case.on_device, case.on_host, strict=True):
        if device_index < 0 or host_index < 0:
            continue
        device_tokens = tokens_of(case.layout, device_index, case.unit)
        host_tokens = tokens_of(case.layout, host_index, case.unit)
        for device_token, host_token in zip(device_tokens, host_tokens, strict=True):
            page, slot = divmod(host_token, case.layout.page_tokens)
            for number, row_nbytes in enumerate(cache.row_nbytes):
                for layer in case.layers:
                    begin = cache.bases[number][layer] + device_token * cache.strides[number]
                    device.append(begin + np.arange(row_nbytes))
                    host.append(aliases[page][offsets[number][layer, slot][cache.in_row[number]]])
    return np.concatenate(device), np.concatenate(host)


@settings(max_examples=150)
@given(cases())
def test_the_argument_block_says_exactly_what_the_layout_says(
    backend: Backend, stream: StreamHandle, case: Case
) -> None:
    launcher = RecordingLauncher()
    recording = Backend(backend.driver, lambda device: launcher)
    cache = GuardedCache(
        backend,
        case.layout,
        case.tokens,
        gap_nbytes=case.gap_nbytes,
        shift_nbytes=case.shift_nbytes,
        heads=case.heads,
    )
    with HostPool(case.layout, case.pages, backend=recording, chunk_nbytes=case.chunk_nbytes) as pool:
        chunks = zip(pool.domain().aliases, pool._resources.memory.chunks, strict=True)
        delta = {int(chunk.address): int(alias) - chunk.address for alias, chunk in chunks}
        places, bases = page_places(pool), np.array(sorted(delta))
        chunk = np.searchsorted(bases, places, side="right") - 1
        aliases = places + np.array([delta[base] for base in bases.tolist()])[chunk]
        kv, unit = cache.pool(pool), cast("Unit", case.unit)
        tickets = [
            pool.store(kv, case.on_device, case.on_host, stream=stream, unit=unit, layers=case.layers),
            pool.load(kv, case.on_host, case.on_device, stream=stream, unit=unit, layers=case.layers),
        ]
        assert len(launcher.launches) == (2 if case.on_device else 0)
        device, host = expected(case, cache, aliases)
        assert np.unique(device).size == device.size
        sides = ((device, host, case.on_device, case.on_host), (host, device, case.on_host, case.on_device))
        for launch, (src, dst, sources, destinations) in zip(launcher.launches, sides, strict=False):
            order = np.argsort(dst)
            found_src, found_dst = moved_bytes(launch, sources, destinations)
            np.testing.assert_array_equal(found_dst, dst[order])  # each once: no word is in two tasks or in none
            np.testing.assert_array_equal(found_src, src[order])
            word, src_words, dst_words = moved_words(launch, sources, destinations)
            assert not (src_words % word).any()
            assert not (dst_words % word).any()
            assert int(launch.args["tasks_per_layer"]) * len(case.layers) < 2**31
        pair_nbytes = sum(cache.row_nbytes) * len(case.layers) * (case.layout.page_tokens if case.unit == "page" else 1)
        assert [ticket.nbytes for ticket in tickets] == [len(case.on_device) * pair_nbytes] * 2
    cache.free()


@settings(max_examples=60)
@given(cases())
def test_the_widest_word_that_fits_is_taken(backend: Backend, stream: StreamHandle, case: Case) -> None:
    """Wider would not divide some address or run: the words are not narrower than they must be."""
    launcher = RecordingLauncher()
    recording = Backend(backend.driver, lambda device: launcher)
    cache = GuardedCache(backend, case.layout, case.tokens)
    with HostPool(case.layout, case.pages, backend=recording) as pool:
        pool.store(cache.pool(pool), [0], [0], stream=stream)
        layout, word = case.layout, moved_words(launcher.launches[0], [0], [0])[0]
        # What a row of the host page is in; a page of a single row may have the pieces one after the other.
        pieces = [component.row_nbytes // layout.head_groups for component in layout.components]
        if layout.order == "page_head":
            pieces = [component.head_nbytes for component in layout.components]
        if layout.layers * layout.page_tokens == 1 and (layout.order == "page_head" or len(pieces) == 1):
            pieces = [component.row_nbytes for component in layout.components]
        if all(nbytes % 16 == 0 for nbytes in pieces):
            assert word == 16
        assert all(nbytes * layout.page_tokens % word == 0 for nbytes in pieces)
    cache.free()
