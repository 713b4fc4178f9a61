"""The list of shipped kernel binaries, and the only way to their bytes: checked against the list first.

``manifest.json`` is written by ``scripts/build_kernels.py`` together with the binaries. A binary that was cut short,
exchanged or edited would at best be refused by a driver and at worst run, so ``Manifest.read`` compares size and
SHA-256 on every read and there is no way around it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast, get_args

from kvferry.drivers.errors import ArtefactError
from kvferry.kernels_cubin import abi

MANIFEST_FILE = "manifest.json"

Kind = Literal["cubin", "ptx", "hsaco", "host"]

_REINSTALL = "reinstall kvferry (pip install --force-reinstall --no-cache-dir kvferry)"


@dataclass(frozen=True)
class Artefact:
    """One shipped binary.

    ``target`` is ``sm_90``, ``gfx942`` or a ``platform.machine()``. A ``ptx`` is text, without a NUL at its end.
    """

    file: str
    target: str
    kind: Kind
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Parameter:
    """A top-level field of the kernels' argument block; offset and size in bytes."""

    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Manifest:
    """The shipped binaries of one folder, all of the kernel ABI that this version of kvferry speaks."""

    directory: Path
    kernel_abi: int
    args_nbytes: int
    kernels: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    artefacts: tuple[Artefact, ...]
    sources: Mapping[str, str] = field(hash=False)
    """SHA-256 of each source file that the binaries were built from."""
    toolchain: Mapping[str, str] = field(hash=False)
    """Version of each compiler that built them."""

    @classmethod
    def load(cls, directory: Path | None = None) -> Manifest:
        """The manifest of ``directory``, or of the installed package.

        Raises ``ArtefactError`` if it is missing, malformed, or of other kernels than ``abi.py`` describes.
        """
        folder = Path(__file__).resolve().parent if directory is None else directory
        path = folder / MANIFEST_FILE
        try:
            document = json.loads(path.read_bytes())
        except OSError as error:
            raise ArtefactError(f"cannot read {path} ({error.strerror}): {_REINSTALL}") from error
        except ValueError as error:
            raise ArtefactError(f"{path} is malformed: not JSON ({error}); {_REINSTALL}") from error
        try:
            # Before anything else: a manifest of another ABI may well have other fields.
            found = _integer(_object(document), "kernel_abi")
            if found != abi.KERNEL_ABI:
                raise ArtefactError(
                    f"{path} has kernels of ABI {found}, and this kvferry speaks ABI {abi.KERNEL_ABI}: "
                    f"files of two versions are mixed; {_REINSTALL}"
                )
            manifest = cls(
                directory=folder,
                kernel_abi=found,
                args_nbytes=_integer(document, "args_nbytes"),
                kernels=tuple(_names(document, "kernels")),
                parameters=tuple(_parameter(entry) for entry in _list(document, "parameters")),
                artefacts=tuple(_artefact(entry) for entry in _list(document, "artefacts")),
                sources=_strings(document, "sources"),
                toolchain=_strings(document, "toolchain"),
            )
            files = [artefact.file for artefact in manifest.artefacts]
            if len(set(files)) != len(files):
                raise _Malformed("a file is listed twice")
        except _Malformed as error:
            raise ArtefactError(f"{path} is malformed: {error}; {_REINSTALL}") from error
        if (manifest.args_nbytes, set(manifest.kernels)) != (abi.ARGS_NBYTES, set(abi.KERNELS)):
            raise ArtefactError(
                f"{path} has kernels {', '.join(manifest.kernels)} with {manifest.args_nbytes} bytes of arguments; "
                f"this kvferry expects {', '.join(abi.KERNELS)} with {abi.ARGS_NBYTES}: rebuild them or {_REINSTALL}"
            )
        return manifest

    def read(self, artefact: Artefact) -> bytes:
        """The bytes of a binary, which are exactly those that were checked.

        Raises ``ArtefactError`` if the file is missing, has another size, or another SHA-256 than the manifest says.
        """
        path = self.directory / artefact.file
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ArtefactError(f"cannot read {path} ({error.strerror}): {_REINSTALL}") from error
        found = hashlib.sha256(data).hexdigest()
        if len(data) != artefact.nbytes or found != artefact.sha256:
            raise ArtefactError(
                f"{path} is not the file that was shipped: expected {artefact.nbytes} bytes with sha256 "
                f"{artefact.sha256}, found {len(data)} bytes with sha256 {found}; {_REINSTALL}"
            )
        return data

    def verify(self) -> dict[Artefact, str | None]:
        """Every artefact with what is wrong with its file, or ``None``."""
        problems: dict[Artefact, str | None] = {}
        for artefact in self.artefacts:
            try:
                self.read(artefact)
            except ArtefactError as error:
                problems[artefact] = str(error)
            else:
                problems[artefact] = None
        return problems


class _Malformed(Exception):
    """The JSON is not a manifest."""


def _object(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise _Malformed(f"{value!r:.40} where an object belongs")
    return value


def _get(document: Mapping[str, object], key: str) -> object:
    if key not in document:
        raise _Malformed(f"{key!r} is missing")
    return document[key]


def _integer(document: Mapping[str, object], key: str) -> int:
    value = _get(document, key)
    if type(value) is not int or value < 0:
        raise _Malformed(f"{key!r} is {value!r:.40}, not a number")
    return value


def _string(document: Mapping[str, object], key: str, pattern: str) -> str:
    value = _get(document, key)
    if not isinstance(value, str) or not re.fullmatch(pattern, value):
        raise _Malformed(f"{key!r} is {value!r:.80}")
    return value


def _list(document: Mapping[str, object], key: str) -> list[object]:
    value = _get(document, key)
    if not isinstance(value, list):
        raise _Malformed(f"{key!r} is {value!r:.40}, not a list")
    return value


def _names(document: Mapping[str, object], key: str) -> list[str]:
    return [_string({key: name}, key, r"\w+") for name in _list(document, key)]


def _strings(document: Mapping[str, object], key: str) -> dict[str, str]:
    values = _object(_get(document, key))
    return {name: _string(values, name, r"[\w.+-]+") for name in values}


def _parameter(entry: object) -> Parameter:
    values = _object(entry)
    return Parameter(_string(values, "name", r"\w+"), _integer(values, "offset"), _integer(values, "nbytes"))


def _artefact(entry: object) -> Artefact:
    values = _object(entry)
    return Artefact(
        file=_string(values, "file", r"\w[\w.-]*"),  # a name in this folder, never a path out of it
        target=_string(values, "target", r"[\w-]+"),
        kind=cast("Kind", _string(values, "kind", "|".join(get_args(Kind)))),
        nbytes=_integer(values, "nbytes"),
        sha256=_string(values, "sha256", r"[0-9a-f]{64}"),
    )
