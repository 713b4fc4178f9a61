"""What can go wrong between a HIP runtime, hip-python and the code objects, each told by an error of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.drivers.errors import DriverError, NoArtefact
from kvferry.drivers.hip import HipDriver
from kvferry.kernels_cubin.launch_hip import HipLauncher
from kvferry.kernels_cubin.manifest import Manifest

from fakes.build import build_fake
from fakes.hip import FakeHip
from support.process import run_python


@pytest.fixture
def manifest() -> Manifest:
    return Manifest.load()


@pytest.mark.parametrize(
    ("architecture", "file", "lanes"),
    [
        ("gfx90a:sramecc+:xnack-", "kv_transfer.gfx90a.hsaco", 64),
        ("gfx942:sramecc+:xnack-", "kv_transfer.gfx942.hsaco", 64),
        ("gfx1030", "kv_transfer.gfx1030.hsaco", 32),
        ("gfx1102", "kv_transfer.gfx11-generic.hsaco", 32),
        ("gfx1201", "kv_transfer.gfx1201.hsaco", 32),
    ],
)
def test_the_code_object_for_the_device(
    fake_hip: FakeHip, manifest: Manifest, architecture: str, file: str, lanes: int
) -> None:
    """By gcnArchName: the named target, then the generic one; padded, for the runtime reads on behind the image."""
    fake_hip.set_architecture(architecture)
    launcher = HipLauncher(HipDriver(), 0, manifest)
    assert (launcher.artefact.file, launcher.warp_lanes) == (file, lanes)
    image = manifest.read(launcher.artefact)
    assert fake_hip.image()[: len(image)] == image


@pytest.mark.parametrize("architecture", ["gfx906:sramecc+:xnack-", "gfx1250"])
def test_a_device_without_a_code_object(fake_hip: FakeHip, manifest: Manifest, architecture: str) -> None:
    """Scenario 3: before any launch, with the architecture, what is shipped, and why each was passed over."""
    fake_hip.set_architecture(architecture)
    with pytest.raises(NoArtefact, match=architecture.partition(":")[0]) as caught:
        HipLauncher(HipDriver(), 0, manifest)
    assert set(caught.value.rejected) == {artefact.file for artefact in manifest.artefacts}
    assert not fake_hip.calls("hipModuleLoadData")


def test_a_runtime_that_refuses_the_named_one_gets_the_generic_one(fake_hip: FakeHip, manifest: Manifest) -> None:
    """209 for the first choice is no end yet; for every choice it is, and the runtime's words are kept."""
    fake_hip.set_architecture("gfx1100")
    fake_hip.fail("hipModuleLoadData", 209)
    assert HipLauncher(HipDriver(), 0, manifest).artefact.file == "kv_transfer.gfx11-generic.hsaco"
    fake_hip.fail("hipModuleLoadData", 209, nth=0)
    with pytest.raises(NoArtefact) as caught:
        HipLauncher(HipDriver(), 0, manifest)
    for file in ("kv_transfer.gfx1100.hsaco", "kv_transfer.gfx11-generic.hsaco"):
        assert "209 hipErrorNoBinaryForGpu" in caught.value.rejected[file]


def test_a_failed_call_leaves_no_error_behind(fake_hip: FakeHip, manifest: Manifest) -> None:
    """HIP keeps a thread's last error, and torch asks for it after its own launches."""
    fake_hip.set_architecture("gfx1030")
    fake_hip.fail("hipModuleLoadData", 209, nth=0)
    with pytest.raises(NoArtefact):
        HipLauncher(HipDriver(), 0, manifest)
    assert fake_hip.call("hipGetLastError") == 0


def test_two_runtimes_are_a_conflict(fakes_dir: Path) -> None:
    """Torch's own copy beside the system's: an error that names both files, instead of addresses of the wrong one."""
    first, second = build_fake("hip", fakes_dir), build_fake("hip", fakes_dir, soname="libamdhip64.so.6")
    printed = run_python(
        f"""
        import ctypes
        from fakes.hip import FakeHip
        FakeHip({str(first)!r})
        ctypes.CDLL({str(second)!r})
        from kvferry.drivers.errors import RuntimeConflict
        from kvferry.hostpool.backend import open_backend
        try:
            open_backend("rocm").launcher(0)
        except RuntimeConflict as error:
            print(error)
        """
    )
    assert str(first) in printed
    assert str(second) in printed


def test_hip_python_uses_the_drivers_file(fakes_dir: Path, tmp_path: Path) -> None:
    """hip-python would open the bare name; it gets the file that is mapped already, and there is one runtime."""
    path = build_fake("hip", fakes_dir)
    printed = run_python(
        f"""
        from fakes.hip import FakeHip
        fake = FakeHip({str(path)!r})
        from kvferry.drivers.loader import mapped_libraries
        from kvferry.hostpool.backend import open_backend
        backend = open_backend("rocm")
        fake.log()
        backend.launcher(0)
        print(any(call.name == "hipModuleLoadData" for call in fake.log()))
        print(mapped_libraries(r"libamdhip64.*"), backend.driver.library)
        """,
        env={"LD_LIBRARY_PATH": str(tmp_path), "ROCM_PATH": str(tmp_path)},
    )
    assert printed.splitlines() == ["True", f"[{str(path)!r}] {path}"]


def test_without_hip_python(fakes_dir: Path) -> None:
    """The error says which extra to install."""
    path = build_fake("hip", fakes_dir)
    printed = run_python(
        f"""
        import sys
        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("hip", "rocm"):
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        sys.meta_path.insert(0, Absent())
        from fakes.hip import FakeHip
        FakeHip({str(path)!r})
        from kvferry.drivers.errors import LauncherNotFound
        from kvferry.hostpool.backend import open_backend
        try:
            open_backend("rocm").launcher(0)
        except LauncherNotFound as error:
            print(error)
        """
    )
    assert "kvferry[rocm]" in printed


def test_without_a_runtime() -> None:
    printed = run_python(
        """
        from kvferry.drivers.errors import DriverNotFound
        from kvferry.hostpool.backend import open_backend
        try:
            open_backend("rocm")
        except DriverNotFound as error:
            print(sorted(error.tried))
        """
    )
    assert printed == "['libamdhip64.so', 'libamdhip64.so.6', 'libamdhip64.so.7']\n"


def test_an_error_of_the_launcher_is_the_drivers(fake_hip: FakeHip, manifest: Manifest) -> None:
    fake_hip.fail("hipModuleGetFunction", 500)
    fake_hip.set_architecture("gfx90a")
    with pytest.raises(NoArtefact, match="hipModuleGetFunction failed with 500") as caught:
        HipLauncher(HipDriver(), 0, manifest)
    assert not isinstance(caught.value, DriverError)
