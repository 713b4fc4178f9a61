"""Why a kernel did not run to its end."""

from __future__ import annotations


class EmulatorError(Exception):
    """The emulator cannot go on."""


class NoDecoder(EmulatorError):
    """Nobody here can read the instructions of this architecture."""

    def __init__(self, architecture: str) -> None:
        super().__init__(f"no decoder for the instructions of {architecture}")
        self.architecture = architecture


class UnknownInstruction(EmulatorError):
    """An instruction, or a form of it, whose meaning is not written down here: never skipped."""

    def __init__(self, opcode: str, architecture: str, detail: str = "") -> None:
        super().__init__(f"{opcode} on {architecture}{f': {detail}' if detail else ''}")
        self.opcode, self.architecture = opcode, architecture


class BadLaunch(EmulatorError):
    """The launch does not fit the kernel."""


class DeviceFault(EmulatorError):
    """An access outside the device's memory: what a GPU answers with a memory fault.

    ``pc`` is an address in the code object, ``instruction`` its text.
    """

    def __init__(self, address: int, nbytes: int, is_write: bool, pc: int, instruction: str) -> None:
        kind = "write" if is_write else "read"
        super().__init__(f"{kind} of {nbytes} bytes at {address:#x}, by {instruction} at {pc:#x}")
        self.address, self.nbytes, self.is_write = address, nbytes, is_write
        self.pc, self.instruction = pc, instruction
