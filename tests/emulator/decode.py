"""One instruction, as numbers: the only module that talks to tinygrad's decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tinygrad.renderer.amd import decode_inst
from tinygrad.renderer.amd.dsl import Reg

from emulator.codeobject import CodeObject, Family
from emulator.errors import UnknownInstruction

_LONGEST_NBYTES = 16
_ENCODING_SUFFIXES = ("_E32", "_E64")


@dataclass(frozen=True)
class Instruction:
    """A decoded instruction.

    ``opcode`` has no suffix for its encoding; a dual instruction's is ``"X+Y"``. ``fields`` has registers as operand
    numbers (0 to 127 scalar, 128 to 255 constants, 256 and up vector) and everything else as in the bits.
    """

    opcode: str
    encoding: str
    architecture: str
    family: Family
    wave_lanes: int
    pc: int
    nbytes: int
    fields: Mapping[str, int]
    text: str

    @property
    def opcodes(self) -> tuple[str, ...]:
        return tuple(self.opcode.split("+"))

    def unknown(self, detail: str = "") -> UnknownInstruction:
        return UnknownInstruction(self.opcode, self.architecture, detail or self.text)

    def refuse(self, *names: str) -> None:
        """Raise unless each of these fields is 0 or absent: a form of the instruction that is not emulated."""
        for name in names:
            if self.fields.get(name, 0):
                raise self.unknown(f"with {name}={self.fields[name]:#x}: {self.text}")

    def first(self, *names: str) -> str:
        """The first of these fields that the encoding has."""
        return next(name for name in names if name in self.fields)

    def signed(self, name: str, bits: int) -> int:
        value = self.fields[name]
        return value - (1 << bits) if value >> (bits - 1) & 1 else value


def decode(code: CodeObject, pc: int, wave_lanes: int) -> Instruction:
    """The instruction at ``pc``; ``UnknownInstruction`` if the bits are none."""
    window = code.memory[pc : pc + _LONGEST_NBYTES]
    try:
        found: Any = decode_inst(window, code.family.decoder)
    except (ValueError, AssertionError) as error:
        detail = f"{error} at {pc:#x}"
        raise UnknownInstruction(f"bits {window[:8].hex()}", code.architecture, detail) from error
    fields: dict[str, int] = {}
    opcodes: list[str] = []
    for name, _ in found._fields:
        value = getattr(found, name)
        if isinstance(value, Enum):
            opcodes.append(_bare(value.name))
        else:
            fields[name] = value.offset if isinstance(value, Reg) else int(value)
    encoding = type(found).__name__
    text = repr(found)
    nbytes = int(found.size())
    opcode = "+".join(opcodes)
    return Instruction(
        opcode, encoding, code.architecture, code.family, wave_lanes, pc, nbytes, fields, f"{opcode} {text}"
    )


def _bare(opcode: str) -> str:
    for suffix in _ENCODING_SUFFIXES:
        opcode = opcode.removesuffix(suffix)
    return opcode
