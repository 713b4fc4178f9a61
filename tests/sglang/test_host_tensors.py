"""Page-locked tensors as SGLang asks for them, and tables of where the device sees them."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvferry.drivers import posix
from kvferry.drivers.errors import AlreadyRegistered, DriverError, HostMemoryError
from kvferry.drivers.protocol import HostAddress
from kvferry.hostpool.backend import Backend, stand_in
from kvferry.hostpool.sglang import (
    HostTensorAllocator,
    KVCacheIOError,
    _cuda_host_register,
    _cuda_host_unregister,
    alloc_with_host_register,
    host_tensors,
    kvcacheio,
    make_kernel_ptr_table,
)
from kvferry.hostpool.sglang.mover import Mover, using

from support.standin import new_stream


@pytest.fixture
def stand_in_backend() -> Backend:
    return stand_in()


@pytest.fixture(autouse=True)
def _mover(stand_in_backend: Backend) -> Iterator[None]:
    stream = new_stream(stand_in_backend)
    mover = Mover(stand_in_backend, lambda device: stream)
    with using(mover):
        yield
    mover.close()


def mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    spans = [re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line) for line in lines]
    return any(s is not None and int(s[1], 16) <= address < int(s[2], 16) for s in spans)


def test_an_allocated_tensor_is_zeros_and_goes_with_its_last_view() -> None:
    tensor = HostTensorAllocator().allocate((3, 5, 7), dtype=torch.bfloat16)
    assert tensor.shape == (3, 5, 7)
    assert not tensor.any()
    tensor[1, 2, 3] = 4
    address, view = tensor.data_ptr(), tensor[1, 2]
    del tensor
    gc.collect()
    assert view[3] == 4
    del view
    gc.collect()
    assert not mapped(address)
    assert HostTensorAllocator().allocate((0, 8), dtype=torch.float16).shape == (0, 8)


def test_more_than_there_is_is_refused_before_any_is_taken() -> None:
    with pytest.raises(HostMemoryError, match="was refused, and nothing taken"):
        HostTensorAllocator().allocate((1 << 50,), dtype=torch.uint8)


@pytest.mark.parametrize("granularity", [None, 3072])
def test_register_and_unregister(monkeypatch: pytest.MonkeyPatch, granularity: int | None) -> None:
    """With a granularity chunks are whole multiples of it and whole pages of the system."""
    monkeypatch.setattr(host_tensors, "_chunk_gib", lambda: 1)
    tensor = alloc_with_host_register((100, 3072), torch.uint8, "cpu", True, HostTensorAllocator(), granularity)
    ranges = tensor._sglang_cuda_host_registered_ranges
    whole = -(-tensor.nbytes // posix.PAGE_NBYTES) * posix.PAGE_NBYTES
    assert [n for _, n in ranges] == [whole]
    assert kvcacheio.get_device_accessible_ptr(tensor[7], 0) != tensor[7].data_ptr()
    _cuda_host_register(tensor)  # page-locked already: stays as it is
    with pytest.raises(AlreadyRegistered, match="a host tensor of 307200 bytes holds"):
        _cuda_host_register(tensor[50:])
    _cuda_host_unregister(tensor)
    _cuda_host_unregister(tensor)
    assert tensor._sglang_cuda_host_registered_ranges == []
    with pytest.raises(DriverError):
        kvcacheio.get_device_accessible_ptr(tensor, 0)
    assert not host_tensors._registered


def test_page_locked_memory_stays_when_its_tensor_is_dropped() -> None:
    """Unmapped under a registration it would be somebody else's memory that the device writes to."""
    tensor = alloc_with_host_register((64, 64), torch.uint8, "cpu", True, HostTensorAllocator())
    address = tensor.data_ptr()
    del tensor
    gc.collect()
    assert mapped(address)
    _cuda_host_unregister(host_tensors._registered[address][1])
    gc.collect()
    assert not mapped(address)


def test_chunks_of_a_large_tensor() -> None:
    limit = 1 << 30
    spans = host_tensors._spans(0, 5 * limit // 2, 3 << 20)
    assert sum(nbytes for _, nbytes in spans) == 5 * limit // 2
    assert [at for at, _ in spans] == [sum(n for _, n in spans[:k]) for k in range(len(spans))]
    assert all(at % (3 << 20) == 0 for at, _ in spans)
    assert all(nbytes <= limit * 256 for _, nbytes in spans)


def test_chunk_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_HOST_REGISTER_CHUNK_GB", "1")
    assert [n for _, n in host_tensors._spans(0, (1 << 31) + 4096, 3 << 20)] == [
        1023 << 20,
        1023 << 20,
        (2 << 20) + 4096,
    ]
    monkeypatch.setenv("SGLANG_HICACHE_HOST_REGISTER_CHUNK_GB", "nonsense")
    assert len(host_tensors._spans(0, 1 << 33, 4096)) == 1
    monkeypatch.setenv("SGLANG_HICACHE_HOST_REGISTER_CHUNK_GB", "1")
    for granularity in (0, (1 << 30) + 1):
        with pytest.raises(KVCacheIOError, match="allows, or none"):
            host_tensors._spans(0, 1 << 31, granularity)
    with pytest.raises(KVCacheIOError, match="raise SGLANG_HICACHE_HOST_REGISTER_CHUNK_GB"):
        host_tensors._spans(0, 1 << 31, (1 << 29) + 1)


def test_tables_hold_what_the_device_sees(stand_in_backend: Backend) -> None:
    pool = alloc_with_host_register((4, 64, 32), torch.float16, "cpu", True, HostTensorAllocator())
    table = make_kernel_ptr_table(list(pool), "cpu", host_memory_registered=True)
    assert (table.dtype, table.shape) == (torch.uint64, (4,))
    with stand_in_backend.driver.context(0):
        seen = [int(stand_in_backend.driver.host_device_pointer(HostAddress(layer.data_ptr()))) for layer in pool]
    assert table.tolist() == seen
    raw = make_kernel_ptr_table(list(pool), "cpu", host_memory_registered=False)
    assert raw.tolist() == [layer.data_ptr() for layer in pool]
    assert not set(raw.tolist()) & set(seen)
    _cuda_host_unregister(pool)
    with pytest.raises(DriverError, match=r"tensors\[0\]: 4096 bytes at 0x.* are not page-locked"):
        make_kernel_ptr_table(list(pool), "cpu", host_memory_registered=True)
