"""The main job once, on whatever is here: back up, wipe, load back, compare every byte."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from kvferry.drivers.protocol import Platform
from kvferry.hostpool.backend import Backend
from kvferry.hostpool.layout import KVLayout, PageOrder
from kvferry.hostpool.mapping import Progress
from kvferry.hostpool.measure import DeviceCache, median_s
from kvferry.hostpool.pool import HostPool


@dataclass(frozen=True)
class DemoResult:
    """What ``kvferry demo`` prints; rates are medians, in 1e9 bytes a second."""

    ok: bool
    platform: Platform
    device: str
    driver: str
    artefact_file: str
    artefact_sha256: str
    domain_kind: str
    domain_reason: str
    nbytes: int
    load_gbps: float
    store_gbps: float
    different_nbytes: int

    def as_json(self) -> dict[str, object]:
        """The object of ``--json``."""
        return {
            "ok": self.ok,
            "platform": self.platform,
            "device": self.device,
            "driver": self.driver,
            "artefact": {"file": self.artefact_file, "sha256": self.artefact_sha256},
            "domain": {"kind": self.domain_kind, "reason": self.domain_reason},
            "nbytes": self.nbytes,
            "load_gbps": self.load_gbps,
            "store_gbps": self.store_gbps,
        }


def run(
    backend: Backend,
    *,
    device: int = 0,
    order: PageOrder = "page_first_direct",
    layers: int = 32,
    pages: int | None = None,
    progress: Progress | None = None,
) -> DemoResult:
    """Run the demo: a cache shaped like Llama 3 8B (32 layers, 8 KV heads of 128 bf16, pages of 64 tokens).

    64 pages on a GPU and 4 on the stand-in, unless ``pages`` says otherwise. Random bytes, random pages on both sides;
    the device cache is wiped between backing up and loading back.
    """
    driver = backend.driver
    layout = KVLayout.mha(layers=layers, heads=8, head_size=128, element_nbytes=2, page_tokens=64, order=order)
    if pages is None:
        pages = 4 if driver.platform == "stand-in" else 64
    random = np.random.default_rng()
    with ExitStack() as stack:
        pool = stack.enter_context(HostPool(layout, 2 * pages, backend=backend, devices=[device], progress=progress))
        stack.enter_context(driver.context(device))
        cache = DeviceCache(driver, layout, pages * layout.page_tokens, stack)
        stream = driver.stream_create()
        stack.callback(driver.stream_destroy, stream)
        content = random.integers(0, 256, cache.nbytes, dtype=np.uint8)
        cache.write(content, stream)
        kv = pool.device_pool(cache.layers, device=device, tokens=pages * layout.page_tokens)

        on_device, on_host = random.permutation(pages), random.permutation(2 * pages)[:pages]
        store_s = median_s(driver, stream, lambda: pool.store(kv, on_device, on_host, stream=stream))
        cache.wipe(stream)
        load_s = median_s(driver, stream, lambda: pool.load(kv, on_host, on_device, stream=stream))
        different = int(np.count_nonzero(cache.read(stream) != content))
        artefact, where = backend.launcher(device).artefact, pool.domain(device)
        return DemoResult(
            ok=different == 0,
            platform=driver.platform,
            device=driver.device_name(device),
            driver=f"{driver.library}, version {driver.version}",
            artefact_file=artefact.file,
            artefact_sha256=artefact.sha256,
            domain_kind=where.kind,
            domain_reason=where.reason,
            nbytes=cache.nbytes,
            load_gbps=cache.nbytes / load_s / 1e9,
            store_gbps=cache.nbytes / store_s / 1e9,
            different_nbytes=different,
        )
