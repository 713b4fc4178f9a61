"""What was executed in this session, for the summary after the tests."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from textwrap import wrap

from kvferry.kernels_cubin.abi import KERNELS
from kvferry.kernels_cubin.manifest import Manifest

from emulator.codeobject import CodeObject, family_of
from emulator.errors import NoDecoder
from emulator.wave import program_of


class Record:
    """Kernels by architecture, and instructions by family."""

    def __init__(self) -> None:
        self.kernels: defaultdict[str, set[str]] = defaultdict(set)
        self.opcodes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.reached: dict[str, int] = {}
        self.instructions: dict[str, int] = {}
        """Of all kernels: instructions that have run, and that there are, by architecture."""

    def add(self, code: CodeObject, kernel: str, counts: Counter[str]) -> None:
        self.kernels[code.architecture].add(kernel)
        self.opcodes[code.family.name].update(counts)
        self.reached[code.architecture] = program_of(code).reached()


RECORD = Record()
"""Of this process."""


def has_decoder(target: str) -> bool:
    try:
        family_of(target)
    except NoDecoder:
        return False
    return True


def lines(record: Record, targets: list[str], width: int) -> Iterator[str]:
    """The report: which code objects ran, and of which instructions they were made up."""
    decodable = [target for target in targets if has_decoder(target)]
    whole = [target for target in decodable if set(KERNELS) <= record.kernels[target]]
    part = [f"{t} ({len(record.kernels[t])} of {len(KERNELS)} kernels)" for t in decodable if t not in whole]
    only = [target for target in targets if target not in decodable]
    yield f"{len(targets)} code objects shipped, {len(whole)} executed with every kernel: {', '.join(whole) or 'none'}"
    if part:
        yield f"not in full: {', '.join(part)}"
    if only:
        yield f"only checked, no decoder: {', '.join(only)}"
    reached = [f"{t} {record.reached[t]:,} of {n:,}" for t, n in record.instructions.items() if t in record.reached]
    if reached:
        yield f"instructions that ran, of those in the file: {', '.join(reached)}"
    for family, counts in sorted(record.opcodes.items()):
        yield f"{family}: {sum(counts.values()):,} instructions of waves, {len(counts)} different"
        names = " ".join(f"{opcode.lower()}:{count}" for opcode, count in sorted(counts.items()))
        yield from wrap(names, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def shipped() -> list[str]:
    """Targets of the shipped code objects."""
    return [artefact.target for artefact in Manifest.load().artefacts if artefact.kind == "hsaco"]
