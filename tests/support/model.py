"""What a layout and a transfer mean, said once more in numpy and without any of kvferry's arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvferry.hostpool import HostPool, KVLayout

from support.standin import Bytes, GuardedCache, memory

Numbers = npt.NDArray[np.int64]


def page_offsets(layout: KVLayout) -> list[Numbers]:
    """By component: the byte in a page of each (layer, slot, byte of the row).

    For ``layer_first`` it is the byte in what ``host_pages`` makes of a page: its runs, one after the other.
    """
    every, layers, tokens = np.arange(layout.page_nbytes), layout.layers, layout.page_tokens
    if layout.order == "page_unified":
        return _unified_offsets(layout, every)
    at, found = 0, []
    for component in layout.components:
        row = component.row_nbytes
        here = every[at : at + layers * tokens * row]
        at += here.size
        if layout.order == "page_first":
            found.append(here.reshape(tokens, layers, row).transpose(1, 0, 2))
        elif layout.order == "page_head":
            by_head = here.reshape(component.heads, tokens, layers, component.head_nbytes)
            found.append(by_head.transpose(2, 1, 0, 3).reshape(layers, tokens, row))
        else:
            found.append(here.reshape(layers, tokens, row))
    assert at == layout.page_nbytes
    return found


def _unified_offsets(layout: KVLayout, every: Numbers) -> list[Numbers]:
    """(group, layer, then component by component the slots), cut apart with ``np.split``."""
    groups, layers, tokens = layout.head_groups, layout.layers, layout.page_tokens
    rows = [component.row_nbytes for component in layout.components]
    ends = np.cumsum([tokens * row // groups for row in rows])
    parts = np.split(every.reshape(groups, layers, -1), ends, axis=2)
    assert parts.pop().size == 0
    return [
        part.reshape(groups, layers, tokens, row // groups).transpose(1, 2, 0, 3).reshape(layers, tokens, row)
        for part, row in zip(parts, rows, strict=True)
    ]


def page_places(pool: HostPool) -> Numbers:
    """(page, byte): the host address of each byte of each page."""
    layout, chunks = pool.layout, pool._resources.memory.chunks
    if layout.order != "layer_first":
        return np.stack([pool.page_address(page) + np.arange(layout.page_nbytes) for page in range(pool.pages)])
    each, found = -(-pool.pages // len(chunks)), []  # spread evenly, the last chunk as large as the others
    for chunk in chunks:
        every, parts, at = chunk.address + np.arange(each * layout.page_nbytes), [], 0
        for component in layout.components:
            nbytes = layout.page_tokens * component.row_nbytes
            here = every[at : at + layout.layers * each * nbytes].reshape(layout.layers, each, nbytes)
            at += here.size
            parts.append(here.transpose(1, 0, 2).reshape(each, -1))
        found.append(np.concatenate(parts, axis=1))
    return np.concatenate(found)[: pool.pages]


def _chunks(pool: HostPool) -> list[tuple[int, Bytes, Numbers]]:
    """By chunk: its address, the bytes themselves, and the places in it of all that belongs to a page."""
    places, found = page_places(pool).ravel(), []
    for chunk in pool._resources.memory.chunks:
        begin, end = int(chunk.address), chunk.address + chunk.nbytes
        inside = places[(places >= begin) & (places < end)] - begin
        found.append((begin, memory(begin, chunk.nbytes), inside))
    assert sum(inside.size for _, _, inside in found) == places.size
    return found


def spare_bytes(pool: HostPool) -> Bytes:
    """A copy of what the chunks hold besides pages, one after the other."""
    return np.concatenate([np.delete(content, inside) for _, content, inside in _chunks(pool)])


def host_pages(pool: HostPool) -> Bytes:
    """A copy of every page of the pool, as (page, byte)."""
    if pool.layout.order != "layer_first":
        return np.stack([pool.page_view(page) for page in range(pool.pages)])
    # Chunks hold whole pages in their order, but not the bytes of a page in one piece: fetch each by its place.
    places = page_places(pool)
    found = np.zeros(places.shape, np.uint8)
    for begin, content, _ in _chunks(pool):
        mine = (places >= begin) & (places < begin + content.size)
        found[mine] = content[places[mine] - begin]
    return found


def scramble_pool(pool: HostPool, seed: int) -> None:
    """Other bytes in every page, and in what the chunks hold besides."""
    random = np.random.default_rng(seed)
    for _, content, _ in _chunks(pool):
        content[:] = random.integers(0, 256, content.size, np.uint8)


def tokens_of(layout: KVLayout, index: int, unit: str) -> range:
    """The tokens that an index selects."""
    return (
        range(index * layout.page_tokens, (index + 1) * layout.page_tokens)
        if unit == "page"
        else range(index, index + 1)
    )


def apply(
    *,
    storing: bool,
    cache: GuardedCache,
    pages: Bytes,
    on_device: Sequence[int],
    on_host: Sequence[int],
    unit: str,
    layers: Iterable[int],
) -> None:
    """Do a transfer to copies of both sides: ``cache`` and ``pages`` are changed in place."""
    layout, offsets = cache.layout, page_offsets(cache.layout)
    for device_index, host_index in zip(on_device, on_host, strict=True):
        if device_index < 0 or host_index < 0:
            continue
        tokens = zip(tokens_of(layout, device_index, unit), tokens_of(layout, host_index, unit), strict=True)
        for device_token, host_token in tokens:
            page, slot = divmod(host_token, layout.page_tokens)
            for number in range(len(layout.components)):
                for layer in layers:
                    row = cache.rows[number][layer][device_token]
                    where = offsets[number][layer, slot][cache.in_row[number]]
                    if storing:
                        pages[page, where] = row
                    else:
                        row[:] = pages[page, where]
