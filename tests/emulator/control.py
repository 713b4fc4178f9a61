"""Where a wave goes on, and what does nothing here."""

from __future__ import annotations

import re
from collections.abc import Callable

from emulator.decode import Instruction
from emulator.state import ENDED, EXEC, VCC, Handler, Wave

_BRANCH: dict[str, Callable[[Wave], bool]] = {
    "S_BRANCH": lambda wave: True,
    "S_CBRANCH_SCC0": lambda wave: wave.scc == 0,
    "S_CBRANCH_SCC1": lambda wave: wave.scc == 1,
    "S_CBRANCH_VCCZ": lambda wave: wave.mask(VCC) == 0,
    "S_CBRANCH_VCCNZ": lambda wave: wave.mask(VCC) != 0,
    "S_CBRANCH_EXECZ": lambda wave: wave.mask(EXEC) == 0,
    "S_CBRANCH_EXECNZ": lambda wave: wave.mask(EXEC) != 0,
}
# One wave after the other, every access done when it is issued: there is nothing to wait for.
_NOTHING = re.compile(
    r"S_NOP|S_WAITCNT|S_WAITCNT_\w+|S_WAIT_\w+|S_CLAUSE|S_DELAY_ALU|S_SLEEP|S_SETPRIO|S_SET_INST_PREFETCH_DISTANCE|"
    r"S_INST_PREFETCH|S_BARRIER|S_BARRIER_SIGNAL|S_BARRIER_WAIT|S_ICACHE_INV|S_DCACHE_INV|S_DCACHE_WB|S_GL1_INV"
)
_DEALLOCATE_VGPRS = 3  # the S_SENDMSG at the end of a kernel


def handler(i: Instruction) -> Handler | None:
    """What a control instruction does; ``None`` if it is none of those here."""
    if i.opcode in _BRANCH:
        return _branch(i, _BRANCH[i.opcode])
    if i.opcode == "S_ENDPGM":
        return _end
    if _NOTHING.fullmatch(i.opcode) or (i.opcode == "S_SENDMSG" and i.fields["simm16"] == _DEALLOCATE_VGPRS):
        return _nothing
    return None


def _end(wave: Wave) -> None:
    wave.pc = ENDED


def _nothing(wave: Wave) -> None:
    pass


def _branch(i: Instruction, taken: Callable[[Wave], bool]) -> Handler:
    target = i.pc + i.nbytes + 4 * i.signed("simm16", 16)

    def run(wave: Wave) -> None:
        if taken(wave):
            wave.pc = target

    return run
