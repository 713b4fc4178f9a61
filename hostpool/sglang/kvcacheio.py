"""The functions of ``sgl_kernel.kvcacheio`` (sglang-kernel 0.4.10): same names, parameters, defaults and meaning.

All run on torch's current stream of the tensors' device and return at once, ``get_device_accessible_ptr`` apart. Where
these take more than the original: indices of 32 bits, on the device or on the host; rows of any number of bytes; no
indices at all, which moves nothing. Negative indices skip their pair. Host tensors must be page-locked.

``item_size`` is the bytes of a token's row of one component in one layer, ``*_layout_dim`` those of all its layers,
``page_size`` is in tokens. Indices are tokens. ``*_layers`` are tables of addresses, uint64 on the device, one a layer.
``block_quota`` is how many multiprocessors the kernel may take; ``num_warps_per_block`` has no meaning here: a CTA has
1024 threads.
"""

from __future__ import annotations

from typing import Any

from kvferry.drivers.protocol import HostAddress
from kvferry.hostpool.sglang.calls import (
    BLOCK_QUOTA,
    WARPS_PER_BLOCK,
    by_table,
    layer_first,
    layer_number,
    move,
    of_layers,
    page_first,
    page_head,
)
from kvferry.hostpool.sglang.direct import (
    transfer_embedding_ranges_direct,
    transfer_kv_all_layer_direct_lf_pf,
    transfer_kv_direct,
    transfer_kv_per_layer_direct_pf_lf,
)
from kvferry.hostpool.sglang.mover import Rows, default_mover
from kvferry.hostpool.sglang.operands import KVCacheIOError, operand

__all__ = [
    "get_device_accessible_ptr",
    "transfer_embedding_ranges_direct",
    "transfer_kv_all_layer",
    "transfer_kv_all_layer_direct_lf_pf",
    "transfer_kv_all_layer_lf_pf",
    "transfer_kv_all_layer_lf_ph",
    "transfer_kv_all_layer_mla",
    "transfer_kv_all_layer_mla_lf_pf",
    "transfer_kv_direct",
    "transfer_kv_per_layer",
    "transfer_kv_per_layer_direct_pf_lf",
    "transfer_kv_per_layer_mla",
    "transfer_kv_per_layer_mla_pf_lf",
    "transfer_kv_per_layer_pf_lf",
    "transfer_kv_per_layer_ph_lf",
]


def get_device_accessible_ptr(tensor: Any, device_index: int) -> int:
    """The address under which device ``device_index`` sees the tensor's first byte, any byte of a registration.

    The driver's error where it does not: memory that is not page-locked has none.
    """
    if isinstance(device_index, bool) or not isinstance(device_index, int) or device_index < 0:
        raise KVCacheIOError(f"device_index must be a whole number of at least 0, not {device_index!r}")
    found = operand("tensor", tensor)
    if found.on_device:
        if found.device is not None and found.device != device_index:
            raise KVCacheIOError(f"the tensor is on device {found.device}, not on {device_index}")
        return found.address
    driver = default_mover().driver
    with driver.context(device_index):
        return int(driver.host_device_pointer(HostAddress(found.address)))


def transfer_kv_per_layer(
    src_k: Any, dst_k: Any, src_v: Any, dst_v: Any, src_indices: Any, dst_indices: Any, item_size: int,
    block_quota: int = BLOCK_QUOTA, num_warps_per_block: int = WARPS_PER_BLOCK,
) -> None:  # fmt: skip
    """K and V of one layer, layer-first on both sides."""
    src = [layer_first("src_k", src_k, item_size), layer_first("src_v", src_v, item_size)]
    dst = [layer_first("dst_k", dst_k, item_size), layer_first("dst_v", dst_v, item_size)]
    move(src, dst, Rows((item_size, item_size)), src_indices, dst_indices, block_quota, num_warps_per_block)


def transfer_kv_per_layer_mla(
    src: Any, dst: Any, src_indices: Any, dst_indices: Any, item_size: int, block_quota: int | None = None,
    num_warps_per_block: int = WARPS_PER_BLOCK,
) -> None:  # fmt: skip
    """The latent of one layer, layer-first on both sides."""
    a, b = layer_first("src", src, item_size), layer_first("dst", dst, item_size)
    move([a], [b], Rows((item_size,)), src_indices, dst_indices, block_quota, num_warps_per_block)


def transfer_kv_per_layer_pf_lf(
    src_k: Any, dst_k: Any, src_v: Any, dst_v: Any, src_indices: Any, dst_indices: Any, layer_id: int, item_size: int,
    src_layout_dim: int, block_quota: int = BLOCK_QUOTA, num_warps_per_block: int = WARPS_PER_BLOCK,
) -> None:  # fmt: skip
    """K and V of one layer, from page-first to the layer's own tensors."""
    layer = layer_number(layer_id, item_size, src_layout_dim)
    src = [page_first(n, t, item_size, src_layout_dim, layer) for n, t in (("src_k", src_k), ("src_v", src_v))]
    dst = [layer_first("dst_k", dst_k, item_size), layer_first("dst_v", dst_v, item_size)]
    move(src, dst, Rows((item_size, item_size)), src_indices, dst_indices, block_quota, num_warps_per_block)


def transfer_kv_per_layer_mla_pf_lf(
    src: Any, dst: Any, src_indices: Any, dst_indices: Any, layer_id: int, item_size: int, src_layout_dim: int,
    block_quota: int | None = None, num_warps_per_block: int = WARPS_PER_BLOCK,
) -> None:  # fmt: skip
    """The latent of one layer, from page-first to the layer's own tensor."""
    layer = layer_number(layer_id, item_size, src_layout_dim)
    a, b = page_first("src", src, item_size, src_layout_dim, layer), layer_first("dst", dst, item_size)
    move([a], [b], Rows((item_size,)), src_indices, dst_indices, block_quota, num_warps_per_block)


def transfer_kv_per_layer_ph_lf(
    src_k: Any, dst_k: Any, src_v: Any, dst_v: Any, src_indices: Any, dst_indices: Any, layer_id: int, item_size: int,
    src_layout_dim: int, page_size: int, head_num: int, block_quota: int = BLOCK_QUOTA,
    num_warps_per_block: int = WARPS_PER_BLOCK,
) -> None:  # fmt: skip
    """K and V of one layer, from pages by head to the layer's own tensors."""
    layer = layer_number(layer_id, item_size, src_layout_dim)
    src = [
        page_head(name, tensor, item_size, src_layout_dim, page_size, head_num, layer)
        for name, tensor in (("src_k", src_k), ("src_v", src_v))
    ]
    dst = [layer_first("dst_k", dst_k, item_size, head_num), layer_first("dst_v", dst_v, item_size, head_num)]
    rows = Rows((item_size // head_num,) * 2, heads=head_num)
    move(src, dst, rows, src_indices, dst_indices, block_quota, num_warps_per_block)


def transfer_kv_all_layer(
    src_k_layers: Any, dst_k_layers: Any, src_v_layers: Any, dst_v_layers: Any, src_indices: Any, dst_indices: Any,
    item_size: int, num_layers: int, block_quota: int = BLOCK_QUOTA, num_warps_per_block: int = WARPS_PER_BLOCK,
) -> None:  # fmt: skip
    """K and V of all layers, layer-first on both sides. Addresses in the tables are divisible by 8."""
    src = [
        by_table(n, t, item_size, num_layers)
        for n, t in (("src_k_layers", src_k_layers), ("src_v_layers", src_v_layers))
    ]
    dst = [
        by_table(n, t, item_size, num_layers)
        for n, t in (("dst_k_layers", dst_k_layers), ("dst_v_layers", dst_v_layers))
    ]
    rows = Rows((item_size, item_size), layers=num_layers)
    move(src, dst, rows, src_indices, dst_indices, block_quota, num_warps_per_block)


def transfer_kv_all_layer_mla(
    src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, item_size: int, num_layers: int,
    block_quota: int = BLOCK_QUOTA, num_warps_per_block: int = WARPS_PER_BLOCK,
) -> None:  # fmt: skip
    """The latent of all layers, layer-first on both sides. Addresses in the tables are divisible by 8."""
    a = by_table("src_layers", src_layers, item_size, num_layers)
    b = by_table("dst_layers", dst_layers, item_size, num_layers)
    move([a], [b], Rows((item_size,), layers=num_layers), src_indices, dst_indices, block_quota, num_warps_per_block)


def transfer_kv_all_layer_lf_pf(
    src_k_layers: Any, dst_k: Any, src_v_layers: Any, dst_v: Any, src_indices: Any, dst_indices: Any, item_size: int,
    dst_layout_dim: int, num_layers: int, block_quota: int = BLOCK_QUOTA, num_warps_per_block: int = WARPS_PER_BLOCK,
) -> None:  # fmt: skip
    """K and V of all layers, from layer-first to page-first. Addresses in the tables are divisible by 8."""
    of_layers(num_layers, item_size, dst_layout_dim)
    src = [
        by_table(n, t, item_size, num_layers)
        for n, t in (("src_k_layers", src_k_layers), ("src_v_layers", src_v_layers))
    ]
    dst = [page_first(n, t, item_size, dst_layout_dim) for n, t in (("dst_k", dst_k), ("dst_v", dst_v))]
    rows = Rows((item_size, item_size), layers=num_layers)
    move(src, dst, rows, src_indices, dst_indices, block_quota, num_warps_per_block)


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: Any, dst: Any, src_indices: Any, dst_indices: Any, item_size: int, dst_layout_dim: int,
    num_layers: int, block_quota: int = BLOCK_QUOTA, num_warps_per_block: int = WARPS_PER_BLOCK,
) -> None:  # fmt: skip
    """The latent of all layers, from layer-first to page-first. Addresses in the table are divisible by 8."""
    of_layers(num_layers, item_size, dst_layout_dim)
    a = by_table("src_layers", src_layers, item_size, num_layers)
    b = page_first("dst", dst, item_size, dst_layout_dim)
    move([a], [b], Rows((item_size,), layers=num_layers), src_indices, dst_indices, block_quota, num_warps_per_block)


def transfer_kv_all_layer_lf_ph(
    src_k_layers: Any, dst_k: Any, src_v_layers: Any, dst_v: Any, src_indices: Any, dst_indices: Any, item_size: int,
    dst_layout_dim: int, num_layers: int, page_size: int, head_num: int, block_quota: int = BLOCK_QUOTA,
    num_warps_per_block: int = WARPS_PER_BLOCK,
) -> None:  # fmt: skip
    """K and V of all layers, from layer-first to pages by head. Addresses in the tables are divisible by 8."""
    of_layers(num_layers, item_size, dst_layout_dim)
    dst = [
        page_head(n, t, item_size, dst_layout_dim, page_size, head_num) for n, t in (("dst_k", dst_k), ("dst_v", dst_v))
    ]
    src = [
        by_table(name, table, item_size, num_layers, head_num)
        for name, table in (("src_k_layers", src_k_layers), ("src_v_layers", src_v_layers))
    ]
    rows = Rows((item_size // head_num,) * 2, heads=head_num, layers=num_layers)
    move(src, dst, rows, src_indices, dst_indices, block_quota, num_warps_per_block)
