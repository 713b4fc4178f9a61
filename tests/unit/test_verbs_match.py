"""The drivers have the protocol's verbs, in the protocol's order, with the protocol's parameters."""

from __future__ import annotations

import importlib
import importlib.util
import inspect

import pytest

from kvferry.drivers.protocol import HostMemoryDriver

DRIVERS = [
    (module, name)
    for module, name in [
        ("kvferry.drivers.cuda", "CudaDriver"),
        ("kvferry.drivers.hip", "HipDriver"),
        ("kvferry.drivers.host", "HostDriver"),
    ]
    if importlib.util.find_spec(module)
]
"""All that there are; CUDA and HIP always."""

# The stand-in's kernels are launched through methods of its own; they come after the verbs.
HAS_MORE = {"HostDriver"}


def verbs(kind: type) -> list[str]:
    """Public methods in the order of their definition."""
    return [name for name, member in vars(kind).items() if inspect.isfunction(member) and not name.startswith("_")]


@pytest.mark.parametrize(("module", "name"), DRIVERS)
def test_the_verbs_come_in_the_protocols_order(module: str, name: str) -> None:
    kind = getattr(importlib.import_module(module), name)
    expected = verbs(HostMemoryDriver)
    assert verbs(kind)[: len(expected)] == expected
    assert name in HAS_MORE or verbs(kind) == expected


@pytest.mark.parametrize(("module", "name"), DRIVERS)
def test_the_verbs_take_the_same_parameters(module: str, name: str) -> None:
    kind = getattr(importlib.import_module(module), name)
    for verb in verbs(HostMemoryDriver):
        expected = inspect.signature(getattr(HostMemoryDriver, verb)).parameters.values()
        actual = inspect.signature(getattr(kind, verb)).parameters.values()
        assert [(p.name, p.kind, p.default) for p in actual] == [(p.name, p.kind, p.default) for p in expected], verb


def test_cuda_and_hip_are_among_them() -> None:
    assert {"CudaDriver", "HipDriver"} <= {name for _, name in DRIVERS}
    assert len(verbs(HostMemoryDriver)) >= 30
