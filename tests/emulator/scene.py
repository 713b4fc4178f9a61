"""A small paged pool and a small KV cache with room around every row, a transfer between them, and what it means.

The pool is page-locked host memory in chunks: each chunk has a host address and, elsewhere, the device's address of
the same pages. The cache is device memory. The model copies by index into numpy arrays, without any address.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.kernels_cubin import abi

from emulator.codeobject import CodeObject
from emulator.report import RECORD
from emulator.wave import execute

Bytes = npt.NDArray[np.uint8]

GUARD_NBYTES = 64
EPOCH = 7
COUNTED_BEFORE = 1000


@dataclass(frozen=True)
class Part:
    """A component of a row: heads of ``run_nbytes``, ``head_nbytes`` apart in the cache and gapless in the pool."""

    run_nbytes: int
    heads: int = 1
    head_gap: int = 0

    @property
    def head_nbytes(self) -> int:
        return self.run_nbytes + self.head_gap


@dataclass(frozen=True)
class Case:
    """A transfer. ``unit`` says what an index is; ``split`` makes the cache find a token by its page, too."""

    word: int
    index_nbytes: int
    parts: tuple[Part, ...]
    narrow: bool
    lanes: int
    pool_indices: tuple[int, ...]
    cache_indices: tuple[int, ...]
    storing: bool = False
    unit: str = "page"
    split: bool = False
    layers: int = 3
    layer_begin: int = 0
    moved_layers: int = 3
    page_tokens: int = 4
    threads: int = 128
    ctas: int = 2
    shift: int = 0
    counting: bool = True
    rcp_direction: int = 0

    @property
    def kernel(self) -> str:
        return abi.kernel_name(self.word, self.index_nbytes)


class Chunk:
    """Shared pages, mapped twice: ``host`` as the process sees them, ``alias`` as the device does."""

    def __init__(self, nbytes: int) -> None:
        descriptor = os.memfd_create("chunk")
        os.ftruncate(descriptor, nbytes)
        self._mappings = [mmap.mmap(descriptor, nbytes) for _ in range(2)]
        os.close(descriptor)
        self.host, alias = (np.frombuffer(mapping, np.uint8) for mapping in self._mappings)
        self.nbytes, self.host_address, self.alias = nbytes, int(self.host.ctypes.data), int(alias.ctypes.data)


@dataclass
class Contents:
    """Every byte of both sides; ``pages`` as (page, byte), ``cache`` by part as (layer, token, head, byte)."""

    blocks: list[Bytes]
    cache: list[Bytes]
    pages: Bytes


@dataclass
class Scene:
    """The memory of a case. ``pool_pages`` pages in ``chunks`` chunks, with room after each page."""

    case: Case
    pool_pages: int = 6
    cache_pages: int = 5
    chunks: int = 3
    seed: int = 0
    ranges: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        case, random = self.case, np.random.default_rng(self.seed)
        self._keep: list[Any] = []
        self.blocks: list[Bytes] = []
        self.cache: list[Bytes] = []
        self._bases: list[list[int]] = []
        tokens = self.cache_pages * case.page_tokens
        for part in case.parts:
            block = self._device(2 * GUARD_NBYTES + case.shift + case.layers * tokens * part.heads * part.head_nbytes)
            block[:] = random.integers(0, 256, block.size, np.uint8)
            begin = GUARD_NBYTES + case.shift
            rows = block[begin : block.size - GUARD_NBYTES].reshape(case.layers, tokens, part.heads, part.head_nbytes)
            self.blocks.append(block)
            self.cache.append(rows)
            self._bases.append([int(rows[layer].ctypes.data) for layer in range(case.layers)])
        self.page_nbytes = sum(case.layers * case.page_tokens * part.heads * part.run_nbytes for part in case.parts)
        self.page_stride = -(-self.page_nbytes // 64) * 64 + GUARD_NBYTES
        self.pages_a_chunk = -(-self.pool_pages // self.chunks)
        whole = -(-self.pages_a_chunk * self.page_stride // mmap.PAGESIZE) * mmap.PAGESIZE
        self.pool = [Chunk(whole * (1 + number)) for number in range(self.chunks)]
        for chunk in self.pool:
            chunk.host[:] = random.integers(0, 256, chunk.nbytes, np.uint8)
            self.ranges.append((chunk.alias, chunk.alias + chunk.nbytes))
        self.counters = self._device(4 * case.layers).view(np.uint32)
        self.counters[:] = COUNTED_BEFORE
        self.error = self._device(abi.ERROR_RECORD.itemsize).view(abi.ERROR_RECORD)
        self.claim = self._device(4).view(np.uint32)
        self.args = self._arguments()

    def _device(self, nbytes: int, content: Bytes | None = None) -> Bytes:
        """Device memory, at an address that suits every word."""
        room = np.zeros(nbytes + 64, np.uint8)
        self._keep.append(room)
        begin = -int(room.ctypes.data) % 64
        block = room[begin : begin + nbytes]
        if content is not None:
            block[:] = content
        self.ranges.append((int(block.ctypes.data), int(block.ctypes.data) + nbytes))
        return block

    def device_array(self, values: npt.NDArray[Any]) -> int:
        """The address of a copy in device memory."""
        return int(self._device(values.nbytes, values.view(np.uint8)).ctypes.data)

    # ---- what the kernel is told ------------------------------------------------------------------------------------

    def page_table(self, addresses: Sequence[int]) -> int:
        """A table of the pool's pages, given the address of each chunk."""
        pages = [divmod(page, self.pages_a_chunk) for page in range(self.pool_pages)]
        return self.device_array(
            np.array([addresses[chunk] + number * self.page_stride for chunk, number in pages], np.uint64)
        )

    def use_page_table(self, addresses: Sequence[int]) -> None:
        for number in range(len(self.case.parts)):
            self.args["component"][number]["dst" if self.case.storing else "src"]["table"] = self.page_table(addresses)

    def _arguments(self) -> npt.NDArray[np.void]:
        case, args = self.case, np.zeros((), abi.ARGS)
        pool_side, cache_side = ("dst", "src") if case.storing else ("src", "dst")
        by_page = self.page_table([chunk.alias for chunk in self.pool])
        kind = np.dtype(f"i{case.index_nbytes}")
        items, paged = len(case.pool_indices), case.unit == "page"
        offset, tasks = 0, []
        for number, part in enumerate(case.parts):
            row, pool_row = part.heads * part.head_nbytes, part.heads * part.run_nbytes
            cache_page = case.page_tokens * row if paged or case.split else row
            by_layer = self.device_array(np.array(self._bases[number], np.uint64))
            component = args["component"][number]
            component[cache_side] = (by_layer, 0, cache_page, row, 0, part.head_nbytes)
            component[pool_side] = (by_page, offset, 0, pool_row, case.page_tokens * pool_row, part.run_nbytes)
            offset += case.layers * case.page_tokens * pool_row
            run_words = part.run_nbytes // case.word
            segment = case.lanes * (1 if case.narrow else abi.words_per_lane(case.word))
            segments, slots = -(-run_words // segment), case.page_tokens if paged else 1
            tasks.append(items * slots * part.heads * segments)
            component["run_words"], component["segments"] = run_words, segments
            component["heads"], component["slots"], component["tasks"] = part.heads, slots, tasks[-1]
        split = 1 if paged else case.page_tokens
        pages = (self.pool_pages, self.cache_pages)
        pool_limit, cache_limit = (count * (1 if paged else case.page_tokens) for count in pages)
        pool_at, cache_at = (self.device_array(np.array(n, kind)) for n in (case.pool_indices, case.cache_indices))
        args[pool_side] = (pool_at, pool_limit, split, abi.TABLE_BY_PAGE, case.layer_begin)
        args[cache_side] = (cache_at, cache_limit, split if case.split else 1, abi.TABLE_BY_LAYER, case.layer_begin)
        args["layer_done"] = int(self.counters.ctypes.data) if case.counting else 0
        args["error_record"], args["error_claim"] = int(self.error.ctypes.data), int(self.claim.ctypes.data)
        args["error_epoch"], args["n_components"], args["n_layers"] = EPOCH, len(case.parts), case.moved_layers
        args["tasks_per_layer"], args["lanes_log2"] = sum(tasks), case.lanes.bit_length() - 1
        args["narrow"] = case.narrow
        return args

    def run(self, code: CodeObject, coverage: Counter[str] | None = None) -> None:
        """Execute the kernel that the case names."""
        wave_lanes = code.kernel(self.case.kernel).wave_lanes
        self.args["warps_per_cta"] = self.case.threads // wave_lanes
        self.args["n_warps"] = self.case.ctas * self.case.threads // wave_lanes
        counts: Counter[str] = Counter()
        try:
            execute(
                code,
                self.case.kernel,
                self.case.ctas,
                self.case.threads,
                self.args.tobytes(),
                self.ranges,
                counts,
                rcp_direction=self.case.rcp_direction,
            )
        finally:
            RECORD.add(code, self.case.kernel, counts)
            if coverage is not None:
                coverage.update(counts)

    # ---- what it means ----------------------------------------------------------------------------------------------

    def contents(self) -> Contents:
        """A copy of all there is."""
        case, blocks = self.case, [block.copy() for block in self.blocks]
        cache = []
        for block, rows in zip(blocks, self.cache, strict=True):
            begin = GUARD_NBYTES + case.shift
            cache.append(block[begin : block.size - GUARD_NBYTES].reshape(rows.shape))
        pool = np.concatenate([chunk.host[: self.pages_a_chunk * self.page_stride] for chunk in self.pool])
        return Contents(blocks, cache, pool.reshape(-1, self.page_stride))

    def expected(self, before: Contents) -> Contents:
        """``before`` after the transfer, changed in place."""
        case = self.case
        for pool_index, cache_index in zip(case.pool_indices, case.cache_indices, strict=True):
            if not self.moves(pool_index, cache_index):
                continue
            if case.unit == "page":
                pool_at = [(pool_index, slot) for slot in range(case.page_tokens)]
                tokens = [cache_index * case.page_tokens + slot for slot in range(case.page_tokens)]
            else:
                pool_at, tokens = [divmod(pool_index, case.page_tokens)], [cache_index]
            for (page, slot), token in zip(pool_at, tokens, strict=True):
                self._move(before, page, slot, token)
        return before

    def _move(self, contents: Contents, page: int, slot: int, token: int) -> None:
        case, begin = self.case, 0
        for rows, part in zip(contents.cache, case.parts, strict=True):
            shape = (case.layers, case.page_tokens, part.heads, part.run_nbytes)
            nbytes = int(np.prod(shape))
            inside = contents.pages[page, begin : begin + nbytes].reshape(shape)
            begin += nbytes
            for layer in range(case.layer_begin, case.layer_begin + case.moved_layers):
                row = rows[layer, token, :, : part.run_nbytes]
                if case.storing:
                    inside[layer, slot] = row
                else:
                    row[:] = inside[layer, slot]

    def moves(self, pool_index: int, cache_index: int) -> bool:
        each = 1 if self.case.unit == "page" else self.case.page_tokens
        return 0 <= pool_index < self.pool_pages * each and 0 <= cache_index < self.cache_pages * each

    def assert_holds(self, expected: Contents) -> None:
        found = self.contents()
        for number, (mine, theirs) in enumerate(zip(found.blocks, expected.blocks, strict=True)):
            np.testing.assert_array_equal(mine, theirs, f"cache, part {number}")
        np.testing.assert_array_equal(found.pages, expected.pages, "pool")

    def counted(self) -> list[int]:
        """Tasks by layer."""
        return [int(count) - COUNTED_BEFORE for count in self.counters]
