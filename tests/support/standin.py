"""The stand-in device in a test's hands: caches in its memory, arrays that lie there, streams that hold still."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from kvferry.drivers import posix
from kvferry.drivers.host import HostDriver
from kvferry.drivers.protocol import DeviceAddress, StreamHandle
from kvferry.hostpool import DevicePool, HostPool, KVLayout
from kvferry.hostpool.backend import Backend

Bytes = npt.NDArray[np.uint8]

GUARD_NBYTES = 64


def host_driver(backend: Backend) -> HostDriver:
    """The stand-in's driver, with the verbs that only the stand-in has."""
    assert isinstance(backend.driver, HostDriver)
    return backend.driver


def memory(address: int, nbytes: int) -> Bytes:
    """Device or host memory of the stand-in as an array over the bytes themselves."""
    return np.frombuffer(posix.buffer(address, nbytes), np.uint8)


def new_stream(backend: Backend, device: int = 0) -> StreamHandle:
    with backend.driver.context(device):
        return backend.driver.stream_create()


def finish(backend: Backend, stream: StreamHandle, device: int = 0) -> None:
    """Block until ``stream`` is empty."""
    with backend.driver.context(device):
        backend.driver.stream_synchronize(stream)


@contextmanager
def blocked(backend: Backend, stream: StreamHandle, device: int = 0) -> Iterator[threading.Event]:
    """``stream`` does nothing inside the block, or until the event is set: what it is given waits."""
    gate = threading.Event()
    with backend.driver.context(device):
        host_driver(backend).submit(stream, gate.wait)
    try:
        yield gate
    finally:
        gate.set()


class CudaArray:
    """A device array as torch, CuPy and Numba show theirs."""

    def __init__(
        self, address: int, shape: Sequence[int], typestr: str = "|u1", strides: Sequence[int] | None = None
    ) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": tuple(shape),
            "typestr": typestr,
            "strides": None if strides is None else tuple(strides),
            "version": 3,
        }


class DeviceValues(CudaArray):
    """Integers in device memory, written without a stream; ``values`` is the memory itself."""

    def __init__(self, backend: Backend, values: Sequence[int], dtype: str = "<i8", device: int = 0) -> None:
        content = np.array(values, dtype)
        with backend.driver.context(device):
            self.address = backend.driver.device_alloc(max(content.nbytes, 8))
        self.values = memory(self.address, content.nbytes).view(dtype)
        self.values[:] = content
        super().__init__(self.address, content.shape, dtype)


class GuardedCache:
    """A layer-first KV cache in device memory, with room that nobody may touch around and between its rows.

    ``gap_nbytes`` lie between rows, ``shift_nbytes`` misalign every base. ``blocks`` are whole allocations, guards
    included; ``rows`` the rows in them, by component and layer. With ``heads`` the rows have these heads of the layout
    alone; ``in_row`` says by component which bytes of the layout's row they are.
    """

    def __init__(
        self,
        backend: Backend,
        layout: KVLayout,
        tokens: int,
        *,
        device: int = 0,
        gap_nbytes: int = 0,
        shift_nbytes: int = 0,
        seed: int = 0,
        heads: range | None = None,
    ) -> None:
        self.heads = heads
        self.in_row = [
            slice(0, component.row_nbytes)
            if heads is None
            else slice(heads.start * component.head_nbytes, heads.stop * component.head_nbytes)
            for component in layout.components
        ]
        self.row_nbytes = [part.stop - part.start for part in self.in_row]
        self._backend, self.layout, self.tokens, self.device = backend, layout, tokens, device
        self.blocks: list[Bytes] = []
        self.rows: list[list[Bytes]] = []
        self.bases: list[list[int]] = []
        self.strides = [row + gap_nbytes for row in self.row_nbytes]
        self._addresses: list[DeviceAddress] = []
        for row, stride in zip(self.row_nbytes, self.strides, strict=True):
            self.rows.append([])
            self.bases.append([])
            for _ in range(layout.layers):
                nbytes = 2 * GUARD_NBYTES + shift_nbytes + tokens * stride
                with backend.driver.context(device):
                    address = backend.driver.device_alloc(nbytes)
                self._addresses.append(address)
                block = memory(address, nbytes)
                begin = GUARD_NBYTES + shift_nbytes
                self.blocks.append(block)
                every = block[begin : begin + tokens * stride].reshape(tokens, stride)
                self.rows[-1].append(every[:, :row])
                self.bases[-1].append(address + begin)
        self.scramble(seed)

    def scramble(self, seed: int) -> None:
        """Other bytes everywhere, guards included."""
        random = np.random.default_rng(seed)
        for block in self.blocks:
            block[:] = random.integers(0, 256, block.size, np.uint8)

    def copy(self) -> GuardedCache:
        """The same shape and bytes in ordinary memory: a model to apply a transfer to."""
        twin = GuardedCache.__new__(GuardedCache)
        twin.layout, twin.tokens, twin.strides = self.layout, self.tokens, self.strides
        twin.heads, twin.in_row, twin.row_nbytes = self.heads, self.in_row, self.row_nbytes
        twin.blocks = [block.copy() for block in self.blocks]
        twin.rows, twin.bases = [], self.bases
        blocks = iter(zip(twin.blocks, self._addresses, strict=True))
        for number, row in enumerate(self.row_nbytes):
            twin.rows.append([])
            for base in self.bases[number]:
                block, address = next(blocks)
                begin, stride = base - address, self.strides[number]
                every = block[begin : begin + self.tokens * stride].reshape(self.tokens, stride)
                twin.rows[-1].append(every[:, :row])
        return twin

    def assert_equals(self, model: GuardedCache) -> None:
        """Every byte, guards and gaps too."""
        for number, (mine, theirs) in enumerate(zip(self.blocks, model.blocks, strict=True)):
            np.testing.assert_array_equal(mine, theirs, f"block {number}")

    def pool(self, pool: HostPool) -> DevicePool:
        """This cache described for transfers with ``pool``."""
        layers = {
            component.name: [
                CudaArray(base, (self.tokens, self.row_nbytes[number]), strides=(stride, 1))
                for base in self.bases[number]
            ]
            for number, (component, stride) in enumerate(zip(self.layout.components, self.strides, strict=True))
        }
        return pool.device_pool(layers, device=self.device, heads=self.heads)

    def free(self) -> None:
        with self._backend.driver.context(self.device):
            while self._addresses:
                self._backend.driver.device_free(self._addresses.pop())
