"""A fresh Python, for what one process cannot do: another variant of a fake driver, a fork, an exit."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping


def start_python(
    code: str, env: Mapping[str, str] | None = None, *, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a new interpreter that imports what this one can, and wait for its end. ``env`` adds to the
    environment."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": path, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def run_python(code: str, env: Mapping[str, str] | None = None, *, timeout_s: float = 120) -> str:
    """The same for code that ends well: returns what it printed, or fails with the child's whole output."""
    done = start_python(code, env, timeout_s=timeout_s)
    assert done.returncode == 0, f"exit status {done.returncode}\n--- stdout\n{done.stdout}\n--- stderr\n{done.stderr}"
    return done.stdout
