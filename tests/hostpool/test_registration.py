"""Page-locking in chunks: all of it or nothing, and every base let go of exactly once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import pytest

from kvferry.drivers.errors import (
    AlreadyRegistered,
    DriverError,
    ForkedProcess,
    HostMemoryError,
    KVFerryError,
    OutOfMemory,
    driver_error,
)
from kvferry.drivers.protocol import HostAddress, HostMemoryDriver
from kvferry.hostpool import HostPool, KVLayout
from kvferry.hostpool.backend import Backend
from kvferry.hostpool.registration import Chunk, Registration

CHUNKS = [Chunk(HostAddress(0x10000 * (number + 1)), 0x1000 * (number + 1)) for number in range(4)]


class Registry:
    """Keeps book as a driver does; ``refuse`` is raised for the base ``at``."""

    def __init__(self, at: int = -1, refuse: BaseException | None = None) -> None:
        self.held: list[int] = []
        self.let_go: list[int] = []
        self.at, self.refuse = at, refuse
        self.gone: KVFerryError | None = None
        self.refuse_unregister: DriverError | None = None
        self.inside = 0

    @contextmanager
    def context(self, device: int) -> Iterator[None]:
        assert device == 3
        if self.gone is not None:
            raise self.gone
        self.inside += 1
        yield
        self.inside -= 1

    def host_register(self, address: HostAddress, nbytes: int, *, read_only: bool = False) -> None:
        assert self.inside
        if address == self.at and self.refuse is not None:
            raise self.refuse
        self.held.append(address)

    def host_unregister(self, address: HostAddress) -> None:
        assert self.inside
        self.held.remove(address)
        self.let_go.append(address)
        if self.refuse_unregister is not None:
            raise self.refuse_unregister


def register(registry: Registry) -> Registration:
    return Registration(cast("HostMemoryDriver", registry), 3, CHUNKS)


@pytest.mark.parametrize("failing", range(4))
@pytest.mark.parametrize("code", [2, 712, 999])
def test_a_chunk_that_fails_takes_those_before_it_back(failing: int, code: int) -> None:
    """Scenario 25: in reverse, and the error says which chunk and keeps its class, call and code."""
    chunk = CHUNKS[failing]
    refuse = driver_error("register", code, "no", f"{chunk.nbytes} bytes at {chunk.address:#x}")
    registry = Registry(chunk.address, refuse)
    with pytest.raises(
        DriverError, match=f"chunk {failing} of 4: {chunk.nbytes} bytes at {chunk.address:#x}"
    ) as caught:
        register(registry)
    assert type(caught.value) is type(refuse)
    assert (caught.value.call, caught.value.code, caught.value.name) == ("register", code, "no")
    assert caught.value.__cause__ is refuse
    assert registry.held == []
    assert registry.let_go == [chunk.address for chunk in CHUNKS[:failing]][::-1]


@pytest.mark.parametrize("refuse", [HostMemoryError("no file"), KeyboardInterrupt()])
def test_whatever_else_goes_wrong_takes_them_back_too(refuse: BaseException) -> None:
    registry = Registry(CHUNKS[2].address, refuse)
    with pytest.raises(type(refuse)) as caught:
        register(registry)
    assert caught.value is refuse
    assert registry.held == []


def test_the_first_error_is_told_when_taking_back_fails_too() -> None:
    registry = Registry(CHUNKS[2].address, driver_error("register", 2, "out of memory"))
    registry.refuse_unregister = driver_error("unregister", 713, "not registered")
    with pytest.raises(OutOfMemory, match="chunk 2 of 4"):
        register(registry)
    assert registry.held == []


def test_release_lets_go_of_each_base_once_and_in_reverse() -> None:
    registry = Registry()
    registration = register(registry)
    assert registration.chunks == tuple(CHUNKS)
    for _ in range(3):
        registration.release()
    assert registry.let_go == [chunk.address for chunk in CHUNKS][::-1]
    assert registration.chunks == ()
    assert registry.inside == 0


def test_release_never_raises_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry()
    registration = register(registry)
    registry.refuse_unregister = driver_error("unregister", 713, "not registered")
    registration.release()
    assert registry.held == []
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 4
    assert f"{CHUNKS[0].nbytes} bytes at {CHUNKS[0].address:#x}" in caplog.text


def test_release_without_a_context_does_nothing() -> None:
    registry = Registry()
    registration = register(registry)
    registry.gone = ForkedProcess("child")
    registration.release()
    assert registry.let_go == []


def test_a_pool_that_cannot_be_registered_leaves_nothing(
    backend: Backend, layout: KVLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, registered = backend.driver, list[int]()
    real_register, real_unregister = driver.host_register, driver.host_unregister

    def host_register(address: HostAddress, nbytes: int, *, read_only: bool = False) -> None:
        if len(registered) == 2:
            raise driver_error("register", 712, "already registered", f"{nbytes} bytes")
        real_register(address, nbytes)
        registered.append(address)

    monkeypatch.setattr(driver, "host_register", host_register)
    with pytest.raises(AlreadyRegistered, match="chunk 2 of 3"):
        HostPool(layout, 3, backend=backend, chunk_nbytes=1)
    with driver.context(0):
        for address in registered:
            with pytest.raises(DriverError, match="not registered"):
                real_unregister(HostAddress(address))
    monkeypatch.undo()
    HostPool(layout, 3, backend=backend, chunk_nbytes=1).close()
