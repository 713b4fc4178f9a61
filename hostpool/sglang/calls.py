"""Where the rows of each of SGLang's layouts lie, checked against the numbers that come with a call."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvferry.hostpool.sglang.mover import Rows, default_mover
from kvferry.hostpool.sglang.operands import KVCacheIOError, operand
from kvferry.hostpool.sglang.places import Place, layer_table

BLOCK_QUOTA = 2
WARPS_PER_BLOCK = 32


def _quota() -> int:
    """The default of the MLA functions, as the environment overrides it; what is not a number does not."""
    try:
        return max(1, int(os.environ["SGLANG_HICACHE_BLOCK_QUOTA"]))
    except (KeyError, ValueError):
        return BLOCK_QUOTA


def positive(**values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise KVCacheIOError(f"{name} must be a whole number of at least 1, not {value!r}")


def layer_number(layer_id: Any, item_size: int, layout_dim: int) -> int:
    positive(item_size=item_size, layout_dim=layout_dim)
    if isinstance(layer_id, bool) or not isinstance(layer_id, (int, np.integer)) or layer_id < 0:
        raise KVCacheIOError(f"layer_id must be a whole number of at least 0, not {layer_id!r}")
    if (layer_id + 1) * item_size > layout_dim:
        raise KVCacheIOError(f"layer {layer_id} of rows of {item_size} bytes ends behind a token's {layout_dim} bytes")
    return int(layer_id)


def of_layers(num_layers: int, item_size: int, layout_dim: int) -> None:
    positive(item_size=item_size, num_layers=num_layers)
    if num_layers * item_size > layout_dim:
        raise KVCacheIOError(f"{num_layers} layers of {item_size} bytes are more than a token's {layout_dim} bytes")


def layer_first(what: str, tensor: Any, item_size: int, heads: int = 1) -> Place:
    """A layer's own tensor: a row a token."""
    positive(item_size=item_size)
    found = operand(what, tensor).gapless()
    return Place(
        [found], page_nbytes=item_size, slot_nbytes=item_size, head_nbytes=item_size // heads,
        rows=found.nbytes // item_size,
    )  # fmt: skip


def by_table(what: str, table: Any, item_size: int, layers: int, heads: int = 1) -> Place:
    positive(item_size=item_size, num_layers=layers)
    found = layer_table(what, table, layers, exact=what.startswith("src"))  # as sgl_kernel has it
    return Place(
        layer_table=found, page_nbytes=item_size, slot_nbytes=item_size, head_nbytes=item_size // heads
    )  # fmt: skip


def page_first(what: str, tensor: Any, item_size: int, layout_dim: int, layer: int = 0) -> Place:
    """All layers of a token one after the other."""
    found = operand(what, tensor).gapless()
    return Place(
        [found], page_nbytes=layout_dim, slot_nbytes=layout_dim, layer_nbytes=item_size, offset=layer * item_size,
        rows=found.nbytes // layout_dim,
    )  # fmt: skip


def page_head(
    what: str, tensor: Any, item_size: int, layout_dim: int, page_size: int, head_num: int, layer: int = 0
) -> Place:
    """Pages of [head][token][layer][head row]."""
    positive(page_size=page_size, head_num=head_num)
    if item_size % head_num or layout_dim % head_num:
        raise KVCacheIOError(f"{head_num} heads do not divide rows of {item_size} bytes in {layout_dim} of a token")
    found, head = operand(what, tensor).gapless(), item_size // head_num
    return Place(
        [found], page_nbytes=page_size * layout_dim, slot_nbytes=layout_dim // head_num, layer_nbytes=head,
        head_nbytes=page_size * (layout_dim // head_num), offset=layer * head, page_tokens=page_size,
        rows=found.nbytes // (page_size * layout_dim) * page_size,
    )  # fmt: skip


def move(
    src: Sequence[Place],
    dst: Sequence[Place],
    rows: Rows,
    src_indices: Any,
    dst_indices: Any,
    quota: int | None = None,
    warps: int = WARPS_PER_BLOCK,
) -> None:
    """Give a transfer to the process's mover; ``quota`` are CTAs, by default those of the environment."""
    quota = _quota() if quota is None else quota
    positive(block_quota=quota, num_warps_per_block=warps)
    default_mover().move(src, dst, rows, src_indices, dst_indices, ctas=int(quota))
