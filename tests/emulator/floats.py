"""The little floating point that integer division is expanded to. Values are the bits of 32-bit floats."""

from __future__ import annotations

from typing import Any

import numpy as np

Value = Any
"""uint32: an array of them, or one."""


def _float(bits: Value) -> Value:
    return np.asarray(bits, np.uint32).view(np.float32)


def _bits(value: Value) -> Value:
    return np.asarray(value, np.float32).view(np.uint32)


def f32_from_u32(value: Value) -> Value:
    """To the nearest float, ties to even: the mode that kernels begin in."""
    return _bits(np.asarray(value, np.uint32).astype(np.float32))


def u32_from_f32(bits: Value) -> Value:
    """Cut towards zero; what does not fit becomes the nearest that does, and NaN becomes 0."""
    wide = np.nan_to_num(_float(bits).astype(np.float64), nan=0.0, posinf=2.0**32, neginf=0.0)
    return np.clip(np.trunc(wide), 0.0, 2.0**32 - 1).astype(np.uint32)


def f32_multiply(a: Value, b: Value) -> Value:
    """The product, rounded once."""
    return _integer(np.multiply(_float(a), _float(b)))


def f32_reciprocal(bits: Value, direction: int) -> Value:
    """1/x: the nearest float, or with a ``direction`` the next one above (1) or below (-1) what is exact.

    Hardware promises one step at most (V_RCP_IFLAG_F32), so what is right for all three is right on a GPU.
    """
    x = _float(bits)
    nearest = np.divide(np.float32(1), x)
    beyond = np.sign(nearest.astype(np.float64) * x.astype(np.float64) - 1) * np.sign(x)  # exact: 24 bits times 24 bits
    step = np.nextafter(nearest, np.float32(np.inf if direction > 0 else -np.inf))
    wrong_side = np.isfinite(nearest) & (beyond == -direction) & (direction != 0)
    return _bits(np.where(wrong_side, step, nearest))


def _integer(value: Value) -> Value:
    found = _bits(value)
    return found if found.ndim else int(found)
