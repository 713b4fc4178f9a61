"""Buffers with guards on both sides of the link, the layouts of SGLang over them, and a model that copies by index."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.drivers import posix
from kvferry.drivers.protocol import HostAddress, StreamHandle
from kvferry.hostpool.backend import Backend
from kvferry.hostpool.mapping import HostMapping
from kvferry.hostpool.registration import Chunk, Registration

from support.standin import CudaArray

Bytes = npt.NDArray[np.uint8]

GUARD_NBYTES = 64


class Buffer:
    """``nbytes`` between two guards; ``model`` is what they, guards included, should hold, ``content`` the part inside.

    ``shift_nbytes`` misalign the content.
    """

    def __init__(self, world: World, nbytes: int, *, on_device: bool, shift_nbytes: int = 0) -> None:
        self._world, self.on_device = world, on_device
        whole = nbytes + 2 * GUARD_NBYTES + shift_nbytes
        begin = GUARD_NBYTES + shift_nbytes
        self._base = world.device_alloc(whole) if on_device else world.host_alloc(whole)
        self.address = self._base + begin
        self.model: Bytes = world.random.integers(0, 256, whole, np.uint8)
        self.content = self.model[begin : begin + nbytes]
        world.write(self._base, self.model, on_device)
        world.buffers.append(self)

    def assert_as_modelled(self) -> None:
        np.testing.assert_array_equal(self._world.read(self._base, self.model.size, self.on_device), self.model)

    def tensor(self, shape: Sequence[int], strides: Sequence[int] | None = None) -> Any:
        """A byte tensor over the content, as a library shows its own."""
        if self.on_device:
            return CudaArray(self.address, shape, strides=strides)
        found: Bytes = np.frombuffer(posix.buffer(HostAddress(self.address), self.content.size), np.uint8)
        return found.reshape(shape) if strides is None else np.lib.stride_tricks.as_strided(found, shape, strides)


class World:
    """Memory of one backend, and a stream of device 0."""

    def __init__(self, backend: Backend, stack: ExitStack) -> None:
        self.backend, self._stack, self.random = backend, stack, np.random.default_rng(7)
        self.driver = backend.driver
        self.buffers: list[Buffer] = []
        stack.enter_context(self.driver.context(0))
        self.stream: StreamHandle = self.driver.stream_create()
        stack.callback(self.driver.stream_destroy, self.stream)
        stack.callback(self.driver.stream_synchronize, self.stream)

    def device_alloc(self, nbytes: int) -> int:
        address = self.driver.device_alloc(nbytes)
        self._stack.callback(self.driver.device_free, address)
        return int(address)

    def host_alloc(self, nbytes: int, chunk_nbytes: int | None = None) -> int:
        """Page-locked memory, in chunks where that is said."""
        whole = -(-nbytes // posix.PAGE_NBYTES) * posix.PAGE_NBYTES
        mapping = HostMapping(whole)
        self._stack.callback(mapping.close)
        step = chunk_nbytes or whole
        chunks = [Chunk(HostAddress(mapping.address + at), min(step, whole - at)) for at in range(0, whole, step)]
        registration = Registration(self.driver, 0, chunks, owner="a test")
        self._stack.callback(registration.release)
        return int(mapping.address)

    def write(self, address: int, data: Bytes, on_device: bool) -> None:
        data = np.ascontiguousarray(data)
        if on_device:
            self.driver.copy_to_device(address, HostAddress(data.ctypes.data), data.nbytes, self.stream)  # type: ignore[arg-type]
            self.driver.stream_synchronize(self.stream)
        else:
            np.frombuffer(posix.buffer(HostAddress(address), data.nbytes), np.uint8)[:] = data.view(np.uint8)

    def read(self, address: int, nbytes: int, on_device: bool) -> Bytes:
        out = np.empty(nbytes, np.uint8)
        if on_device:
            self.driver.copy_to_host(HostAddress(out.ctypes.data), address, nbytes, self.stream)  # type: ignore[arg-type]
            self.driver.stream_synchronize(self.stream)
        else:
            out[:] = np.frombuffer(posix.buffer(HostAddress(address), nbytes), np.uint8)
        return out

    def device_values(self, values: npt.NDArray[Any]) -> CudaArray:
        address = self.device_alloc(max(8, values.nbytes))
        self.write(address, values.view(np.uint8), True)
        return CudaArray(address, values.shape, values.dtype.str)

    def finish(self) -> None:
        self.driver.stream_synchronize(self.stream)

    def assert_as_modelled(self) -> None:
        for buffer in self.buffers:
            buffer.assert_as_modelled()


class LayerFirst:
    """A buffer a layer: (token, row)."""

    def __init__(self, world: World, layers: int, tokens: int, row: int, *, on_device: bool, shift: int = 0) -> None:
        self.buffers = [Buffer(world, tokens * row, on_device=on_device, shift_nbytes=shift) for _ in range(layers)]
        self.tensors = [buffer.tensor((tokens, row)) for buffer in self.buffers]
        self._rows = [buffer.content.reshape(tokens, row) for buffer in self.buffers]

    def row(self, layer: int, token: int) -> Bytes:
        row: Bytes = self._rows[layer][token]
        return row

    def set(self, layer: int, token: int, row: Bytes) -> None:
        self._rows[layer][token] = row

    def table(self, world: World) -> CudaArray:
        """The addresses of the layers as the device sees them."""
        seen = [
            b.address if b.on_device else int(world.driver.host_device_pointer(HostAddress(b.address)))
            for b in self.buffers
        ]
        return world.device_values(np.array(seen, np.uint64))


class Paged:
    """One buffer for all layers.

    ``order`` is pf (token, layer, row), direct (page, layer, slot, row) or ph (page, head, slot, layer, head row).
    """

    def __init__(
        self, world: World, order: str, layers: int, tokens: int, row: int, page: int, heads: int, *, on_device: bool
    ) -> None:
        self.buffer = Buffer(world, tokens * layers * row, on_device=on_device)
        pages = tokens // page
        shape = {
            "pf": (tokens, layers, row),
            "direct": (pages, layers, page, row),
            "ph": (pages, heads, page, layers, row // heads),
        }[order]
        self._order, self._page, self._content = order, page, self.buffer.content.reshape(shape)
        self.tensor = self.buffer.tensor((*shape[:-1], 1, shape[-1]) if order == "direct" else shape)

    def _at(self, layer: int, token: int) -> tuple[Any, ...]:
        page, slot = divmod(token, self._page)
        if self._order == "pf":
            return token, layer
        return (page, layer, slot) if self._order == "direct" else (page, slice(None), slot, layer)

    def row(self, layer: int, token: int) -> Bytes:
        return np.ravel(self._content[self._at(layer, token)])

    def set(self, layer: int, token: int, row: Bytes) -> None:
        target = self._content[self._at(layer, token)]
        target[...] = row.reshape(target.shape)


def copy_rows(
    src: LayerFirst | Paged,
    dst: LayerFirst | Paged,
    pairs: Sequence[tuple[int, int]],
    layers: Sequence[tuple[int, int]],
) -> None:
    """The transfer, on the models: ``layers`` are (source's, destination's) numbers."""
    for from_layer, to_layer in layers:
        for source, target in pairs:
            dst.set(to_layer, target, src.row(from_layer, source))
