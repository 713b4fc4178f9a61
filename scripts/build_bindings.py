"""Generate every ``_*_ffi.py`` from the ``*.cdef.h`` beside it; ``--check`` compares instead.

The modules are cffi's out-of-line ABI mode: plain Python, importable without a compiler and without pycparser.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parent.parent


def generate(cdef: Path, target: Path) -> None:
    """Write the module for one ``.cdef.h``."""
    ffi = FFI()
    ffi.set_source(f"kvferry.{cdef.parent.name}.{target.stem}", None)
    ffi.cdef(cdef.read_text(encoding="utf-8"))
    ffi.emit_python_code(str(target))


def main() -> int:
    """Exit 1 when ``--check`` finds a module that does not match its declarations."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with what is checked in, write nothing")
    check = parser.parse_args().check
    stale = []
    for cdef in sorted(ROOT.glob("*/*.cdef.h")):
        module = cdef.parent / f"_{cdef.name.removesuffix('.cdef.h')}_ffi.py"
        with tempfile.TemporaryDirectory() as scratch:
            fresh = Path(scratch) / module.name
            generate(cdef, fresh)
            if check and (not module.exists() or module.read_bytes() != fresh.read_bytes()):
                stale.append(module.name)
            elif not check:
                module.write_bytes(fresh.read_bytes())
    if stale:
        print(f"stale: {', '.join(stale)}; run python scripts/build_bindings.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
