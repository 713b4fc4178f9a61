"""The fake drivers of a session: built and loaded once, since one process takes one runtime of a vendor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.hip import FakeHip


@pytest.fixture(scope="session")
def fakes_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the fakes are built."""
    return tmp_path_factory.mktemp("fakes")


@pytest.fixture
def fake_hip(fakes_dir: Path) -> Iterator[FakeHip]:
    fake = FakeHip.build(fakes_dir)
    fake.reset()
    yield fake
    fake.reset()
