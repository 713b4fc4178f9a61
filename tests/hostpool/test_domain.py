"""The pointer domain is what the driver answered, never what a platform is called."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import pytest

from kvferry.drivers.errors import InvalidValue, driver_error
from kvferry.drivers.protocol import DeviceAddress, DeviceAttributes, HostAddress, HostMemoryDriver
from kvferry.hostpool.domain import ask
from kvferry.hostpool.registration import Chunk

CHUNKS = [Chunk(HostAddress(0x10000 * (number + 1)), 0x1000) for number in range(4)]


class Answers:
    """A driver that answers each base with what it was told to."""

    platform = "cuda"

    def __init__(self, aliases: dict[int, int], claim: bool) -> None:
        self.aliases, self.claim = aliases, claim

    def context(self, device: int) -> AbstractContextManager[None]:
        return nullcontext()

    def host_device_pointer(self, address: HostAddress) -> DeviceAddress:
        if address not in self.aliases:
            raise driver_error("pointer", 1, "invalid value", f"{address:#x}")
        return DeviceAddress(self.aliases[address])

    def device_attributes(self, device: int) -> DeviceAttributes:
        return DeviceAttributes(self.claim, False, True, False, 1)


def driver(aliases: list[int], claim: bool) -> HostMemoryDriver:
    return cast("HostMemoryDriver", Answers({c.address: a for c, a in zip(CHUNKS, aliases, strict=False)}, claim))


SAME = [int(chunk.address) for chunk in CHUNKS]


@pytest.mark.parametrize("claim", [True, False])
def test_equal_answers_are_the_host_domain_whatever_is_claimed(claim: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvferry"):
        found = ask(driver(SAME, claim), 2, CHUNKS)
    assert (found.device, found.kind, found.aliases) == (2, "host", tuple(SAME))
    assert "each of 4 chunks" in found.reason
    assert ("does not claim" in found.reason) is not claim
    assert "device 2: pointer domain host" in caplog.text


@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("claim", [True, False])
def test_one_different_answer_is_the_alias_domain(first: int, claim: bool) -> None:
    aliases = [address + (0x7000 if number >= first else 0) for number, address in enumerate(SAME)]
    found = ask(driver(aliases, claim), 0, CHUNKS)
    assert (found.kind, found.aliases) == ("alias", tuple(aliases))
    where = f"chunk {first} of 4 has host address {SAME[first]:#x} and device address {aliases[first]:#x}"
    assert found.reason.startswith(where)


def test_no_answer_is_the_drivers_error() -> None:
    with pytest.raises(InvalidValue, match=f"{SAME[3]:#x}"):
        ask(driver(SAME[:3], True), 0, CHUNKS)
