"""Which shared object is opened: the one in the process first."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.drivers.errors import DriverNotFound, ForkedProcess
from kvferry.drivers.loader import ForkGuard, mapped_libraries, open_library

from fakes.build import build_fake
from support.process import run_python

CUDA_PATTERN = r"libcuda\.so(\.\d+)*"

MAPS = """\
55d0c8e00000-55d0c8e21000 r--p 00000000 08:01 131090                     /usr/bin/python3.11
7f10a0000000-7f10a0021000 rw-p 00000000 00:00 0
7f10a1000000-7f10a1100000 r-xp 00000000 08:01 222                        /opt/my drivers/with  spaces/libcuda.so.550.54
7f10a1100000-7f10a1200000 r--p 00100000 08:01 222                        /opt/my drivers/with  spaces/libcuda.so.550.54
7f10a2000000-7f10a2100000 r-xp 00000000 08:01 333                        /old/libcuda.so.1 (deleted)
7f10a3000000-7f10a3100000 r-xp 00000000 08:01 444                        /lib/libcudart.so.12
7f10a3100000-7f10a3200000 r-xp 00000000 08:01 445                        /lib/libcuda.so.1.1
7f10a3200000-7f10a3300000 r-xp 00000000 08:01 446                        /lib/mylibcuda.so.1
7f10a3300000-7f10a3400000 r-xp 00000000 08:01 447                        /lib/libcuda.so.1.bak
7ffd1a5e0000-7ffd1a601000 rw-p 00000000 00:00 0                          [stack]
"""


def test_mapped_paths_in_order_once_with_spaces_and_without_deleted_files(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(MAPS, encoding="utf-8")
    found = mapped_libraries(CUDA_PATTERN, str(maps))
    assert found == ["/opt/my drivers/with  spaces/libcuda.so.550.54", "/lib/libcuda.so.1.1"]


def test_a_path_that_is_not_utf8_is_still_a_path(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_bytes(b"7f10a0000000-7f10a0021000 r-xp 00000000 08:01 1      /caf\xe9/libcuda.so.1\n")
    assert [os.fsencode(path) for path in mapped_libraries(CUDA_PATTERN, str(maps))] == [b"/caf\xe9/libcuda.so.1"]


def test_without_proc_nothing_is_known_to_be_mapped(tmp_path: Path) -> None:
    assert mapped_libraries(CUDA_PATTERN, str(tmp_path / "absent")) == []


def test_a_mapped_library_wins_over_the_names(fakes_dir: Path) -> None:
    """torch brings its own libamdhip64: a second copy would be a second runtime."""
    first, second = build_fake("hip", fakes_dir, soname="libamdhip64-of-torch.so"), build_fake("hip", fakes_dir)
    printed = run_python(
        f"""
        from fakes.hip import FakeHip
        from kvferry.drivers.hip import HipDriver

        fake = FakeHip({str(first)!r})
        driver = HipDriver()
        print(driver.library)
        print(sum("libamdhip64" in line for line in {{line.split()[-1] for line in open("/proc/self/maps")}}))
        print(any(call.name == "hipInit" for call in fake.log()))
        """,
        env={"LD_LIBRARY_PATH": str(second.parent)},
    )
    assert printed.split() == [str(first), "1", "True"]


def test_by_name_when_nothing_is_mapped_and_the_path_is_known_afterwards(build_variant: Callable[..., Path]) -> None:
    path = build_variant("cuda")
    printed = run_python(
        """
        from kvferry.drivers.cuda import CudaDriver
        from kvferry.drivers.loader import mapped_libraries

        assert mapped_libraries(r"libcuda.*") == [], "importing opens nothing"
        print(CudaDriver().library)
        """,
        env={"LD_LIBRARY_PATH": str(path.parent)},
    )
    assert printed.strip() == str(path)


@pytest.mark.parametrize(("vendor", "name"), [("cuda", "CudaDriver"), ("hip", "HipDriver")])
def test_the_import_opens_and_initialises_nothing(vendor: str, name: str, build_variant: Callable[..., Path]) -> None:
    path = build_variant(vendor)
    printed = run_python(
        f"""
        import threading
        from fakes.{vendor} import Fake{vendor.capitalize()}

        fake = Fake{vendor.capitalize()}({str(path)!r})
        import kvferry.drivers.{vendor} as module
        print(len(fake.log()), threading.active_count())
        module.{name}()
        print(len(fake.log()) > 0)
        """
    )
    assert printed.split() == ["0", "1", "True"]


class _Ffi:
    """A loader that knows two names."""

    def __init__(self, opens: set[str]) -> None:
        self._opens = opens

    def dlopen(self, name: str) -> str:
        if name not in self._opens:
            raise OSError(f"{name}: cannot open shared object file")
        return f"handle of {name}"


def test_every_candidate_and_its_reason_when_nothing_opens() -> None:
    with pytest.raises(DriverNotFound) as caught:
        open_library(_Ffi(set()), "rocm", r"libnothing\.so", ["libnothing.so.7", "libnothing.so"])
    assert caught.value.platform == "rocm"
    assert caught.value.tried == {
        "libnothing.so.7": "libnothing.so.7: cannot open shared object file",
        "libnothing.so": "libnothing.so: cannot open shared object file",
    }


def test_the_first_name_that_opens() -> None:
    opened = open_library(_Ffi({"b.so", "c.so"}), "rocm", r"libnothing\.so", ["a.so", "b.so", "c.so"])
    assert opened == ("handle of b.so", "b.so")


def test_a_mapped_library_that_does_not_open_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.drivers.loader.mapped_libraries", lambda pattern: ["/gone/libcuda.so.1"])
    opened = open_library(_Ffi({"libcuda.so.1"}), "cuda", CUDA_PATTERN, ["libcuda.so.1"])
    assert opened == ("handle of libcuda.so.1", "libcuda.so.1")


def test_the_fork_guard_lets_its_own_process_through() -> None:
    guard = ForkGuard("the driver")
    guard.check()
    assert not guard.in_child()


def test_the_fork_guard_stops_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    guard, parent = ForkGuard("the driver"), os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    assert guard.in_child()
    with pytest.raises(ForkedProcess, match=rf"the driver was opened in process {parent}.*child {parent + 1}.*spawn"):
        guard.check()
