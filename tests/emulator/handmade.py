"""Instructions and waves made by hand, for tests of what one instruction does."""

from __future__ import annotations

import numpy as np

from emulator.addresses import Memory
from emulator.codeobject import GFX9, GFX11, Family
from emulator.decode import Instruction
from emulator.state import Wave

M32, M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
EDGES = [0, 1, 2, 31, 32, 33, 0x7F, 0x80, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFF, 0x800000, M32 - 1, M32]
SOME_LANES = 0x5F0F_3355_8001_FFF2
V = 256


def s32(value: int) -> int:
    return value - (1 << 32) if value >> 31 & 1 else value


def s24(value: int) -> int:
    value &= 0xFFFFFF
    return value - (1 << 24) if value >> 23 & 1 else value


def made(opcode: str, family: Family = GFX11, encoding: str = "VOP3", /, **fields: int) -> Instruction:
    lanes = 64 if family is GFX9 else 32
    return Instruction(opcode, encoding, family.name, family, lanes, 0x100, 8, fields, f"{opcode} {fields}")


def wave(family: Family = GFX11, exec_mask: int = SOME_LANES) -> Wave:
    lanes = 64 if family is GFX9 else 32
    made_wave = Wave(lanes, 32, Memory([]), 1, 0)
    made_wave.begin(0, exec_mask & ((1 << lanes) - 1))
    random = np.random.default_rng(2)
    for register in range(8):
        values = [*random.permutation(np.array(EDGES, np.uint32)), *random.integers(0, 1 << 32, lanes, np.uint32)]
        made_wave.v[register][:] = values[:lanes]
    return made_wave


def bits(mask: int, lane: int) -> bool:
    return bool(mask >> lane & 1)
