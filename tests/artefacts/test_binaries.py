"""What the shipped binaries say of themselves, read without a GPU and without a vendor's tools."""

from __future__ import annotations

import io
import re
import tempfile
import zipfile
from pathlib import Path

import pytest

from kvferry.kernels_cubin import abi
from kvferry.kernels_cubin.manifest import Artefact, Kind, Manifest

from elf import MACHINES, Elf, MalformedBinary, read_cubin, read_hsaco, unpack_messagepack

SHIPPED = Manifest.load()


def each(*kinds: Kind) -> pytest.MarkDecorator:
    chosen = [artefact for artefact in SHIPPED.artefacts if artefact.kind in kinds]
    assert chosen
    return pytest.mark.parametrize("artefact", chosen, ids=lambda artefact: artefact.file)


@each("cubin", "hsaco")
def test_every_kernel_is_there_and_takes_the_argument_block(artefact: Artefact) -> None:
    binary = (read_cubin if artefact.kind == "cubin" else read_hsaco)(SHIPPED.read(artefact))
    assert binary.target == artefact.target
    assert set(binary.kernels) == set(abi.KERNELS)
    assert {kernel.args_nbytes for kernel in binary.kernels.values()} == {abi.ARGS_NBYTES}


@each("hsaco")
def test_amd_kernels_keep_everything_in_registers(artefact: Artefact) -> None:
    for name, kernel in read_hsaco(SHIPPED.read(artefact)).kernels.items():
        assert (kernel.spilled_registers, kernel.stack_nbytes) == (0, 0), name


@each("hsaco")
def test_amd_code_objects_are_of_the_oldest_version_that_serves(artefact: Artefact) -> None:
    """V5 for named processors, V6 for generic ones: ELFABIVERSION_AMDGPU_HSA_V5 is 3, _V6 is 4."""
    assert read_hsaco(SHIPPED.read(artefact)).elf_abi == (4 if artefact.target.endswith("generic") else 3)


@each("cubin")
def test_cubins_hardly_spill(artefact: Artefact) -> None:
    # 64 registers a thread is what 1024 threads a CTA leave; a few values of some kernels do not fit.
    for name, kernel in read_cubin(SHIPPED.read(artefact)).kernels.items():
        assert kernel.stack_nbytes <= (32 if artefact.target in ("sm_75", "sm_80", "sm_86", "sm_89") else 0), name


@each("cubin")
def test_cubins_have_the_elf_abi_of_the_oldest_driver_that_may_load_them(artefact: Artefact) -> None:
    assert read_cubin(SHIPPED.read(artefact)).elf_abi == (8 if artefact.target in ("sm_100", "sm_120") else 7)


@each("ptx")
def test_ptx_is_for_old_drivers_and_copies_no_arguments(artefact: Artefact) -> None:
    text = SHIPPED.read(artefact).decode("ascii")
    version, target = re.findall(r"^\.(?:version|target) (\S+)$", text, re.MULTILINE)
    assert tuple(map(int, version.split("."))) <= (8, 0)  # CUDA 12.0, the oldest driver that is served
    assert target == artefact.target
    assert set(re.findall(r"\.entry (\w+)\(", text)) == set(abi.KERNELS)
    assert re.findall(r"_param_0\[(\d+)\]$", text, re.MULTILINE) == [str(abi.ARGS_NBYTES)] * len(abi.KERNELS)
    assert ".local" not in text
    assert "//" not in text


@each("host")
def test_the_stand_in_needs_nothing_and_exports_three_functions(artefact: Artefact) -> None:
    elf = Elf(SHIPPED.read(artefact))
    symbols = [symbol for symbol in elf.symbols(dynamic=True) if symbol.name]
    assert MACHINES[elf.machine] == artefact.target
    assert [symbol.name for symbol in symbols if not symbol.section] == []
    assert {symbol.name for symbol in symbols} == {"kv_host_abi", "kv_host_find", "kv_host_launch"}
    assert {section.name for section in elf.sections}.isdisjoint({".init", ".init_array", ".interp"})


@each("cubin", "ptx", "hsaco", "host")
def test_no_path_of_the_machine_that_built_it(artefact: Artefact) -> None:
    data = SHIPPED.read(artefact)
    places = {tempfile.gettempdir(), "/tmp/", "/home/", "/Users/", "site-packages", "kvferry-build-", "kv_transfer.cu"}
    places |= {str(path) for path in (Path.home(), Path(__file__).resolve().parents[2]) if len(path.parts) > 1}
    assert [place for place in sorted(places) if place.encode() in data] == []


def test_all_of_them_zipped_stay_below_two_megabytes() -> None:
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for artefact in SHIPPED.artefacts:
            archive.writestr(artefact.file, SHIPPED.read(artefact))
    assert len(wheel.getvalue()) < 2_000_000


def test_files_are_readable_by_everybody_and_not_executable() -> None:
    modes = {
        artefact.file: (SHIPPED.directory / artefact.file).stat().st_mode & 0o777 for artefact in SHIPPED.artefacts
    }
    assert all(mode & 0o111 == 0 and mode & 0o400 for mode in modes.values()), modes


def test_the_reader_refuses_what_it_does_not_understand() -> None:
    cubin = SHIPPED.read(next(artefact for artefact in SHIPPED.artefacts if artefact.kind == "cubin"))
    hsaco = SHIPPED.read(next(artefact for artefact in SHIPPED.artefacts if artefact.kind == "hsaco"))
    with pytest.raises(MalformedBinary, match="not a 64-bit"):
        Elf(b"MZ" + cubin[2:])
    with pytest.raises(MalformedBinary, match="cut short"):
        Elf(cubin[: len(cubin) // 2])
    with pytest.raises(MalformedBinary, match="not a CUDA binary"):
        read_cubin(hsaco)
    with pytest.raises(MalformedBinary, match="not an AMD code object"):
        read_hsaco(cubin)


@pytest.mark.parametrize(
    ("packed", "value"),
    [
        ("05", 5),
        ("ff", -1),
        ("cd0248", 584),
        ("d1fffe", -2),
        ("c0", None),
        ("c3", True),
        ("a26869", "hi"),
        ("d9026869", "hi"),
        ("9201a161", [1, "a"]),
        ("dc000201a161", [1, "a"]),
        ("81a16101", {"a": 1}),
        ("de0001a16101", {"a": 1}),
    ],
)
def test_messagepack(packed: str, value: object) -> None:
    assert unpack_messagepack(bytes.fromhex(packed)) == value


def test_messagepack_of_unknown_type_is_refused() -> None:
    with pytest.raises(MalformedBinary, match="0xcb"):
        unpack_messagepack(b"\xcb" + b"\0" * 8)
