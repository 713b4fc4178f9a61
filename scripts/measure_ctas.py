"""How many CTAs a transfer needs on the GPU at hand: the table behind ``DEFAULT_CTAS``, as Markdown.

Every rate is a ratio to what the copy engine moves between contiguous pinned and device memory in the same run. Random
bytes and random pages, 4096 tokens, one launch for all layers; each number is the median of ``--repeats`` transfers,
timed by events on the device, and the bytes are compared after each case.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from functools import partial

import numpy as np

from kvferry.drivers import posix
from kvferry.drivers.protocol import HostMemoryDriver, StreamHandle
from kvferry.hostpool import HostPool, KVLayout
from kvferry.hostpool.backend import open_backend
from kvferry.hostpool.layout import PageOrder
from kvferry.hostpool.measure import DeviceCache, median_s

TOKENS = 4096
LINK_NBYTES = 512 << 20
ORDERS: tuple[PageOrder, ...] = ("page_first_direct", "page_first")


def link_rates(driver: HostMemoryDriver, stream: StreamHandle, repeats: int) -> tuple[float, float]:
    """Bytes a second of the copy engine, to the device and back."""
    host, device = driver.host_alloc(LINK_NBYTES), driver.device_alloc(LINK_NBYTES)
    view = np.frombuffer(posix.buffer(host, LINK_NBYTES), np.uint8)
    view[:] = np.random.default_rng().integers(0, 256, LINK_NBYTES, dtype=np.uint8)
    load = median_s(driver, stream, lambda: driver.copy_to_device(device, host, LINK_NBYTES, stream), repeats)
    store = median_s(driver, stream, lambda: driver.copy_to_host(host, device, LINK_NBYTES, stream), repeats)
    driver.device_free(device)
    driver.host_free(host)
    return LINK_NBYTES / load, LINK_NBYTES / store


def layouts(page_tokens: int, order: PageOrder) -> dict[str, KVLayout]:
    """Rows of 2048 bytes (Llama 3 8B) and of 1152 bytes (DeepSeek V3)."""
    return {
        "MHA 2048 B": KVLayout.mha(
            layers=32, heads=8, head_size=128, element_nbytes=2, page_tokens=page_tokens, order=order
        ),
        "MLA 1152 B": KVLayout.mla(layers=61, latent_size=576, element_nbytes=2, page_tokens=page_tokens, order=order),
    }


def main() -> int:
    """Print the table; exit 1 when a byte differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ctas", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--pages", type=int, nargs="+", default=[64, 16, 1], help="tokens of a page")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()

    backend = open_backend("cuda")
    driver, random, wrong = backend.driver, np.random.default_rng(), 0
    with driver.context(0):
        stream = driver.stream_create()
        link_load, link_store = link_rates(driver, stream, options.repeats)
        print(f"link: load {link_load / 1e9:.1f} GB/s, store {link_store / 1e9:.1f} GB/s; cells: load / store\n")
        print("| rows, order, page | " + " | ".join(f"{ctas} CTAs" for ctas in options.ctas) + " |")
        print("|---" * (1 + len(options.ctas)) + "|")
        for order in ORDERS:
            for page_tokens in options.pages:
                for name, layout in layouts(page_tokens, order).items():
                    cells = []
                    pages = TOKENS // page_tokens
                    with ExitStack() as stack:
                        pool = stack.enter_context(HostPool(layout, 2 * pages, backend=backend))
                        cache = DeviceCache(driver, layout, TOKENS, stack)
                        content = random.integers(0, 256, cache.nbytes, dtype=np.uint8)
                        cache.write(content, stream)
                        kv = pool.device_pool(cache.layers, tokens=TOKENS)
                        on_device, on_host = random.permutation(pages), random.permutation(2 * pages)[:pages]

                        for ctas in options.ctas:
                            store = partial(pool.store, kv, on_device, on_host, stream=stream, ctas=ctas)
                            load = partial(pool.load, kv, on_host, on_device, stream=stream, ctas=ctas)
                            storing = cache.nbytes / median_s(driver, stream, store, options.repeats)
                            cache.wipe(stream)
                            loading = cache.nbytes / median_s(driver, stream, load, options.repeats)
                            wrong += int(np.count_nonzero(cache.read(stream) != content))
                            cells.append(f"{loading / link_load:.2f} / {storing / link_store:.2f}")
                    print(f"| {name}, {order}, {page_tokens} | " + " | ".join(cells) + " |", flush=True)
        driver.stream_destroy(stream)
    print(f"\n{wrong} bytes differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
