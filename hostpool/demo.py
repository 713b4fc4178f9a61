"""The main job once, on whatever is here: back up, wipe, load back, compare every byte."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from kvferry.drivers.protocol import DeviceAddress, HostAddress, HostMemoryDriver, Platform, StreamHandle
from kvferry.hostpool.backend import Backend
from kvferry.hostpool.layout import KVLayout, PageOrder
from kvferry.hostpool.mapping import Progress
from kvferry.hostpool.pool import HostPool
from kvferry.hostpool.ticket import Ticket

_WIPE = 0xA5
_REPEATS = 7


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


class _DeviceCache:
    """A layer-first KV cache of ``tokens`` tokens: one allocation a component and layer."""

    def __init__(self, driver: HostMemoryDriver, layout: KVLayout, tokens: int, stack: ExitStack) -> None:
        self._driver, self.layers = driver, {component.name: list[int]() for component in layout.components}
        self._blocks: list[tuple[DeviceAddress, int]] = []
        for component in layout.components:
            for _ in range(layout.layers):
                nbytes = tokens * component.row_nbytes
                address = driver.device_alloc(nbytes)
                stack.callback(driver.device_free, address)
                self.layers[component.name].append(address)
                self._blocks.append((address, nbytes))

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self._blocks)

    def write(self, content: npt.NDArray[np.uint8], stream: StreamHandle) -> None:
        at = content.ctypes.data
        for address, nbytes in self._blocks:
            self._driver.copy_to_device(address, HostAddress(at), nbytes, stream)
            at += nbytes
        self._driver.stream_synchronize(stream)

    def read(self, stream: StreamHandle) -> npt.NDArray[np.uint8]:
        content = np.empty(self.nbytes, np.uint8)
        at = content.ctypes.data
        for address, nbytes in self._blocks:
            self._driver.copy_to_host(HostAddress(at), address, nbytes, stream)
            at += nbytes
        self._driver.stream_synchronize(stream)
        return content

    def wipe(self, stream: StreamHandle) -> None:
        for address, nbytes in self._blocks:
            self._driver.memset_async(address, _WIPE, nbytes, stream)
        self._driver.stream_synchronize(stream)


def run(
    backend: Backend, *, device: int = 0, order: PageOrder = "page_first_direct", progress: Progress | None = None
) -> DemoResult:
    """Run the demo: a cache shaped like Llama 3 8B (32 layers, 8 KV heads of 128 bf16, pages of 64 tokens).

    4096 tokens on a GPU, 256 on the stand-in. Random bytes, random pages on both sides; the device cache is wiped
    between backing up and loading back.
    """
    driver = backend.driver
    layout = KVLayout.mha(layers=32, heads=8, head_size=128, element_nbytes=2, page_tokens=64, order=order)
    pages = 4 if driver.platform == "stand-in" else 64
    random = np.random.default_rng()
    with ExitStack() as stack:
        pool = stack.enter_context(HostPool(layout, 2 * pages, backend=backend, devices=[device], progress=progress))
        stack.enter_context(driver.context(device))
        cache = _DeviceCache(driver, layout, pages * layout.page_tokens, stack)
        stream = driver.stream_create()
        stack.callback(driver.stream_destroy, stream)
        content = random.integers(0, 256, cache.nbytes, dtype=np.uint8)
        cache.write(content, stream)
        kv = pool.device_pool(cache.layers, device=device, tokens=pages * layout.page_tokens)

        on_device, on_host = random.permutation(pages), random.permutation(2 * pages)[:pages]
        store_s = _median_s(driver, stream, lambda: pool.store(kv, on_device, on_host, stream=stream))
        cache.wipe(stream)
        load_s = _median_s(driver, stream, lambda: pool.load(kv, on_host, on_device, stream=stream))
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


def _median_s(driver: HostMemoryDriver, stream: StreamHandle, transfer: Callable[[], Ticket]) -> float:
    """Seconds that the device took, the first transfer left out."""
    transfer().synchronize()
    times = []
    for _ in range(_REPEATS):
        start, end = driver.event_create(timing=True), driver.event_create(timing=True)
        driver.event_record(start, stream)
        ticket = transfer()
        driver.event_record(end, stream)
        ticket.synchronize()
        driver.event_synchronize(end)
        times.append(driver.event_elapsed_ms(start, end) / 1e3)
        driver.event_destroy(start)
        driver.event_destroy(end)
    return statistics.median(times)
