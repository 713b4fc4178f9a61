"""Gives ``scripts/demo.sh`` an AMD GPU that is emulated: ``PYTHONPATH=tests/emulator/inject sh scripts/demo.sh``.

Python imports this at its start. It acts in the ``kvferry`` command and where the script looks for a driver, not in
pip. The environment has to hold the ``test`` extra.
"""

from __future__ import annotations

import atexit
import sys
import tempfile
from pathlib import Path

ARCHITECTURE = "gfx942"


def inject() -> None:
    """Load the fake HIP, so that it is the one runtime of this process, and let the emulator execute its launches."""
    tests = Path(__file__).resolve().parents[2]
    sys.path += [str(tests), str(tests.parent / "scripts")]

    from emulator.device import EmulatedGpu
    from fakes.hip import FakeHip

    folder = tempfile.TemporaryDirectory(prefix="kvferry-fake-hip-")
    atexit.register(folder.cleanup)
    fake = FakeHip.build(Path(folder.name))
    fake.reset()
    fake.set_architecture(f"{ARCHITECTURE}:sramecc+:xnack-")
    fake.set_product(f"emulated {ARCHITECTURE}")
    atexit.register(EmulatedGpu(fake).close)  # raises what the emulator does not know


if Path([*sys.orig_argv, ""][1]).name in ("kvferry", "-"):
    inject()
