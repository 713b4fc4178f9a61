"""Every function of ``kvcacheio`` against a model that copies by index, byte by byte, guards included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvferry.hostpool.sglang import kvcacheio as io
from kvferry.hostpool.sglang.mover import Mover

from support.sglang_world import Buffer, LayerFirst, Paged, World, copy_rows

pytestmark = pytest.mark.usefixtures("mover")

ROWS = [96, 132, 576, 656, 1152, 2048, 37440]
PAGES = [1, 16, 64, 128]
LAYERS, HEADS = 2, 4
EVERY_LAYER = [(layer, layer) for layer in range(LAYERS)]


@dataclass(frozen=True)
class Job:
    """What a test asks of a function."""

    world: World
    row: int
    page: int
    src_indices: Any
    dst_indices: Any
    pairs: list[tuple[int, int]]
    parts: int

    @property
    def tokens(self) -> int:
        return token_count(self.page)

    @property
    def indices(self) -> dict[str, Any]:
        return {"src_indices": self.src_indices, "dst_indices": self.dst_indices}

    def layer_first(self, *, on_device: bool, layers: int = LAYERS) -> list[LayerFirst]:
        return [LayerFirst(self.world, layers, self.tokens, self.row, on_device=on_device) for _ in range(self.parts)]

    def paged(self, order: str) -> list[Paged]:
        return [
            Paged(self.world, order, LAYERS, self.tokens, self.row, self.page, HEADS, on_device=False)
            for _ in range(self.parts)
        ]

    def expect(self, src: list[Any], dst: list[Any], layers: list[tuple[int, int]]) -> None:
        for a, b in zip(src, dst, strict=True):
            copy_rows(a, b, self.pairs, layers)


def token_count(page: int) -> int:
    return 8 if page == 1 else 2 * page


def kv(prefix: str, values: list[Any], suffix: str = "") -> dict[str, Any]:
    """Parameters of K and V, or of the one that MLA has."""
    if len(values) == 1:
        return {f"{prefix}{suffix}": values[0]}
    return {f"{prefix}_k{suffix}": values[0], f"{prefix}_v{suffix}": values[1]}


def per_layer(job: Job) -> None:
    for host_first in (False, True):  # both directions
        src, dst = job.layer_first(on_device=not host_first), job.layer_first(on_device=host_first)
        call = io.transfer_kv_per_layer if job.parts == 2 else io.transfer_kv_per_layer_mla
        call(
            **kv("src", [s.tensors[1] for s in src]),
            **kv("dst", [d.tensors[1] for d in dst]),
            **job.indices,
            item_size=job.row,
        )
        job.expect(src, dst, [(1, 1)])


def all_layer(job: Job) -> None:
    for host_first in (False, True):
        src, dst = job.layer_first(on_device=not host_first), job.layer_first(on_device=host_first)
        tables = {
            **kv("src", [s.table(job.world) for s in src], "_layers"),
            **kv("dst", [d.table(job.world) for d in dst], "_layers"),
        }
        call = io.transfer_kv_all_layer if job.parts == 2 else io.transfer_kv_all_layer_mla
        call(**tables, **job.indices, item_size=job.row, num_layers=LAYERS)
        job.expect(src, dst, EVERY_LAYER)


def per_layer_pf_lf(job: Job) -> None:
    src, dst = job.paged("pf"), job.layer_first(on_device=True)
    call = io.transfer_kv_per_layer_pf_lf if job.parts == 2 else io.transfer_kv_per_layer_mla_pf_lf
    for layer in range(LAYERS):
        call(
            **kv("src", [s.tensor for s in src]),
            **kv("dst", [d.tensors[layer] for d in dst]),
            **job.indices,
            layer_id=layer,
            item_size=job.row,
            src_layout_dim=LAYERS * job.row,
        )
    job.expect(src, dst, EVERY_LAYER)


def all_layer_lf_pf(job: Job) -> None:
    src, dst = job.layer_first(on_device=True), job.paged("pf")
    call = io.transfer_kv_all_layer_lf_pf if job.parts == 2 else io.transfer_kv_all_layer_mla_lf_pf
    call(
        **kv("src", [s.table(job.world) for s in src], "_layers"),
        **kv("dst", [d.tensor for d in dst]),
        **job.indices,
        item_size=job.row,
        dst_layout_dim=LAYERS * job.row,
        num_layers=LAYERS,
    )
    job.expect(src, dst, EVERY_LAYER)


def per_layer_ph_lf(job: Job) -> None:
    src, dst = job.paged("ph"), job.layer_first(on_device=True)
    for layer in range(LAYERS):
        io.transfer_kv_per_layer_ph_lf(
            src[0].tensor, dst[0].tensors[layer], src[1].tensor, dst[1].tensors[layer], job.src_indices,
            job.dst_indices, layer, job.row, LAYERS * job.row, job.page, HEADS,
        )  # fmt: skip
    job.expect(src, dst, EVERY_LAYER)


def all_layer_lf_ph(job: Job) -> None:
    src, dst = job.layer_first(on_device=True), job.paged("ph")
    io.transfer_kv_all_layer_lf_ph(
        src[0].table(job.world), dst[0].tensor, src[1].table(job.world), dst[1].tensor, job.src_indices,
        job.dst_indices, job.row, LAYERS * job.row, LAYERS, job.page, HEADS,
    )  # fmt: skip
    job.expect(src, dst, EVERY_LAYER)


def direct(job: Job) -> None:
    for host_first in (False, True):
        src, dst = job.layer_first(on_device=not host_first), job.layer_first(on_device=host_first)
        io.transfer_kv_direct(
            [t for s in src for t in s.tensors], [t for d in dst for t in d.tensors], **job.indices, page_size=job.page
        )
        job.expect(src, dst, EVERY_LAYER)


def per_layer_direct_pf_lf(job: Job) -> None:
    src, dst = job.paged("direct"), job.layer_first(on_device=True)
    for layer in range(LAYERS):
        io.transfer_kv_per_layer_direct_pf_lf(
            [s.tensor for s in src], [d.tensors[layer] for d in dst], **job.indices, layer_id=layer, page_size=job.page
        )
    job.expect(src, dst, EVERY_LAYER)


def all_layer_direct_lf_pf(job: Job) -> None:
    src, dst = job.layer_first(on_device=True), job.paged("direct")
    io.transfer_kv_all_layer_direct_lf_pf(
        [t for s in src for t in s.tensors], [d.tensor for d in dst], **job.indices, page_size=job.page
    )
    job.expect(src, dst, EVERY_LAYER)


Function = Callable[[Job], None]
KERNEL: list[Function] = [per_layer, all_layer, per_layer_pf_lf, all_layer_lf_pf, per_layer_ph_lf, all_layer_lf_ph]
DIRECT: list[Function] = [direct, per_layer_direct_pf_lf, all_layer_direct_lf_pf]
K_AND_V_ONLY = {per_layer_ph_lf, all_layer_lf_ph}
FUNCTIONS = [
    pytest.param(function, parts, id=f"{function.__name__}-{'kv' if parts == 2 else 'mla'}")
    for function in KERNEL + DIRECT
    for parts in (2, 1)
    if parts == 2 or function not in K_AND_V_ONLY
]


def make_job(world: World, function: Function, parts: int, row: int, page: int, where: str, dtype: str) -> Job:
    """Some tokens for the kernel family, whole pages for the direct one, each once."""
    tokens, random = token_count(page), world.random
    if function in DIRECT:
        pages = tokens // page
        chosen = [random.permutation(pages)[: max(1, pages // 2)] for _ in range(2)]
        src, dst = ((each[:, None] * page + np.arange(page)).ravel().astype(dtype) for each in chosen)
    else:
        src, dst = (random.permutation(tokens)[: tokens * 3 // 4].astype(dtype) for _ in range(2))
    pairs = list(zip(src.tolist(), dst.tolist(), strict=True))
    given: tuple[Any, Any] = (world.device_values(src), world.device_values(dst)) if where == "device" else (src, dst)
    return Job(world, row, page, given[0], given[1], pairs, parts)


@pytest.mark.parametrize(("where", "dtype"), [("device", "int64"), ("device", "int32"), ("host", "int64")])
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(("function", "parts"), FUNCTIONS)
def test_moves_exactly_the_rows(
    world: World, function: Function, parts: int, row: int, page: int, where: str, dtype: str
) -> None:
    if row > 4096 and page > 16 and where == "host":
        page = 16  # what differs here is where the indices are
    function(make_job(world, function, parts, row, page, where, dtype))
    world.finish()
    world.assert_as_modelled()


@pytest.mark.parametrize("row", [1, 3, 96, 132])
@pytest.mark.parametrize("to_device", [True, False])
def test_embedding_ranges(world: World, row: int, to_device: bool) -> None:
    src = Buffer(world, 40 * row, on_device=not to_device, shift_nbytes=1)
    dst = Buffer(world, 50 * row, on_device=to_device)
    ranges = ([0, 30, 12], [3, 40, 20], [5, 10, 0])
    io.transfer_embedding_ranges_direct(src.tensor((40, row)), dst.tensor((50, row)), *ranges)
    a, b = src.content.reshape(40, row), dst.content.reshape(50, row)
    for begin, target, count in zip(*ranges, strict=True):
        b[target : target + count] = a[begin : begin + count]
    world.finish()
    world.assert_as_modelled()


def test_parts_of_different_rows_and_alignments(world: World) -> None:
    """K and V that differ, each from another alignment, in one direct call."""
    wide, narrow = (LayerFirst(world, 2, 8, row, on_device=True, shift=shift) for row, shift in ((96, 0), (7, 3)))
    to_wide, to_narrow = (LayerFirst(world, 2, 8, row, on_device=False) for row in (96, 7))
    io.transfer_kv_direct(wide.tensors + narrow.tensors, to_wide.tensors + to_narrow.tensors, [1, 5], [7, 0], 1)
    for src, dst in ((wide, to_wide), (narrow, to_narrow)):
        copy_rows(src, dst, [(1, 7), (5, 0)], EVERY_LAYER)
    world.finish()
    world.assert_as_modelled()


def test_nothing_to_move_and_negative_indices(world: World) -> None:
    """No indices end the original's process; here they are nothing. A negative one skips its pair."""
    src, dst = (LayerFirst(world, 1, 8, 64, on_device=side) for side in (True, False))
    nothing = world.device_values(np.zeros(0, np.int64))
    io.transfer_kv_per_layer_mla(src.tensors[0], dst.tensors[0], nothing, nothing, 64)
    io.transfer_kv_per_layer_mla(src.tensors[0], dst.tensors[0], [3, -1, 2], [1, 4, -7], 64)
    copy_rows(src, dst, [(3, 1)], [(0, 0)])
    world.finish()
    world.assert_as_modelled()


def test_a_repeated_shape_is_planned_once(world: World, mover: Mover) -> None:
    src, dst = (LayerFirst(world, 2, 8, 64, on_device=side) for side in (True, False))
    for _ in range(3):
        for layer in range(2):
            io.transfer_kv_per_layer_mla(src.tensors[layer], dst.tensors[layer], [1], [2], 64)
    assert len(mover._plans) == 2


def test_addresses_in_tables_need_not_be_divisible_by_16(world: World, mover: Mover) -> None:
    """Nobody has seen them on the host, so words of 8 bytes are the widest, as in the original."""
    src, dst = (LayerFirst(world, LAYERS, 8, 96, on_device=side, shift=8) for side in (True, False))
    io.transfer_kv_all_layer_mla(src.table(world), dst.table(world), [1, 5], [7, 0], 96, LAYERS)
    copy_rows(src, dst, [(1, 7), (5, 0)], EVERY_LAYER)
    assert [entry.plan.word_nbytes for entry in mover._plans.values()] == [8]
    world.finish()
    world.assert_as_modelled()
