"""A wave: its registers, its execution mask, and how operands are read and written."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from emulator.addresses import Memory
from emulator.decode import Instruction

VCC, EXEC = 106, 126
WORD, LONG = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
ENDED = -1

U32: TypeAlias = npt.NDArray[np.uint32]
Lanes: TypeAlias = npt.NDArray[np.bool_]
Value: TypeAlias = Any
"""A value in every lane: an array of uint32 or uint64, or one number for all of them."""

Handler: TypeAlias = "Callable[[Wave], None]"
ScalarSource: TypeAlias = "Callable[[Wave], int]"
ScalarTarget: TypeAlias = "Callable[[Wave, int], None]"
VectorSource: TypeAlias = "Callable[[Wave], Value]"
VectorTarget: TypeAlias = "Callable[[Wave, Value], None]"

# Operand numbers 240 to 248: 0.5, -0.5, 1, -1, 2, -2, 4, -4, 1/(2*pi), as 32-bit floats.
_FLOATS = (0x3F000000, 0xBF000000, 0x3F800000, 0xBF800000, 0x40000000, 0xC0000000, 0x40800000, 0xC0800000, 0x3E22F983)
_VCCZ, _EXECZ, _SCC, _LITERAL = 251, 252, 253, 255


@lru_cache(maxsize=1 << 16)
def lanes_of(mask: int, width: int) -> Lanes:
    """A mask's bits, lane by lane; not to be written."""
    found = np.unpackbits(np.frombuffer(mask.to_bytes(8, "little"), np.uint8), bitorder="little")[:width].astype(bool)
    found.setflags(write=False)
    return found


def mask_of(lanes: Lanes) -> int:
    return int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")


class Wave:
    """The registers of one wave. They begin as junk: a kernel that reads what it has not written gets that."""

    def __init__(self, lanes: int, vgprs: int, memory: Memory, seed: int, rcp_direction: int) -> None:
        self.lanes, self.memory, self.rcp_direction = lanes, memory, rcp_direction
        random = np.random.default_rng(seed)
        self._scalar_junk = [int(junk) for junk in random.integers(1, 1 << 32, 128, np.uint32)]
        self._vector_junk: U32 = random.integers(1, 1 << 32, (vgprs, lanes), np.uint32)
        self._vectors = np.empty_like(self._vector_junk)
        self.v: list[U32] = list(self._vectors)
        self.s: list[int] = []
        self.scc = self.pc = 0
        self.everywhere: Lanes = lanes_of((1 << lanes) - 1, lanes)
        self.active: Lanes = self.everywhere

    def begin(self, pc: int, exec_mask: int) -> None:
        """Forget everything and stand at ``pc``."""
        self.s = self._scalar_junk.copy()
        self._vectors[:] = self._vector_junk
        self.scc, self.pc = 1, pc
        self.set_mask(EXEC, exec_mask)

    def set_pair(self, register: int, value: int) -> None:
        self.s[register], self.s[register + 1] = value & WORD, value >> 32 & WORD

    def mask(self, register: int) -> int:
        """A mask as wide as the wave."""
        return self.s[register] if self.lanes == 32 else self.s[register] | self.s[register + 1] << 32

    def set_mask(self, register: int, value: int) -> None:
        if self.lanes == 32:
            self.s[register] = value
        else:
            self.set_pair(register, value)
        if register == EXEC:
            self.active = lanes_of(value, self.lanes)

    def exec_changed(self) -> None:
        """To be called after EXEC was written as a register."""
        self.active = lanes_of(self.mask(EXEC), self.lanes)

    def write(self, register: int, value: Value) -> None:
        """Write a VGPR in the active lanes."""
        np.copyto(self.v[register], value, where=self.active)


# ---- scalar operands -----------------------------------------------------------------------------------------------


def scalar_source(i: Instruction, name: str, bits: int = 32) -> ScalarSource:
    """Reads ``bits`` of an operand that is the same in every lane."""
    number = i.fields[name]
    if number == i.family.null:
        return lambda wave: 0
    if number < 128:
        if bits == 64:
            return lambda wave: wave.s[number] | wave.s[number + 1] << 32
        return lambda wave: wave.s[number]
    if number == _SCC:
        return lambda wave: wave.scc
    if i.family.name == "gfx9" and number in (_VCCZ, _EXECZ):
        register = VCC if number == _VCCZ else EXEC
        return lambda wave: int(wave.mask(register) == 0)
    constant = _constant(i, number, bits)
    return lambda wave: constant


def _constant(i: Instruction, number: int, bits: int) -> int:
    if 128 <= number <= 192:
        return number - 128
    if 193 <= number <= 208:
        return (192 - number) & (LONG if bits == 64 else WORD)
    if 240 <= number <= 248 and bits == 32:
        return _FLOATS[number - 240]
    # A literal has 32 bits; unsigned operands of 64 are extended with zeros, signed ones are not expected here.
    if number == _LITERAL and "literal" in i.fields and not (bits == 64 and i.opcode.endswith("_I64")):
        return i.fields["literal"] & WORD
    raise i.unknown(f"operand {number} of {bits} bits: {i.text}")


def scalar_target(i: Instruction, name: str, bits: int = 32) -> ScalarTarget:
    """Writes ``bits`` of a scalar register; the value fits."""
    number = i.fields[name] & 0xFF  # where an encoding has a vector register as a rule, the decoder says so
    if number == i.family.null:
        return lambda wave, value: None
    if number >= 128:
        raise i.unknown(f"target {number}: {i.text}")
    into_exec = number in (EXEC, EXEC + 1)

    def write(wave: Wave, value: int) -> None:
        wave.s[number] = value & WORD
        if bits == 64:
            wave.s[number + 1] = value >> 32
        if into_exec:
            wave.exec_changed()

    return write


def mask_source(i: Instruction, name: str) -> ScalarSource:
    """Reads a mask as wide as the wave."""
    return scalar_source(i, name, i.wave_lanes)


def mask_target(i: Instruction, name: str | None) -> ScalarTarget:
    """Writes a mask as wide as the wave; VCC where the encoding has no operand for it."""
    if name is None:
        return lambda wave, value: wave.set_mask(VCC, value)
    return scalar_target(i, name, i.wave_lanes)


# ---- vector operands -----------------------------------------------------------------------------------------------


def vector_source(i: Instruction, name: str, bits: Literal[32, 64] = 32) -> VectorSource:
    """Reads an operand in every lane, active or not. The array may be the register itself."""
    number = i.fields[name]
    if number >= 256:
        register = number - 256
        if bits == 32:
            return lambda wave: wave.v[register]
        return lambda wave: long(wave.v[register], wave.v[register + 1])
    kind = np.uint32 if bits == 32 else np.uint64
    scalar = scalar_source(i, name, bits)
    if number >= 128 and number not in (_VCCZ, _EXECZ, _SCC):
        constant = kind(_constant(i, number, bits))
        return lambda wave: constant
    return lambda wave: kind(scalar(wave))


def long(low: U32, high: U32) -> npt.NDArray[np.uint64]:
    """Two registers as one of 64 bits."""
    return np.left_shift(high, 32, dtype=np.uint64) | low


def vector_target(i: Instruction, name: str, bits: Literal[32, 64] = 32) -> VectorTarget:
    """Writes an operand in the active lanes."""
    register = i.fields[name] - 256
    if register < 0:
        raise i.unknown(f"target {i.fields[name]}: {i.text}")
    if bits == 32:
        return lambda wave, value: wave.write(register, value)

    def write(wave: Wave, value: Value) -> None:
        wave.write(register, np.bitwise_and(value, WORD).astype(np.uint32))
        wave.write(register + 1, np.right_shift(value, 32).astype(np.uint32))

    return write
