"""A driver gets exactly the bytes that were shipped, or the user gets a sentence that says what to do."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry.drivers.errors import ArtefactError
from kvferry.kernels_cubin import abi
from kvferry.kernels_cubin.manifest import Artefact, Manifest

Document = dict[str, Any]


def pick(manifest: Manifest, file: str) -> Artefact:
    return next(artefact for artefact in manifest.artefacts if artefact.file == file)


def edit(folder: Path, change: Callable[[Document], object]) -> None:
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_every_shipped_file_is_what_the_manifest_says(shipped: Manifest) -> None:
    problems = shipped.verify()
    assert set(problems) == set(shipped.artefacts)
    assert not any(problems.values()), problems
    assert {artefact.kind for artefact in problems} == {"cubin", "ptx", "hsaco", "host"}


def test_no_binary_lies_beside_the_manifest_unlisted(shipped: Manifest) -> None:
    lying = {path.name for kind in ("cubin", "ptx", "hsaco", "so") for path in shipped.directory.glob(f"*.{kind}")}
    assert lying == {artefact.file for artefact in shipped.artefacts}


def test_it_was_built_from_the_sources_that_lie_beside_it(shipped: Manifest) -> None:
    assert set(shipped.sources) >= {"kv_transfer.cu", "kv_platform.h", "kv_host.h"}
    for file, expected in shipped.sources.items():
        assert hashlib.sha256((shipped.directory / file).read_bytes()).hexdigest() == expected, file


def test_the_compiler_and_python_agree_on_the_argument_block(shipped: Manifest) -> None:
    fields = abi.ARGS.fields
    assert fields is not None
    python = {name: (entry[1], entry[0].itemsize) for name, entry in fields.items()}
    assert {field.name: (field.offset, field.nbytes) for field in shipped.parameters} == python
    assert shipped.args_nbytes == abi.ARGS.itemsize == abi.ARGS_NBYTES


def test_read_gives_the_bytes(shipped: Manifest) -> None:
    artefact = shipped.artefacts[0]
    assert shipped.read(artefact) == (shipped.directory / artefact.file).read_bytes()


def test_a_flipped_bit_is_found_and_named(copied: Path) -> None:
    manifest = Manifest.load(copied)
    artefact = pick(manifest, "kv_transfer.sm_90.cubin")
    path = copied / artefact.file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)

    with pytest.raises(ArtefactError) as caught:
        manifest.read(artefact)

    message = str(caught.value)
    assert artefact.file in message
    assert artefact.sha256 in message
    assert hashlib.sha256(data).hexdigest() in message
    assert "reinstall" in message
    damaged = {found.file for found, problem in manifest.verify().items() if problem}
    assert damaged == {artefact.file}


@pytest.mark.parametrize("kept", [0, 1000])
def test_a_truncated_file_is_refused_with_both_sizes(copied: Path, kept: int) -> None:
    manifest = Manifest.load(copied)
    artefact = pick(manifest, "kv_transfer.gfx942.hsaco")
    path = copied / artefact.file
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ArtefactError, match=rf"expected {artefact.nbytes} bytes .* found {kept} bytes"):
        manifest.read(artefact)


def test_a_missing_file_is_refused(copied: Path) -> None:
    manifest = Manifest.load(copied)
    artefact = manifest.artefacts[0]
    (copied / artefact.file).unlink()
    with pytest.raises(ArtefactError, match=rf"cannot read .*{artefact.file} \(No such file.*reinstall"):
        manifest.read(artefact)
    assert manifest.verify()[artefact] is not None


def test_no_environment_variable_lets_a_damaged_file_through(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVFERRY_SKIP_CHECKSUMS", "KVFERRY_NO_VERIFY", "KVFERRY_TOOLCHAIN", "PYTHONOPTIMIZE"):
        monkeypatch.setenv(name, "1")
    manifest = Manifest.load(copied)
    (copied / manifest.artefacts[0].file).write_bytes(b"\x7fELF")
    with pytest.raises(ArtefactError):
        manifest.read(manifest.artefacts[0])


def test_a_missing_manifest(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match=r"cannot read .*manifest\.json \(No such file.*reinstall"):
        Manifest.load(tmp_path)


def test_another_kernel_abi_names_both_versions(copied: Path) -> None:
    edit(copied, lambda document: document.update(kernel_abi=abi.KERNEL_ABI + 41))
    with pytest.raises(
        ArtefactError, match=rf"ABI {abi.KERNEL_ABI + 41}, and this kvferry speaks ABI {abi.KERNEL_ABI}:"
    ):
        Manifest.load(copied)


def test_another_kernel_abi_is_told_even_if_the_rest_has_changed_too(copied: Path) -> None:
    (copied / "manifest.json").write_text('{"kernel_abi": 7, "binaries": {}}')
    with pytest.raises(ArtefactError, match="kernels of ABI 7"):
        Manifest.load(copied)


def test_other_arguments_under_the_same_abi_are_refused(copied: Path) -> None:
    edit(copied, lambda document: document.update(args_nbytes=abi.ARGS_NBYTES + 8))
    with pytest.raises(ArtefactError, match=rf"with {abi.ARGS_NBYTES + 8} bytes of arguments.*expects"):
        Manifest.load(copied)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"text"', "\udcff"])
def test_what_is_not_a_manifest_is_malformed(copied: Path, text: str) -> None:
    (copied / "manifest.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ArtefactError, match=r"manifest\.json is malformed: .*reinstall"):
        Manifest.load(copied)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda document: document.pop("kernel_abi"), "'kernel_abi' is missing"),
        (lambda document: document.pop("artefacts"), "'artefacts' is missing"),
        (lambda document: document.update(artefacts={}), "not a list"),
        (lambda document: document.update(args_nbytes="584"), "not a number"),
        (lambda document: document.update(args_nbytes=True), "not a number"),
        (lambda document: document["artefacts"][0].pop("sha256"), "'sha256' is missing"),
        (lambda document: document["artefacts"][0].update(sha256="0" * 63), "'sha256' is"),
        (lambda document: document["artefacts"][0].update(sha256=""), "'sha256' is"),
        (lambda document: document["artefacts"][0].update(kind="exe"), "'kind' is 'exe'"),
        (lambda document: document["artefacts"][0].update(file="../other.cubin"), "'file' is"),
        (lambda document: document["artefacts"][0].update(file="/etc/passwd"), "'file' is"),
        (lambda document: document["artefacts"].append(document["artefacts"][0]), "listed twice"),
    ],
)
def test_a_damaged_entry_is_malformed(copied: Path, change: Callable[[Document], object], complaint: str) -> None:
    edit(copied, change)
    with pytest.raises(ArtefactError, match=rf"malformed: .*{complaint}"):
        Manifest.load(copied)
