"""What may still be taken of the host's memory, read from trees as real systems show them; and pools refused by it."""

from __future__ import annotations

import os
import re
import resource
import time
from pathlib import Path
from typing import get_args

import pytest

from kvferry.drivers import posix
from kvferry.drivers.errors import HostMemoryError
from kvferry.hostpool import HostPool, KVLayout
from kvferry.hostpool import limits as module
from kvferry.hostpool.backend import Backend
from kvferry.hostpool.limits import HugePages, Limit, Room, huge_pages, limits, numa_free, preflight, shm
from kvferry.hostpool.memory import MemoryKind

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "36 31 0:33 {inside} /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"
OTHER_MOUNTS = (
    "23 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
    "35 31 0:32 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "a line of - cgroup2 another kernel\n"
)
UNLIMITED_V1 = 2**63 - 4096


class Tree:
    """A fake root; ``cgroup`` and ``mountinfo`` are what /proc/self shows."""

    def __init__(self, root: Path, cgroup: str = "", mountinfo: str = "") -> None:
        self.root = root
        self.write("proc/self/cgroup", cgroup)
        self.write("proc/self/mountinfo", OTHER_MOUNTS + mountinfo)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def v2(self, group: str, most: int | str, used: int = 0, stat: str = "") -> None:
        base = f"sys/fs/cgroup/{group}"
        self.write(f"{base}/memory.max", f"{most}\n")
        self.write(f"{base}/memory.current", f"{used}\n")
        self.write(f"{base}/memory.stat", stat)

    def v1(self, group: str, most: int, used: int = 0, stat: str = "") -> None:
        base = f"sys/fs/cgroup/memory/{group}"
        self.write(f"{base}/memory.limit_in_bytes", f"{most}\n")
        self.write(f"{base}/memory.usage_in_bytes", f"{used}\n")
        self.write(f"{base}/memory.stat", stat)

    def cgroups(self) -> list[tuple[str, int | None, int | None]]:
        """(directory below /sys/fs/cgroup, available, total) of each group found."""
        return [
            (found[1], limit.available_nbytes, limit.total_nbytes)
            for limit in limits(self.root)
            if (found := re.fullmatch(r"the cgroup of /sys/fs/cgroup/?(.*)/memory\.\w+", limit.what))
        ]


def test_memory_of_the_host(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.write(
        "proc/meminfo",
        "MemTotal:       67108864 kB\nMemFree:  1024 kB\nMemAvailable:   62914560 kB\nHugePages_Total: 3\n",
    )
    (host,) = (limit for limit in limits(tmp_path) if "MemAvailable" in limit.what)
    assert (host.available_nbytes, host.total_nbytes, host.refuses) == (60 * GIB, 64 * GIB, True)


def test_a_kernel_without_the_estimate_sets_no_bound(tmp_path: Path) -> None:
    """Linux before 3.14. MemFree is no substitute: most of what is used may be page cache."""
    Tree(tmp_path).write("proc/meminfo", "MemTotal:       67108864 kB\nMemFree:  1024 kB\n")
    assert [limit.what for limit in limits(tmp_path)] == ["RLIMIT_MEMLOCK"]


def test_a_group_of_version_2_and_the_tighter_one_around_it(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/slice/pod/leaf\n", V2_MOUNT)
    tree.v2("slice/pod/leaf", 8 * GIB, GIB)
    tree.v2("slice/pod", 4 * GIB, 3 * GIB)
    tree.v2("slice", "max", 5 * GIB)
    tree.v2("slice/pod/neighbour", 1 * MIB, 0)  # not around us; and the real root has no memory.max
    assert tree.cgroups() == [
        ("slice/pod/leaf", 7 * GIB, 8 * GIB),
        ("slice/pod", GIB, 4 * GIB),
        ("slice", None, None),
    ]
    with pytest.raises(HostMemoryError, match=r"cgroup of /sys/fs/cgroup/slice/pod/memory\.max has"):
        preflight(2 * GIB, found=limits(tmp_path))


def test_in_a_container_the_group_is_the_mount(tmp_path: Path) -> None:
    """Scenario 26: with a cgroup namespace of its own, a container sees its group as the root."""
    tree = Tree(tmp_path, "0::/\n", V2_MOUNT)
    tree.v2("", 8 * GIB, 2 * GIB)
    assert tree.cgroups() == [("", 6 * GIB, 8 * GIB)]


def test_page_cache_and_slab_can_be_reclaimed(tmp_path: Path) -> None:
    """A group that is full of a model's files still has memory to give: the kernel drops them."""
    tree = Tree(tmp_path, "0::/\n", V2_MOUNT)
    stat = "anon 1073741824\nfile 6442450944\ninactive_file {}\nactive_file {}\nslab_reclaimable {}\nslab 77\n"
    tree.v2("", 8 * GIB, 8 * GIB, stat.format(4 * GIB, 2 * GIB, GIB))
    assert tree.cgroups() == [("", 7 * GIB, 8 * GIB)]
    tree.v2("", 8 * GIB, GIB, stat.format(4 * GIB, 2 * GIB, 5 * GIB))  # read a moment later than the usage
    assert tree.cgroups() == [("", 8 * GIB, 8 * GIB)]


def test_a_limit_lowered_below_the_usage_leaves_nothing(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/\n", V2_MOUNT)
    tree.v2("", GIB, 2 * GIB)
    assert tree.cgroups() == [("", 0, GIB)]


def test_version_1(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "5:devices:/d\n4:cpu,memory:/docker/abc\n", V1_MOUNT.format(inside="/"))
    tree.v1("docker/abc", 8 * GIB, 6 * GIB, f"inactive_file 7\ntotal_inactive_file {GIB}\ntotal_active_file {MIB}\n")
    tree.v1("docker", UNLIMITED_V1, 7 * GIB)
    tree.v1("", 2**63 - 65536, 9 * GIB)
    assert tree.cgroups() == [
        ("memory/docker/abc", 3 * GIB + MIB, 8 * GIB),
        ("memory/docker", None, None),
        ("memory", None, None),
    ]


def test_version_1_in_a_container_without_a_namespace(tmp_path: Path) -> None:
    """The path is the host's, and the mount shows the container's group alone."""
    tree = Tree(tmp_path, "4:memory:/docker/abc/job\n", V1_MOUNT.format(inside="/docker/abc"))
    tree.v1("", 8 * GIB, GIB)
    tree.v1("job", 2 * GIB, GIB)
    assert tree.cgroups() == [("memory/job", GIB, 2 * GIB), ("memory", 7 * GIB, 8 * GIB)]


def test_hybrid(tmp_path: Path) -> None:
    """Version 2 is there, but version 1 has the memory controller."""
    unified = V2_MOUNT.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
    tree = Tree(tmp_path, "4:memory:/job\n1:name=systemd:/other\n0::/other\n", V1_MOUNT.format(inside="/") + unified)
    tree.write("sys/fs/cgroup/unified/other/cgroup.procs", "1\n")
    tree.write("sys/fs/cgroup/unified/job/memory.max", "7\n")  # the name of our group of version 1, not of this one
    tree.v1("job", 8 * GIB, GIB)
    assert tree.cgroups() == [("memory/job", 7 * GIB, 8 * GIB)]


def test_a_group_that_was_moved_out_of_its_namespace_is_not_judged_by_it(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/../sibling\n", V2_MOUNT)
    tree.v2("", MIB, 0)
    tree.v2("sibling", MIB, 0)
    tree.write("sys/fs/sibling/memory.max", "7\n")
    assert tree.cgroups() == []


def test_a_mount_from_before_the_namespace_is_around_it(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/\n", V2_MOUNT.replace(" / /sys", " /../.. /sys"))
    tree.v2("", 8 * GIB, GIB)
    assert tree.cgroups() == [("", 7 * GIB, 8 * GIB)]


def test_of_two_mounts_the_one_that_shows_more(tmp_path: Path) -> None:
    part = "31 23 0:26 /a/b /mnt/part rw - cgroup2 cgroup2 rw\n"
    tree = Tree(tmp_path, "0::/a/b\n", part + V2_MOUNT + part)
    tree.v2("a/b", 2 * GIB)
    tree.v2("a", GIB)
    tree.write("mnt/part/memory.max", "5\n")
    assert tree.cgroups() == [("a/b", 2 * GIB, 2 * GIB), ("a", GIB, GIB)]


def test_names_with_blanks_and_colons(tmp_path: Path) -> None:
    mount = V2_MOUNT.replace("/sys/fs/cgroup", r"/sys/fs/cgroup/my\040groups")
    tree = Tree(tmp_path, "0::/a b:c\n", mount)
    tree.v2("my groups/a b:c", 8 * GIB, GIB)
    assert tree.cgroups() == [("my groups/a b:c", 7 * GIB, 8 * GIB)]


@pytest.mark.parametrize("strange", ["", "lots\n", "-1\n", "٣\n", "12 13\n"])
def test_what_reads_strangely_is_left_out(tmp_path: Path, strange: str) -> None:
    tree = Tree(tmp_path, "0::/leaf\nno colons\n4:memory:/job\n", V2_MOUNT + V1_MOUNT.format(inside="/"))
    tree.v2("leaf", strange)
    tree.write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", strange)
    tree.write("proc/meminfo", f"MemTotal: 8 kB\nMemAvailable: {strange}")
    assert [limit.what for limit in limits(tmp_path)] == ["RLIMIT_MEMLOCK"]


def test_without_the_usage_the_whole_limit_is_the_bound(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/\n", V2_MOUNT)
    tree.write("sys/fs/cgroup/memory.max", f"{GIB}\n")
    assert tree.cgroups() == [("", GIB, GIB)]


def test_an_empty_root_has_no_limits_but_the_process(tmp_path: Path) -> None:
    assert [limit.what for limit in limits(tmp_path)] == ["RLIMIT_MEMLOCK"]
    assert huge_pages(tmp_path) == HugePages(None, {})
    assert numa_free(tmp_path) == {}
    assert shm(tmp_path) is None


def test_memlock_is_reported_and_refuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Tree(tmp_path).write("proc/self/status", "Name:\tpython\nVmLck:\t    3072 kB\n")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 * MIB, 9 * MIB))
    (memlock,) = limits(tmp_path)
    assert (memlock.available_nbytes, memlock.total_nbytes) == (5 * MIB, 8 * MIB)
    preflight(GIB, found=[memlock])
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    (memlock,) = limits(tmp_path)
    assert (memlock.available_nbytes, memlock.total_nbytes) == (None, None)


def test_huge_pages(tmp_path: Path) -> None:
    tree, base = Tree(tmp_path), "sys/kernel/mm"
    tree.write(f"{base}/transparent_hugepage/enabled", "always [madvise] never\n")
    for kib, total, free, reserved in ((2048, 10, 6, 2), (1048576, 3, 1, 2)):
        pool = f"{base}/hugepages/hugepages-{kib}kB"
        tree.write(f"{pool}/nr_hugepages", f"{total}\n")
        tree.write(f"{pool}/free_hugepages", f"{free}\n")
        tree.write(f"{pool}/resv_hugepages", f"{reserved}\n")
    tree.write(f"{base}/hugepages/hugepages-64kB/nr_hugepages", "4\n")
    assert huge_pages(tmp_path) == HugePages("madvise", {2 * MIB: Room(8 * MIB, 20 * MIB), GIB: Room(0, 3 * GIB)})
    tree.write(f"{base}/transparent_hugepage/enabled", "always madvise [perhaps]\n")
    assert huge_pages(tmp_path).transparent is None


def test_numa_nodes(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    for node in (10, 2, 7, 1, 5):
        lines = f"MemTotal:  {node * 1024} kB", f"MemFree:   {node} kB", "Active(file): 9 kB"
        text = "".join(f"Node {node} {line}\n" for line in lines)
        tree.write(f"sys/devices/system/node/node{node}/meminfo", text)
    tree.write("sys/devices/system/node/possible", "0-10\n")
    tree.write("sys/devices/system/node/node3_old/meminfo", "MemTotal: 2 kB\nMemFree: 1 kB\n")
    found = numa_free(tmp_path)
    assert list(found.items()) == [(node, (node * KIB, node * MIB)) for node in (1, 2, 5, 7, 10)]
    assert (found[2].free_nbytes, found[2].total_nbytes) == (2 * KIB, 2 * MIB)


def test_shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Path]()

    def statvfs(path: Path) -> os.statvfs_result:
        asked.append(path)  # block size, fragment size, blocks, free, free to us, ...
        return os.statvfs_result((1, 4096, 16384, 300, 200, 0, 0, 0, 0, 255))

    monkeypatch.setattr(os, "statvfs", statvfs)
    found = shm(tmp_path)
    assert found == (200 * 4096, 64 * MIB)
    assert asked == [tmp_path / "dev/shm"]


GROUP = Limit("the cgroup of /x/memory.max", 6 * GIB, 8 * GIB, "raise memory.max")
RESERVE = 10 * GIB // 100 + 8 * GIB // 100


def test_the_message_tells_what_is_short_and_what_to_do() -> None:
    """Scenario 26: a group of 8 GiB on a host with more, and 10 GiB asked."""
    host = Limit("the host", 60 * GIB, 64 * GIB, "buy memory")
    with pytest.raises(HostMemoryError) as caught:
        preflight(10 * GIB, found=[host, GROUP])
    assert str(caught.value) == (
        f"a pool of {10 * GIB} bytes was refused, and nothing taken: the cgroup of /x/memory.max has {6 * GIB} bytes "
        f"of {8 * GIB} available, {4 * GIB + RESERVE} too few with the {RESERVE} kept in reserve: raise memory.max; "
        "or ask for fewer pages"
    )


def test_every_limit_in_the_way_is_told_the_worst_first() -> None:
    other = Limit("the host", 9 * GIB, None, "buy memory")
    with pytest.raises(HostMemoryError, match=r"memory\.max has .*raise memory\.max; the host has .*buy memory; or"):
        preflight(10 * GIB, found=[other, GROUP])


def test_the_last_byte_that_fits() -> None:
    """1 % of the pool stays free, and 256 MiB or 1 % of the limit."""
    for total, kept in ((64 * GIB, 256 * MIB), (GIB, GIB // 100), (None, 0)):
        limit = Limit("x", 10_000_000 + 100_000 + kept, total, "")
        preflight(10_000_000, found=[limit])
        with pytest.raises(HostMemoryError, match=", 1 too few"):
            preflight(10_000_001, found=[limit])


def test_no_bound_lets_everything_through() -> None:
    preflight(1 << 60, found=[Limit("x", None, None, "")])
    preflight(1 << 60, found=[])


def test_looking_costs_little() -> None:
    best = 1.0
    for _ in range(5):
        start = time.perf_counter()
        preflight(4096)
        best = min(best, time.perf_counter() - start)
    assert best < 0.01


@pytest.mark.parametrize("memory", get_args(MemoryKind))
def test_a_pool_is_refused_before_anything_is_mapped(
    monkeypatch: pytest.MonkeyPatch, backend: Backend, memory: MemoryKind
) -> None:
    layout = KVLayout.mla(layers=1, latent_size=4096, element_nbytes=1, page_tokens=1)
    pages, nbytes = 4, 4 * 4096
    found = [Limit("the cgroup of this test", nbytes, None, "raise it")]
    monkeypatch.setattr(module, "limits", lambda: found)

    with monkeypatch.context() as patch:
        for owner, name in ((posix, "map_anonymous"), (posix, "advise"), (backend.driver, "host_alloc")):
            patch.setattr(owner, name, lambda *_, name=name: pytest.fail(f"{name} was called"))
        patch.setattr(backend.driver, "host_register", lambda *_: pytest.fail("host_register was called"))
        with pytest.raises(HostMemoryError, match=rf"a pool of {nbytes} bytes .*this test has .* 163 too few"):
            HostPool(layout, pages, backend=backend, memory=memory)

    found[0] = Limit("the cgroup of this test", nbytes + 163, None, "raise it")
    with HostPool(layout, pages, backend=backend, memory=memory) as pool:
        assert pool.nbytes == nbytes
