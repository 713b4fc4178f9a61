"""What a layout and a transfer mean, said once more in numpy and without any of kvferry's arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvferry.hostpool import HostPool, KVLayout

from support.standin import Bytes, GuardedCache

Numbers = npt.NDArray[np.int64]


def page_offsets(layout: KVLayout) -> list[Numbers]:
    """By component: the byte in a page of each (layer, slot, byte of the row)."""
    every, at, found = np.arange(layout.page_nbytes), 0, []
    for component in layout.components:
        row = component.row_nbytes
        here = every[at : at + layout.layers * layout.page_tokens * row]
        at += here.size
        if layout.order == "page_first_direct":
            found.append(here.reshape(layout.layers, layout.page_tokens, row))
        else:
            found.append(here.reshape(layout.page_tokens, layout.layers, row).transpose(1, 0, 2))
    assert at == layout.page_nbytes
    return found


def host_pages(pool: HostPool) -> Bytes:
    """A copy of every page of the pool, as (page, byte)."""
    return np.stack([pool.page_view(page) for page in range(pool.pages)])


def scramble_pool(pool: HostPool, seed: int) -> None:
    random = np.random.default_rng(seed)
    for page in range(pool.pages):
        pool.page_view(page)[:] = random.integers(0, 256, pool.layout.page_nbytes, np.uint8)


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
                    row, where = cache.rows[number][layer][device_token], offsets[number][layer, slot]
                    if storing:
                        pages[page, where] = row
                    else:
                        row[:] = pages[page, where]
