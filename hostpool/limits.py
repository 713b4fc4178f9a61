"""What this process may still take of the host's memory, as data. No GPU knowledge here.

Sources: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst, Documentation/filesystems/
proc.rst, proc_pid_mountinfo(5) and cgroup_namespaces(7). The functions take the ``root`` under which they find
``/proc``, ``/sys`` and ``/dev``. A file that is missing or reads strangely is no error: what it would have told is left
out.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple, get_args

from kvferry.drivers.errors import HostMemoryError

ThpMode = Literal["always", "madvise", "never"]
"""When anonymous memory gets transparent huge pages: always, where ``madvise`` asked for them, or never."""

RESERVE_NBYTES = 256 << 20
"""Kept back of every limit, though never more than 1 % of it, for what the process and its driver take next.

``preflight`` keeps back 1 % of the pool on top. A page-locked page of 4 KiB costs 8 bytes each in the page table (kept
beside huge pages too, to split them), in the driver's list of pages and in the table of an IOMMU. That is 0.6 %, and a
cgroup is charged for a part of it.
"""

_V1_UNLIMITED_NBYTES = 1 << 62  # an unlimited group of version 1 reads 2**63 less one page of 4, 16 or 64 KiB
_ROOT = Path("/")


class Room(NamedTuple):
    """Bytes that are free, and bytes in all."""

    free_nbytes: int
    total_nbytes: int


@dataclass(frozen=True)
class Limit:
    """A bound on the memory of this process: what sets it, and in one line how to raise it."""

    what: str
    available_nbytes: int | None
    """What may still be taken, with what the kernel can reclaim; ``None`` without a bound."""
    total_nbytes: int | None
    """The whole bound; ``None`` without one."""
    advice: str
    refuses: bool = True
    """Whether ``preflight`` goes by it."""


@dataclass(frozen=True)
class HugePages:
    """Huge pages of the system; see the kernel's Documentation/admin-guide/mm/transhuge.rst and hugetlbpage.rst."""

    transparent: ThpMode | None
    """``None`` where the kernel has no transparent huge pages."""
    hugetlb: dict[int, Room] = field(default_factory=dict)
    """Bytes of a page to what its pool holds. Free are the pages that nobody has reserved."""


def limits(root: Path = _ROOT) -> list[Limit]:
    """Every bound that can be found: the host's memory, each cgroup around this process, and ``RLIMIT_MEMLOCK``.

    Groups come from the inside out. Those above the root of a container's cgroup namespace cannot be seen.
    """
    return [*_host(root), *_cgroups_v2(root), *_cgroups_v1(root), _memlock(root)]


def preflight(nbytes: int, *, found: Sequence[Limit] | None = None) -> None:
    """Raise ``HostMemoryError`` when a pool of ``nbytes`` does not fit a limit. Nothing is mapped or touched.

    ``found`` are the limits to go by; left out, ``limits()`` looks. A container's limit counts beside the host's
    MemAvailable, which knows nothing of it (imp#2070): beyond it the kernel does not refuse, it kills.
    ``RESERVE_NBYTES`` says what is kept back. This is a look and no reservation: of processes that ask at the same
    time each may be let through.
    """
    short: list[tuple[int, str]] = []
    for limit in limits() if found is None else found:
        if limit.available_nbytes is None or not limit.refuses:
            continue
        reserve = nbytes // 100
        if limit.total_nbytes is not None:
            reserve += min(RESERVE_NBYTES, limit.total_nbytes // 100)
        if (missing := nbytes + reserve - limit.available_nbytes) > 0:
            of_all = "" if limit.total_nbytes is None else f" of {limit.total_nbytes}"
            told = (
                f"{limit.what} has {limit.available_nbytes} bytes{of_all} available, {missing} too few with the "
                f"{reserve} kept in reserve: {limit.advice}"
            )
            short.append((missing, told))
    if short:
        why = "; ".join(told for _, told in sorted(short, reverse=True))
        raise HostMemoryError(f"a pool of {nbytes} bytes was refused, and nothing taken: {why}; or ask for fewer pages")


def huge_pages(root: Path = _ROOT) -> HugePages:
    """The mode of transparent huge pages, and the hugetlb pools."""
    base = root / "sys/kernel/mm"
    chosen = re.search(r"\[(\w+)\]", _text(base / "transparent_hugepage/enabled") or "")
    mode = next((mode for mode in get_args(ThpMode) if chosen and chosen[1] == mode), None)
    pools: dict[int, Room] = {}
    for page_nbytes, pool in _numbered(base / "hugepages", r"hugepages-(\d+)kB", unit=1024):
        total, free = _number(pool / "nr_hugepages"), _number(pool / "free_hugepages")
        if total is not None and free is not None:
            unreserved = max(0, free - (_number(pool / "resv_hugepages") or 0))
            pools[page_nbytes] = Room(unreserved * page_nbytes, total * page_nbytes)
    return HugePages(mode, pools)


def numa_free(root: Path = _ROOT) -> dict[int, Room]:
    """Bytes of each NUMA node by its number. Free are unused ones alone: the page cache is not counted."""
    nodes: dict[int, Room] = {}
    for number, node in _numbered(root / "sys/devices/system/node", r"node(\d+)"):
        found = _table(node / "meminfo")
        if "MemFree" in found and "MemTotal" in found:
            nodes[number] = Room(found["MemFree"], found["MemTotal"])
    return nodes


def shm(root: Path = _ROOT) -> Room | None:
    """Bytes of ``/dev/shm``, or ``None`` without one. Beyond them a write ends in SIGBUS (vllm#52496)."""
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError:
        return None
    return Room(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)


def _host(root: Path) -> Iterator[Limit]:
    """MemAvailable counts free and reclaimable memory but no swap, as suits pages that cannot be swapped out."""
    found = _table(root / "proc/meminfo")
    if "MemAvailable" in found:
        yield Limit(
            "the host (MemAvailable of /proc/meminfo)",
            found["MemAvailable"],
            found.get("MemTotal"),
            "end other processes, give back hugetlb pages, or take a machine with more memory",
        )


def _memlock(root: Path) -> Limit:
    """Reported and no more: it bounds ``mlock``, and GPU drivers pin through an ioctl that need not count by it."""
    total: int | None = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if total == resource.RLIM_INFINITY:
        total = None
    locked = _table(root / "proc/self/status").get("VmLck", 0)
    return Limit(
        "RLIMIT_MEMLOCK",
        None if total is None else max(0, total - locked),
        total,
        "ulimit -l unlimited, docker run --ulimit memlock=-1, or LimitMEMLOCK=infinity in the systemd unit",
        refuses=False,
    )


def _cgroups_v2(root: Path) -> Iterator[Limit]:
    """``memory.max`` of this process's group and of those around it; a real root group has none."""
    path = next((path for number, _, path in _memberships(root) if number == "0"), None)
    for group in _around(root, path, "cgroup2", None):
        text = _text(root / group / "memory.max")
        total = _as_number(text)
        if total is not None or (text is not None and text.strip() == "max"):
            used, stat = _number(root / group / "memory.current"), _table(root / group / "memory.stat")
            reclaimable = sum(stat.get(name, 0) for name in ("inactive_file", "active_file", "slab_reclaimable"))
            yield _cgroup(f"/{group}/memory.max", total, used, reclaimable)


def _cgroups_v1(root: Path) -> Iterator[Limit]:
    """``memory.limit_in_bytes`` likewise. The ``total_`` figures count the groups inside; slab has no figure."""
    path = next((path for _, names, path in _memberships(root) if "memory" in names), None)
    for group in _around(root, path, "cgroup", "memory"):
        total: int | None = _number(root / group / "memory.limit_in_bytes")
        if total is not None:
            used, stat = _number(root / group / "memory.usage_in_bytes"), _table(root / group / "memory.stat")
            reclaimable = sum(stat.get(name, 0) for name in ("total_inactive_file", "total_active_file"))
            total = None if total >= _V1_UNLIMITED_NBYTES else total
            yield _cgroup(f"/{group}/memory.limit_in_bytes", total, used, reclaimable)


def _cgroup(file: str, total: int | None, used: int | None, reclaimable: int) -> Limit:
    """``reclaimable`` is the page cache: a group full of a model's files still gets memory, the kernel drops them.

    Both its lists count, as in MemAvailable: a file that was mapped or read twice is on the active one.
    """
    return Limit(
        f"the cgroup of {file}",
        None if total is None else min(total, max(0, total - (used or 0) + reclaimable)),
        total,
        "raise it by docker run --memory, limits.memory of the pod, MemoryMax of the systemd unit, or --mem of Slurm",
    )


def _memberships(root: Path) -> Iterator[tuple[str, list[str], PurePosixPath]]:
    """(hierarchy, controllers, path) of each line of ``/proc/self/cgroup``; hierarchy 0 is version 2."""
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            yield parts[0], parts[1].split(","), PurePosixPath(parts[2])


def _around(root: Path, path: PurePosixPath | None, kind: str, controller: str | None) -> list[PurePosixPath]:
    """Directories below ``root`` of the group ``path`` and of those around it, from the inside out."""
    if path is None:
        return []
    found: list[list[PurePosixPath]] = [[]]
    for line in (_text(root / "proc/self/mountinfo") or "").splitlines():
        # number, parent, device, root within the file system, mount point, options, optional fields, "-", type, source,
        # options of the file system
        before, _, behind = line.partition(" - ")
        where, what = before.split(" "), behind.split(" ")
        if len(where) < 5 or what[0] != kind or (controller is not None and controller not in what[-1].split(",")):
            continue
        inside, mount = PurePosixPath(_unescaped(where[3])), PurePosixPath(_unescaped(where[4]).lstrip("/"))
        if path.is_relative_to(inside):
            below = path.relative_to(inside)
            if ".." not in below.parts:  # else we were moved out of the namespace, and nothing here is around us
                found.append([mount / group for group in (below, *below.parents)])
        elif set(inside.parts) == {"/", ".."}:  # a mount from before our cgroup namespace: its top is around us
            found.append([mount])
    return max(found, key=len)


def _unescaped(text: str) -> str:
    """Blank, tab, newline and backslash stand in ``/proc/self/mountinfo`` as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)


def _numbered(directory: Path, pattern: str, *, unit: int = 1) -> list[tuple[int, Path]]:
    """(number in the name times ``unit``, path) of the entries whose whole name has ``pattern``, in rising order."""
    try:
        entries = list(directory.iterdir())
    except OSError:
        return []
    names = ((re.fullmatch(pattern, entry.name), entry) for entry in entries)
    return sorted((int(name[1]) * unit, entry) for name, entry in names if name)


def _table(path: Path) -> dict[str, int]:
    """Lines of a name and a number, as in ``/proc/meminfo`` and ``memory.stat``; those in kB become bytes."""
    lines = re.finditer(r"^(?:Node \d+ )?([\w()]+):?[ \t]+(\d+)( kB)?$", _text(path) or "", re.MULTILINE | re.ASCII)
    return {line[1]: int(line[2]) * (1024 if line[3] else 1) for line in lines}


def _number(path: Path) -> int | None:
    return _as_number(_text(path))


def _as_number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"\d+\s*", text, re.ASCII) else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
