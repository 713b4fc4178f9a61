"""One stand-in for all examples: a new one each would cost more than the examples."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from kvferry.drivers.protocol import StreamHandle
from kvferry.hostpool.backend import Backend, stand_in

from support.standin import new_stream

settings.register_profile("kvferry", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("kvferry")


@pytest.fixture(scope="session")
def backend() -> Backend:
    return stand_in()


@pytest.fixture(scope="session")
def stream(backend: Backend) -> StreamHandle:
    return new_stream(backend)
