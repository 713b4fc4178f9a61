"""SGLang's own host-pool code on kvferry: its files are imported as they are published, on a GPU or on the stand-in.

    python scripts/try_sglang.py                # fetches sglang 0.5.23 with pip, without what it depends on
    python scripts/try_sglang.py --wheel FILE   # a wheel that is here already

Needs the package with the ``test`` extra. Imported are ``pool_host/common.py`` and the allocator that it uses; of the
rest of SGLang, which wants an installed server, two modules are empty shells here. Shown are the call sites of
``common.py``: a page-locked pool, a table of where the device sees its layers, rows moved through that table by
``sgl_kernel.kvcacheio``, and the pool let go of.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

VERSION = "0.5.23"
COMMON = "sglang.srt.mem_cache.pool_host.common"
LAYERS, TOKENS, ROW = 4, 256, 1152


def fetch(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*command, f"sglang=={VERSION}"], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@contextmanager
def published(wheel: Path) -> Iterator[Path]:
    """The wheel's Python files, importable without running what its packages run at import."""
    with tempfile.TemporaryDirectory(prefix="kvferry-sglang-") as name, zipfile.ZipFile(wheel) as archive:
        archive.extractall(name, [entry for entry in archive.namelist() if entry.endswith(".py")])
        for package in ("", ".srt", ".srt.mem_cache", ".srt.mem_cache.pool_host", ".srt.mem_cache.storage"):
            module = ModuleType(f"sglang{package}")
            module.__path__ = [str(Path(name, "sglang", *package.split(".")[1:]))]
            sys.modules[module.__name__] = module
        shell("sglang.srt.utils", is_hip=lambda: False, is_cuda=lambda: True)
        shell("sglang.srt.runtime_context", get_memory=lambda: SimpleNamespace(hicache_storage_backend=None))
        yield Path(name)


def shell(name: str, **content: object) -> None:
    module = ModuleType(name)
    module.__dict__.update(content)
    sys.modules[name] = module


def address(tensor: Any) -> int:
    return int(tensor.__cuda_array_interface__["data"][0])


def gpu_cache(torch: Any) -> tuple[list[Any], Callable[[list[int], str], Any]]:
    """A layer-first cache on the GPU, and how to bring numbers there."""
    cache = [torch.zeros((TOKENS, ROW), dtype=torch.uint8, device="cuda") for _ in range(LAYERS)]
    return cache, lambda values, dtype: torch.tensor(values, dtype=getattr(torch, dtype), device="cuda")


def stand_in_cache(mover: Any, stack: ExitStack) -> tuple[list[Any], Callable[[list[int], str], Any]]:
    """The same in the stand-in's device memory."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    import numpy as np

    from support.sglang_world import LayerFirst, World

    world = World(mover.backend, stack)
    layers = LayerFirst(world, LAYERS, TOKENS, ROW, on_device=True)
    return layers.tensors, lambda values, dtype: world.device_values(np.array(values, dtype))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help=f"sglang {VERSION}, instead of fetching it")
    options = parser.parse_args()

    import torch

    from kvferry.hostpool.backend import stand_in
    from kvferry.hostpool.sglang import install, uninstall
    from kvferry.hostpool.sglang.mover import Mover, default_mover, using

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(published(options.wheel or fetch(folder)))
        if torch.cuda.is_available():
            mover = default_mover()
        else:
            backend = stand_in()
            with backend.driver.context(0):
                stream = backend.driver.stream_create()
            mover = stack.enter_context(using(Mover(backend, lambda device: stream)))
        print(f"device      {mover.driver.device_name(0)}")
        install()
        stack.callback(uninstall)
        common = importlib.import_module(COMMON)
        io = importlib.import_module("sgl_kernel.kvcacheio")
        print(f"common.py   {common.__file__}")

        pool = common.alloc_with_host_register((LAYERS, TOKENS, ROW), torch.uint8, "cpu", True,
                                               common.HostTensorAllocator(), TOKENS * ROW)  # fmt: skip
        pool.random_(0, 256)
        print(f"pool        {tuple(pool.shape)}, registered as {pool._sglang_cuda_host_registered_ranges}")

        on_gpu = mover.driver.platform != "stand-in"
        cache, put = gpu_cache(torch) if on_gpu else stand_in_cache(mover, stack)
        seen = [common._resolve_device_accessible_ptr_fn()(layer, 0) for layer in pool]
        # The table of a device that torch does not know is brought there by hand.
        table = common.make_kernel_ptr_table(list(pool), "cuda", host_memory_registered=True) if on_gpu else None
        assert table is None or table.tolist() == seen, "the table holds something else"
        tables = put(seen, "uint64") if table is None else table, put([address(t) for t in cache], "uint64")
        io.transfer_kv_all_layer_mla(*tables, put([3, 5], "int64"), put([7, 1], "int64"), ROW, LAYERS)
        back = torch.zeros_like(pool)
        common._cuda_host_register(back)
        for layer in range(LAYERS):
            io.transfer_kv_direct([cache[layer]], [back[layer]], [7, 1], [3, 5], 1)
        mover.synchronize()
        same = bool((back[:, [3, 5]] == pool[:, [3, 5]]).all()) and not back[:, [0, 1, 2, 4]].any()
        print(f"layer 0     host {pool[0].data_ptr():#x}, device {seen[0]:#x}")
        print(f"rows        there and back: {'all bytes equal' if same else 'BYTES DIFFER'}")
        for tensor in (pool, back):
            common._cuda_host_unregister(tensor)
        print(f"unregistered {pool._sglang_cuda_host_registered_ranges}")
        mover.close()
        return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
