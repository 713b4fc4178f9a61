"""The scripts that build and read binaries are no package; these tests import them by name."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from kvferry.kernels_cubin.manifest import Manifest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "toolchain: downloads the compilers and builds; about a minute")


@pytest.fixture(scope="session")
def shipped() -> Manifest:
    """The manifest of the tree under test."""
    return Manifest.load()


@pytest.fixture
def copied(shipped: Manifest, tmp_path: Path) -> Path:
    """A folder with all binaries and the manifest, to be damaged."""
    folder = tmp_path / "kernels_cubin"
    folder.mkdir()
    for file in ["manifest.json", *(artefact.file for artefact in shipped.artefacts)]:
        shutil.copy(shipped.directory / file, folder / file)
    return folder
