"""The checked-in cffi modules are what their declarations generate."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def check(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(root / "scripts" / "build_bindings.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The declarations, their modules and the script, to be changed."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "drivers").mkdir()
    shutil.copy(ROOT / "scripts" / "build_bindings.py", tmp_path / "scripts")
    for file in [*(ROOT / "drivers").glob("*.cdef.h"), *(ROOT / "drivers").glob("_*_ffi.py")]:
        shutil.copy(file, tmp_path / "drivers")
    return tmp_path


def test_the_modules_match_their_declarations() -> None:
    done = check(ROOT)
    assert done.returncode == 0, done.stderr


def test_a_copy_matches_too(copied: Path) -> None:
    assert check(copied).returncode == 0


@pytest.mark.parametrize("vendor", ["cuda", "hip"])
def test_a_changed_declaration_is_noticed(copied: Path, vendor: str) -> None:
    declarations = copied / "drivers" / f"{vendor}.cdef.h"
    declarations.write_text(declarations.read_text(encoding="utf-8") + "int kv_new_call(int);\n", encoding="utf-8")
    before = (copied / "drivers" / f"_{vendor}_ffi.py").read_bytes()
    done = check(copied)
    assert done.returncode == 1
    assert f"stale: _{vendor}_ffi.py" in done.stderr
    assert (copied / "drivers" / f"_{vendor}_ffi.py").read_bytes() == before, "a check writes nothing"


def test_a_missing_module_is_noticed(copied: Path) -> None:
    (copied / "drivers" / "_cuda_ffi.py").unlink()
    done = check(copied)
    assert done.returncode == 1
    assert "_cuda_ffi.py" in done.stderr


def test_every_declaration_file_has_a_module() -> None:
    declared = {file.name.removesuffix(".cdef.h") for file in (ROOT / "drivers").glob("*.cdef.h")}
    generated = {file.stem.removeprefix("_").removesuffix("_ffi") for file in (ROOT / "drivers").glob("_*_ffi.py")}
    assert declared == generated
    assert {"cuda", "hip"} <= declared
