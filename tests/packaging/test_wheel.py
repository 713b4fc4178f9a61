"""What a wheel holds."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_NBYTES = 2_000_000


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources without network."""
    source = tmp_path_factory.mktemp("source") / "kvferry"
    ignore = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "tests")
    shutil.copytree(ROOT, source, ignore=ignore)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "-w", str(out), str(source)], check=True)
    (path,) = out.glob("*.whl")
    return path


def test_one_small_wheel_for_every_machine(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size < MAX_NBYTES


def test_every_binary_and_nothing_at_the_top(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    manifest = json.loads((ROOT / "kernels_cubin" / "manifest.json").read_text(encoding="utf-8"))
    for artefact in manifest["artefacts"]:
        assert f"kvferry/kernels_cubin/{artefact['file']}" in names
    assert "kvferry/kernels_cubin/manifest.json" in names
    for room in ("drivers", "hostpool", "kernels_cubin"):
        assert f"kvferry/{room}/py.typed" in names
        for module in (ROOT / room).rglob("*.py"):
            assert f"kvferry/{module.relative_to(ROOT)}" in names
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"kvferry"}
    assert "kvferry/__init__.py" not in names, "kvferry is a namespace: others may add to it"


def test_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(archive.read(name).decode())
    needs = metadata.get_all("Requires-Dist") or []
    base = sorted(need.split(">")[0] for need in needs if "extra ==" not in need)
    assert base == ["cffi", "numpy"]
    assert set(metadata.get_all("Provides-Extra") or []) == {"cuda12", "cuda13", "rocm", "torch", "cli", "test"}
