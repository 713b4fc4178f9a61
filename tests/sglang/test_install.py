"""The functions under SGLang's name, and that no registered torch operator is ever looked up."""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kvferry.hostpool.sglang import host_tensors, install, kvcacheio, uninstall
from kvferry.hostpool.sglang.hooks import Hooks

from support.process import run_python

W, QUOTA = 32, 2
SIGNATURES = {
    "get_device_accessible_ptr": "tensor device_index",
    "transfer_kv_per_layer": "src_k dst_k src_v dst_v src_indices dst_indices item_size block_quota "
    "num_warps_per_block",
    "transfer_kv_per_layer_pf_lf": "src_k dst_k src_v dst_v src_indices dst_indices layer_id item_size src_layout_dim "
    "block_quota num_warps_per_block",
    "transfer_kv_per_layer_ph_lf": "src_k dst_k src_v dst_v src_indices dst_indices layer_id item_size src_layout_dim "
    "page_size head_num block_quota num_warps_per_block",
    "transfer_kv_all_layer": "src_k_layers dst_k_layers src_v_layers dst_v_layers src_indices dst_indices item_size "
    "num_layers block_quota num_warps_per_block",
    "transfer_kv_all_layer_lf_pf": "src_k_layers dst_k src_v_layers dst_v src_indices dst_indices item_size "
    "dst_layout_dim num_layers block_quota num_warps_per_block",
    "transfer_kv_all_layer_lf_ph": "src_k_layers dst_k src_v_layers dst_v src_indices dst_indices item_size "
    "dst_layout_dim num_layers page_size head_num block_quota num_warps_per_block",
    "transfer_kv_direct": "src_layers dst_layers src_indices dst_indices page_size",
    "transfer_embedding_ranges_direct": "src dst src_starts dst_starts lengths",
    "transfer_kv_per_layer_direct_pf_lf": "src_ptrs dst_ptrs src_indices dst_indices layer_id page_size",
    "transfer_kv_all_layer_direct_lf_pf": "src_ptrs dst_ptrs src_indices dst_indices page_size",
    "transfer_kv_per_layer_mla": "src dst src_indices dst_indices item_size block_quota num_warps_per_block",
    "transfer_kv_per_layer_mla_pf_lf": "src dst src_indices dst_indices layer_id item_size src_layout_dim block_quota "
    "num_warps_per_block",
    "transfer_kv_all_layer_mla": "src_layers dst_layers src_indices dst_indices item_size num_layers block_quota "
    "num_warps_per_block",
    "transfer_kv_all_layer_mla_lf_pf": "src_layers dst src_indices dst_indices item_size dst_layout_dim num_layers "
    "block_quota num_warps_per_block",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters_have_the_names_that_callers_use(name: str) -> None:
    parameters = inspect.signature(getattr(kvcacheio, name)).parameters
    assert " ".join(parameters) == SIGNATURES[name]
    defaults = {p.name: p.default for p in parameters.values() if p.default is not inspect.Parameter.empty}
    quota = None if name in ("transfer_kv_per_layer_mla", "transfer_kv_per_layer_mla_pf_lf") else QUOTA
    assert defaults == ({"block_quota": quota, "num_warps_per_block": W} if "block_quota" in parameters else {})


def test_nothing_is_missing() -> None:
    assert set(kvcacheio.__all__) == set(SIGNATURES)


@pytest.fixture
def _clean() -> Iterator[None]:
    yield
    uninstall()
    sys.modules.pop("sgl_kernel", None)
    sys.modules.pop("sgl_kernel.kvcacheio", None)


@pytest.mark.usefixtures("_clean")
def test_without_the_wheel(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ImportError):
        importlib.import_module("sgl_kernel.kvcacheio")
    with caplog.at_level(logging.INFO, "kvferry"):
        install()
        install()
    assert [record.getMessage() for record in caplog.records] == [
        "sgl_kernel.kvcacheio is kvferry's from now on (15 functions)"
    ]
    assert importlib.import_module("sgl_kernel.kvcacheio") is kvcacheio
    assert importlib.import_module("sgl_kernel").transfer_kv_per_layer is kvcacheio.transfer_kv_per_layer
    uninstall()
    with pytest.raises(ImportError):
        importlib.import_module("sgl_kernel")


@pytest.mark.usefixtures("_clean")
@pytest.mark.parametrize("imported", [False, True])
def test_with_an_older_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imported: bool) -> None:
    """A wheel whose module has fewer functions: its other parts stay, and come back whole."""
    package = tmp_path / "sgl_kernel"
    package.mkdir()
    (package / "__init__.py").write_text("from sgl_kernel.kvcacheio import transfer_kv_per_layer\nother = 1\n")
    (package / "kvcacheio.py").write_text("def transfer_kv_per_layer(): return 'the original'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before: ModuleType | None = importlib.import_module("sgl_kernel") if imported else None
    install()
    found = importlib.import_module("sgl_kernel")
    assert found.other == 1
    assert found.transfer_kv_per_layer is kvcacheio.transfer_kv_per_layer
    assert importlib.import_module("sgl_kernel.kvcacheio") is kvcacheio
    uninstall()
    if before is not None:
        assert before.transfer_kv_per_layer() == "the original"
        assert not hasattr(before, "transfer_kv_all_layer")
        assert importlib.import_module("sgl_kernel.kvcacheio").transfer_kv_per_layer() == "the original"


def test_torch_ops_are_never_read() -> None:
    """With ``torch.ops`` poisoned, and torch's own pinning too: the driver is asked, nobody else."""
    printed = run_python(
        """
        import numpy as np, torch

        class Poison:
            def __getattr__(self, name):
                raise AssertionError(f"torch.ops.{name} was read")

        torch.ops = torch._ops.ops = Poison()
        from contextlib import ExitStack
        from kvferry.hostpool.backend import stand_in
        from kvferry.hostpool.sglang import HostTensorAllocator, alloc_with_host_register, install, kvcacheio
        from kvferry.hostpool.sglang import _cuda_host_unregister, make_kernel_ptr_table
        from kvferry.hostpool.sglang.mover import Mover, using
        from support.sglang_world import LayerFirst, World
        install()
        with ExitStack() as stack:
            world = World(stand_in(), stack)
            mover = stack.enter_context(using(Mover(world.backend, lambda device: world.stream)))
            import sgl_kernel.kvcacheio as io
            pool = alloc_with_host_register((8, 2, 64), torch.uint8, "cpu", True, HostTensorAllocator())
            make_kernel_ptr_table([pool], "cpu", host_memory_registered=True)
            pool[:] = torch.arange(64, dtype=torch.uint8)
            dst = LayerFirst(world, 1, 8, 64, on_device=True)
            io.transfer_kv_per_layer_mla_pf_lf(pool, dst.tensors[0], torch.tensor([3]), torch.tensor([4]), 1, 64, 128)
            dst.set(0, 4, pool[3, 1].numpy())
            world.finish()
            world.assert_as_modelled()
            _cuda_host_unregister(pool)
            mover.close()
        print("moved")
        """
    )
    assert printed.strip() == "moved"


def test_without_a_gpu_the_first_call_says_so() -> None:
    """In a process of its own, in which no driver can be found."""
    printed = run_python(
        """
        from kvferry.drivers import loader
        from kvferry.drivers.errors import DriverNotFound, NotSupported
        from kvferry.hostpool.sglang import mover

        def absent(ffi, platform, *more):
            raise DriverNotFound(platform, {"its library": "not here"})

        loader.open_library = absent
        try:
            mover.default_mover()
        except NotSupported as error:
            print(error)
        """
    )
    assert printed.startswith("no GPU to move KV-cache rows on: cuda: ")
    assert "rocm: " in printed


COMMON = """
import torch

def _resolve_device_accessible_ptr_fn():
    return None if not hasattr(torch.ops.sgl_kernel, "get_device_accessible_ptr") else 1

def _cuda_host_register(buffer, registration_granularity_bytes=None): return "the original"
def _cuda_host_unregister(buffer): return "the original"
def alloc(buffer): return _cuda_host_register(buffer)
"""
POOL = "from sglang.srt.mem_cache.pool_host.common import _cuda_host_unregister\n"
HOOKED = "sglang.srt.mem_cache.pool_host.common"


@pytest.fixture
def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An SGLang that asks ``torch.ops`` before it uses what it has imported."""
    folder = tmp_path / "sglang" / "srt" / "mem_cache" / "pool_host"
    folder.mkdir(parents=True)
    (folder / "common.py").write_text(COMMON)
    (folder / "base.py").write_text(POOL)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]


@pytest.mark.usefixtures("_clean", "sglang")
@pytest.mark.parametrize("loaded", [False, True], ids=["installed first", "sglang first"])
def test_sglang_asks_the_driver_whatever_torch_has(loaded: bool) -> None:
    base_name = HOOKED.replace("common", "base")
    if loaded:
        importlib.import_module(base_name)
    install()
    base, common = importlib.import_module(base_name), importlib.import_module(HOOKED)
    assert common._resolve_device_accessible_ptr_fn() is kvcacheio.get_device_accessible_ptr
    assert base._cuda_host_unregister is common._cuda_host_unregister is host_tensors._cuda_host_unregister
    assert common._cuda_host_register is host_tensors._cuda_host_register
    assert inspect.getsource(common.alloc).startswith("def alloc")
    uninstall()
    assert common._resolve_device_accessible_ptr_fn() is None
    assert common._cuda_host_register(None) == base._cuda_host_unregister(None) == "the original"
    assert not [finder for finder in sys.meta_path if isinstance(finder, Hooks)]
