"""The GPU tests run wherever a driver is, and are skipped only where none exists."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.drivers.cuda import CudaDriver
from kvferry.drivers.errors import DriverNotFound
from kvferry.drivers.protocol import StreamHandle
from kvferry.hostpool.backend import Backend, open_backend

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in this folder."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session", autouse=True)
def _driver() -> None:
    """Skip where no driver exists; any other trouble with the driver is a failure. Asked only once a test runs."""
    try:
        CudaDriver()
    except DriverNotFound as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def backend() -> Backend:
    return open_backend("cuda")


@pytest.fixture
def stream(backend: Backend) -> Iterator[StreamHandle]:
    """A stream of its own, with device 0's context current for the test."""
    with backend.driver.context(0):
        handle = backend.driver.stream_create()
        yield handle
        backend.driver.stream_synchronize(handle)
        backend.driver.stream_destroy(handle)
