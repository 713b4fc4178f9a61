"""Builds the fake drivers with the compiler that pip installs (ziglang); no other compiler is needed."""

from __future__ import annotations

import platform as python_platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "kernels_cubin"
FILE_NAMES = {"cuda": "libcuda.so.1", "hip": "libamdhip64.so.7"}


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


def build_fake(vendor: str, tmp_dir: Path, defines: Sequence[str] = (), *, soname: str = "") -> Path:
    """The library of ``vendor`` ("cuda" or "hip") under its real name; what is in ``tmp_dir`` already is taken.

    ``defines`` are macros of the C source that leave something out, such as ``NO_BATCH``. With another ``soname`` the
    dynamic linker does not take it for the same library as one of that name elsewhere.
    """
    target = tmp_dir / "-".join([vendor, *sorted(defines), *([soname] if soname else [])]) / FILE_NAMES[vendor]
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden"]
        names = [f"-Wl,-soname,{soname or target.name}", *(f"-D{name}" for name in defines), "-o", f"{target}.part"]
        _run(sys.executable, "-m", "ziglang", "cc", *flags, *names, str(HERE / f"fake_{vendor}.c"))
        Path(f"{target}.part").rename(target)
    return target


def host_kernels() -> Path:
    """The shipped kernels as a library of this machine."""
    return KERNELS / f"kv_transfer.{python_platform.machine()}.so"
