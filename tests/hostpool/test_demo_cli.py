"""``kvferry demo`` and ``kvferry artefacts``: what they print, and the exit code that scripts go by."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import get_args

import pytest

from kvferry.hostpool import DevicePool, HostPool, Ticket
from kvferry.hostpool.cli import main
from kvferry.hostpool.layout import PageOrder
from kvferry.kernels_cubin.manifest import Manifest

DEMO = ["demo", "--platform", "stand-in"]


def test_demo_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DEMO, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found = json.loads(out)
    assert set(found) == {
        "ok",
        "platform",
        "device",
        "driver",
        "artefact",
        "domain",
        "nbytes",
        "load_gbps",
        "store_gbps",
    }
    assert found["ok"] is True
    assert found["platform"] == "stand-in"
    assert set(found["artefact"]) == {"file", "sha256"}
    listed = {artefact.file: artefact.sha256 for artefact in Manifest.load().artefacts}
    assert listed[found["artefact"]["file"]] == found["artefact"]["sha256"]
    assert set(found["domain"]) == {"kind", "reason"}
    assert found["domain"]["kind"] == "alias"
    assert "host address 0x" in found["domain"]["reason"]
    assert found["nbytes"] == 256 * 32 * 2 * 8 * 128 * 2
    assert found["load_gbps"] > 0 < found["store_gbps"]


@pytest.mark.parametrize("order", get_args(PageOrder))
def test_demo_for_people(capsys: pytest.CaptureFixture[str], order: str) -> None:
    assert main([*DEMO, "--order", order]) == 0
    out = capsys.readouterr().out
    assert "all bytes equal" in out
    assert "domain       alias: chunk 0 of 1 has host address" in out


def break_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads that move nothing, and say that all is well."""
    real = HostPool.load

    def load(
        self: HostPool, device_pool: DevicePool, from_host: object, to_device: object, *, stream: object
    ) -> Ticket:
        return real(self, device_pool, [-1], [-1], stream=stream)

    monkeypatch.setattr(HostPool, "load", load)


def test_demo_that_moves_nothing_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    break_load(monkeypatch)
    assert main([*DEMO, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
    assert main(DEMO) == 1
    assert "bytes differ" in capsys.readouterr().out


def test_demo_on_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DEMO, "--device", "7", "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvferry: ")
    assert "device 7 of 1" in err
    assert err.count("\n") == 1


def test_arguments_that_do_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["demo", "--platform", "metal"], ["demo", "--order", "token_first"], []):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    assert "invalid choice: 'metal'" in capsys.readouterr().err


def test_artefacts_lists_every_binary(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["artefacts", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [set(row) for row in rows] == [{"file", "target", "kind", "sha256", "verified"}] * len(rows)
    shipped = Manifest.load()
    assert {row["file"]: row["sha256"] for row in rows} == {a.file: a.sha256 for a in shipped.artefacts}
    assert all(row["verified"] is True for row in rows)
    assert main(["artefacts"]) == 0
    out, err = capsys.readouterr()
    assert out.count("verified") == len(rows)
    assert err == ""


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the shipped files that the command takes for the installed ones."""
    real, shipped = Manifest.load, Manifest.load()
    for file in ["manifest.json", *(artefact.file for artefact in shipped.artefacts)]:
        shutil.copy(shipped.directory / file, tmp_path / file)
    monkeypatch.setattr(Manifest, "load", lambda directory=None: real(directory or tmp_path))
    return tmp_path


def test_a_flipped_byte_is_found(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copied / "kv_transfer.sm_90.cubin"
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    assert main(["artefacts", "--json"]) == 1
    out, err = capsys.readouterr()
    assert [row["file"] for row in json.loads(out) if not row["verified"]] == [path.name]
    assert err.startswith(f"kvferry: {path.name}: ")
    assert "is not the file that was shipped" in err
    assert err.count("\n") == 1
    assert main(["artefacts"]) == 1


def test_a_manifest_that_is_missing(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copied / "manifest.json").unlink()
    assert main(["artefacts"]) == 2
    assert capsys.readouterr().err.startswith("kvferry: cannot read ")


def test_a_stand_in_kernel_that_was_altered_is_never_loaded(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from kvferry.drivers.errors import ArtefactError
    from kvferry.hostpool.backend import stand_in

    backend = stand_in()
    file = backend.launcher(0).artefact.file
    (copied / file).write_bytes(b"\x7fELF")
    with pytest.raises(ArtefactError, match="is not the file that was shipped"):
        stand_in().launcher(0)
