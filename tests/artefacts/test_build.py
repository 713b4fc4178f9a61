"""The checked-in binaries are what the source and the pinned compilers give, byte for byte."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.kernels_cubin.manifest import Manifest

from build_kernels import MANIFEST, TARGETS, Interface, Target, check_binary, differences, write
from toolchain import BuildError

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "build_kernels.py"


@pytest.mark.toolchain
def test_building_again_gives_the_same_bytes() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def interface(manifest: Manifest, *, args_nbytes: int | None = None) -> Interface:
    return Interface(manifest.kernel_abi, args_nbytes or manifest.args_nbytes, manifest.kernels, ())


def as_built(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in [MANIFEST, *(target.file for target in TARGETS)]}


def test_check_names_what_is_altered_missing_and_unexpected(copied: Path) -> None:
    built = as_built(copied)
    assert differences(built, copied) == {}

    altered, missing = copied / "kv_transfer.sm_90.cubin", copied / "kv_transfer.gfx942.hsaco"
    altered.write_bytes(altered.read_bytes() + b"\0")
    missing.unlink()
    (copied / "kv_transfer.sm_10.cubin").write_bytes(b"")

    problems = differences(built, copied)
    assert set(problems) == {altered.name, missing.name, "kv_transfer.sm_10.cubin"}
    assert problems[altered.name].startswith("differs")
    assert problems[missing.name] == "missing"
    assert problems["kv_transfer.sm_10.cubin"].startswith("unexpected")


def test_writing_makes_the_folder_what_was_built(copied: Path) -> None:
    built = as_built(copied)
    (copied / "kv_transfer.sm_10.cubin").write_bytes(b"")
    (copied / "kv_transfer.sm_90.cubin").unlink()
    write(built, copied)
    assert differences(built, copied) == {}
    assert {path.stat().st_mode & 0o777 for path in copied.iterdir()} == {0o644}


def test_every_target_is_shipped_and_nothing_else(shipped: Manifest) -> None:
    assert [(target.file, target.name, target.kind) for target in TARGETS] == [
        (artefact.file, artefact.target, artefact.kind) for artefact in shipped.artefacts
    ]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.file)
def test_a_binary_that_is_not_what_was_asked_for_fails_the_build(target: Target, shipped: Manifest) -> None:
    data = (shipped.directory / target.file).read_bytes()
    check_binary(target, data, interface(shipped))
    with pytest.raises(BuildError, match="built for"):
        check_binary(
            Target({"host": "riscv64"}.get(target.kind, "sm_10"), target.kind, target.elf_abi), data, interface(shipped)
        )
    if target.kind != "host":
        with pytest.raises(BuildError, match="bytes"):
            check_binary(target, data, interface(shipped, args_nbytes=592))
        with pytest.raises(BuildError, match="kernels"):
            check_binary(target, data, Interface(1, 584, (*shipped.kernels, "kv_other"), ()))


def test_pins_carry_hashes_and_no_address() -> None:
    text = SCRIPT.with_name("toolchain.txt").read_text()
    pins = re.findall(r"^([\w-]+)==[\d.]+((?: \\\n +--hash=sha256:[0-9a-f]{64}){2})$", text, re.MULTILINE)
    assert [name for name, _ in pins] == ["ziglang", "nvidia-cuda-nvcc-cu12"]
    assert "/" not in re.sub(r"#.*", "", text)
    assert "index" not in text
