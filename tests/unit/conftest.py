"""Fixtures on the fake drivers. Each test gets a fake as new: one device, no registrations, an empty log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry.drivers.protocol import HostMemoryDriver
from kvferry.hostpool.backend import Backend
from kvferry.kernels_cubin.launch_cuda import CudaLauncher
from kvferry.kernels_cubin.launch_hip import HipLauncher
from kvferry.kernels_cubin.manifest import Manifest

from fakes.build import build_fake, host_kernels
from fakes.cuda import FakeCuda
from fakes.vendors import VENDORS, Bench, Vendor


@pytest.fixture(scope="session")
def build_variant(fakes_dir: Path) -> Callable[..., Path]:
    """``build_variant("cuda", "NO_BATCH")``: a fake with something left out, to be loaded in a process of its own."""
    return lambda vendor, *defines: build_fake(vendor, fakes_dir, defines)


@pytest.fixture(scope="session")
def kernels_library() -> Path:
    """The kernels as a library of this machine, for ``fake.set_kernels``."""
    return host_kernels()


@pytest.fixture
def fake_cuda(fakes_dir: Path) -> Iterator[FakeCuda]:
    fake = FakeCuda.build(fakes_dir)
    fake.reset()
    yield fake
    fake.reset()


@pytest.fixture(params=VENDORS, ids=lambda vendor: vendor.name)
def bench(request: pytest.FixtureRequest, fakes_dir: Path) -> Iterator[Bench]:
    """Both vendors, one after the other."""
    vendor: Vendor = request.param
    path = str(build_fake(vendor.name, fakes_dir))
    fake = vendor.fake(path)
    fake.reset()
    yield Bench(vendor, fake, path)
    fake.reset()


@pytest.fixture
def driver(bench: Bench) -> HostMemoryDriver:
    """A driver on one device."""
    return bench.driver()


@pytest.fixture
def backend(bench: Bench, kernels_library: Path) -> Backend:
    """A backend on the fake, whose launches run the kernels' host build through the vendor's real bindings."""
    bench.fake.set_kernels(kernels_library)
    driver = bench.driver()
    if driver.platform == "cuda":
        return Backend(driver, lambda device: CudaLauncher(driver, device, Manifest.load()))
    return Backend(driver, lambda device: HipLauncher(driver, device, Manifest.load()))
