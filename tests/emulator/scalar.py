"""Scalar instructions: one value a wave. Python's integers, cut to the width of the operation.

Sources: AMD's instruction set guides for MI200, MI300, RDNA 3 and RDNA 4.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np

from emulator.decode import Instruction
from emulator.floats import f32_from_u32, f32_multiply, u32_from_f32
from emulator.state import (
    EXEC,
    LONG,
    WORD,
    Handler,
    ScalarSource,
    Wave,
    mask_source,
    mask_target,
    scalar_source,
    scalar_target,
)

Bits: TypeAlias = Literal[32, 64]
Flag: TypeAlias = "Callable[[int, int, int, int], bool] | None"
"""SCC from (a, b, the exact result, the result cut to its width); ``None``: left alone."""


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) & 1 else value


def _nonzero(a: int, b: int, exact: int, cut: int) -> bool:
    return cut != 0


def _outside(a: int, b: int, exact: int, cut: int) -> bool:
    return exact != cut  # a carry or a borrow


def _sum_overflows(a: int, b: int, exact: int, cut: int) -> bool:
    return signed(a, 32) + signed(b, 32) != signed(cut, 32)


def _difference_overflows(a: int, b: int, exact: int, cut: int) -> bool:
    return signed(a, 32) - signed(b, 32) != signed(cut, 32)


def _field(bits: Bits, is_signed: bool) -> Callable[[int, int], int]:
    def extract(a: int, b: int) -> int:
        begin, width = b & (bits - 1), b >> 16 & 0x7F
        value = a >> begin & ((1 << width) - 1)
        return signed(value, width) if is_signed and 0 < width < bits else value

    return extract


# By name: width of the sources and the result, what it computes, and SCC. The second source of a shift has 32 bits.
_BINARY: dict[str, tuple[Bits, Callable[[int, int], int], Flag]] = {
    "S_ADD_U32": (32, operator.add, _outside),
    "S_SUB_U32": (32, operator.sub, _outside),
    "S_ADD_I32": (32, operator.add, _sum_overflows),
    "S_SUB_I32": (32, operator.sub, _difference_overflows),
    "S_ADD_NC_U64": (64, operator.add, None),
    "S_SUB_NC_U64": (64, operator.sub, None),
    "S_MUL_I32": (32, operator.mul, None),
    "S_MUL_U64": (64, operator.mul, None),
    "S_MUL_HI_U32": (32, lambda a, b: a * b >> 32, None),
    "S_MUL_HI_I32": (32, lambda a, b: signed(a, 32) * signed(b, 32) >> 32, None),
    "S_MUL_F32": (32, f32_multiply, None),
    "S_BFE_U32": (32, _field(32, False), _nonzero),
    "S_BFE_I32": (32, _field(32, True), _nonzero),
    "S_BFE_U64": (64, _field(64, False), _nonzero),
    "S_PACK_LL_B32_B16": (32, lambda a, b: a & 0xFFFF | b << 16, None),
}


def _of_width(bits: Bits) -> dict[str, tuple[Bits, Callable[[int, int], int], Flag]]:
    """Operations that come in both widths."""
    return {
        f"S_AND_B{bits}": (bits, operator.and_, _nonzero),
        f"S_OR_B{bits}": (bits, operator.or_, _nonzero),
        f"S_XOR_B{bits}": (bits, operator.xor, _nonzero),
        f"S_AND_NOT1_B{bits}": (bits, lambda a, b: a & ~b, _nonzero),
        f"S_OR_NOT1_B{bits}": (bits, lambda a, b: a | ~b, _nonzero),
        f"S_NAND_B{bits}": (bits, lambda a, b: ~(a & b), _nonzero),
        f"S_NOR_B{bits}": (bits, lambda a, b: ~(a | b), _nonzero),
        f"S_XNOR_B{bits}": (bits, lambda a, b: ~(a ^ b), _nonzero),
        f"S_LSHL_B{bits}": (bits, lambda a, b: a << (b & (bits - 1)), _nonzero),
        f"S_LSHR_B{bits}": (bits, lambda a, b: a >> (b & (bits - 1)), _nonzero),
        f"S_ASHR_I{bits}": (bits, lambda a, b: signed(a, bits) >> (b & (bits - 1)), _nonzero),
        f"S_BFM_B{bits}": (bits, lambda a, b: ((1 << (a & (bits - 1))) - 1) << (b & (bits - 1)), None),
    }


def _shift_and_add(by: int) -> Callable[[int, int], int]:
    return lambda a, b: (a << by) + b


_BINARY |= _of_width(32) | _of_width(64)
_BINARY |= {f"S_LSHL{by}_ADD_U32": (32, _shift_and_add(by), _outside) for by in (1, 2, 3, 4)}

_UNARY: dict[str, tuple[Bits, Callable[[int], int], bool]] = {
    "S_MOV_B32": (32, lambda a: a, False),
    "S_MOV_B64": (64, lambda a: a, False),
    "S_NOT_B32": (32, lambda a: ~a, True),
    "S_NOT_B64": (64, lambda a: ~a, True),
    "S_BREV_B32": (32, lambda a: int(f"{a:032b}"[::-1], 2), False),
    "S_SEXT_I32_I8": (32, lambda a: signed(a & 0xFF, 8), False),
    "S_SEXT_I32_I16": (32, lambda a: signed(a & 0xFFFF, 16), False),
    "S_CVT_F32_U32": (32, lambda a: int(f32_from_u32(np.uint32(a))), False),
    "S_CVT_U32_F32": (32, lambda a: int(u32_from_f32(np.uint32(a))), False),
}
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "EQ": operator.eq,
    "LG": operator.ne,
    "GT": operator.gt,
    "GE": operator.ge,
    "LT": operator.lt,
    "LE": operator.le,
}
_SAVEEXEC: dict[str, Callable[[int, int], int]] = {
    "AND": lambda source, exec_: source & exec_,
    "OR": lambda source, exec_: source | exec_,
    "XOR": lambda source, exec_: source ^ exec_,
    "AND_NOT1": lambda source, exec_: source & ~exec_,
    "AND_NOT0": lambda source, exec_: ~source & exec_,
}
# The older name of an operation -> the name here.
_RENAMED = {
    "S_ADD_CO_U32": "S_ADD_U32",
    "S_SUB_CO_U32": "S_SUB_U32",
    "S_ADD_CO_I32": "S_ADD_I32",
    "S_SUB_CO_I32": "S_SUB_I32",
    "S_ADDC_U32": "S_ADD_CO_CI_U32",
    "S_SUBB_U32": "S_SUB_CO_CI_U32",
    "S_ADD_U64": "S_ADD_NC_U64",
    "S_SUB_U64": "S_SUB_NC_U64",
    "S_ANDN2_B32": "S_AND_NOT1_B32",
    "S_ANDN2_B64": "S_AND_NOT1_B64",
    "S_ORN2_B32": "S_OR_NOT1_B32",
    "S_ORN2_B64": "S_OR_NOT1_B64",
    "S_ANDN2_SAVEEXEC_B64": "S_AND_NOT1_SAVEEXEC_B64",
    "S_ANDN1_SAVEEXEC_B64": "S_AND_NOT0_SAVEEXEC_B64",
    "S_ADDK_CO_I32": "S_ADDK_I32",
}


def handler(i: Instruction) -> Handler | None:
    """What a scalar instruction does; ``None`` if it is none of those here."""
    name = _RENAMED.get(i.opcode, i.opcode)
    if name in _BINARY:
        return _binary(i, *_BINARY[name])
    if name in _UNARY:
        return _unary(i, *_UNARY[name])
    if name in ("S_ADD_CO_CI_U32", "S_SUB_CO_CI_U32"):
        return _with_carry(i, 1 if "ADD" in name else -1)
    if name == "S_MOVK_I32":
        return _move_immediate(i)
    if name in ("S_ADDK_I32", "S_MULK_I32"):
        return _immediate(i, _BINARY["S_ADD_I32"] if "ADD" in name else _BINARY["S_MUL_I32"])
    if match := re.fullmatch(r"S_CSELECT_B(32|64)", name):
        return _select(i, int(match[1]))
    if match := re.fullmatch(r"S_(\w+)_SAVEEXEC_B(32|64)", name):
        return _save_exec(i, match[1], int(match[2]))
    if match := re.fullmatch(r"S_CMP_(EQ|LG|GT|GE|LT|LE)_(U32|I32|U64)", name):
        return _compare(i, _COMPARE[match[1]], int(match[2][1:]), match[2][0] == "I")
    if match := re.fullmatch(r"S_BITCMP([01])_B(32|64)", name):
        return _test_bit(i, int(match[1]), int(match[2]))
    return None


def _second(i: Instruction, bits: Bits) -> ScalarSource:
    narrow = re.match(r"S_(LSH|ASH|BFE|BFM)", i.opcode)
    return scalar_source(i, "ssrc1", 32 if narrow else bits)


def _binary(i: Instruction, bits: Bits, compute: Callable[[int, int], int], flag: Flag) -> Handler:
    first = scalar_source(i, "ssrc0", 32 if "BFM" in i.opcode else bits)
    second, target, cut_to = _second(i, bits), scalar_target(i, "sdst", bits), LONG if bits == 64 else WORD

    def run(wave: Wave) -> None:
        a, b = first(wave), second(wave)
        exact = compute(a, b)
        cut = exact & cut_to
        target(wave, cut)
        if flag is not None:
            wave.scc = int(flag(a, b, exact, cut))

    return run


def _unary(i: Instruction, bits: Bits, compute: Callable[[int], int], flag: bool) -> Handler:
    source, target, cut_to = (
        scalar_source(i, "ssrc0", bits),
        scalar_target(i, "sdst", bits),
        LONG if bits == 64 else WORD,
    )

    def run(wave: Wave) -> None:
        cut = compute(source(wave)) & cut_to
        target(wave, cut)
        if flag:
            wave.scc = int(cut != 0)

    return run


def _with_carry(i: Instruction, sign: int) -> Handler:
    first, second, target = scalar_source(i, "ssrc0"), scalar_source(i, "ssrc1"), scalar_target(i, "sdst")

    def run(wave: Wave) -> None:
        exact = first(wave) + sign * (second(wave) + wave.scc)
        target(wave, exact & WORD)
        wave.scc = int(exact != exact & WORD)

    return run


def _move_immediate(i: Instruction) -> Handler:
    value, target = i.signed("simm16", 16) & WORD, scalar_target(i, "sdst")
    return lambda wave: target(wave, value)


def _immediate(i: Instruction, what: tuple[Bits, Callable[[int, int], int], Flag]) -> Handler:
    value, source, target = i.signed("simm16", 16) & WORD, scalar_source(i, "sdst"), scalar_target(i, "sdst")
    _, compute, flag = what

    def run(wave: Wave) -> None:
        a = source(wave)
        exact = compute(a, value)
        target(wave, exact & WORD)
        if flag is not None:
            wave.scc = int(flag(a, value, exact, exact & WORD))

    return run


def _select(i: Instruction, bits: int) -> Handler:
    first, second, target = (
        scalar_source(i, "ssrc0", bits),
        scalar_source(i, "ssrc1", bits),
        scalar_target(i, "sdst", bits),
    )
    return lambda wave: target(wave, first(wave) if wave.scc else second(wave))


def _save_exec(i: Instruction, what: str, bits: int) -> Handler:
    if what not in _SAVEEXEC or bits != i.wave_lanes:
        raise i.unknown()
    source, target, compute = mask_source(i, "ssrc0"), mask_target(i, "sdst"), _SAVEEXEC[what]
    all_lanes = (1 << bits) - 1

    def run(wave: Wave) -> None:
        before = wave.mask(EXEC)
        after = compute(source(wave), before) & all_lanes
        target(wave, before)
        wave.set_mask(EXEC, after)
        wave.scc = int(after != 0)

    return run


def _compare(i: Instruction, compute: Callable[[int, int], bool], bits: int, is_signed: bool) -> Handler:
    first, second = scalar_source(i, "ssrc0", bits), scalar_source(i, "ssrc1", bits)

    def run(wave: Wave) -> None:
        a, b = first(wave), second(wave)
        wave.scc = int(compute(signed(a, bits), signed(b, bits)) if is_signed else compute(a, b))

    return run


def _test_bit(i: Instruction, wanted: int, bits: int) -> Handler:
    value, number = scalar_source(i, "ssrc0", bits), scalar_source(i, "ssrc1")

    def run(wave: Wave) -> None:
        wave.scc = int(value(wave) >> (number(wave) & (bits - 1)) & 1 == wanted)

    return run
