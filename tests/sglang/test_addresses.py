"""Host tensors as the device sees them: interior addresses, several registrations, memory that is not page-locked."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.drivers import posix
from kvferry.drivers.errors import DriverError
from kvferry.drivers.protocol import HostAddress
from kvferry.hostpool.sglang import KVCacheIOError, kvcacheio
from kvferry.hostpool.sglang.mover import Mover

from support.sglang_world import LayerFirst, Paged, World

pytestmark = pytest.mark.usefixtures("mover")

ROW, LAYERS, PAGE = 128, 2, 16
LAYOUT_DIM = ROW * LAYERS
CHUNK = 4 * posix.PAGE_NBYTES
TOKENS = 3 * CHUNK // LAYOUT_DIM


def host_array(world: World, chunk_nbytes: int | None, begin: int = 0) -> tuple[np.ndarray, int]:
    """(bytes, address) of three chunks' worth of page-locked memory from ``begin`` on."""
    address = world.host_alloc(3 * CHUNK + posix.PAGE_NBYTES, chunk_nbytes) + begin
    found = np.frombuffer(posix.buffer(HostAddress(address), 3 * CHUNK), np.uint8)
    found[:] = world.random.integers(0, 256, found.size, np.uint8)
    return found, address


def test_an_interior_address_is_seen_where_it_is(world: World) -> None:
    array, address = host_array(world, None)
    base = kvcacheio.get_device_accessible_ptr(array, 0)
    assert base == world.driver.host_device_pointer(HostAddress(address))
    assert kvcacheio.get_device_accessible_ptr(array[4321:], 0) == base + 4321
    on_device = LayerFirst(world, 1, 4, ROW, on_device=True)
    assert kvcacheio.get_device_accessible_ptr(on_device.tensors[0], 0) == on_device.buffers[0].address
    for bad in (-1, True, None):
        with pytest.raises(KVCacheIOError, match="device_index"):
            kvcacheio.get_device_accessible_ptr(array, bad)  # type: ignore[arg-type]


def test_memory_that_is_not_page_locked_is_the_drivers_error(world: World) -> None:
    pageable = np.zeros(64 * ROW, np.uint8)
    with pytest.raises(DriverError):
        kvcacheio.get_device_accessible_ptr(pageable, 0)
    dst = LayerFirst(world, 1, 8, ROW, on_device=True)
    with pytest.raises(DriverError, match=r"src: 8192 bytes at 0x.* are not page-locked"):
        kvcacheio.transfer_kv_per_layer_mla(pageable, dst.tensors[0], [0], [1], ROW)
    world.assert_as_modelled()


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_tensor_in_several_registrations(world: World, layer: int) -> None:
    """Device addresses of separate registrations need not follow each other (sglang#37596)."""
    array, _ = host_array(world, CHUNK)
    dst = LayerFirst(world, 1, TOKENS, ROW, on_device=True)
    tokens = np.array([0, TOKENS // 3 - 1, TOKENS // 3, TOKENS - 1, TOKENS // 2])
    kvcacheio.transfer_kv_per_layer_mla_pf_lf(array, dst.tensors[0], tokens, tokens, layer, ROW, LAYOUT_DIM)
    rows = array.reshape(TOKENS, LAYERS, ROW)
    for token in tokens:
        dst.set(0, token, rows[token, layer])
    world.finish()
    world.assert_as_modelled()


def test_a_row_across_two_registrations_is_refused(world: World) -> None:
    array, _ = host_array(world, CHUNK, begin=64)
    dst = LayerFirst(world, 1, TOKENS, ROW, on_device=True)
    if world.driver.platform == "stand-in":
        with pytest.raises(KVCacheIOError, match="cross a boundary between two registrations"):
            kvcacheio.transfer_kv_per_layer_mla_pf_lf(array, dst.tensors[0], [0], [0], 0, ROW, LAYOUT_DIM)
    else:  # where both registrations have the host's addresses there is no boundary
        kvcacheio.transfer_kv_per_layer_mla_pf_lf(array, dst.tensors[0], [0], [0], 0, ROW, LAYOUT_DIM)
        dst.set(0, 0, array[:ROW])
    world.finish()
    world.assert_as_modelled()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"item_size": 0}, "item_size must be a whole number of at least 1, not 0"),
        ({"layer_id": 2}, "layer 2 of rows of 128 bytes ends behind a token's 256 bytes"),
        ({"layer_id": -1}, "layer_id must be a whole number of at least 0"),
        ({"src_indices": [0.5]}, "whole numbers"),
        ({"src_indices": [1, 2]}, "2 source indices for 1 destination indices"),
        ({"dst": "text"}, "dst is str, not a tensor"),
        ({"block_quota": 0}, "block_quota must be"),
        ({"num_warps_per_block": "x"}, "num_warps_per_block must be"),
    ],
)
def test_calls_that_cannot_be_right(world: World, change: dict[str, object], message: str) -> None:
    """Nothing has moved, and callers that know ``RuntimeError`` meet one."""
    src = Paged(world, "pf", LAYERS, 32, ROW, PAGE, 1, on_device=False)
    dst = LayerFirst(world, 1, 32, ROW, on_device=True)
    call = {
        "src": src.tensor, "dst": dst.tensors[0], "src_indices": [1], "dst_indices": [2], "layer_id": 0,
        "item_size": ROW, "src_layout_dim": LAYOUT_DIM,
    }  # fmt: skip
    with pytest.raises(RuntimeError, match=message) as caught:
        kvcacheio.transfer_kv_per_layer_mla_pf_lf(**{**call, **change})
    assert isinstance(caught.value, KVCacheIOError)
    world.finish()
    world.assert_as_modelled()


def test_indices_out_of_range(world: World) -> None:
    """On the host an error before anything moves; on the device every other pair moves, as far as one can see."""
    src, dst = (LayerFirst(world, 1, 8, ROW, on_device=side) for side in (True, False))
    with pytest.raises(IndexError, match="destination index 8 at position 1"):
        kvcacheio.transfer_kv_per_layer_mla(src.tensors[0], dst.tensors[0], [0, 1], [3, 8], ROW)
    given = [world.device_values(np.array(values)) for values in ([0, 9, 2], [3, 4, 5])]
    kvcacheio.transfer_kv_per_layer_mla(src.tensors[0], dst.tensors[0], given[0], given[1], ROW)
    for source, target in ((0, 3), (2, 5)):
        dst.set(0, target, src.row(0, source))
    world.finish()
    world.assert_as_modelled()


def test_tensors_with_gaps_and_tables_of_another_length(world: World, mover: Mover) -> None:
    dst = LayerFirst(world, 2, 8, ROW, on_device=True)
    gaps = dst.buffers[0].tensor((4, ROW), strides=(2 * ROW, 1))
    with pytest.raises(KVCacheIOError, match=r"src is not contiguous: .*strides \(256, 1\)"):
        kvcacheio.transfer_kv_per_layer_mla(gaps, dst.tensors[1], [0], [0], ROW)
    kvcacheio.transfer_kv_direct([gaps], [dst.tensors[1]], [1], [5], 1)  # the direct family takes evenly spaced rows
    dst.set(1, 5, dst.row(0, 2))
    table = dst.table(world)
    with pytest.raises(KVCacheIOError, match="src_layers has 2 addresses for 3 layers"):
        kvcacheio.transfer_kv_all_layer_mla(table, table, [0], [0], ROW, 3)
    with pytest.raises(KVCacheIOError, match="rows of 128 bytes, dst_layers\\[0\\] of 64"):
        kvcacheio.transfer_kv_direct([dst.tensors[0]], [dst.buffers[1].tensor((16, 64))], [0], [0], 1)
    with pytest.raises(KVCacheIOError, match="3 indices are not whole pages of 2 tokens"):
        kvcacheio.transfer_kv_direct([dst.tensors[0]], [dst.tensors[1]], [0, 1, 2], [0, 1, 2], 2)
    world.finish()
    world.assert_as_modelled()
