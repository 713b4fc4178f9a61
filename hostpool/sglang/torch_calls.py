"""Every use of torch, imported when it is first needed: the caller has it, or it is not called."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from kvferry.drivers.protocol import StreamHandle


def current_stream(device: int) -> StreamHandle:
    """torch's current stream on ``device``."""
    import torch

    return StreamHandle(int(torch.cuda.current_stream(device).cuda_stream))


def tensor_over(address: int, shape: Sequence[int], dtype: Any, nbytes: int, release: Callable[[], None]) -> Any:
    """A CPU tensor over memory that is somebody else's; ``release`` runs when the last view of it has gone.

    Not at exit: then the driver may still hold the memory, and the process gives it back as a whole.
    """
    import torch

    class Block(ctypes.c_uint8 * nbytes):  # type: ignore[misc]  # a length is known at run time alone
        """The memory, as what the tensor's storage keeps a reference to."""

    block = Block.from_address(address)
    weakref.finalize(block, release).atexit = False
    if not math.prod(shape):
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(block, dtype=dtype, count=math.prod(shape)).view(tuple(shape))


def element_nbytes(dtype: Any) -> int:
    """Bytes of an element."""
    import torch

    return int(torch.empty(0, dtype=dtype).element_size())


def address_tensor(addresses: Sequence[int], device: Any) -> Any:
    """Addresses as a one-dimensional uint64 tensor on ``device``."""
    import torch

    return torch.tensor(list(addresses), dtype=torch.uint64, device=device)


def device_index(device: Any) -> int | None:
    """The number of a GPU that is given as torch takes it; ``None`` for the CPU."""
    import torch

    found = torch.device(device)
    if found.type == "cpu":
        return None
    return int(torch.cuda.current_device()) if found.index is None else int(found.index)
