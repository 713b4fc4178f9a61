"""Memory instructions: scalar loads, global loads, stores and atomics. All are done when they are issued."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from emulator.addresses import Addresses, Bytes, OutOfMemoryRange
from emulator.decode import Instruction
from emulator.errors import DeviceFault
from emulator.state import LONG, WORD, Handler, Wave, long, scalar_source

_WORDS = {"DWORD": 1, "DWORDX2": 2, "DWORDX3": 3, "DWORDX4": 4, "DWORDX8": 8, "DWORDX16": 16}
_WORDS |= {f"B{32 * words}": words for words in (1, 2, 3, 4, 8, 16)}

# Cache maintenance: there are no caches here, and what is not aligned with another wave cannot be seen anyway.
_NOTHING = re.compile(r"BUFFER_(WBL2|INV|WBINVL1|WBINVL1_VOL|GL0_INV|GL1_INV)|GLOBAL_(WB|INV|WBINV)")


@dataclass(frozen=True)
class Narrow:
    """An access of less than a register. ``shift``: where it is in the register; ``keep``: the bits a load leaves."""

    nbytes: int
    shift: int = 0
    is_signed: bool = False
    keep: int = 0


_NARROW_LOADS = {
    "UBYTE": Narrow(1),
    "SBYTE": Narrow(1, is_signed=True),
    "USHORT": Narrow(2),
    "SSHORT": Narrow(2, is_signed=True),
    "U8": Narrow(1),
    "I8": Narrow(1, is_signed=True),
    "U16": Narrow(2),
    "I16": Narrow(2, is_signed=True),
}
# On gfx9 with error correction these clear the other half instead (LLVM's sramecc): left unknown there.
_HALF_LOADS = {
    "D16_U8": Narrow(1, keep=0xFFFF0000),
    "D16_HI_U8": Narrow(1, 16, keep=0x0000FFFF),
    "D16_B16": Narrow(2, keep=0xFFFF0000),
    "D16_HI_B16": Narrow(2, 16, keep=0x0000FFFF),
}
_NARROW_STORES = {
    "BYTE": Narrow(1),
    "BYTE_D16_HI": Narrow(1, 16),
    "SHORT": Narrow(2),
    "SHORT_D16_HI": Narrow(2, 16),
    "B8": Narrow(1),
    "D16_HI_B8": Narrow(1, 16),
    "B16": Narrow(2),
    "D16_HI_B16": Narrow(2, 16),
}
_ATOMICS: dict[str, tuple[int, Callable[[int, int], int]]] = {
    "ADD": (4, lambda old, value: old + value),
    "ADD_U32": (4, lambda old, value: old + value),
    "ADD_X2": (8, lambda old, value: old + value),
    "ADD_U64": (8, lambda old, value: old + value),
    "SWAP": (4, lambda old, value: value),
    "SWAP_B32": (4, lambda old, value: value),
    "SWAP_X2": (8, lambda old, value: value),
    "SWAP_B64": (8, lambda old, value: value),
}


def handler(i: Instruction) -> Handler | None:
    """What a memory instruction does; ``None`` if it is none of those here."""
    if _NOTHING.fullmatch(i.opcode):
        return lambda wave: None
    run: Handler | None = None
    if match := re.fullmatch(r"S_LOAD_(\w+)", i.opcode):
        run = _scalar_load(i, _WORDS[match[1]]) if match[1] in _WORDS else None
    elif match := re.fullmatch(r"(?:GLOBAL|FLAT)_(LOAD|STORE|ATOMIC)_(\w+)", i.opcode):
        i.refuse("acc", "lds")
        make = {"LOAD": _load, "STORE": _store, "ATOMIC": _atomic}[match[1]]
        run = make(i, match[2])
    return None if run is None else _faulting(i, run)


def _faulting(i: Instruction, run: Handler) -> Handler:
    def guarded(wave: Wave) -> None:
        try:
            run(wave)
        except OutOfMemoryRange as error:
            raise DeviceFault(error.address, error.nbytes, error.is_write, i.pc, i.text) from None

    return guarded


def _scalar_load(i: Instruction, words: int) -> Handler:
    base, first = scalar_source(i, "sbase", 64), i.fields["sdata"]
    if first + words > 106:
        raise i.unknown(f"into special registers: {i.text}")
    offset = i.signed("ioffset", 24) if "ioffset" in i.fields else i.signed("offset", 21)
    if i.family.name == "gfx9" and not i.fields["imm"]:
        offset = 0
    has_register = i.family.name != "gfx9" or i.fields["soffset_en"]
    more = scalar_source(i, "soffset") if has_register else lambda wave: 0
    unpack = struct.Struct(f"<{words}I").unpack

    def run(wave: Wave) -> None:
        address = (base(wave) + offset + more(wave)) & LONG & ~3
        wave.s[first : first + words] = unpack(wave.memory.read(address, 4 * words))

    return run


# ---- each lane its own address -------------------------------------------------------------------------------------


def _addresses(i: Instruction) -> Callable[[Wave], Addresses]:
    """Addresses of all lanes."""
    if "ioffset" in i.fields:
        offset = i.signed("ioffset", 24)
    elif i.opcode.startswith("GLOBAL"):
        offset = i.signed("offset", 13)
    else:
        offset = i.fields["offset"] & 0xFFF  # of a flat access: never negative
    register, saddr = i.fields[i.first("vaddr", "addr")] - 256, i.fields["saddr"]
    add = np.uint64(offset & LONG)
    off = 127 if i.family.name == "gfx9" else i.family.null
    if saddr == off or i.opcode.startswith("FLAT"):
        return lambda wave: long(wave.v[register], wave.v[register + 1]) + add
    base = scalar_source(i, "saddr", 64)
    return lambda wave: wave.v[register] + np.uint64((base(wave) + offset) & LONG)


def _data(i: Instruction) -> int:
    return i.fields[i.first("vsrc", "data")] - 256


def _load(i: Instruction, kind: str) -> Handler | None:
    addresses, register = _addresses(i), i.fields["vdst"] - 256
    if kind in _WORDS:
        words = _WORDS[kind]

        def run(wave: Wave) -> None:
            lanes = np.flatnonzero(wave.active)
            if lanes.size:
                found = wave.memory.load(addresses(wave)[lanes], 4 * words).view(np.uint32)
                for word in range(words):
                    wave.v[register + word][lanes] = found[:, word]

        return run
    narrow = _NARROW_LOADS.get(kind) or (_HALF_LOADS.get(kind) if i.family.name != "gfx9" else None)
    return None if narrow is None else _narrow_load(register, addresses, narrow)


def _narrow_load(register: int, addresses: Callable[[Wave], Addresses], narrow: Narrow) -> Handler:
    kind = np.dtype(f"{'i' if narrow.is_signed else 'u'}{narrow.nbytes}")

    def run(wave: Wave) -> None:
        lanes = np.flatnonzero(wave.active)
        if lanes.size:
            found = (
                wave.memory.load(addresses(wave)[lanes], narrow.nbytes)
                .view(kind)[:, 0]
                .astype(np.int32)
                .view(np.uint32)
            )
            kept = wave.v[register][lanes] & np.uint32(narrow.keep)
            wave.v[register][lanes] = kept | found << np.uint32(narrow.shift)

    return run


def _store(i: Instruction, kind: str) -> Handler | None:
    addresses, register = _addresses(i), _data(i)
    words = _WORDS.get(kind)
    narrow = _NARROW_STORES.get(kind)
    if words is None and narrow is None:
        return None

    def bytes_of(wave: Wave, lanes: np.typing.NDArray[np.intp]) -> Bytes:
        if narrow is None:
            found = np.stack([wave.v[register + word][lanes] for word in range(words or 0)], axis=1)
            return found.view(np.uint8)
        value = (wave.v[register][lanes] >> np.uint32(narrow.shift)).astype(np.dtype(f"u{narrow.nbytes}"))
        return value[:, None].view(np.uint8)

    def run(wave: Wave) -> None:
        lanes = np.flatnonzero(wave.active)
        if lanes.size:
            wave.memory.store(addresses(wave)[lanes], bytes_of(wave, lanes))

    return run


def _atomic(i: Instruction, kind: str) -> Handler | None:
    if kind not in _ATOMICS:
        return None
    nbytes, compute = _ATOMICS[kind]
    addresses, register, target = _addresses(i), _data(i), i.fields["vdst"] - 256
    # glc on gfx11, sc0 on gfx9, bit 0 of the temporal hint on gfx12: the old value is wanted.
    returns = bool(i.fields[i.first("glc", "sc0", "th")] & 1)

    def run(wave: Wave) -> None:
        every = addresses(wave)
        for lane in np.flatnonzero(wave.active):
            element = wave.memory.atomic(int(every[lane]), nbytes)
            value = sum(int(wave.v[register + word][lane]) << 32 * word for word in range(nbytes // 4))
            old = int(element[0])
            element[0] = compute(old, value) & ((1 << 8 * nbytes) - 1)
            if returns:
                for word in range(nbytes // 4):
                    wave.v[target + word][lane] = old >> 32 * word & WORD

    return run
