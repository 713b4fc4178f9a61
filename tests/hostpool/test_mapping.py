"""Host memory: aligned, really there, and gone again when something fails."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from kvferry.drivers import posix
from kvferry.drivers.errors import HostMemoryError
from kvferry.hostpool import HostPool, KVLayout
from kvferry.hostpool.backend import Backend
from kvferry.hostpool.mapping import HUGE_PAGE_NBYTES, HostMapping

MIB = 1 << 20


def resident_nbytes(address: int, nbytes: int) -> int:
    """What the system holds in memory of exactly this range."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(number, 16) for number in found.groups())
            inside = begin >= address and end <= address + nbytes
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def mapped_nbytes(address: int, nbytes: int) -> int:
    """How much of the range is mapped."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(number, 16) for number in line.split()[0].split("-"))
        total += max(0, min(end, address + nbytes) - max(begin, address))
    return total


@pytest.mark.parametrize("nbytes", [4096, 3 * MIB, 5 * MIB + 4096])
def test_nothing_is_there_before_populate_and_all_of_it_after(nbytes: int) -> None:
    """Scenario 23: resident memory grows by what was asked for, within a page."""
    mapping = HostMapping(nbytes)
    assert mapping.address % HUGE_PAGE_NBYTES == 0
    assert resident_nbytes(mapping.address, nbytes) == 0
    assert mapping.populate(threads=2) >= 0
    assert abs(resident_nbytes(mapping.address, nbytes) - nbytes) <= posix.PAGE_NBYTES
    assert bytes(posix.buffer(mapping.address, nbytes)) == bytes(nbytes)
    mapping.close()
    assert mapped_nbytes(mapping.address, nbytes) == 0


def address_space_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * posix.PAGE_NBYTES


def test_what_was_reserved_to_align_it_is_given_back() -> None:
    before = address_space_nbytes()
    mappings = [HostMapping(3 * MIB) for _ in range(8)]
    assert 0 <= address_space_nbytes() - before - 8 * 3 * MIB < 2 * MIB
    for mapping in mappings:
        mapping.close()


def test_progress_reaches_the_total_in_rising_steps() -> None:
    mapping, seen = HostMapping(130 * MIB), list[tuple[int, int]]()
    mapping.populate(threads=2, progress=lambda done, total: seen.append((done, total)))
    mapping.close()
    done = [now for now, _ in seen]
    assert {total for _, total in seen} == {130 * MIB}
    assert done == sorted(set(done))
    assert len(done) == 3
    assert done[-1] == 130 * MIB


def test_a_second_close_leaves_the_address_to_its_next_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    mapping = HostMapping(4096)
    mapping.close()
    monkeypatch.setattr(posix, "unmap", lambda *_: pytest.fail("unmapped twice"))
    mapping.close()


def refusing(monkeypatch: pytest.MonkeyPatch, advice: str, code: int) -> None:
    real = posix.advise
    monkeypatch.setattr(posix, "advise", lambda at, n, what: code if what == advice else real(at, n, what))


def test_a_shortage_is_reported_and_nothing_stays_mapped(
    monkeypatch: pytest.MonkeyPatch, backend: Backend, layout: KVLayout
) -> None:
    refusing(monkeypatch, "MADV_POPULATE_WRITE", errno.ENOMEM)
    mapped = list[tuple[int, int]]()
    real = HostMapping.populate

    def populate(self: HostMapping, **options: object) -> float:
        mapped.append((self.address, self.nbytes))
        return real(self, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(HostMapping, "populate", populate)
    with pytest.raises(HostMemoryError, match=r"no memory for 8192 bytes .*Cannot allocate memory.*fewer pages"):
        HostPool(KVLayout.mla(layers=1, latent_size=4096, element_nbytes=1, page_tokens=1), 2, backend=backend)
    ((address, nbytes),) = mapped
    assert mapped_nbytes(address, nbytes) == 0


def test_a_progress_that_raises_stops_it_and_nothing_stays_mapped(backend: Backend, layout: KVLayout) -> None:
    class Stop(Exception):
        pass

    def progress(done: int, total: int) -> None:
        raise Stop

    before = Path("/proc/self/maps").read_text().count("\n")
    for _ in range(20):
        with pytest.raises(Stop):
            HostPool(layout, 2, backend=backend, progress=progress)
    assert Path("/proc/self/maps").read_text().count("\n") < before + 20


def test_without_the_call_the_pages_are_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch, "MADV_POPULATE_WRITE", errno.EINVAL)
    mapping = HostMapping(3 * MIB)
    mapping.populate(threads=1)
    assert resident_nbytes(mapping.address, 3 * MIB) == 3 * MIB
    mapping.close()


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EINTR])
def test_an_interrupted_call_is_made_again(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    real, calls = posix.advise, list[str]()

    def advise(address: int, nbytes: int, advice: str) -> int:
        calls.append(advice)
        first = advice == "MADV_POPULATE_WRITE" and calls.count(advice) == 1
        return code if first else real(address, nbytes, advice)

    monkeypatch.setattr(posix, "advise", advise)
    mapping = HostMapping(4096)
    mapping.populate(threads=1)
    assert resident_nbytes(mapping.address, 4096) == 4096
    mapping.close()


def test_no_huge_pages_is_no_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    refusing(monkeypatch, "MADV_HUGEPAGE", errno.EINVAL)
    with caplog.at_level("INFO", "kvferry"):
        mapping = HostMapping(4096)
    assert not mapping.huge_pages
    assert "no transparent huge pages" in caplog.text
    mapping.populate()
    mapping.close()
