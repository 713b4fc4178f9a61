"""Fixtures of the emulator, and its part of the summary."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvferry.kernels_cubin.manifest import Manifest

from emulator.codeobject import CodeObject, load
from emulator.device import EmulatedGpu
from emulator.report import RECORD, lines, shipped
from fakes.hip import FakeHip


@pytest.fixture(scope="session")
def manifest() -> Manifest:
    return Manifest.load()


@pytest.fixture
def code(manifest: Manifest, target: str) -> CodeObject:
    """The shipped code object of ``target``."""
    (artefact,) = (a for a in manifest.artefacts if a.kind == "hsaco" and a.target == target)
    return load(manifest.read(artefact))


@pytest.fixture
def gpu(fake_hip: FakeHip) -> Iterator[EmulatedGpu]:
    with EmulatedGpu(fake_hip) as gpu:
        yield gpu


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if RECORD.opcodes:
        terminalreporter.section("AMD code objects, emulated")
        for line in lines(RECORD, shipped(), 160):
            terminalreporter.write_line(line)
