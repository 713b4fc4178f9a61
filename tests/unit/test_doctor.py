"""What ``kvferry doctor`` finds on both fakes, on the stand-in, and where there is nothing."""

from __future__ import annotations

import json

import pytest

from kvferry.drivers.errors import NoArtefact
from kvferry.hostpool import doctor
from kvferry.hostpool.backend import Backend
from kvferry.hostpool.cli import main
from kvferry.hostpool.doctor import Report
from kvferry.kernels_cubin.launch_cuda import CudaLauncher

from fakes.vendors import Bench
from support.process import run_python


def report_on(backend: Backend) -> Report:
    report = Report()
    doctor.look_at(backend, report)
    return report


def test_a_device_that_works(bench: Bench, backend: Backend) -> None:
    report = report_on(backend)
    assert report.ok, report.problems
    (device,) = report.sections["devices"]
    assert device["domain"]["kind"] == "alias"
    assert device["round trip"] == "all bytes equal"
    assert device["artefact"]["file"].endswith({"cuda": ".cubin", "hip": ".hsaco"}[bench.vendor.name])
    assert report.sections["driver"]["library"] in report.sections["driver"]["mapped"]
    assert "the main job works" in doctor.lines(report)


def test_each_device_is_looked_at(bench: Bench, backend: Backend) -> None:
    bench.fake.set_devices(3)
    assert [device["number"] for device in report_on(backend).sections["devices"]] == [0, 1, 2]


def test_registration_that_the_driver_refuses(bench: Bench, backend: Backend) -> None:
    bench.fake.fail(bench.calls.register, 2, nth=0)
    bench.fake.fail(bench.calls.host_alloc, 2, nth=0)
    report = report_on(backend)
    assert not report.ok
    (problem,) = report.problems
    assert problem.what.startswith("device 0, a page there and back: ")
    assert problem.advice
    assert report.sections["devices"][0]["round trip"] is None
    text = doctor.lines(report)
    assert "the main job would fail:" in text
    assert f"    -> {problem.advice}" in text


def test_a_device_without_kernels(backend: Backend) -> None:
    def nothing(device: int) -> CudaLauncher:
        raise NoArtefact("sm_35", {})

    report = report_on(Backend(backend.driver, nothing))
    assert [problem.what for problem in report.problems] == [
        "device 0, kernels: no kernel binary for sm_35 (none is shipped)"
    ]
    assert "kvferry artefacts" in report.problems[0].advice


def test_the_stand_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--platform", "stand-in", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["platform"], found["problems"]) == (True, "stand-in", [])
    assert set(found) == {"ok", "platform", "problems", "packages", "host", "driver", "devices", "engines"}
    assert {limit["what"] for limit in found["host"]["limits"]}
    assert all(set(room) == {"free_nbytes", "total_nbytes"} for room in found["host"]["numa nodes"].values())
    assert main(["doctor", "--platform", "stand-in"]) == 0
    assert "the main job works" in capsys.readouterr().out


def test_nothing_but_the_stand_in() -> None:
    """Nobody asked for it: a server would not start here."""
    printed = run_python(
        """
        from kvferry.drivers import loader
        from kvferry.drivers.errors import DriverNotFound
        from kvferry.hostpool.cli import main

        def absent(ffi, platform, *more):
            raise DriverNotFound(platform, {"its library": "not here"})

        loader.open_library = absent
        assert main(["doctor"]) == 1
        """
    )
    assert "the main job would fail:\n  no GPU driver works here: no cuda driver could be opened" in printed
    assert "    -> on a machine with a GPU, install its driver" in printed
