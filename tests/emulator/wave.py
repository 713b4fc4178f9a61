"""Runs kernels: every wave of every workgroup, one after the other."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from emulator import control, memory, scalar, vector
from emulator.addresses import Memory
from emulator.codeobject import CodeObject, KernelDescriptor
from emulator.decode import Instruction, decode
from emulator.errors import BadLaunch, EmulatorError
from emulator.state import ENDED, Handler, Wave

_ENDS_BLOCK = ("S_BRANCH", "S_CBRANCH", "S_ENDPGM")
_LONGEST_BLOCK = 4096
_MOST_BLOCKS = 1_000_000  # of a wave: a loop that does not end
_TTMP7, _TTMP9 = 108 + 7, 108 + 9


class Block:
    """Instructions up to a branch; ``end`` is where the wave goes on if it does not branch."""

    def __init__(self, instructions: list[Instruction]) -> None:
        self.handlers = [handler_of(i) for i in instructions]
        self.opcodes = Counter(opcode for i in instructions for opcode in i.opcodes)
        self.end = instructions[-1].pc + instructions[-1].nbytes
        self.pcs = [i.pc for i in instructions]
        self.runs = 0
        self.reached = False


def handler_of(i: Instruction) -> Handler:
    """What an instruction does, or ``UnknownInstruction``."""
    for find in (control.handler, scalar.handler, vector.handler, memory.handler):
        found = find(i)
        if found is not None:
            return found
    raise i.unknown()


class Program:
    """The blocks of a code object that have been reached so far."""

    def __init__(self, code: CodeObject) -> None:
        self._code = code
        self._blocks: dict[int, Block] = {}

    def run(self, wave: Wave) -> None:
        """Run a wave to its end."""
        for _ in range(_MOST_BLOCKS):
            block = self._blocks.get(wave.pc)
            if block is None:
                block = self._blocks[wave.pc] = self._decode(wave.pc)
            wave.pc = block.end
            for handler in block.handlers:
                handler(wave)
            block.runs += 1
            block.reached = True
            if wave.pc == ENDED:
                return
        raise EmulatorError("a wave does not end")

    def _decode(self, pc: int) -> Block:
        instructions: list[Instruction] = []
        while not instructions or not instructions[-1].opcode.startswith(_ENDS_BLOCK):
            instructions.append(decode(self._code, pc, self._code.family.wave_lanes))
            pc += instructions[-1].nbytes
            if len(instructions) == _LONGEST_BLOCK:
                raise EmulatorError(f"no branch after {pc:#x}")
        return Block(instructions)

    def reached(self) -> int:
        """How many different instructions have run."""
        return len({pc for block in self._blocks.values() if block.reached for pc in block.pcs})

    def take_counts(self, coverage: Counter[str]) -> None:
        """Add what has run since the last time, by opcode."""
        for block in self._blocks.values():
            if block.runs:
                for opcode, count in block.opcodes.items():
                    coverage[opcode] += count * block.runs
                block.runs = 0


_programs: WeakKeyDictionary[CodeObject, Program] = WeakKeyDictionary()


def program_of(code: CodeObject) -> Program:
    """What has been decoded of a code object; it is kept."""
    if code not in _programs:
        _programs[code] = Program(code)
    return _programs[code]


def sweep(code: CodeObject) -> list[Instruction]:
    """Every instruction of every kernel, run or not; ``UnknownInstruction`` at the first that is not known."""
    found: list[Instruction] = []
    for name, kernel in code.kernels.items():
        pc = kernel.entry
        while pc < kernel.entry + code.sizes[name]:
            found.append(decode(code, pc, kernel.wave_lanes))
            handler_of(found[-1])
            pc += found[-1].nbytes
    return found


def execute(
    code: CodeObject,
    kernel: str,
    ctas: int,
    threads: int,
    kernarg: bytes,
    ranges: Sequence[tuple[int, int]],
    coverage: Counter[str],
    *,
    seed: int = 0,
    rcp_direction: int = 0,
) -> None:
    """Run ``kernel`` on ``ctas`` workgroups of ``threads`` threads.

    ``ranges`` are (begin, end) of the memory that the device has, at addresses of this process; anything else raises
    ``DeviceFault``. Instructions that have run are added to ``coverage``. ``seed`` chooses what registers hold before
    they are written, ``rcp_direction`` on which side of the truth reciprocals are: see ``floats``.
    """
    descriptor = code.kernel(kernel)
    if len(kernarg) != descriptor.kernarg_nbytes:
        raise BadLaunch(f"{kernel} takes {descriptor.kernarg_nbytes} bytes of arguments, not {len(kernarg)}")
    if not 0 < threads <= 1024:
        raise BadLaunch(f"{threads} threads in a workgroup")
    block = ctypes.create_string_buffer(kernarg, len(kernarg))
    kernarg_at = ctypes.addressof(block)
    device = Memory(ranges, [(kernarg_at, kernarg_at + len(kernarg))])
    program, lanes = program_of(code), descriptor.wave_lanes
    wave = Wave(lanes, descriptor.vgprs, device, seed, rcp_direction)
    try:
        with np.errstate(all="ignore"):
            for cta in range(ctas):
                for first in range(0, threads, lanes):
                    _begin(wave, descriptor, kernarg_at, cta, first, threads)
                    program.run(wave)
    finally:
        program.take_counts(coverage)


def _begin(wave: Wave, descriptor: KernelDescriptor, kernarg: int, cta: int, first: int, threads: int) -> None:
    """The state in which the command processor starts a wave."""
    lanes = descriptor.wave_lanes
    wave.begin(descriptor.entry, (1 << min(lanes, threads - first)) - 1)
    wave.set_pair(descriptor.kernarg_sgpr, kernarg)
    for register, number in zip(descriptor.workgroup_sgprs, (cta, 0, 0), strict=True):
        if register is not None:
            wave.s[register] = number
    wave.s[_TTMP9], wave.s[_TTMP7] = cta, 0  # gfx12 tells it here, y and z in one; others never read them
    wave.v[0][:] = np.arange(first, first + lanes, dtype=np.uint32)  # y and z, in the bits above, are 0
