"""The emulator behind the fake HIP, called as HIP is called."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import pytest

from kvferry.kernels_cubin import abi
from kvferry.kernels_cubin.abi import ArgumentBlock
from kvferry.kernels_cubin.manifest import Manifest

from emulator import device as device_module
from emulator.device import ILLEGAL_ADDRESS, LAUNCH_FAILURE, EmulatedGpu
from emulator.errors import BadLaunch, DeviceFault, UnknownInstruction
from emulator.report import has_decoder, shipped
from fakes.hip import FakeHip
from fakes.memory import PAGE, Pages, bytes_at, pattern, put_at

pytestmark = pytest.mark.emulated

TARGETS = [target for target in shipped() if has_decoder(target)]
NO_BINARY, NOT_FOUND = 209, 500
ROW, ROWS = 48, 20
MEMBERS = {"gfx9-4-generic": "gfx942", "gfx11-generic": "gfx1102", "gfx12-generic": "gfx1201"}


def image_of(target: str) -> bytes:
    (artefact,) = (a for a in Manifest.load().artefacts if a.kind == "hsaco" and a.target == target)
    return Manifest.load().read(artefact)


class Rows:
    """Rows of a registered page go to device memory in reverse order; ``block`` says so to the kernel."""

    def __init__(self, fake: FakeHip) -> None:
        self.fake = fake
        assert fake.call("hipInit", 0) == 0
        self.pool = Pages(PAGE)
        self.pool.array[:] = pattern(PAGE, 5)
        assert fake.call("hipHostRegister", ctypes.c_void_p(self.pool.address), ctypes.c_size_t(PAGE), 0) == 0
        alias = ctypes.c_uint64()
        assert fake.call("hipHostGetDevicePointer", ctypes.byref(alias), ctypes.c_void_p(self.pool.address), 0) == 0
        self.alias = alias.value
        self.target, self.small = self.allocate(ROW * ROWS), self.allocate(4096)
        self.block = ArgumentBlock()

    def allocate(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        assert self.fake.call("hipMalloc", ctypes.byref(address), ctypes.c_size_t(nbytes)) == 0
        return address.value

    def describe(self, base: int, warps: int) -> None:
        """``base`` is the pool's address as the kernel is told."""
        sources, targets = np.arange(ROWS, dtype=np.int64)[::-1], np.arange(ROWS, dtype=np.int64)
        tables: npt.NDArray[np.uint64] = np.array([base, self.target], np.uint64)
        for at, values in ((0, tables), (512, sources), (1024, targets)):
            put_at(self.small + at, values.tobytes())
        args = self.block.array
        component = args["component"][0]
        component["src"] = (self.small, 0, ROW, 0, 0, 0)
        component["dst"] = (self.small + 8, 0, ROW, 0, 0, 0)
        component["run_words"], component["segments"], component["heads"], component["slots"] = ROW // 16, 1, 1, 1
        component["tasks"] = args["tasks_per_layer"] = ROWS
        args["src"] = (self.small + 512, ROWS, 1, abi.TABLE_ONE, 0)
        args["dst"] = (self.small + 1024, ROWS, 1, abi.TABLE_ONE, 0)
        args["error_record"], args["error_claim"], args["error_epoch"] = self.small + 2048, self.small + 2112, 1
        args["n_components"] = args["n_layers"] = 1
        args["lanes_log2"], args["narrow"] = 2, 1
        args["n_warps"] = args["warps_per_cta"] = warps

    def moved(self) -> bytes:
        return bytes_at(self.target, ROW * ROWS)

    def expected(self) -> bytes:
        return self.pool.array[: ROW * ROWS].reshape(ROWS, ROW)[::-1].tobytes()

    def load(self, image: bytes, kernel: str = "kv_transfer_w16_i64") -> ctypes.c_void_p:
        self.image = ctypes.create_string_buffer(image, len(image) + 4096)
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        code = self.fake.call("hipModuleLoadData", ctypes.byref(module), self.image)
        code = code or self.fake.call("hipModuleGetFunction", ctypes.byref(function), module, kernel.encode())
        if code:
            raise OSError(code, "load")
        return function

    def launch(self, function: ctypes.c_void_p, *, packed: bool = True) -> int:
        extra, parameters = ctypes.c_void_p(self.block.extra), ctypes.c_void_p(self.block.parameters)
        how = (None, extra) if packed else (parameters, None)
        return self.fake.call("hipModuleLaunchKernel", function, 1, 1, 1, abi.CTA_THREADS, 1, 1, 0, None, *how)


@pytest.fixture
def rows(fake_hip: FakeHip) -> Rows:
    return Rows(fake_hip)


def on(fake: FakeHip, target: str) -> EmulatedGpu:
    """A device that takes images for ``target``."""
    fake.set_architecture(f"{MEMBERS.get(target, target)}:sramecc+:xnack-")
    return EmulatedGpu(fake)


def warps(target: str) -> int:
    return abi.CTA_THREADS // (64 if target.startswith("gfx9") else 32)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("packed", [True, False], ids=["extra", "parameters"])
def test_a_launch_executes_the_image_that_was_loaded(fake_hip: FakeHip, rows: Rows, target: str, packed: bool) -> None:
    with on(fake_hip, target) as gpu:
        function = rows.load(image_of(target))
        rows.describe(rows.alias, warps(target))
        assert rows.launch(function, packed=packed) == 0
        assert rows.moved() == rows.expected()
        (launch,) = gpu.launches
        assert (launch.architecture, launch.kernel, launch.ctas, launch.threads) == (
            target,
            "kv_transfer_w16_i64",
            1,
            1024,
        )
        assert launch.kernarg == rows.block.array.tobytes()
        assert gpu.coverage["S_ENDPGM"] == warps(target)


@pytest.mark.parametrize("target", TARGETS)
def test_a_host_address_is_a_fault_that_stays(fake_hip: FakeHip, rows: Rows, target: str) -> None:
    with on(fake_hip, target) as gpu:
        function = rows.load(image_of(target))
        rows.describe(rows.pool.address, warps(target))
        assert rows.launch(function) == ILLEGAL_ADDRESS
        assert isinstance(gpu.fault, DeviceFault)
        assert rows.pool.address <= gpu.fault.address < rows.pool.address + PAGE
        assert not gpu.fault.is_write
        assert fake_hip.call("hipDeviceSynchronize") == ILLEGAL_ADDRESS
        assert rows.launch(function) == ILLEGAL_ADDRESS
        assert len(gpu.launches) == 1


def test_without_aliases_the_host_address_is_right(fake_hip: FakeHip) -> None:
    """An APU, and memory that the kernel driver maps alike: both addresses are one."""
    fake_hip.set_alias(False)
    rows = Rows(fake_hip)
    assert rows.alias == rows.pool.address
    with on(fake_hip, "gfx942"):
        function = rows.load(image_of("gfx942"))
        rows.describe(rows.pool.address, warps("gfx942"))
        assert rows.launch(function) == 0
    assert rows.moved() == rows.expected()


def test_images_of_other_processors_and_machines_are_refused(fake_hip: FakeHip, rows: Rows, manifest: Manifest) -> None:
    fake_hip.set_architecture("gfx942:sramecc+:xnack-")
    for artefact in manifest.artefacts:
        if artefact.kind in ("hsaco", "cubin") and artefact.target not in ("gfx942", "gfx9-4-generic"):
            with pytest.raises(OSError, match=str(NO_BINARY)):
                rows.load(manifest.read(artefact))
    with pytest.raises(OSError, match=str(NOT_FOUND)):
        rows.load(image_of("gfx942"), "kv_transfer_w3_i64")


@pytest.mark.parametrize(
    ("architecture", "number", "loads"),
    [
        ("gfx942", 0x5F, True),
        ("gfx90a", 0x5F, False),
        ("gfx1151", 0x54, True),
        ("gfx1201", 0x59, True),
        ("gfx1201", 0x54, False),
    ],
)
def test_a_generic_image_suits_its_family(
    fake_hip: FakeHip, rows: Rows, architecture: str, number: int, loads: bool
) -> None:
    image = bytearray(image_of("gfx942"))
    image[48] = number  # e_flags
    fake_hip.set_architecture(architecture)
    if loads:
        assert rows.load(bytes(image)).value
    else:
        with pytest.raises(OSError, match=str(NO_BINARY)):
            rows.load(bytes(image))


def test_what_the_emulator_does_not_know_fails_the_launch_and_the_test(
    fake_hip: FakeHip, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object) -> None:
        raise UnknownInstruction("V_SIN_F32", "gfx942")

    gpu = on(fake_hip, "gfx942")
    function = rows.load(image_of("gfx942"))
    rows.describe(rows.alias, warps("gfx942"))
    monkeypatch.setattr(device_module, "execute", unknown)
    assert rows.launch(function) == LAUNCH_FAILURE
    assert gpu.fault is None
    with pytest.raises(UnknownInstruction, match="V_SIN_F32 on gfx942"):
        gpu.close()


def test_an_argument_block_of_another_size_does_not_launch(fake_hip: FakeHip, rows: Rows) -> None:
    gpu = on(fake_hip, "gfx942")
    function, nbytes = rows.load(image_of("gfx942")), ctypes.c_size_t(abi.ARGS_NBYTES - 8)
    rows.describe(rows.alias, warps("gfx942"))
    extra = (ctypes.c_void_p * 5)(1, rows.block.address, 2, ctypes.addressof(nbytes), 3)
    launched = fake_hip.call("hipModuleLaunchKernel", function, 1, 1, 1, 64, 1, 1, 0, None, None, extra)
    assert launched == LAUNCH_FAILURE
    with pytest.raises(BadLaunch, match="584"):
        gpu.close()


def test_memory_that_was_given_back_is_out_of_reach(fake_hip: FakeHip, rows: Rows) -> None:
    with on(fake_hip, "gfx1100") as gpu:
        function = rows.load(image_of("gfx1100"))
        rows.describe(rows.alias, warps("gfx1100"))
        assert fake_hip.call("hipHostUnregister", ctypes.c_void_p(rows.pool.address)) == 0
        assert rows.launch(function) == ILLEGAL_ADDRESS
        assert gpu.fault is not None
        assert rows.alias <= gpu.fault.address < rows.alias + PAGE
