"""A mover on the stand-in, and the same on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvferry.drivers.errors import DriverNotFound
from kvferry.hostpool.backend import Backend, open_backend, stand_in
from kvferry.hostpool.sglang.mover import Mover, using

from support.sglang_world import World


def gpu_backend() -> Backend:
    """The GPU's; skips only where no driver exists."""
    missing: list[str] = []
    for platform in ("cuda", "rocm"):
        try:
            return open_backend(platform)
        except DriverNotFound as error:
            missing.append(str(error))
    # Only "no driver could be opened" comes here; a driver in trouble raises another error, and the test fails.
    pytest.skip("; ".join(missing))


@pytest.fixture(params=["stand-in", pytest.param("gpu", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> Backend:
    return stand_in() if request.param == "stand-in" else gpu_backend()


@pytest.fixture
def world(backend: Backend) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(backend, stack)


@pytest.fixture
def mover(world: World) -> Iterator[Mover]:
    """What the functions use inside the test."""
    mover = Mover(world.backend, lambda device: world.stream)
    with using(mover):
        yield mover
    mover.close()
