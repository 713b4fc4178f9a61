"""Scalar instructions, and what is not known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from emulator.codeobject import GFX9, GFX11, GFX12
from emulator.errors import UnknownInstruction
from emulator.handmade import EDGES, M32, V, made, s32, wave
from emulator.state import EXEC
from emulator.wave import handler_of

pytestmark = pytest.mark.emulated


# Result and SCC of (a, b), and whether SCC is written.
SCALAR: dict[str, Callable[[int, int], tuple[int, bool | None]]] = {
    "S_ADD_U32": lambda a, b: (a + b, a + b > M32),
    "S_SUB_U32": lambda a, b: (a - b, a < b),
    "S_ADD_I32": lambda a, b: (a + b, not -(2**31) <= s32(a) + s32(b) < 2**31),
    "S_SUB_CO_I32": lambda a, b: (a - b, not -(2**31) <= s32(a) - s32(b) < 2**31),
    "S_MUL_I32": lambda a, b: (a * b, None),
    "S_MUL_HI_U32": lambda a, b: (a * b >> 32, None),
    "S_MUL_HI_I32": lambda a, b: (s32(a) * s32(b) >> 32, None),
    "S_AND_NOT1_B32": lambda a, b: (a & ~b, a & ~b != 0),
    "S_ANDN2_B32": lambda a, b: (a & ~b, a & ~b != 0),
    "S_XNOR_B32": lambda a, b: (~(a ^ b), a ^ b != M32),
    "S_LSHL_B32": lambda a, b: (a << (b & 31), a << (b & 31) & M32 != 0),
    "S_ASHR_I32": lambda a, b: (s32(a) >> (b & 31), s32(a) >> (b & 31) != 0),
    "S_BFM_B32": lambda a, b: (((1 << (a & 31)) - 1) << (b & 31), None),
    "S_BFE_U32": lambda a, b: (
        a >> (b & 31) & (1 << (b >> 16 & 127)) - 1,
        a >> (b & 31) & (1 << (b >> 16 & 127)) - 1 != 0,
    ),
    "S_LSHL2_ADD_U32": lambda a, b: ((a << 2) + b, (a << 2) + b > M32),
    "S_CSELECT_B32": lambda a, b: (a, None),
}


@pytest.mark.parametrize("opcode", SCALAR)
def test_scalar_arithmetic(opcode: str) -> None:
    w = wave()
    run = handler_of(made(opcode, GFX11, "SOP2", sdst=10, ssrc0=2, ssrc1=3))
    for a in EDGES:
        for b in EDGES:
            w.s[2], w.s[3], w.scc = a, b, 1
            run(w)
            want, flag = SCALAR[opcode](a, b)
            assert w.s[10] == want & M32, (a, b)
            assert w.scc == (1 if flag is None else flag), (a, b)


def test_scalar_carry_chain() -> None:
    w = wave()
    add, carry = (
        made(name, GFX11, "SOP2", sdst=10 + n, ssrc0=2 + n, ssrc1=4 + n)
        for n, name in enumerate(("S_ADD_U32", "S_ADDC_U32"))
    )
    w.set_pair(2, 0xFFFFFFFF_FFFFFFFF)
    w.set_pair(4, 0x00000001_00000002)
    for i in (add, carry):
        handler_of(i)(w)
    assert (w.s[10] | w.s[11] << 32, w.scc) == (0x00000001_00000001, 1)


def test_save_exec_and_null() -> None:
    w = wave(exec_mask=0xFF)
    w.s[2] = 0xF0F0
    handler_of(made("S_AND_SAVEEXEC_B32", GFX11, "SOP1", sdst=3, ssrc0=2))(w)
    assert (w.s[3], w.mask(EXEC), w.scc) == (0xFF, 0xF0, 1)
    handler_of(made("S_MOV_B32", GFX11, "SOP1", sdst=EXEC, ssrc0=128))(w)
    assert not w.active.any()
    w.s[124] = 99
    handler_of(made("S_MOV_B32", GFX12, "SOP1", sdst=5, ssrc0=124))(w)
    handler_of(made("S_MOV_B32", GFX12, "SOP1", sdst=124, ssrc0=128 + 7))(w)
    assert (w.s[5], w.s[124]) == (0, 99)


@pytest.mark.parametrize(
    ("opcode", "fields"),
    [
        ("V_SIN_F32", {"vdst": V, "src0": V}),
        ("S_GETPC_B64", {"sdst": 0}),
        ("DS_LOAD_B32", {"vdst": V, "addr": V}),
        ("V_ADD_NC_U32", {"vdst": V, "src0": V, "src1": V, "clmp": 1}),
        ("V_MUL_F32", {"vdst": V, "src0": V, "src1": V, "neg": 1}),
        ("S_SENDMSG", {"simm16": 1}),
        ("GLOBAL_LOAD_TR_B128", {"vdst": V, "addr": V, "saddr": 124, "offset": 0}),
    ],
)
def test_what_is_not_known_is_never_skipped(opcode: str, fields: dict[str, int]) -> None:
    with pytest.raises(UnknownInstruction, match=f"{opcode} on gfx11"):
        handler_of(made(opcode, **fields))


def test_dpp_and_sdwa_are_not_taken_for_the_plain_form() -> None:
    for encoding in ("VOP2_DPP16", "VOP2_SDWA"):
        with pytest.raises(UnknownInstruction, match=encoding):
            handler_of(made("V_ADD_U32", GFX9, encoding, vdst=V, src0=V, vsrc1=V))
