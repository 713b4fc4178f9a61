"""Who may import whom, and what an import must not do."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("drivers", "kernels_cubin", "hostpool")  # each may import those before it
THIRD_PARTY = {
    "drivers": {"cffi", "_cffi_backend"},
    "kernels_cubin": {"cffi", "_cffi_backend", "numpy"},
    "hostpool": {"numpy"},
}
ONLY_IN = {
    "cuda": "launch_cuda.py",
    "hip": "launch_hip.py",
    "rocm": "launch_hip.py",
    "torch": "torch_calls.py",
    "tqdm": "cli.py",
}


def modules() -> list[Path]:
    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def imports(path: Path) -> set[str]:
    """Full names of what a module imports, wherever the import stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            assert node.module is not None
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_import_direction(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    allowed = ROOMS[: ROOMS.index(room) + 1]
    for name in imports(path):
        top, *rest = name.split(".")
        if top == "kvferry":
            assert rest[0] in allowed, f"{room} must not import {name}"
        elif top in ONLY_IN:
            assert path.name == ONLY_IN[top], f"{name} belongs in {ONLY_IN[top]} alone"
        else:
            assert top in sys.stdlib_module_names | THIRD_PARTY[room], f"{room} must not import {name}"


IMPORT_EVERYTHING = """
import importlib, os, re, sys, threading
for name in sys.argv[1:]:
    importlib.import_module(name)
packages = {name.split(".")[0] for name in sys.modules}
assert not packages & {"torch", "cuda", "hip", "rocm"}, packages
with open("/proc/self/maps") as maps:
    files = {os.path.basename(line.split(maxsplit=5)[5].strip()) for line in maps if len(line.split(maxsplit=5)) == 6}
gpu = [file for file in files if re.match(r"lib(cuda|nv|amd|hip|hsa|roc|torch|c10)|kv_transfer", file)]
assert not gpu, gpu
assert threading.active_count() == 1
"""


def test_import_starts_nothing() -> None:
    """Scenario 30: importing every module loads no torch, no driver, no GPU library, and starts no thread."""
    names = [".".join(("kvferry", *path.relative_to(ROOT).with_suffix("").parts)) for path in modules()]
    subprocess.run(
        [sys.executable, "-c", IMPORT_EVERYTHING, *(name.removesuffix(".__init__") for name in names)], check=True
    )


ROUND_TRIP = """
import numpy as np
from kvferry.drivers import posix
from kvferry.hostpool import HostPool, KVLayout
from kvferry.hostpool.backend import stand_in

backend = stand_in()
layout = KVLayout.mha(layers=2, heads=2, head_size=8, element_nbytes=2, page_tokens=4)
with HostPool(layout, 8, backend=backend) as pool, backend.driver.context(0):
    tokens = 16
    caches = {name: [backend.driver.device_alloc(tokens * 32) for _ in range(2)] for name in "kv"}
    views = [np.frombuffer(posix.buffer(a, tokens * 32), np.uint8) for layers in caches.values() for a in layers]
    for view in views:
        view[:] = np.random.default_rng(view.ctypes.data).integers(0, 256, view.size)
    want = [view.copy() for view in views]
    kv = pool.device_pool(caches, tokens=tokens)
    pool.store(kv, [0, 1, 2, 3], [7, 5, 3, 1], stream=0).synchronize()
    for view in views:
        view[:] = 0
    pool.load(kv, [7, 5, 3, 1], [0, 1, 2, 3], stream=0).synchronize()
    assert all((a == b).all() for a, b in zip(views, want, strict=True))
print("moved")
"""

NO_TORCH = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Absent())
"""

STRANGE_TORCH = """
import sys, types
class Torch(types.ModuleType):
    def __getattr__(self, name):
        raise RuntimeError(f"torch.{name} was looked at")
sys.modules["torch"] = Torch("torch")
"""


@pytest.mark.parametrize("before", [NO_TORCH, STRANGE_TORCH], ids=["torch absent", "torch of another age"])
def test_torch_does_not_matter(before: str) -> None:
    """Scenario 1: pages move without torch, and with a torch that is not to be looked at."""
    done = subprocess.run([sys.executable, "-c", before + ROUND_TRIP], check=True, capture_output=True, text=True)
    assert done.stdout == "moved\n"


def test_pages_move_with_an_empty_path() -> None:
    """No compiler, nor anything else, is looked up on PATH."""
    environment = {**os.environ, "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", ROUND_TRIP], check=True, capture_output=True, text=True, env=environment
    )
    assert done.stdout == "moved\n"
