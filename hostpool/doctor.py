"""What is here, what would work, and what to do about the rest: the page that ``kvferry doctor`` prints.

It does what a pool does, on a small scale: opens the driver, loads each device's kernels, page-locks memory and asks
for its device address, moves a page there and back.
"""

from __future__ import annotations

import platform as python_platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import metadata
from typing import Any

from kvferry.drivers import cuda, hip
from kvferry.drivers.errors import KVFerryError, LauncherNotFound, NoArtefact, RuntimeConflict
from kvferry.drivers.loader import mapped_libraries
from kvferry.drivers.protocol import Platform
from kvferry.hostpool import demo, limits
from kvferry.hostpool.backend import Backend, first_backend, open_backend

_PACKAGES = ("cffi", "numpy", "torch", "cuda-bindings", "hip-python")
_PATTERNS: dict[Platform, str] = {"cuda": cuda.LIBRARY_PATTERN, "rocm": hip.LIBRARY_PATTERN}


@dataclass(frozen=True)
class Problem:
    """Something that keeps the main job from working, and one line of what to do."""

    what: str
    advice: str


@dataclass
class Report:
    """What was found. ``sections`` are by name, each of plain values."""

    platform: Platform | None = None
    problems: list[Problem] = field(default_factory=list)
    sections: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the main job works."""
        return not self.problems

    def as_json(self) -> dict[str, object]:
        """The object of ``--json``."""
        problems = [asdict(problem) for problem in self.problems]
        return {"ok": self.ok, "platform": self.platform, "problems": problems, **self.sections}

    def attempt(self, what: str, step: Callable[[], Any]) -> Any:
        """What ``step`` returns; kvferry's errors become a problem and ``None``."""
        try:
            return step()
        except KVFerryError as error:
            self.problems.append(Problem(f"{what}: {error}", _advice(error)))
            return None


def _advice(error: KVFerryError) -> str:
    if isinstance(error, LauncherNotFound):
        return "install kvferry with the extra that fits the driver: cuda13, cuda12 or rocm"
    if isinstance(error, NoArtefact):
        return "this device has no kernels in this version; `kvferry artefacts` lists those that ship"
    if isinstance(error, RuntimeConflict):
        return "let every library of the process use one runtime: start torch first, then kvferry"
    return str(getattr(error, "advice", "")) or "the message says what the driver was asked, and what it answered"


def examine(platform: Platform | None = None) -> Report:
    """Look at ``platform``, or at the first that works; without a GPU that is a problem.

    The stand-in is what a server falls back to in tests alone, so it is only looked at for itself when it is asked for.
    """
    report = Report()
    report.sections["packages"] = _packages()
    report.sections["host"] = _host()
    if platform is None:
        backend, passed_over = first_backend()
        report.sections["passed over"] = dict(passed_over)
        if backend.driver.platform == "stand-in":
            nothing = "no GPU driver works here: " + "; ".join(passed_over.values())
            advice = "on a machine with a GPU, install its driver and give this process its devices"
            report.problems.append(Problem(nothing, advice))
    else:
        found = report.attempt(platform, lambda: open_backend(platform))
        if found is None:
            return report
        backend = found
    look_at(backend, report)
    return report


def look_at(backend: Backend, report: Report) -> None:
    """The driver, the devices and the engines of ``backend``."""
    report.platform = backend.driver.platform
    report.sections["driver"] = _driver(backend, report)
    report.sections["devices"] = [_device(backend, n, report) for n in range(backend.driver.device_count())]
    missing = report.attempt("asking for batch copies", backend.driver.batch_copy_missing)
    report.sections["engines"] = {
        "kernel": "available",
        "batch copy": missing or "the driver has it; no engine uses it yet",
    }


def _packages() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": python_platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _host() -> dict[str, Any]:
    huge, shm = limits.huge_pages(), limits.shm()
    return {
        "kernel": python_platform.release(),
        "machine": python_platform.machine(),
        "limits": [asdict(limit) for limit in limits.limits()],
        "huge pages": {
            "transparent": huge.transparent,
            "pools": {str(nbytes): room._asdict() for nbytes, room in huge.hugetlb.items()},
        },
        "numa nodes": {str(node): room._asdict() for node, room in limits.numa_free().items()},
        "shared memory": shm and shm._asdict(),
    }


def _driver(backend: Backend, report: Report) -> dict[str, Any]:
    driver = backend.driver
    pattern = _PATTERNS.get(driver.platform)
    runtimes = mapped_libraries(pattern) if pattern else []
    if len(runtimes) > 1:
        conflict = RuntimeConflict(f"{len(runtimes)} runtimes are in this process: {', '.join(runtimes)}")
        report.problems.append(Problem(str(conflict), _advice(conflict)))
    return {"library": driver.library, "version": driver.version, "mapped": runtimes}


def _device(backend: Backend, number: int, report: Report) -> dict[str, Any]:
    """One device, as far as it works."""
    driver, what = backend.driver, f"device {number}"
    found: dict[str, Any] = {"number": number, "artefact": None, "domain": None, "round trip": None}
    for name, ask in (
        ("name", driver.device_name),
        ("architecture", driver.device_architecture),
        ("pci_address", driver.device_pci_address),
    ):
        found[name] = report.attempt(f"{what}, {name}", partial(ask, number))
    attributes = report.attempt(f"{what}, attributes", lambda: driver.device_attributes(number))
    found["attributes"] = None if attributes is None else asdict(attributes)
    launcher = report.attempt(f"{what}, kernels", lambda: backend.launcher(number))
    if launcher is None:
        return found
    found["artefact"] = {"file": launcher.artefact.file, "sha256": launcher.artefact.sha256}
    job = partial(demo.run, backend, device=number, layers=2, pages=1)
    result = report.attempt(f"{what}, a page there and back", job)
    if result is not None:
        found["domain"] = {"kind": result.domain_kind, "reason": result.domain_reason}
        found["round trip"] = "all bytes equal" if result.ok else f"{result.different_nbytes} bytes differ"
        if not result.ok:
            wrong = f"{what}: {result.different_nbytes} of {result.nbytes} bytes differ after a page there and back"
            advice = "do not use this device; report it with the output of `kvferry doctor --json`"
            report.problems.append(Problem(wrong, advice))
    return found


def lines(report: Report) -> list[str]:
    """The page for people."""
    out = [f"platform     {report.platform or 'none'}"]
    for name, section in report.sections.items():
        out.append(f"{name}:")
        out += _shown(section, 2)
    out += ["", "the main job works" if report.ok else "the main job would fail:"]
    for problem in report.problems:
        out += [f"  {problem.what}", f"    -> {problem.advice}"]
    return out


def _shown(value: Any, indent: int) -> list[str]:
    pad, out = " " * indent, []
    for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(entry, (dict, list)):
            out += [f"{pad}{key}:", *_shown(entry, indent + 2)] if entry else [f"{pad}{key}: none"]
        else:
            out.append(f"{pad}{key}: {_number(str(key), entry)}")
    return out


def _number(key: str, value: Any) -> str:
    if value is None:
        return "unlimited" if key.endswith("_nbytes") else "none"
    if key.endswith("_nbytes") and isinstance(value, int):
        return f"{value} ({value / 2**30:.1f} GiB)"
    return str(value)
