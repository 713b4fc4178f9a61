"""A code object as the runtime loads it: segments in memory, and for each kernel where and how a wave begins.

Sources: LLVM, "User Guide for AMDGPU Backend": e_flags, kernel descriptor, initial kernel execution state.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache

from elf import MACHINES, Elf, read_hsaco
from emulator.errors import BadLaunch, EmulatorError, NoDecoder

PROCESSORS = {
    0x2F: "gfx906",
    0x30: "gfx908",
    0x36: "gfx1030",
    0x3F: "gfx90a",
    0x41: "gfx1100",
    0x43: "gfx1150",
    0x44: "gfx1103",
    0x46: "gfx1101",
    0x47: "gfx1102",
    0x48: "gfx1200",
    0x49: "gfx1250",
    0x4A: "gfx1151",
    0x4C: "gfx942",
    0x4E: "gfx1201",
    0x4F: "gfx950",
    0x53: "gfx10-3-generic",
    0x54: "gfx11-generic",
    0x59: "gfx12-generic",
    0x5F: "gfx9-4-generic",
}
"""``EF_AMDGPU_MACH``: the lowest byte of ``e_flags``."""

_GFX9 = {"gfx90a", "gfx942", "gfx950", "gfx9-4-generic"}  # what the decoder calls CDNA
_GFX12 = {"gfx1200", "gfx1201", "gfx12-generic"}  # gfx1250 has other encodings and begins otherwise

_PT_LOAD = 1
_SLACK_NBYTES = 64  # the decoder looks past the last instruction

# Kernel code properties, and how many user SGPRs each of them takes, in the order in which they are set up.
_KERNARG_POINTER = 1 << 3
_USER_SGPRS = ((1 << 0, 4), (1 << 1, 2), (1 << 2, 2), (_KERNARG_POINTER, 2), (1 << 4, 2), (1 << 5, 2), (1 << 6, 1))
_WAVE32 = 1 << 10


@dataclass(frozen=True)
class Family:
    """Architectures that decode alike. ``name`` is gfx9, gfx11 or gfx12; ``decoder`` is tinygrad's word for it."""

    name: str
    decoder: str

    @property
    def wave_lanes(self) -> int:
        """Lanes of a wave, unless a kernel asks for another number: not emulated."""
        return 64 if self.name == "gfx9" else 32

    @property
    def null(self) -> int | None:
        """The operand that reads as 0 and is written in vain."""
        return None if self.name == "gfx9" else 124


GFX9, GFX11, GFX12 = Family("gfx9", "cdna"), Family("gfx11", "rdna3"), Family("gfx12", "rdna4")


def family_of(architecture: str) -> Family:
    """The family of an architecture, or ``NoDecoder``."""
    if architecture in _GFX9:
        return GFX9
    if architecture in _GFX12:
        return GFX12
    if architecture.startswith("gfx11"):
        return GFX11
    raise NoDecoder(architecture)


@dataclass(frozen=True)
class KernelDescriptor:
    """How a wave of one kernel begins."""

    name: str
    entry: int
    kernarg_nbytes: int
    wave_lanes: int
    vgprs: int
    kernarg_sgpr: int
    """First of the two SGPRs with the argument block's address."""
    workgroup_sgprs: tuple[int | None, int | None, int | None]
    """SGPRs with the workgroup's x, y and z; ``None``: not asked for. On gfx12 trap registers have them."""


class CodeObject:
    """A loaded code object; ``memory`` is its image from address 0."""

    def __init__(self, data: bytes) -> None:
        elf = Elf(data)
        if MACHINES.get(elf.machine) != "amdgpu":
            raise EmulatorError(f"not an AMD code object: e_machine is {elf.machine}")
        number = elf.flags & 0xFF
        self.architecture = PROCESSORS.get(number, f"processor {number:#x}")
        self.metadata = read_hsaco(data)
        if self.metadata.target.partition(":")[0] != self.architecture:
            raise EmulatorError(f"e_flags say {self.architecture}, the metadata {self.metadata.target}")
        self.family = family_of(self.architecture)
        self.memory = _load(data)
        symbols = [symbol for symbol in elf.symbols(dynamic=True) if symbol.section]
        self.symbols = {symbol.name: symbol.value for symbol in symbols}
        self.sizes = {symbol.name: symbol.nbytes for symbol in symbols}
        self.kernels = {name: self._descriptor(name) for name in self.metadata.kernels}

    def kernel(self, name: str) -> KernelDescriptor:
        try:
            return self.kernels[name]
        except KeyError:
            raise BadLaunch(f"no kernel {name} for {self.architecture}") from None

    def _descriptor(self, name: str) -> KernelDescriptor:
        at = self.symbols[f"{name}.kd"]
        group_nbytes, private_nbytes, kernarg_nbytes, _, entry = struct.unpack_from("<IIIIq", self.memory, at)
        rsrc3, rsrc1, rsrc2, properties, preload = struct.unpack_from("<IIIHH", self.memory, at + 44)
        if kernarg_nbytes != self.metadata.kernels[name].args_nbytes:
            raise EmulatorError(
                f"{name}: the descriptor says {kernarg_nbytes} bytes of arguments, the metadata another"
            )
        if group_nbytes or private_nbytes or rsrc2 & 1 or self.metadata.kernels[name].stack_nbytes:
            raise EmulatorError(f"{name} wants local or private memory: not emulated")
        if preload & 0x7F:
            raise EmulatorError(f"{name} wants arguments preloaded into SGPRs: not emulated")
        if not properties & _KERNARG_POINTER:
            raise EmulatorError(f"{name} does not ask for its arguments")
        kernarg_sgpr = sum(sgprs for bit, sgprs in _USER_SGPRS if properties & bit and bit < _KERNARG_POINTER)
        wave_lanes = 32 if properties & _WAVE32 else 64
        if wave_lanes != self.family.wave_lanes:
            raise EmulatorError(f"{name}: waves of {wave_lanes} are not emulated on {self.architecture}")
        # gfx90a and later: the VGPRs below the accumulation registers; gfx10 and later: blocks of eight.
        vgprs = 4 * ((rsrc3 & 0x3F) + 1) if self.family is GFX9 else 8 * ((rsrc1 & 0x3F) + 1)
        workgroup: list[int | None] = []
        sgpr = rsrc2 >> 1 & 0x1F  # system SGPRs follow as many user SGPRs as are declared
        for bit in (7, 8, 9):
            asked = bool(rsrc2 >> bit & 1) and self.family is not GFX12
            workgroup.append(sgpr if asked else None)
            sgpr += asked
        x, y, z = workgroup
        return KernelDescriptor(name, at + entry, kernarg_nbytes, wave_lanes, vgprs, kernarg_sgpr, (x, y, z))


def _load(data: bytes) -> bytes:
    begin, entry_nbytes, count = (struct.unpack_from(f, data, at)[0] for f, at in (("<Q", 32), ("<H", 54), ("<H", 56)))
    headers = [struct.unpack_from("<IIQQQQQQ", data, begin + i * entry_nbytes) for i in range(count)]
    loaded = [header for header in headers if header[0] == _PT_LOAD]
    memory = bytearray(max(address + nbytes for _, _, _, address, _, _, nbytes, _ in loaded) + _SLACK_NBYTES)
    for _, _, at, address, _, file_nbytes, _, _ in loaded:
        memory[address : address + file_nbytes] = data[at : at + file_nbytes]
    return bytes(memory)


@lru_cache(maxsize=16)
def load(data: bytes) -> CodeObject:
    """The code object of a file, once for equal bytes: what has been decoded of it is kept."""
    return CodeObject(data)
