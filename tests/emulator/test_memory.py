"""Memory instructions: forms of the address, widths, and what is out of bounds."""

from __future__ import annotations

import numpy as np
import pytest

from emulator.addresses import Memory
from emulator.codeobject import GFX9, GFX11, GFX12, Family
from emulator.errors import DeviceFault
from emulator.handmade import M32, V, made
from emulator.state import Wave
from emulator.wave import handler_of

pytestmark = pytest.mark.emulated


def wave_on(memory: Memory, addresses: list[int], family: Family = GFX11) -> Wave:
    w = Wave(64 if family is GFX9 else 32, 32, memory, 1, 0)
    w.begin(0, (1 << len(addresses)) - 1)
    for lane, address in enumerate(addresses):
        w.v[0][lane], w.v[1][lane] = address & M32, address >> 32
    return w


@pytest.mark.parametrize("family", [GFX9, GFX11, GFX12], ids=lambda f: f.name)
def test_forms_of_the_address(family: Family) -> None:
    data = np.arange(256, dtype=np.uint8)
    base = int(data.ctypes.data)
    w = wave_on(Memory([(base, base + 256)]), [base + 40, base + 3])
    none = 127 if family is GFX9 else 124
    offset = {"ioffset": -4 & 0xFFFFFF, "vaddr": V} if family is GFX12 else {"offset": -4 & 0x1FFF, "addr": V}
    run = handler_of(made("GLOBAL_LOAD_UBYTE", family, "GLOBAL", vdst=V + 4, saddr=none, **offset))
    with pytest.raises(DeviceFault):
        run(w)  # the second lane's address is one byte before the memory
    w.v[0][1] += np.uint32(1)
    run(w)
    assert w.v[4][:2].tolist() == [36, 0]
    w.set_pair(6, base + 100)
    w.v[2][:2] = (7, 0)
    register = {"vaddr": V + 2} if family is GFX12 else {"addr": V + 2}
    handler_of(made("GLOBAL_LOAD_UBYTE", family, "GLOBAL", vdst=V + 4, saddr=6, **{**offset, **register}))(w)
    assert w.v[4][:2].tolist() == [103, 96]


def test_halves_of_a_register_are_kept() -> None:
    data = np.array([0xAB, 0xCD, 0, 0], np.uint8)
    base = int(data.ctypes.data)
    w = wave_on(Memory([(base, base + 4)]), [base])
    w.v[4][0] = 0x11223344
    handler_of(made("GLOBAL_LOAD_D16_U8", GFX11, "GLOBAL", vdst=V + 4, saddr=124, offset=0, addr=V))(w)
    assert int(w.v[4][0]) == 0x112200AB
    handler_of(made("GLOBAL_LOAD_D16_HI_U8", GFX11, "GLOBAL", vdst=V + 4, saddr=124, offset=1, addr=V))(w)
    assert int(w.v[4][0]) == 0x00CD00AB
    handler_of(made("GLOBAL_STORE_D16_HI_B8", GFX11, "GLOBAL", data=V + 4, saddr=124, offset=2, addr=V))(w)
    assert data.tolist() == [0xAB, 0xCD, 0xCD, 0]


def test_lanes_in_several_ranges_and_across_an_end() -> None:
    one, two = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    at = [int(one.ctypes.data) + 16, int(two.ctypes.data) + 33]
    memory = Memory([(int(a.ctypes.data), int(a.ctypes.data) + 64) for a in (one, two)])
    w = wave_on(memory, at)
    store = handler_of(made("GLOBAL_STORE_B128", GFX11, "GLOBAL", data=V + 4, saddr=124, offset=0, addr=V))
    store(w)
    for block, begin, lane in ((one, 16, 0), (two, 33, 1)):
        want = b"".join(int(w.v[4 + word][lane]).to_bytes(4, "little") for word in range(4))
        assert block[begin : begin + 16].tobytes() == want
        assert not block[:begin].any()
        assert not block[begin + 16 :].any()
    w.v[0][1] += np.uint32(16)
    with pytest.raises(DeviceFault) as caught:
        store(w)
    assert (caught.value.address, caught.value.nbytes, caught.value.is_write) == (at[1] + 16, 16, True)


def test_atomics_happen_lane_after_lane() -> None:
    data = np.array([5, 0], np.uint32)
    base = int(data.ctypes.data)
    w = wave_on(Memory([(base, base + 8)]), [base] * 3)
    w.v[4][:3] = (1, 10, M32)
    fields = {"data": V + 4, "saddr": 124, "offset": 0, "addr": V, "vdst": V + 5}
    handler_of(made("GLOBAL_ATOMIC_ADD_U32", GFX11, "GLOBAL", glc=1, **fields))(w)
    assert w.v[5][:3].tolist() == [5, 6, 16]
    assert int(data[0]) == 15
    kept = w.v[5].copy()
    handler_of(made("GLOBAL_ATOMIC_SWAP_B32", GFX11, "GLOBAL", glc=0, **fields))(w)
    assert int(data[0]) == M32
    assert (w.v[5] == kept).all()
    w.v[0][0] += np.uint32(2)
    with pytest.raises(DeviceFault):
        handler_of(made("GLOBAL_ATOMIC_ADD_U32", GFX11, "GLOBAL", glc=0, **fields))(w)


def test_scalar_loads() -> None:
    data = np.arange(1, 17, dtype=np.uint32)
    base = int(data.ctypes.data)
    w = Wave(32, 8, Memory([], [(base, base + 64)]), 1, 0)
    w.begin(0, 1)
    w.set_pair(4, base + 8)
    w.s[9] = 4
    handler_of(made("S_LOAD_B128", GFX11, "SMEM", sdata=20, sbase=4, soffset=9, offset=-8 & 0x1FFFFF))(w)
    assert w.s[20:24] == [2, 3, 4, 5]
    handler_of(made("S_LOAD_DWORDX2", GFX9, "SMEM", sdata=20, sbase=4, soffset=9, offset=8, imm=1, soffset_en=0))(w)
    assert w.s[20:22] == [5, 6]
    with pytest.raises(DeviceFault):
        handler_of(made("S_LOAD_B64", GFX12, "SMEM", sdata=20, sbase=4, soffset=124, ioffset=52))(w)
