"""Vector instructions, against Python's integers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from emulator.codeobject import GFX9, GFX11, GFX12, Family
from emulator.handmade import M32, M64, SOME_LANES, V, bits, made, s24, s32, wave
from emulator.state import EXEC, VCC
from emulator.wave import handler_of

pytestmark = pytest.mark.emulated


VECTOR: dict[str, Callable[..., int]] = {
    "V_MOV_B32": lambda a: a,
    "V_NOT_B32": lambda a: ~a,
    "V_BFREV_B32": lambda a: int(f"{a:032b}"[::-1], 2),
    "V_ADD_NC_U32": lambda a, b: a + b,
    "V_SUB_NC_U32": lambda a, b: a - b,
    "V_SUBREV_NC_U32": lambda a, b: b - a,
    "V_MUL_LO_U32": lambda a, b: a * b,
    "V_MUL_HI_U32": lambda a, b: a * b >> 32,
    "V_MUL_U32_U24": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF),
    "V_MUL_HI_U32_U24": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) >> 32,
    "V_MUL_I32_I24": lambda a, b: s24(a) * s24(b),
    "V_MIN_U32": min,
    "V_MAX_U32": max,
    "V_MIN_I32": lambda a, b: min(s32(a), s32(b)),
    "V_MAX_I32": lambda a, b: max(s32(a), s32(b)),
    "V_AND_B32": lambda a, b: a & b,
    "V_OR_B32": lambda a, b: a | b,
    "V_XOR_B32": lambda a, b: a ^ b,
    "V_XNOR_B32": lambda a, b: ~(a ^ b),
    "V_LSHLREV_B32": lambda a, b: b << (a & 31),
    "V_LSHRREV_B32": lambda a, b: b >> (a & 31),
    "V_ASHRREV_I32": lambda a, b: s32(b) >> (a & 31),
    "V_BFM_B32": lambda a, b: ((1 << (a & 31)) - 1) << (b & 31),
    "V_ADD3_U32": lambda a, b, c: a + b + c,
    "V_ADD_LSHL_U32": lambda a, b, c: (a + b & M32) << (c & 31),
    "V_LSHL_ADD_U32": lambda a, b, c: (a << (b & 31)) + c,
    "V_LSHL_OR_B32": lambda a, b, c: (a << (b & 31)) | c,
    "V_AND_OR_B32": lambda a, b, c: a & b | c,
    "V_OR3_B32": lambda a, b, c: a | b | c,
    "V_XOR3_B32": lambda a, b, c: a ^ b ^ c,
    "V_XAD_U32": lambda a, b, c: (a ^ b) + c,
    "V_BFE_U32": lambda a, b, c: (a >> (b & 31)) & ((1 << (c & 31)) - 1),
    "V_BFE_I32": lambda a, b, c: signed_field(a, b & 31, c & 31),
    "V_BFI_B32": lambda a, b, c: a & b | ~a & c,
    "V_ALIGNBIT_B32": lambda a, b, c: (a << 32 | b) >> (c & 31),
    "V_MAD_U32_U24": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c,
    "V_MAD_I32_I24": lambda a, b, c: s24(a) * s24(b) + c,
    "V_PERM_B32": lambda a, b, c: sum(permuted(a << 32 | b, c >> 8 * n & 0xFF) << 8 * n for n in range(4)),
}


def signed_field(value: int, begin: int, width: int) -> int:
    field = value >> begin & ((1 << width) - 1)
    return field - (1 << width) if width and field >> (width - 1) else field


def permuted(both: int, pick: int) -> int:
    if pick < 8:
        return both >> 8 * pick & 0xFF
    if pick < 12:
        return 0xFF * (both >> (16 * (pick - 8) + 15) & 1)
    return 0 if pick == 12 else 0xFF


@pytest.mark.parametrize("opcode", VECTOR)
def test_vector_arithmetic_writes_the_active_lanes(opcode: str) -> None:
    w, count = wave(), VECTOR[opcode].__code__.co_argcount if hasattr(VECTOR[opcode], "__code__") else 2
    if opcode == "V_PERM_B32":
        w.v[2][:] = np.arange(32, dtype=np.uint32) % 16 * 0x01010101 + np.uint32(0x03020100)
    operands = [[int(x) for x in w.v[register]] for register in range(count)]
    before = w.v[9].copy()
    handler_of(made(opcode, vdst=V + 9, **{f"src{n}": V + n for n in range(count)}))(w)
    for lane in range(32):
        want = VECTOR[opcode](*(operand[lane] for operand in operands)) & M32
        assert int(w.v[9][lane]) == (want if bits(SOME_LANES, lane) else int(before[lane])), lane


@pytest.mark.parametrize("family", [GFX9, GFX11], ids=lambda f: f.name)
def test_scalar_operands_are_the_same_in_every_lane(family: Family) -> None:
    w = wave(family)
    w.s[4] = 0xFFFFFFF0
    handler_of(made("V_ADD_U32", family, "VOP2_LIT", vdst=V + 9, src0=255, vsrc1=V, literal=0x12345678))(w)
    handler_of(made("V_SUB_U32", family, vdst=V + 10, src0=4, src1=193 + 4))(w)  # the constant -5
    active = np.array([bits(SOME_LANES, lane) for lane in range(w.lanes)])
    assert (w.v[9][active] == w.v[0][active] + np.uint32(0x12345678)).all()
    assert (w.v[10][active] == 0xFFFFFFF5).all()
    assert active.any()
    assert not active.all()


@pytest.mark.parametrize("carry_in", [False, True])
@pytest.mark.parametrize("name", ["ADD", "SUB", "SUBREV"])
@pytest.mark.parametrize("family", [GFX9, GFX12], ids=lambda f: f.name)
def test_carries(family: Family, name: str, carry_in: bool) -> None:
    w, incoming = wave(family), 0x1234_5678_9ABC_DEF0 & (M64 if family is GFX9 else M32)
    w.set_mask(20, incoming)
    opcode = f"V_{name}_CO{'_CI' if carry_in else ''}_U32"
    handler_of(made(opcode, family, "VOP3SD", vdst=V + 9, sdst=30, src0=V, src1=V + 1, src2=20))(w)
    for lane in range(w.lanes):
        a, b, c = int(w.v[0][lane]), int(w.v[1][lane]), int(carry_in and bits(incoming, lane))
        exact = {"ADD": a + b + c, "SUB": a - b - c, "SUBREV": b - a - c}[name]
        if bits(SOME_LANES, lane):
            assert int(w.v[9][lane]) == exact & M32
        assert bits(w.mask(30), lane) == (bits(SOME_LANES, lane) and not 0 <= exact <= M32)


def test_multiply_add_of_64_bits_carries_and_wraps() -> None:
    w = wave(exec_mask=M32)
    handler_of(made("V_MAD_U64_U32", GFX11, "VOP3SD", vdst=V + 8, sdst=40, src0=V, src1=V + 1, src2=V + 2))(w)
    for lane in range(32):
        exact = int(w.v[0][lane]) * int(w.v[1][lane]) + (int(w.v[2][lane]) | int(w.v[3][lane]) << 32)
        assert int(w.v[8][lane]) | int(w.v[9][lane]) << 32 == exact & M64
        assert bits(w.s[40], lane) == (exact > M64)


@pytest.mark.parametrize(
    ("opcode", "want"), [("V_LSHLREV_B64", lambda a, b: b << (a & 63)), ("V_LSHRREV_B64", lambda a, b: b >> (a & 63))]
)
def test_shifts_of_64_bits(opcode: str, want: Callable[[int, int], int]) -> None:
    w = wave(exec_mask=M32)
    handler_of(made(opcode, vdst=V + 8, src0=V, src1=V + 2))(w)
    for lane in range(32):
        value = int(w.v[2][lane]) | int(w.v[3][lane]) << 32
        assert int(w.v[8][lane]) | int(w.v[9][lane]) << 32 == want(int(w.v[0][lane]), value) & M64


def test_shift_add_of_64_bits_reads_before_it_writes() -> None:
    w = wave(exec_mask=M32)
    low, high = w.v[0].copy(), w.v[1].copy()
    w.s[6], w.s[7] = 0x89ABCDEF, 0x01234567
    handler_of(made("V_LSHL_ADD_U64", GFX11, vdst=V, src0=V, src1=128 + 3, src2=6))(w)
    for lane in range(32):
        want = ((int(low[lane]) | int(high[lane]) << 32) << 3) + 0x0123456789ABCDEF
        assert int(w.v[0][lane]) | int(w.v[1][lane]) << 32 == want & M64


@pytest.mark.parametrize("kind", ["U32", "I32", "U64", "I64"])
@pytest.mark.parametrize("name", ["LT", "EQ", "LE", "GT", "NE", "GE"])
def test_comparisons(name: str, kind: str) -> None:
    compare: Callable[[int, int], bool] = getattr(int, f"__{name.lower()}__")
    for family in (GFX9, GFX11):
        w = wave(family)
        w.v[4][:20], w.v[5][:20] = w.v[0][:20], w.v[1][:20]  # some are equal
        both = [
            [int(w.v[n][k]) | (int(w.v[n + 1][k]) << 32 if "64" in kind else 0) for k in range(w.lanes)] for n in (0, 4)
        ]
        width = int(kind[1:])
        want = 0
        for lane, (a, b) in enumerate(zip(*both, strict=True)):
            if kind[0] == "I":
                a, b = (x - (1 << width) if x >> (width - 1) else x for x in (a, b))
            want |= int(compare(a, b) and bits(SOME_LANES, lane)) << lane
        handler_of(made(f"V_CMP_{name}_{kind}", family, vdst=50, src0=V, src1=V + 4))(w)
        handler_of(made(f"V_CMP_{name}_{kind}", family, "VOPC", src0=V, vsrc1=V + 4))(w)
        assert w.mask(50) == w.mask(VCC) == want
        w.set_mask(VCC, 0)
        handler_of(made(f"V_CMPX_{name}_{kind}", family, "VOPC", src0=V, vsrc1=V + 4))(w)
        assert w.mask(EXEC) == want
        assert w.mask(VCC) == (want if family is GFX9 else 0), "only gfx9 writes both"


def test_a_dual_instruction_reads_before_it_writes() -> None:
    w = wave(exec_mask=M32)
    a, b = w.v[0].copy(), w.v[1].copy()
    fields = {"srcx0": V + 1, "vsrcx1": V, "vdstx": V, "srcy0": V, "vsrcy1": V, "vdsty": V + 1}
    handler_of(made("V_DUAL_MOV_B32+V_DUAL_ADD_NC_U32", GFX11, "VOPD", **fields))(w)
    assert (w.v[0] == b).all()
    assert (w.v[1] == a + a).all()


def test_packed_moves_choose_halves() -> None:
    w = wave(GFX9)
    w.set_pair(8, 0x1111222233334444)
    for select, want in ((0, (0x33334444, 0x33334444)), (2, (0x33334444, 0x11112222)), (3, (0x11112222, 0x11112222))):
        handler_of(made("V_PK_MOV_B32", GFX9, "VOP3P", vdst=V + 8, src0=8, src1=8, opsel=select))(w)
        assert (int(w.v[8][1]), int(w.v[9][1])) == want


def test_lanes_are_read_and_written() -> None:
    w = wave(exec_mask=0b1000)
    handler_of(made("V_READFIRSTLANE_B32", GFX11, "VOP1_SDST", vdst=3, src0=V))(w)
    handler_of(made("V_READLANE_B32", vdst=4, src0=V, src1=128 + 9))(w)
    assert (w.s[3], w.s[4]) == (int(w.v[0][3]), int(w.v[0][9]))
    handler_of(made("V_WRITELANE_B32", vdst=V, src0=128 + 42, src1=128 + 1))(w)
    assert int(w.v[0][1]) == 42
    w.set_mask(EXEC, 0)
    handler_of(made("V_READFIRSTLANE_B32", GFX9, "VOP1", vdst=V + 5, src0=V))(w)
    assert w.s[5] == int(w.v[0][0]), "lane 0 where none is active"


# Result and SCC of (a, b), and whether SCC is written.
