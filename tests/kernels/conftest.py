"""A stand-in device of its own for every test, so that a fault in one is not met by the next."""

from __future__ import annotations

import pytest

from kvferry.drivers.protocol import StreamHandle
from kvferry.hostpool import KVLayout
from kvferry.hostpool.backend import Backend, stand_in

from support.standin import new_stream


@pytest.fixture
def backend() -> Backend:
    return stand_in()


@pytest.fixture
def stream(backend: Backend) -> StreamHandle:
    return new_stream(backend)


@pytest.fixture
def layout() -> KVLayout:
    """Two layers of K and V, pages of four tokens."""
    return KVLayout.mha(layers=2, heads=2, head_size=8, v_head_size=12, element_nbytes=2, page_tokens=4)
