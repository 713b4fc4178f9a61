"""Vector instructions: 32-bit and 64-bit integers in every lane, written where the lane is active.

Arrays of uint32 and uint64 wrap as the hardware's registers do. Sources: see ``scalar``.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from emulator.arithmetic import BINARY, NARROW, WIDE, Bits, Compute
from emulator.decode import Instruction
from emulator.floats import f32_reciprocal
from emulator.state import (
    EXEC,
    VCC,
    Handler,
    VectorSource,
    Wave,
    lanes_of,
    mask_of,
    mask_source,
    mask_target,
    scalar_source,
    scalar_target,
    vector_source,
    vector_target,
)

CARRIES: Mapping[str, tuple[str, bool]] = {
    "V_ADD_CO_U32": ("a+b", False),
    "V_SUB_CO_U32": ("a-b", False),
    "V_SUBREV_CO_U32": ("b-a", False),
    "V_ADD_CO_CI_U32": ("a+b", True),
    "V_SUB_CO_CI_U32": ("a-b", True),
    "V_SUBREV_CO_CI_U32": ("b-a", True),
}
_COMPARE: Mapping[str, Callable[[Any, Any], Any]] = {
    "LT": operator.lt,
    "EQ": operator.eq,
    "LE": operator.le,
    "GT": operator.gt,
    "NE": operator.ne,
    "GE": operator.ge,
}
# The older name of an operation -> the name here.
_RENAMED = {
    "V_ADD_U32": "V_ADD_NC_U32",
    "V_SUB_U32": "V_SUB_NC_U32",
    "V_SUBREV_U32": "V_SUBREV_NC_U32",
    "V_ADDC_CO_U32": "V_ADD_CO_CI_U32",
    "V_SUBB_CO_U32": "V_SUB_CO_CI_U32",
    "V_SUBBREV_CO_U32": "V_SUBREV_CO_CI_U32",
    "V_MAD_CO_U64_U32": "V_MAD_U64_U32",
}


def handler(i: Instruction) -> Handler | None:
    """What a vector instruction does; ``None`` if it is none of those here."""
    if not i.opcode.startswith("V_"):
        return None
    if re.search(r"DPP|SDWA", i.encoding):
        raise i.unknown(f"encoding {i.encoding}: {i.text}")
    if i.opcode == "V_PK_MOV_B32":
        return _packed_move(i)
    i.refuse("neg", "abs", "omod", "clmp", "opsel", "neg_hi")
    if i.encoding.startswith("VOPD"):
        return _dual(i)
    name = _RENAMED.get(i.opcode, i.opcode)
    for table, widths in NARROW:
        if name in table:
            return _elementwise(i, 32, _sources(i, widths), table[name])
    if name in WIDE:
        bits, widths, compute = WIDE[name]
        return _elementwise(i, bits, _sources(i, widths), compute)
    if name in CARRIES:
        return _with_carry(i, *CARRIES[name])
    if match := re.fullmatch(r"V_CMP(X?)_(LT|EQ|LE|GT|NE|GE)_([UI])(32|64)", name):
        return _compare(i, _COMPARE[match[2]], 32 if match[4] == "32" else 64, match[3] == "I", bool(match[1]))
    found = {
        "V_CNDMASK_B32": _conditional,
        "V_MAD_U64_U32": _multiply_add_long,
        "V_RCP_IFLAG_F32": _reciprocal,
        "V_READFIRSTLANE_B32": _read_first_lane,
        "V_READLANE_B32": _read_lane,
        "V_WRITELANE_B32": _write_lane,
    }.get(name)
    return found(i) if found else None


def _sources(i: Instruction, widths: tuple[Bits, ...]) -> list[VectorSource]:
    names = ("src0", i.first("vsrc1", "src1") if len(widths) > 1 else "", "src2")
    return [vector_source(i, name, bits) for name, bits in zip(names, widths, strict=False)]


def _elementwise(i: Instruction, bits: Bits, sources: list[VectorSource], compute: Compute) -> Handler:
    target = vector_target(i, "vdst", bits)
    if len(sources) == 1:
        (only,) = sources
        return lambda wave: target(wave, compute(only(wave)))
    if len(sources) == 2:
        first, second = sources
        return lambda wave: target(wave, compute(first(wave), second(wave)))
    return lambda wave: target(wave, compute(*(source(wave) for source in sources)))


def _dual(i: Instruction) -> Handler:
    """Two instructions at once: both read before either writes."""
    halves: list[Compute] = []
    for half, opcode in zip("xy", i.opcodes, strict=True):
        name = opcode.replace("V_DUAL_", "V_")
        first, second = vector_source(i, f"src{half}0"), vector_source(i, f"vsrc{half}1")
        if name == "V_MOV_B32":
            halves.append(lambda wave, a=first: np.array(a(wave)))
        elif name == "V_CNDMASK_B32":
            halves.append(
                lambda wave, a=first, b=second: np.where(lanes_of(wave.mask(VCC), wave.lanes), b(wave), a(wave))
            )
        elif name in BINARY:
            halves.append(lambda wave, a=first, b=second, compute=BINARY[name]: compute(a(wave), b(wave)))
        else:
            raise i.unknown()
    x, y = halves
    into_x, into_y = vector_target(i, "vdstx"), vector_target(i, "vdsty")

    def run(wave: Wave) -> None:
        a, b = x(wave), y(wave)
        into_x(wave, a)
        into_y(wave, b)

    return run


def _packed_move(i: Instruction) -> Handler:
    """Two registers from two pairs; ``opsel`` says which of each pair."""
    i.refuse("neg", "neg_hi", "clmp")
    select = i.fields["opsel"]
    low, high = (_half(i, name, select >> bit & 1) for bit, name in enumerate(("src0", "src1")))
    register = i.fields["vdst"] - 256

    def run(wave: Wave) -> None:
        a, b = np.array(low(wave)), np.array(high(wave))
        wave.write(register, a)
        wave.write(register + 1, b)

    return run


def _half(i: Instruction, name: str, upper: int) -> VectorSource:
    if i.fields[name] >= 256:
        register = i.fields[name] - 256 + upper
        return lambda wave: wave.v[register]
    source = scalar_source(i, name, 64)
    return lambda wave: np.uint32(source(wave) >> 32 * upper & 0xFFFFFFFF)


def _conditional(i: Instruction) -> Handler:
    otherwise, then = _sources(i, (32, 32))
    target = vector_target(i, "vdst")
    if "src2" in i.fields:
        condition = mask_source(i, "src2")
        return lambda wave: target(wave, np.where(lanes_of(condition(wave), wave.lanes), then(wave), otherwise(wave)))
    return lambda wave: target(wave, np.where(lanes_of(wave.mask(VCC), wave.lanes), then(wave), otherwise(wave)))


def _with_carry(i: Instruction, what: str, carry_in: bool) -> Handler:
    first, second = _sources(i, (32, 32))
    target, carry_out = vector_target(i, "vdst"), mask_target(i, "sdst" if "sdst" in i.fields else None)
    carry = mask_source(i, "src2") if "src2" in i.fields else lambda wave: wave.mask(VCC)

    def run(wave: Wave) -> None:
        a, b = np.int64(1) * first(wave), np.int64(1) * second(wave)
        c = lanes_of(carry(wave), wave.lanes) if carry_in else 0
        exact = {"a+b": a + b + c, "a-b": a - b - c, "b-a": b - a - c}[what]
        carries = np.broadcast_to((exact < 0) | (exact > 0xFFFFFFFF), wave.active.shape) & wave.active
        target(wave, np.bitwise_and(exact, 0xFFFFFFFF).astype(np.uint32))
        carry_out(wave, mask_of(carries))

    return run


def _multiply_add_long(i: Instruction) -> Handler:
    first, second, third = _sources(i, (32, 32, 64))
    target, carry_out = vector_target(i, "vdst", 64), mask_target(i, "sdst")

    def run(wave: Wave) -> None:
        product = np.multiply(first(wave), second(wave), dtype=np.uint64)
        total = np.add(product, third(wave))
        carries = np.broadcast_to(total < product, wave.active.shape) & wave.active
        target(wave, total)
        carry_out(wave, mask_of(carries))

    return run


def _compare(i: Instruction, compute: Compute, bits: Bits, is_signed: bool, to_exec: bool) -> Handler:
    first, second = _sources(i, (bits, bits))
    kind = np.dtype(f"i{bits // 8}")
    target = mask_target(i, "vdst" if "vdst" in i.fields else None)
    both = to_exec and i.family.name == "gfx9"

    def run(wave: Wave) -> None:
        a, b = first(wave), second(wave)
        if is_signed:
            a, b = a.view(kind), b.view(kind)
        found = mask_of(np.broadcast_to(compute(a, b), wave.active.shape) & wave.active)
        if not to_exec or both:
            target(wave, found)
        if to_exec:
            wave.set_mask(EXEC, found)

    return run


def _reciprocal(i: Instruction) -> Handler:
    (source,) = _sources(i, (32,))
    target = vector_target(i, "vdst")
    return lambda wave: target(wave, f32_reciprocal(source(wave), wave.rcp_direction))


def _read_first_lane(i: Instruction) -> Handler:
    (source,) = _sources(i, (32,))
    target = scalar_target(i, "vdst")

    def run(wave: Wave) -> None:
        value = np.broadcast_to(source(wave), wave.active.shape)
        target(wave, int(value[int(wave.active.argmax())]))  # lane 0 where none is active

    return run


def _read_lane(i: Instruction) -> Handler:
    (source,) = _sources(i, (32,))
    lane, target = scalar_source(i, i.first("vsrc1", "src1")), scalar_target(i, "vdst")
    return lambda wave: target(wave, int(np.broadcast_to(source(wave), (wave.lanes,))[lane(wave) % wave.lanes]))


def _write_lane(i: Instruction) -> Handler:
    value, lane = scalar_source(i, "src0"), scalar_source(i, i.first("vsrc1", "src1"))
    register = i.fields["vdst"] - 256

    def run(wave: Wave) -> None:
        wave.v[register][lane(wave) % wave.lanes] = value(wave)  # active or not

    return run
