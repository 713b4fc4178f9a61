"""The fakes themselves: kernels run for real on them, and real cuda-python runs on the fake libcuda."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from kvferry.drivers.errors import IllegalAddress, InvalidValue
from kvferry.drivers.protocol import DeviceAddress, HostAddress, HostMemoryDriver, StreamHandle
from kvferry.kernels_cubin.abi import CTA_THREADS, ArgumentBlock

from fakes.cuda import FakeCuda
from fakes.memory import PAGE, Pages, bytes_at, pattern
from fakes.vendors import Bench
from support.process import run_python

KERNELS = Path(__file__).resolve().parents[2] / "kernels_cubin"
IMAGES = {"cuda": "kv_transfer.sm_90.cubin", "hip": "kv_transfer.gfx942.hsaco"}
ROW, ROWS = 92, 40
NOT_FOUND, NO_BINARY, ILLEGAL_ADDRESS = 500, 209, 700


def load(bench: Bench, image: bytes, kernel: str = "kv_transfer_w1_i64") -> ctypes.c_void_p:
    """A kernel's handle, through the vendor's own calls; fails with the code of the first that refuses."""
    library, function = ctypes.c_void_p(), ctypes.c_void_p()
    if bench.vendor.name == "cuda":
        nothing = (None, None, 0, None, None, 0)
        code = bench.fake.call("cuLibraryLoadData", ctypes.byref(library), image, *nothing)
        code = code or bench.fake.call("cuLibraryGetKernel", ctypes.byref(function), library, kernel.encode())
    else:
        code = bench.fake.call("hipModuleLoadData", ctypes.byref(library), image)
        code = code or bench.fake.call("hipModuleGetFunction", ctypes.byref(function), library, kernel.encode())
    if code:
        raise OSError(code, "load")
    return function


def launch(bench: Bench, function: ctypes.c_void_p, block: ArgumentBlock, *, packed: bool) -> int:
    """Launch one CTA, with the block as the only parameter or as a packed buffer."""
    nbytes = ctypes.c_size_t(block.array.nbytes)
    end = 0 if bench.vendor.name == "cuda" else 3
    extra = (ctypes.c_void_p * 5)(1, block.address, 2, ctypes.addressof(nbytes), end)
    parameters = ctypes.c_void_p(block.parameters)
    how = (None, extra) if packed else (parameters, None)
    call = {"cuda": "cuLaunchKernel", "hip": "hipModuleLaunchKernel"}[bench.vendor.name]
    return bench.fake.call(call, function, 1, 1, 1, CTA_THREADS, 1, 1, 0, None, *how)


def image_of(bench: Bench) -> bytes:
    return (KERNELS / IMAGES[bench.vendor.name]).read_bytes()


class Reversal:
    """Rows of a registered pool go to device memory in reverse order, one launch."""

    def __init__(self, driver: HostMemoryDriver) -> None:
        self.pool, self.small = Pages(PAGE), Pages(PAGE)
        self.pool.array[:] = pattern(PAGE, 8)
        for pages in (self.pool, self.small):
            driver.host_register(HostAddress(pages.address), PAGE)
        self.alias = driver.host_device_pointer(HostAddress(self.pool.address))
        small = driver.host_device_pointer(HostAddress(self.small.address))
        self.target = driver.device_alloc(ROW * ROWS)
        claim = driver.device_alloc(4)
        driver.memset_async(claim, 0, 4, StreamHandle(0))
        words = self.small.array.view(np.uint64)
        words[0], words[1] = self.alias, self.target
        words[16 : 16 + ROWS] = np.arange(ROWS)
        words[128 : 128 + ROWS] = np.arange(ROWS)[::-1]
        self.block = ArgumentBlock()
        args = self.block.array
        component = args["component"][0:1]
        component["src"]["table"], component["dst"]["table"] = small, small + 8
        component["src"]["page"] = component["dst"]["page"] = ROW
        component["run_words"], component["segments"], component["heads"], component["slots"] = ROW, 1, 1, 1
        component["tasks"] = ROWS
        for side, at in (("src", 16), ("dst", 128)):
            args[side]["indices"], args[side]["limit"], args[side]["split"] = small + 8 * at, ROWS, 1
        args["error_record"], args["error_claim"], args["error_epoch"] = small + 2048, claim, 1
        args["n_components"], args["n_layers"], args["tasks_per_layer"] = 1, 1, ROWS
        args["lanes_log2"], args["n_warps"], args["warps_per_cta"] = 5, CTA_THREADS // 32, CTA_THREADS // 32

    def expected(self) -> bytes:
        return self.pool.array[: ROW * ROWS].reshape(ROWS, ROW)[::-1].tobytes()

    def moved(self) -> bytes:
        return bytes_at(self.target, ROW * ROWS)


@pytest.mark.parametrize("packed", [False, True], ids=["parameters", "packed"])
def test_a_kernel_runs_for_real(bench: Bench, kernels_library: Path, packed: bool) -> None:
    bench.fake.set_kernels(kernels_library)
    driver, image = bench.driver(), image_of(bench)
    with driver.context(0):
        transfer = Reversal(driver)
        function = load(bench, image)
        assert transfer.moved() != transfer.expected()
        assert launch(bench, function, transfer.block, packed=packed) == 0
    assert transfer.moved() == transfer.expected()
    assert bench.fake.image() == image


def test_a_host_address_in_a_table_is_an_illegal_access_and_the_device_stays_faulted(
    bench: Bench, kernels_library: Path
) -> None:
    bench.fake.set_kernels(kernels_library)
    driver, image = bench.driver(devices=2), image_of(bench)
    with driver.context(0):
        transfer = Reversal(driver)
        transfer.small.array.view(np.uint64)[0] = transfer.pool.address
        function = load(bench, image)
        bench.fake.log()
        assert launch(bench, function, transfer.block, packed=False) == ILLEGAL_ADDRESS
        fault = bench.fake.calls("fault")[0]
        assert transfer.pool.address <= int(fault.values["address"]) < transfer.pool.address + PAGE
        assert fault.values["write"] == 0
        with pytest.raises(IllegalAddress):
            driver.stream_synchronize(StreamHandle(0))
        with pytest.raises(IllegalAddress):
            driver.host_device_pointer(HostAddress(transfer.pool.address))
    with driver.context(1):
        assert driver.host_device_pointer(HostAddress(transfer.pool.address)), "the other device is well"


def test_a_kernel_that_is_not_there(bench: Bench, kernels_library: Path) -> None:
    bench.fake.set_kernels(kernels_library)
    driver = bench.driver()
    with driver.context(0), pytest.raises(OSError, match=str(NOT_FOUND)):
        load(bench, image_of(bench), "kv_transfer_w3_i64")


def test_an_image_for_another_architecture_is_refused(bench: Bench) -> None:
    driver, image = bench.driver(), bytearray(image_of(bench))
    other = {"cuda": (KERNELS / "kv_transfer.sm_86.cubin"), "hip": (KERNELS / "kv_transfer.gfx90a.hsaco")}
    broken = bytes(image).replace(b"\x7fELF", b"\x7fELG", 1)
    with driver.context(0):
        for wrong in (other[bench.vendor.name].read_bytes(), broken):
            with pytest.raises(OSError, match=str(NO_BINARY)):
                load(bench, wrong)


@pytest.mark.parametrize(
    ("file", "major", "minor", "code"),
    [
        ("kv_transfer.sm_86.cubin", 8, 6, 0),
        ("kv_transfer.sm_86.cubin", 8, 9, 0),
        ("kv_transfer.sm_86.cubin", 8, 0, NO_BINARY),
        ("kv_transfer.sm_86.cubin", 9, 0, NO_BINARY),
        ("kv_transfer.sm_100.cubin", 10, 3, 0),
        ("kv_transfer.sm_120.cubin", 10, 0, NO_BINARY),
        ("kv_transfer.sm_75.ptx", 9, 0, 0),
        ("kv_transfer.sm_75.ptx", 7, 0, NO_BINARY),
    ],
)
def test_which_devices_load_an_image(fake_cuda: FakeCuda, file: str, major: int, minor: int, code: int) -> None:
    """Scenario 4, as the driver sees it."""
    assert fake_cuda.call("cuInit", 0) == 0
    fake_cuda.set_attribute(75, major)
    fake_cuda.set_attribute(76, minor)
    library, image = ctypes.c_void_p(), (KERNELS / file).read_bytes() + b"\0"
    nothing = (None, None, 0, None, None, 0)
    assert fake_cuda.call("cuLibraryLoadData", ctypes.byref(library), image, *nothing) == code


def test_real_cuda_python_launches_on_the_fake(fakes_dir: Path, kernels_library: Path, tmp_path: Path) -> None:
    path = FakeCuda.build(fakes_dir).path
    printed = run_python(
        f"""
        import sys
        from fakes.cuda import FakeCuda

        fake = FakeCuda({path!r})
        fake.set_kernels({str(kernels_library)!r})
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from kvferry.drivers.cuda import CudaDriver
        from kvferry.kernels_cubin.launch_cuda import CudaLauncher
        from kvferry.kernels_cubin.manifest import Manifest
        from test_fakes import Reversal

        driver = CudaDriver()
        launcher = CudaLauncher(driver, 0, Manifest.load())
        with driver.context(0):
            transfer, stream = Reversal(driver), driver.stream_create()
            launcher.launch("kv_transfer_w1_i64", 1, transfer.block, stream)
        print(launcher.artefact.file, transfer.moved() == transfer.expected())
        print([call.values["ctas"] for call in fake.calls("cuLaunchKernel")])
        """
    )
    assert printed.splitlines() == ["kv_transfer.sm_90.cubin True", "[1]"]


def test_the_log_names_calls_values_devices_and_results(bench: Bench) -> None:
    driver = bench.driver(devices=2)
    pages = Pages(PAGE)
    with driver.context(1):
        driver.host_register(HostAddress(pages.address), PAGE)
        with pytest.raises(InvalidValue):
            driver.copy_to_device(DeviceAddress(pages.address), HostAddress(pages.address), 101, StreamHandle(0))
    register, copy = bench.fake.calls(bench.calls.register, bench.calls.copy_to_device)
    assert register.values == {"address": pages.address, "nbytes": PAGE, "flags": 3}
    assert (register.device, register.result) == (1, 0)
    assert copy.values == {"dst": pages.address, "src": pages.address, "nbytes": 101, "stream": 0}
    assert (copy.device, copy.result) == (1, 1)
    assert bench.fake.log() == [], "taking the log empties it"
