"""The floating point under integer division."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from emulator.floats import f32_from_u32, f32_multiply, f32_reciprocal, u32_from_f32
from emulator.handmade import M32

pytestmark = pytest.mark.emulated


@pytest.mark.parametrize("direction", [-1, 0, 1])
def test_division_as_compilers_expand_it(direction: int) -> None:
    """x / y from an estimate of 1/y that is off by up to one step, as LLVM expands it for AMD."""
    random = np.random.default_rng(3)
    ys = np.array([1, 2, 3, 5, 7, 255, 256, 257, 65535, 2**24 - 1, 2**24 + 1, 2**31 - 1, 2**31, 2**32 - 1], np.uint32)
    ys = np.concatenate([ys, random.integers(1, 1 << 32, 2000, np.uint32), random.integers(1, 5000, 2000, np.uint32)])
    xs = random.integers(0, 1 << 32, ys.size, np.uint32)
    xs[::3] = ys[::3] * (xs[::3] % np.uint32(7)) - np.uint32(1)
    with np.errstate(over="ignore"):
        z = u32_from_f32(
            f32_multiply(np.full(ys.size, 0x4F7FFFFE, np.uint32), f32_reciprocal(f32_from_u32(ys), direction))
        )
        z = z + ((z.astype(np.uint64) * ((np.uint32(0) - ys) * z).astype(np.uint64)) >> np.uint64(32)).astype(np.uint32)
        q = ((xs.astype(np.uint64) * z) >> np.uint64(32)).astype(np.uint32)
        r = xs - q * ys
        for _ in range(2):
            more = r >= ys
            q, r = q + more.astype(np.uint32), np.where(more, r - ys, r)
    assert (q == xs // ys).all()
    assert (r == xs % ys).all()


def test_reciprocals_stay_within_a_step_of_the_truth() -> None:
    values = np.array([1, 3, 5, 7, 10, 641, 0xFFFFFF, 4096, 6700417], np.uint32)
    for direction in (-1, 0, 1):
        found = f32_reciprocal(f32_from_u32(values), direction).view(np.float32)
        for value, reciprocal in zip(values.tolist(), found.tolist(), strict=True):
            distance = Fraction(reciprocal) - Fraction(1, value)
            assert distance * direction >= 0
            assert abs(distance) < Fraction(float(np.spacing(np.float32(reciprocal))))


def test_conversion_to_integers_saturates() -> None:
    floats = np.array([np.nan, -1.5, -np.inf, np.inf, 0.99, 4294967040.0, 4294967296.0, 16777217], np.float32)
    assert u32_from_f32(floats.view(np.uint32)).tolist() == [0, 0, 0, M32, 0, 4294967040, M32, 16777216]
