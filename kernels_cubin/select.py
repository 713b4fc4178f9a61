"""Which shipped binary runs on a device, and why each of the others does not. Pure functions: data in, data out.

The rules are the vendors':

* A cubin runs on devices of its own major compute capability with the same or a higher minor; PTX is compiled by the
  driver for any device that is not older than it (CUDA C++ Programming Guide, "Binary Compatibility", "PTX
  Compatibility").
* A code object runs on the processor that it names, a generic one on each of its family, a little slower (LLVM, "User
  Guide for AMDGPU Backend", "Target Processors", "Generic Processors").
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvferry.drivers.errors import NoArtefact
from kvferry.drivers.protocol import Platform
from kvferry.kernels_cubin.manifest import Artefact

OLDEST_CUDA_DRIVER = 12000
"""CUDA 12.0 brought ``cuLibraryLoadData``, which loads every kernel here (CUDA driver API, library management)."""

BLACKWELL_DRIVER = 12080
"""CUDA 12.8 is the first that knows compute capability 10.0 and 12.0 (CUDA 12.8 release notes)."""

GENERIC_PROCESSORS = {
    "gfx9-4-generic": ("gfx942", "gfx950"),
    "gfx10-3-generic": ("gfx1030", "gfx1031", "gfx1032", "gfx1033", "gfx1034", "gfx1035", "gfx1036"),
    "gfx11-generic": ("gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153"),
    "gfx12-generic": ("gfx1200", "gfx1201"),
}
"""Which processors each generic one stands for."""

_PLATFORM_OF_KIND: dict[str, Platform] = {"cubin": "cuda", "ptx": "cuda", "hsaco": "rocm", "host": "stand-in"}


def choose(artefacts: Iterable[Artefact], platform: Platform, architecture: str, driver_version: int) -> list[Artefact]:
    """What runs on a device, best first, at least one; else ``NoArtefact`` with every reason. As ``candidates``."""
    accepted, rejected = candidates(artefacts, platform, architecture, driver_version)
    if not accepted:
        raise NoArtefact(architecture, rejected)
    return accepted


def candidates(
    artefacts: Iterable[Artefact], platform: Platform, architecture: str, driver_version: int
) -> tuple[list[Artefact], dict[str, str]]:
    """What runs on a device, best first, and for every other file the reason why it does not.

    ``architecture`` is what ``HostMemoryDriver.device_architecture`` says (``sm_90``; ``gfx942``, with or without
    features after a colon; ``x86_64``), ``driver_version`` what its ``version`` says; only CUDA's matters.
    """
    ranked: list[tuple[tuple[int, int, int], Artefact]] = []
    rejected: dict[str, str] = {}
    for artefact in artefacts:
        belongs_to = _PLATFORM_OF_KIND[artefact.kind]
        verdict: tuple[int, int, int] | str
        if belongs_to != platform:
            verdict = f"for {belongs_to}, and this device is {platform}"
        elif platform == "cuda":
            verdict = _judge_cuda(artefact, architecture, driver_version)
        else:
            verdict = _judge_by_name(artefact, architecture.partition(":")[0])
        if isinstance(verdict, str):
            rejected[artefact.file] = verdict
        else:
            ranked.append((verdict, artefact))
    ranked.sort(key=lambda entry: (entry[0], entry[1].file), reverse=True)
    return [artefact for _, artefact in ranked], rejected


def _judge_cuda(artefact: Artefact, architecture: str, driver_version: int) -> tuple[int, int, int] | str:
    """How well it fits (a cubin before PTX, then the newest), or why it does not."""
    device, built = _compute_capability(architecture), _compute_capability(artefact.target)
    if device is None:
        return f"the device's architecture {architecture!r} is not a compute capability like sm_90"
    if built is None:
        return f"built for {artefact.target!r}, which is not a compute capability like sm_90"
    is_cubin = artefact.kind == "cubin"
    (major, minor), (device_major, device_minor) = built, device
    if is_cubin and (major != device_major or minor > device_minor):
        only = f"{major}.{minor} and later {major}.x" if minor else f"{major}.x"
        return f"built for {artefact.target}, compute capability {only} only"
    if device < built:
        return f"PTX for compute capability {major}.{minor} and later"
    needed = BLACKWELL_DRIVER if is_cubin and major >= 10 else OLDEST_CUDA_DRIVER
    if driver_version < needed:
        return (
            f"needs a driver for CUDA {_cuda_version(needed)} or later, this one is for {_cuda_version(driver_version)}"
        )
    return (int(is_cubin), major, minor)


def _judge_by_name(artefact: Artefact, architecture: str) -> tuple[int, int, int] | str:
    if artefact.target == architecture:
        return (1, 0, 0)
    family = GENERIC_PROCESSORS.get(artefact.target)
    if family is None:
        return f"built for {artefact.target} only"
    return (0, 0, 0) if architecture in family else f"built for {', '.join(family)}"


def _compute_capability(architecture: str) -> tuple[int, int] | None:
    """``sm_86`` is (8, 6), ``sm_120`` is (12, 0): the last digit is the minor."""
    match = re.fullmatch(r"sm_([0-9]+)([0-9])", architecture)
    return (int(match[1]), int(match[2])) if match else None


def _cuda_version(encoded: int) -> str:
    """13010 is CUDA 13.1."""
    return f"{encoded // 1000}.{encoded % 1000 // 10}"
