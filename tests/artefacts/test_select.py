"""Which binary a device gets, and what a user reads when it gets none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.drivers.errors import NoArtefact
from kvferry.kernels_cubin.manifest import Artefact, Kind, Manifest
from kvferry.kernels_cubin.select import GENERIC_PROCESSORS, candidates, choose

NEW = 13000


def artefact(target: str, kind: Kind) -> Artefact:
    return Artefact(f"kv_transfer.{target}.{kind}", target, kind, 1, "0" * 64)


SM_75, SM_80, SM_86, SM_89, SM_90, SM_100, SM_120 = (
    artefact(f"sm_{architecture}", "cubin") for architecture in (75, 80, 86, 89, 90, 100, 120)
)
PTX = artefact("sm_75", "ptx")
CUDA = [SM_75, PTX, SM_120, SM_86, SM_80, SM_89, SM_90, SM_100]
GFX90A, GFX942, GFX9 = (artefact(target, "hsaco") for target in ("gfx90a", "gfx942", "gfx9"))
X86, ARM = artefact("x86_64", "host"), artefact("aarch64", "host")


@pytest.mark.parametrize(
    ("architecture", "best_first"),
    [
        ("sm_75", [SM_75, PTX]),
        ("sm_80", [SM_80, PTX]),
        ("sm_86", [SM_86, SM_80, PTX]),
        ("sm_87", [SM_86, SM_80, PTX]),
        ("sm_89", [SM_89, SM_86, SM_80, PTX]),
        ("sm_90", [SM_90, PTX]),
        ("sm_100", [SM_100, PTX]),
        ("sm_103", [SM_100, PTX]),
        ("sm_110", [PTX]),
        ("sm_121", [SM_120, PTX]),
        ("sm_200", [PTX]),
        ("sm_70", []),
    ],
)
def test_cuda_order_of_preference(architecture: str, best_first: list[Artefact]) -> None:
    accepted, rejected = candidates(CUDA, "cuda", architecture, NEW)
    assert accepted == best_first
    assert set(rejected) == {each.file for each in CUDA} - {each.file for each in best_first}


@pytest.mark.parametrize("architecture", ["sm_86", "sm_89"])
def test_an_sm_86_cubin_alone_serves_its_major_from_its_minor_on(architecture: str) -> None:
    assert choose([SM_86], "cuda", architecture, NEW) == [SM_86]


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_75", "sm_120"])
def test_an_sm_86_cubin_alone_is_refused_elsewhere(architecture: str) -> None:
    with pytest.raises(NoArtefact) as caught:
        choose([SM_86], "cuda", architecture, NEW)
    assert caught.value.target == architecture
    assert caught.value.rejected == {SM_86.file: "built for sm_86, compute capability 8.6 and later 8.x only"}


def test_nothing_fits_and_each_file_has_its_reason() -> None:
    with pytest.raises(NoArtefact) as caught:
        choose([SM_90, PTX, GFX942, X86], "cuda", "sm_70", NEW)
    assert caught.value.rejected == {
        SM_90.file: "built for sm_90, compute capability 9.x only",
        PTX.file: "PTX for compute capability 7.5 and later",
        GFX942.file: "for rocm, and this device is cuda",
        X86.file: "for stand-in, and this device is cuda",
    }
    for file, reason in caught.value.rejected.items():
        assert f"{file}: {reason}" in str(caught.value)


def test_nothing_is_shipped() -> None:
    with pytest.raises(NoArtefact, match="none is shipped"):
        choose([], "cuda", "sm_90", NEW)


@pytest.mark.parametrize("version", [11080, 11999, 0])
def test_a_driver_before_12_has_no_library_loading(version: int) -> None:
    accepted, rejected = candidates([SM_90, PTX], "cuda", "sm_90", version)
    assert accepted == []
    said = f"this one is for {version // 1000}.{version % 1000 // 10}"
    assert all(reason.startswith("needs a driver for CUDA 12.0") and said in reason for reason in rejected.values())


def test_a_driver_of_12_0_takes_cubin_and_ptx() -> None:
    assert choose([PTX, SM_90], "cuda", "sm_90", 12000) == [SM_90, PTX]


@pytest.mark.parametrize("cubin", [SM_100, SM_120])
def test_blackwell_cubins_need_12_8_and_ptx_does_not(cubin: Artefact) -> None:
    accepted, rejected = candidates([cubin, PTX], "cuda", cubin.target, 12070)
    assert accepted == [PTX]
    assert rejected == {cubin.file: "needs a driver for CUDA 12.8 or later, this one is for 12.7"}
    assert choose([cubin, PTX], "cuda", cubin.target, 12080) == [cubin, PTX]


@pytest.mark.parametrize("architecture", ["gfx942", "", "sm_", "90", "sm_90a", "compute_90"])
def test_what_is_no_compute_capability_is_refused_with_the_reason(architecture: str) -> None:
    with pytest.raises(NoArtefact, match="is not a compute capability"):
        choose(CUDA, "cuda", architecture, NEW)


@pytest.mark.parametrize("architecture", ["gfx90a", "gfx90a:sramecc+:xnack-"])
def test_rocm_ignores_the_features_and_wants_the_very_processor(architecture: str) -> None:
    accepted, rejected = candidates([GFX942, GFX9, GFX90A, SM_90], "rocm", architecture, 0)
    assert accepted == [GFX90A]
    assert rejected[GFX942.file] == "built for gfx942 only"
    assert rejected[GFX9.file] == "built for gfx9 only"
    assert rejected[SM_90.file] == "for cuda, and this device is rocm"


def test_the_stand_in_gets_the_build_for_this_machine() -> None:
    assert choose([ARM, X86, SM_90], "stand-in", "x86_64", 0) == [X86]
    with pytest.raises(NoArtefact, match="built for aarch64 only"):
        choose([ARM], "stand-in", "riscv64", 0)


@given(
    st.lists(st.sampled_from(CUDA), unique=True),
    st.integers(5, 13),
    st.integers(0, 9),
    st.sampled_from([11080, 12000, 12070, 12080, 13000]),
)
def test_no_cubin_is_accepted_that_the_device_cannot_run(
    shipped: list[Artefact], major: int, minor: int, driver_version: int
) -> None:
    accepted, rejected = candidates(shipped, "cuda", f"sm_{major}{minor}", driver_version)
    assert sorted([*(each.file for each in accepted), *rejected]) == sorted(each.file for each in shipped)
    assert all(rejected.values())
    built = [divmod(int(each.target.removeprefix("sm_")), 10) for each in accepted if each.kind == "cubin"]
    for built_major, built_minor in built:
        assert built_major == major
        assert built_minor <= minor
    assert built == sorted(built, reverse=True)
    assert PTX not in accepted[:-1]


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_what_is_shipped_has_a_cubin_for_the_supported_devices(shipped: Manifest, architecture: str) -> None:
    assert choose(shipped.artefacts, "cuda", architecture, 12080)[0].kind == "cubin"


@pytest.mark.parametrize(
    "architecture", ["gfx90a", "gfx942", "gfx950", "gfx1030", "gfx1100", "gfx1101", "gfx1200", "gfx1201"]
)
def test_what_is_shipped_serves_the_supported_amd_devices(shipped: Manifest, architecture: str) -> None:
    targets = [each.target for each in choose(shipped.artefacts, "rocm", architecture, 0)]
    assert targets[0] == architecture
    assert all(architecture in GENERIC_PROCESSORS[generic] for generic in targets[1:])


@pytest.mark.parametrize(
    ("architecture", "generic"),
    [
        ("gfx950:sramecc+:xnack-", "gfx9-4-generic"),
        ("gfx1036", "gfx10-3-generic"),
        ("gfx1151", "gfx11-generic"),
        ("gfx1201", "gfx12-generic"),
    ],
)
def test_a_generic_code_object_serves_its_family(shipped: Manifest, architecture: str, generic: str) -> None:
    assert choose(shipped.artefacts, "rocm", architecture, 0)[-1].target == generic


@pytest.mark.parametrize("architecture", ["gfx906", "gfx908", "gfx1010", "gfx1250"])
def test_other_amd_devices_are_refused_with_every_reason(shipped: Manifest, architecture: str) -> None:
    with pytest.raises(NoArtefact) as caught:
        choose(shipped.artefacts, "rocm", architecture, 0)
    assert set(caught.value.rejected) == {each.file for each in shipped.artefacts}
    assert "gfx1150" in caught.value.rejected["kv_transfer.gfx11-generic.hsaco"]
