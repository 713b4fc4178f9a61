"""Merging, words and tasks never change what a transfer means: every byte of it moves once, to its place."""

from __future__ import annotations

from typing import cast

import numpy as np
from hypothesis import given, settings

from kvferry.drivers.protocol import StreamHandle
from kvferry.hostpool import HostPool
from kvferry.hostpool.backend import Backend
from kvferry.hostpool.plan import Unit

from support.model import page_offsets, tokens_of
from support.reference import Addresses, RecordingLauncher, moved_bytes, moved_words
from support.standin import GuardedCache
from support.strategies import Case, cases


def expected(case: Case, cache: GuardedCache, aliases: list[int]) -> tuple[Addresses, Addresses]:
    """The (device, host) address of every byte that a transfer moves."""
    offsets = page_offsets(case.layout)
    device, host = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for device_index, host_index in zip(case.on_device, case.on_host, strict=True):
        if device_index < 0 or host_index < 0:
            continue
        device_tokens = tokens_of(case.layout, device_index, case.unit)
        host_tokens = tokens_of(case.layout, host_index, case.unit)
        for device_token, host_token in zip(device_tokens, host_tokens, strict=True):
            page, slot = divmod(host_token, case.layout.page_tokens)
            for number, component in enumerate(case.layout.components):
                for layer in case.layers:
                    begin = cache.bases[number][layer] + device_token * cache.strides[number]
                    device.append(begin + np.arange(component.row_nbytes))
                    host.append(aliases[page] + offsets[number][layer, slot])
    return np.concatenate(device), np.concatenate(host)


@settings(max_examples=150)
@given(cases())
def test_the_argument_block_says_exactly_what_the_layout_says(
    backend: Backend, stream: StreamHandle, case: Case
) -> None:
    launcher = RecordingLauncher()
    recording = Backend(backend.driver, lambda device: launcher)
    cache = GuardedCache(backend, case.layout, case.tokens, gap_nbytes=case.gap_nbytes, shift_nbytes=case.shift_nbytes)
    with HostPool(case.layout, case.pages, backend=recording, chunk_nbytes=case.chunk_nbytes) as pool:
        chunks = zip(pool.domain().aliases, pool._resources.memory.chunks, strict=True)
        delta = {int(chunk.address): int(alias) - chunk.address for alias, chunk in chunks}
        at = [pool.page_address(page) for page in range(case.pages)]
        aliases = [address + delta[max(base for base in delta if base <= address)] for address in at]
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
        row_nbytes = sum(component.row_nbytes for component in case.layout.components)
        pair_nbytes = row_nbytes * len(case.layers) * (case.layout.page_tokens if case.unit == "page" else 1)
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
        divisor = np.gcd.reduce([component.row_nbytes for component in case.layout.components])
        page = case.layout.page_nbytes
        word = moved_words(launcher.launches[0], [0], [0])[0]
        if all(number % 16 == 0 for number in (divisor, page)):
            assert word == 16
        assert divisor % word == 0 or all(
            component.row_nbytes * case.layout.page_tokens % word == 0 for component in case.layout.components
        )
    cache.free()
