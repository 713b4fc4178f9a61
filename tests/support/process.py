"""A fresh interpreter, for exits and forks, with all of its output."""

from __future__ import annotations

import os
import subprocess
import sys


def start_python(code: str, *, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a new interpreter that imports what this one can, and wait for its end."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
