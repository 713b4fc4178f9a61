"""What the real driver answers, where a fake could only say what we think."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from kvferry.drivers import posix
from kvferry.drivers.errors import AlreadyRegistered, InvalidValue, NoArtefact, NotRegistered
from kvferry.drivers.protocol import HostAddress, StreamHandle
from kvferry.hostpool import demo
from kvferry.hostpool.backend import Backend
from kvferry.hostpool.mapping import HostMapping
from kvferry.kernels_cubin.launch_cuda import CudaLauncher
from kvferry.kernels_cubin.manifest import Manifest

from support.process import run_python

MIB = 1 << 20


def test_registration_answers(backend: Backend, stream: StreamHandle) -> None:
    driver, mapping = backend.driver, HostMapping(4 * MIB)
    mapping.populate()
    base = mapping.address
    driver.host_register(base, 2 * MIB)
    with pytest.raises(AlreadyRegistered):
        driver.host_register(base, 2 * MIB)
    with pytest.raises(AlreadyRegistered):
        driver.host_register(HostAddress(base + MIB), 2 * MIB)
    assert driver.host_device_pointer(HostAddress(base + 12345)) == driver.host_device_pointer(base) + 12345
    with pytest.raises(InvalidValue):
        driver.host_device_pointer(HostAddress(base + 3 * MIB))
    with pytest.raises((NotRegistered, InvalidValue)):
        driver.host_unregister(HostAddress(base + MIB))
    driver.host_unregister(base)
    with pytest.raises(NotRegistered):
        driver.host_unregister(base)
    mapping.close()


def test_chunks_that_share_no_page_register_side_by_side(backend: Backend, stream: StreamHandle) -> None:
    driver, mapping = backend.driver, HostMapping(64 * posix.PAGE_NBYTES)
    mapping.populate()
    bases = [HostAddress(mapping.address + n * posix.PAGE_NBYTES) for n in range(64)]
    for base in bases:
        driver.host_register(base, posix.PAGE_NBYTES)
    for base in reversed(bases):
        driver.host_unregister(base)
    mapping.close()


def test_batch_copy_moves_bytes(backend: Backend, stream: StreamHandle) -> None:
    """Many ranges in one call, to the device and back."""
    driver = backend.driver
    assert driver.batch_copy_missing() is None
    nbytes, piece = 8 * MIB, 64 << 10
    host, device = driver.host_alloc(nbytes), driver.device_alloc(nbytes)
    view = np.frombuffer(posix.buffer(host, nbytes), np.uint8)
    content = np.random.default_rng(5).integers(0, 256, nbytes, dtype=np.uint8)
    view[:] = content
    order = np.random.default_rng(6).permutation(nbytes // piece).astype(np.uint64) * piece
    here = np.uint64(host) + np.arange(nbytes // piece, dtype=np.uint64) * piece
    there = np.uint64(device) + order
    sizes = np.full(here.size, piece, np.uint64)
    arrays = [a.ctypes.data for a in (there, here, sizes)]
    driver.batch_copy(arrays[0], arrays[1], arrays[2], here.size, stream)
    driver.stream_synchronize(stream)
    view[:] = 0
    driver.batch_copy(arrays[1], arrays[0], arrays[2], here.size, stream)
    driver.stream_synchronize(stream)
    assert np.array_equal(view, content)
    driver.device_free(device)
    driver.host_free(host)


def test_the_ptx_of_last_resort_runs(backend: Backend) -> None:
    """Without a cubin for the device the driver compiles the PTX, and the pages move all the same."""
    manifest = Manifest.load()
    only = replace(manifest, artefacts=tuple(a for a in manifest.artefacts if a.kind == "ptx"))
    launcher = CudaLauncher(backend.driver, 0, only)
    assert launcher.artefact.kind == "ptx"
    result = demo.run(Backend(backend.driver, lambda device: launcher))
    assert result.ok
    assert result.artefact_file == launcher.artefact.file


def test_the_driver_refuses_other_architectures(backend: Backend) -> None:
    """A cubin that claims to suit the device and does not: the driver's refusal is told, file by file."""
    manifest = Manifest.load()
    mine = backend.driver.device_architecture(0)
    others = [a for a in manifest.artefacts if a.kind == "cubin" and a.target.split("_")[1][0] != mine.split("_")[1][0]]
    only = replace(manifest, artefacts=tuple(replace(a, target=mine) for a in others))
    with pytest.raises(NoArtefact) as caught:
        CudaLauncher(backend.driver, 0, only)
    assert set(caught.value.rejected) == {a.file for a in others}
    assert all("209" in why for why in caught.value.rejected.values())


def test_demo(backend: Backend) -> None:
    result = demo.run(backend)
    assert result.ok
    assert result.artefact_file == f"kv_transfer.{backend.driver.device_architecture(0)}.cubin"


def test_fork() -> None:
    """Scenario 30: the child may not use the driver, and its end takes nothing from the parent."""
    run_python(
        """
        import os
        import numpy as np
        from kvferry.drivers.errors import ForkedProcess
        from kvferry.hostpool import HostPool, KVLayout
        pool = HostPool(KVLayout.mla(layers=1, latent_size=64, element_nbytes=2, page_tokens=16), 4, platform="cuda")
        pool.page_view(1)[:] = 7
        child = os.fork()
        if child == 0:
            try:
                pool.backend.driver.device_name(0)
            except ForkedProcess:
                raise SystemExit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        driver = pool.backend.driver
        with driver.context(0):
            assert driver.host_device_pointer(pool.page_address(1)) > 0
        assert (pool.page_view(1) == 7).all()
        pool.close()
        """
    )


IN_FLIGHT_AT_EXIT = """
import numpy as np
from kvferry.hostpool import HostPool, KVLayout

layout = KVLayout.mha(layers=8, heads=8, head_size=128, element_nbytes=2, page_tokens=64)
pool = HostPool(layout, 64, platform="cuda")
driver = pool.backend.driver
with driver.context(0):
    caches = {name: [driver.device_alloc(64 * 64 * 2048) for _ in range(8)] for name in "kv"}
    stream = driver.stream_create()
kv = pool.device_pool(caches, tokens=64 * 64)
pool.store(kv, np.arange(64), np.arange(64), stream=stream)
"""


def test_exit_with_a_transfer_in_flight_is_silent() -> None:
    """Scenario 19: nothing is closed, the interpreter ends, nobody complains."""
    done = subprocess.run([sys.executable, "-c", IN_FLIGHT_AT_EXIT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
