"""The streams of others: which handle an object of torch, CuPy or cuda.core stands for."""

from __future__ import annotations

import numpy as np

from kvferry.drivers.errors import ArgumentError
from kvferry.drivers.protocol import StreamHandle


def stream_handle(stream: object) -> StreamHandle:
    """A stream's handle: from an integer, or from an object of torch, CuPy or cuda.core."""
    if isinstance(stream, (int, np.integer)) and not isinstance(stream, bool):
        return StreamHandle(int(stream))
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return StreamHandle(int(protocol()[1]))
    for attribute in ("cuda_stream", "ptr"):
        handle = getattr(stream, attribute, None)
        if isinstance(handle, int):
            return StreamHandle(handle)
    raise ArgumentError(f"stream must be a handle or a stream object, not {type(stream).__name__}")
