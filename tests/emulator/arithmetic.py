"""What vector instructions compute from the values of their operands.

Arrays of uint32 and uint64 wrap as the hardware's registers do. Of the names of an operation the newest is here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

import numpy as np

from emulator.floats import f32_from_u32, f32_multiply, u32_from_f32
from emulator.integers import (
    align_bits,
    bit_field,
    insert_bits,
    mask_bits,
    multiply_high,
    permute_bytes,
    reverse_bits,
    shift,
    signed_24,
    signed_bit_field,
    unsigned_24,
)
from emulator.state import Value

Bits: TypeAlias = Literal[32, 64]
Compute: TypeAlias = Callable[..., Value]


def _reversed(compute: Compute) -> Compute:
    return lambda a, b: compute(b, a)


def _signed(compute: Compute) -> Compute:
    """A computation on int32."""
    return lambda *values: np.asarray(compute(*(np.asarray(v).view(np.int32) for v in values))).view(np.uint32)


_left, _right = shift(np.left_shift, 31), shift(np.right_shift, 31)
_left64, _right64 = shift(np.left_shift, 63), shift(np.right_shift, 63)

UNARY: Mapping[str, Compute] = {
    "V_MOV_B32": lambda a: a,
    "V_NOT_B32": np.invert,
    "V_BFREV_B32": reverse_bits,
    "V_CVT_F32_U32": f32_from_u32,
    "V_CVT_U32_F32": u32_from_f32,
}
BINARY: Mapping[str, Compute] = {
    "V_ADD_NC_U32": np.add,
    "V_SUB_NC_U32": np.subtract,
    "V_SUBREV_NC_U32": _reversed(np.subtract),
    "V_MUL_LO_U32": np.multiply,
    "V_MUL_HI_U32": multiply_high,
    "V_MUL_U32_U24": lambda a, b: unsigned_24(a) * unsigned_24(b),
    "V_MUL_HI_U32_U24": lambda a, b: multiply_high(unsigned_24(a), unsigned_24(b)),
    "V_MUL_I32_I24": lambda a, b: np.multiply(signed_24(a), signed_24(b)).view(np.uint32),
    "V_MUL_F32": f32_multiply,
    "V_MIN_U32": np.minimum,
    "V_MAX_U32": np.maximum,
    "V_MIN_I32": _signed(np.minimum),
    "V_MAX_I32": _signed(np.maximum),
    "V_AND_B32": np.bitwise_and,
    "V_OR_B32": np.bitwise_or,
    "V_XOR_B32": np.bitwise_xor,
    "V_XNOR_B32": lambda a, b: np.invert(np.bitwise_xor(a, b)),
    "V_LSHLREV_B32": _reversed(_left),
    "V_LSHRREV_B32": _reversed(_right),
    "V_ASHRREV_I32": lambda a, b: np.right_shift(np.asarray(b).view(np.int32), (a & 31).astype(np.int32)).view(
        np.uint32
    ),
    "V_BFM_B32": lambda a, b: _left(mask_bits(a), b),
}
TERNARY: Mapping[str, Compute] = {
    "V_ADD3_U32": lambda a, b, c: np.add(np.add(a, b), c),
    "V_ADD_LSHL_U32": lambda a, b, c: _left(np.add(a, b), c),
    "V_LSHL_ADD_U32": lambda a, b, c: np.add(_left(a, b), c),
    "V_LSHL_OR_B32": lambda a, b, c: np.bitwise_or(_left(a, b), c),
    "V_AND_OR_B32": lambda a, b, c: np.bitwise_or(np.bitwise_and(a, b), c),
    "V_OR3_B32": lambda a, b, c: np.bitwise_or(np.bitwise_or(a, b), c),
    "V_XOR3_B32": lambda a, b, c: np.bitwise_xor(np.bitwise_xor(a, b), c),
    "V_XAD_U32": lambda a, b, c: np.add(np.bitwise_xor(a, b), c),
    "V_BFE_U32": bit_field,
    "V_BFE_I32": signed_bit_field,
    "V_BFI_B32": insert_bits,
    "V_ALIGNBIT_B32": align_bits,
    "V_PERM_B32": permute_bytes,
    "V_MAD_U32_U24": lambda a, b, c: np.add(np.multiply(unsigned_24(a), unsigned_24(b)), c),
    "V_MAD_I32_I24": lambda a, b, c: np.add(np.multiply(signed_24(a), signed_24(b)).view(np.uint32), c),
}
NARROW: tuple[tuple[Mapping[str, Compute], tuple[Bits, ...]], ...] = (
    (UNARY, (32,)),
    (BINARY, (32, 32)),
    (TERNARY, (32, 32, 32)),
)
"""Tables of operations on 32 bits, with the widths of their sources."""

WIDE: Mapping[str, tuple[Bits, tuple[Bits, ...], Compute]] = {
    "V_MOV_B64": (64, (64,), lambda a: a),
    "V_LSHLREV_B64": (64, (32, 64), lambda a, b: _left64(b, a)),
    "V_LSHRREV_B64": (64, (32, 64), lambda a, b: _right64(b, a)),
    "V_LSHL_ADD_U64": (
        64,
        (64, 32, 64),
        lambda a, b, c: np.add(np.left_shift(a, np.bitwise_and(b, 7), dtype=np.uint64), c),
    ),
}
"""Operations on 64 bits: width of the result, widths of the sources."""
