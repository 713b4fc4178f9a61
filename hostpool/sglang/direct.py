"""The direct family of ``sgl_kernel.kvcacheio``: lists of tensors instead of tables; indices may be on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvferry.hostpool.arrays import device_array
from kvferry.hostpool.sglang.calls import move, positive
from kvferry.hostpool.sglang.mover import Rows
from kvferry.hostpool.sglang.operands import KVCacheIOError, Operand, operand
from kvferry.hostpool.sglang.places import Place


def _whole_pages(src_indices: Any, page_size: int) -> None:
    positive(page_size=page_size)
    on_device = device_array(src_indices)
    count = len(src_indices) if on_device is None else int(np.prod(on_device.shape))
    if count % page_size:
        raise KVCacheIOError(f"{count} indices are not whole pages of {page_size} tokens")


def _rows_of(tensors: Sequence[Operand]) -> tuple[int, int, int]:
    """(tokens, row bytes, row stride in bytes) that all of the tensors have."""
    found = {tensor.rows() for tensor in tensors}
    if len(found) > 1:
        raise KVCacheIOError("layers of different shapes: " + "; ".join(f"{t.what}: {t.describe()}" for t in tensors))
    return found.pop()


def _layers_place(tensors: Sequence[Operand]) -> Place:
    tokens, _, stride = _rows_of(tensors)
    return Place(tensors, page_nbytes=stride, slot_nbytes=stride, rows=tokens)


def _named(what: str, tensors: Sequence[Any]) -> list[Operand]:
    return [operand(f"{what}[{number}]", tensor) for number, tensor in enumerate(tensors)]


def transfer_kv_direct(
    src_layers: Sequence[Any], dst_layers: Sequence[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """Rows ``dst_layers[n][d] = src_layers[n][s]``, for every ``n``; rows of different tensors may differ in size."""
    _whole_pages(src_indices, page_size)
    if len(src_layers) != len(dst_layers):
        raise KVCacheIOError(f"{len(src_layers)} source layers for {len(dst_layers)} destination layers")
    pairs = list(zip(_named("src_layers", src_layers), _named("dst_layers", dst_layers), strict=True))
    groups: dict[tuple[object, ...], list[tuple[Operand, Operand]]] = {}
    for src, dst in pairs:
        (_, src_row, _), (_, dst_row, _) = src.rows(), dst.rows()
        if src_row != dst_row:
            raise KVCacheIOError(f"{src.what} has rows of {src_row} bytes, {dst.what} of {dst_row}")
        groups.setdefault((*src.rows(), *dst.rows()), []).append((src, dst))
    for group in groups.values():
        sources, targets = [src for src, _ in group], [dst for _, dst in group]
        rows = Rows((sources[0].rows()[1],), layers=len(group))
        move([_layers_place(sources)], [_layers_place(targets)], rows, src_indices, dst_indices)


def _direct_pages(what: str, host: Operand, page_size: int) -> tuple[Place, int, int]:
    """(place, layers, row bytes) of a tensor (page, layer, slot, ...)."""
    if len(host.shape) < 4:
        raise KVCacheIOError(f"{what} is not (page, layer, slot, ...): {host.describe()}")
    host.gapless()
    pages, layers, slots = host.shape[:3]
    if slots != page_size:
        raise KVCacheIOError(f"{what} has {slots} slots a page, not {page_size}: {host.describe()}")
    row = host.nbytes // max(1, pages * layers * slots)
    place = Place(
        [host], page_nbytes=layers * slots * row, slot_nbytes=row, layer_nbytes=slots * row, page_tokens=page_size,
        rows=pages * page_size,
    )  # fmt: skip
    return place, layers, row


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[Any], dst_ptrs: Sequence[Any], src_indices: Any, dst_indices: Any, layer_id: int, page_size: int
) -> None:
    """One layer from pages of (layer, slot, ...) to the layer's own tensors: [K, V], or [latent]."""
    _whole_pages(src_indices, page_size)
    sources, targets = _named("src_ptrs", src_ptrs), _named("dst_ptrs", dst_ptrs)
    if not sources or len(sources) != len(targets):
        raise KVCacheIOError(f"{len(sources)} source tensors for {len(targets)} destination tensors")
    for host, device in zip(sources, targets, strict=True):
        place, layers, row = _direct_pages(host.what, host, page_size)
        if isinstance(layer_id, bool) or not 0 <= layer_id < layers:
            raise KVCacheIOError(f"layer_id {layer_id!r} is outside {host.what}: valid are 0 to {layers - 1}")
        _same_row(host, row, device)
        one = replace(place, offset=layer_id * place.layer_nbytes)
        move([one], [_layers_place([device])], Rows((row,)), src_indices, dst_indices)


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Any], dst_ptrs: Sequence[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """All layers from their own tensors, K's and then V's, to pages of (layer, slot, ...): [K, V], or [latent]."""
    _whole_pages(src_indices, page_size)
    sources, targets = _named("src_ptrs", src_ptrs), _named("dst_ptrs", dst_ptrs)
    if not targets or len(sources) % len(targets) or not sources:
        raise KVCacheIOError(f"{len(sources)} source tensors for {len(targets)} destination tensors")
    each = len(sources) // len(targets)
    for number, host in enumerate(targets):
        place, layers, row = _direct_pages(host.what, host, page_size)
        if each > layers:
            raise KVCacheIOError(f"{each} source layers for {layers} layers of {host.what}")
        mine = sources[number * each : (number + 1) * each]
        _same_row(host, row, mine[0])
        rows = Rows((row,), layers=each)
        move([_layers_place(mine)], [place], rows, src_indices, dst_indices)


def _same_row(host: Operand, row: int, device: Operand) -> None:
    if device.rows()[1] != row:
        raise KVCacheIOError(f"{host.what} has rows of {row} bytes, {device.what} of {device.rows()[1]}")


def transfer_embedding_ranges_direct(
    src: Any, dst: Any, src_starts: Sequence[int], dst_starts: Sequence[int], lengths: Sequence[int]
) -> None:
    """Ranges of rows between two matrices, one on the device and one in page-locked memory."""
    a, b = operand("src", src), operand("dst", dst)
    for matrix in (a, b):
        if len(matrix.shape) != 2:
            raise KVCacheIOError(f"{matrix.what} is not a matrix: {matrix.describe()}")
        matrix.gapless()
    if a.on_device == b.on_device:
        raise KVCacheIOError(f"one of src and dst is on the device: src is {a.describe()}, dst is {b.describe()}")
    if a.shape[1] != b.shape[1] or a.itemsize != b.itemsize or len({_dtype(src), _dtype(dst)} - {""}) > 1:
        raise KVCacheIOError(f"src and dst have different rows: {a.describe()} and {b.describe()}")
    starts = [np.asarray(values, np.int64) for values in (src_starts, dst_starts, lengths)]
    if len({values.shape for values in starts}) != 1 or starts[0].ndim != 1:
        raise KVCacheIOError(f"{len(src_starts)} and {len(dst_starts)} starts for {len(lengths)} lengths")
    sources, targets, counts = starts
    for what, begins, rows in (("src", sources, a.shape[0]), ("dst", targets, b.shape[0])):
        bad = np.flatnonzero((begins < 0) | (counts < 0) | (begins + counts > rows))
        if bad.size:
            n = int(bad[0])
            raise KVCacheIOError(f"range {n} of {what}: {counts[n]} rows from row {begins[n]} on, of {rows} rows")
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    if not within.size or not a.shape[1]:
        return
    given = [np.repeat(begins, counts) + within for begins in (sources, targets)]
    move([_layers_place([a])], [_layers_place([b])], Rows((a.rows()[1],)), given[0], given[1])


def _dtype(tensor: Any) -> str:
    """The element type, as its library calls it; nothing where it does not."""
    return str(getattr(tensor, "dtype", ""))
