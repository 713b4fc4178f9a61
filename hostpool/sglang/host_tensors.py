"""What SGLang's host pools get their memory from: page-locked tensors, and tables of where the GPU sees them.

Call shapes and environment variables are those of ``pool_host/common.py`` (sglang 0.5.23).
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from typing import Any

from kvferry.drivers import posix
from kvferry.drivers.protocol import HostAddress
from kvferry.hostpool.limits import preflight
from kvferry.hostpool.mapping import HostMapping
from kvferry.hostpool.registration import Chunk, Registration
from kvferry.hostpool.sglang import torch_calls
from kvferry.hostpool.sglang.mover import default_mover
from kvferry.hostpool.sglang.operands import KVCacheIOError, operand
from kvferry.hostpool.sglang.places import pieces

_CHUNK_VARIABLE = "SGLANG_HICACHE_HOST_REGISTER_CHUNK_GB"
_RANGES = "_sglang_cuda_host_registered_ranges"  # where SGLang keeps (address, bytes) of what it registered

_registered: dict[int, tuple[Registration, Any]] = {}
"""By address: the registration and the tensor, whose memory must stay while it is page-locked."""
_lock = threading.Lock()


class HostTensorAllocator:
    """Tensors of anonymous memory, present before they are returned, with huge pages where the kernel gives them."""

    def allocate(self, dims: Sequence[int], dtype: Any, device: Any = "cpu") -> Any:
        """A CPU tensor of shape ``dims``, zeros. ``HostMemoryError`` when memory is short, before it is used up."""
        if torch_calls.device_index(device) is not None:
            raise KVCacheIOError(f"host tensors are on the CPU, not on {device}")
        nbytes = max(1, math.prod(dims) * torch_calls.element_nbytes(dtype))
        preflight(nbytes)
        mapping = HostMapping(nbytes)
        try:
            mapping.populate()
            return torch_calls.tensor_over(mapping.address, dims, dtype, nbytes, mapping.close)
        except BaseException:
            mapping.close()
            raise


def alloc_with_host_register(
    dims: Sequence[int],
    dtype: Any,
    device: Any,
    pin_memory: bool,
    allocator: Any,
    registration_granularity_bytes: int | None = None,
) -> Any:
    """A tensor of ``allocator``, page-locked when ``pin_memory`` is true. ``_cuda_host_unregister`` undoes that."""
    buffer = allocator.allocate(dims, dtype=dtype, device=device)
    if pin_memory:
        _cuda_host_register(buffer, registration_granularity_bytes)
    return buffer


def _cuda_host_register(buffer: Any, registration_granularity_bytes: int | None = None) -> None:
    """Page-lock a CPU tensor for all devices, in one call or in chunks of whole multiples of the granularity.

    A chunk has at most ``SGLANG_HICACHE_HOST_REGISTER_CHUNK_GB`` GiB (256) and ends on a page of the system. When one
    chunk fails the ones before it are released, and the driver's error names it. A tensor that is page-locked here
    already stays as it is; one that meets somebody else's range is ``AlreadyRegistered``, with the holder's name.
    """
    tensor = operand("buffer", buffer).gapless()
    if tensor.on_device:
        raise KVCacheIOError(f"only host memory can be page-locked, not {tensor.describe()}")
    if not tensor.nbytes:
        setattr(buffer, _RANGES, [])
        return
    page = posix.PAGE_NBYTES
    begin = tensor.address // page * page
    end = -(-(tensor.address + tensor.nbytes) // page) * page
    mover = default_mover()
    with _lock:
        if tensor.address not in _registered:
            spans = _spans(tensor.address - begin, end - begin, registration_granularity_bytes)
            chunks = [Chunk(HostAddress(begin + at), nbytes) for at, nbytes in spans]
            device = torch_calls.device_index("cuda") if mover.driver.platform != "stand-in" else 0
            held = Registration(mover.driver, device or 0, chunks, owner=f"a host tensor of {tensor.nbytes} bytes")
            _registered[tensor.address] = held, buffer
        setattr(buffer, _RANGES, [(int(c.address), c.nbytes) for c in _registered[tensor.address][0].chunks])


def _spans(before: int, nbytes: int, granularity: int | None) -> list[tuple[int, int]]:
    """(offset, bytes) of each chunk of ``nbytes`` whose first ``before`` bytes lie before the tensor."""
    if granularity is None:
        return [(0, nbytes)]
    limit = max(1, _chunk_gib()) << 30
    if granularity < 1 or granularity > limit:
        raise KVCacheIOError(
            f"chunks of {granularity} bytes are more than {_CHUNK_VARIABLE} allows, or none: {limit} bytes"
        )
    step = math.lcm(granularity, posix.PAGE_NBYTES) if not before else 0
    if not step or step > limit:
        if nbytes <= limit:
            return [(0, nbytes)]
        raise KVCacheIOError(
            f"{nbytes} bytes cannot be cut at multiples of {granularity} that are pages of the system within {limit} "
            f"bytes: raise {_CHUNK_VARIABLE}"
        )
    chunk = limit // step * step
    return [(at, min(chunk, nbytes - at)) for at in range(0, nbytes, chunk)]


def _chunk_gib() -> int:
    try:
        return int(os.environ[_CHUNK_VARIABLE])
    except (KeyError, ValueError):
        return 256


def _cuda_host_unregister(buffer: Any) -> None:
    """Undo ``_cuda_host_register``: wait for what is in flight, then every base once, in reverse.

    A tensor that is not page-locked here is left alone.
    """
    address = operand("buffer", buffer).address
    with _lock:
        held = _registered.pop(address, None)
    if held is not None:
        default_mover().synchronize()
        held[0].release()
        setattr(buffer, _RANGES, [])


def make_kernel_ptr_table(tensors: Sequence[Any], target_device: Any, *, host_memory_registered: bool) -> Any:
    """Where the GPU sees each tensor, as a uint64 tensor on ``target_device``; for the ``*_layers`` parameters.

    Host tensors are asked for one by one when ``host_memory_registered``; otherwise the table has their own addresses,
    which no kernel may use.
    """
    found = [operand(f"tensors[{number}]", tensor) for number, tensor in enumerate(tensors)]
    if not host_memory_registered:
        return torch_calls.address_tensor([tensor.address for tensor in found], target_device)
    mover = default_mover()
    device = torch_calls.device_index(target_device)
    addresses = []
    with mover.driver.context(mover.device_of() if device is None else device):
        for tensor in found:
            parts = pieces(mover.driver, tensor)
            if len(parts) > 1:
                raise KVCacheIOError(
                    f"{tensor.what} lies in {len(parts)} registrations with device addresses of their own: no single "
                    f"address serves; register each layer's tensor in one piece"
                )
            addresses.append(parts[0][1])
    return torch_calls.address_tensor(addresses, target_device)
