"""The compilers that build the kernels: the wheels of toolchain.txt, and nothing else that this machine has."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

PINS = Path(__file__).resolve().with_name("toolchain.txt")
LINK = ["-shared", "--no-undefined", "--strip-all", "--build-id=none"]


class BuildError(Exception):
    """A compiler failed, or what it wrote is not what was asked for."""


@dataclass(frozen=True)
class Tools:
    """The compilers, and the folder with the sources in which they run: relative names keep its path out of the output.

    They get an environment of their own: an empty PATH, a fixed locale, and scratch folders inside the work folder.
    """

    toolchain: Path
    work: Path

    def clang(self, *arguments: str) -> str:
        return self._run(sys.executable, "-s", "-m", "ziglang", "clang", *arguments)

    def link(self, *arguments: str) -> str:
        return self._run(sys.executable, "-s", "-m", "ziglang", "ld.lld", *LINK, *arguments)

    def ptxas(self, *arguments: str) -> str:
        return self._run(str(ptxas_path(self.toolchain)), *arguments)

    def _run(self, *command: str) -> str:
        temporary = self.work / "tmp"
        temporary.mkdir(exist_ok=True)
        folders = dict.fromkeys(("HOME", "TMPDIR", "ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(temporary))
        environment = {"PATH": "", "LC_ALL": "C", "PYTHONPATH": str(self.toolchain), **folders}
        done = subprocess.run(command, cwd=self.work, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(f"{' '.join(command)}\nexit status {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout


def ptxas_path(toolchain: Path) -> Path:
    """Where the wheel puts the program; the package has no entry point for it."""
    return toolchain / "nvidia" / "cuda_nvcc" / "bin" / "ptxas"


def install_toolchain() -> Path:
    """The folder with the compilers of toolchain.txt, downloaded if this machine has not used them before.

    Its name holds the hash of toolchain.txt and it appears by a rename, so it is either whole or not there.
    """
    cache = os.environ.get("KVFERRY_TOOLCHAIN")
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parent = Path(cache).resolve() if cache else user_cache / "kvferry" / "toolchain"
    folder = parent / hashlib.sha256(PINS.read_bytes()).hexdigest()[:16]
    if ptxas_path(folder).is_file():
        return folder
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="installing-", dir=parent) as temporary:
        fresh = Path(temporary) / "packages"
        options = ["--require-hashes", "--only-binary=:all:", "--no-deps", "--no-compile", "--quiet"]
        pip = [sys.executable, "-m", "pip", "install", *options, "--target", str(fresh), "-r", str(PINS)]
        if subprocess.run(pip, check=False).returncode:
            raise BuildError("pip could not install the compilers of scripts/toolchain.txt; see its message above")
        if not ptxas_path(fresh).is_file():
            raise BuildError("the compilers were installed but there is no ptxas among them")
        try:
            fresh.rename(folder)
        except OSError:
            if not ptxas_path(folder).is_file():  # else somebody else was faster with the same thing
                raise
    return folder


def pinned_versions() -> dict[str, str]:
    """Package to version, as toolchain.txt pins them."""
    return dict(re.findall(r"^([\w-]+)==(\S+)", PINS.read_text(), re.MULTILINE))
