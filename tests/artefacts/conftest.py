"""A folder of binaries to break."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvferry.kernels_cubin.manifest import Manifest


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
