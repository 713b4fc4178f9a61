#!/bin/sh
# Environment, install, ruff, mypy, pytest: what CI runs. Needs Python 3.10 or newer with pip and venv, nothing else.
# Further arguments go to pytest: sh scripts/test.sh -m gpu
set -eu
cd "$(dirname "$0")/.."

[ -x .venv/bin/python ] || python3 -m venv .venv
bin="$PWD/.venv/bin"
rm -rf build ./*.egg-info # a build folder would bring back files that are gone
"$bin/python" -m pip install --quiet --upgrade pip
"$bin/python" -m pip install --quiet --upgrade '.[test]'

"$bin/ruff" check .
"$bin/ruff" format --check .

# What was just installed, under the names it has there.
"$bin/mypy" -p kvferry.drivers -p kvferry.kernels_cubin -p kvferry.hostpool
MYPYPATH=scripts:tests "$bin/mypy" scripts tests

# No compiler is on this PATH: what the tests compile, they compile with the pinned package. The GPU's tests have a process
# of their own, since the others load fake drivers under the real ones' names.
if [ $# -gt 0 ]; then
    PATH="$bin" exec "$bin/python" -m pytest "$@"
fi
PATH="$bin" "$bin/python" -m pytest -m gpu
PATH="$bin" "$bin/python" -m pytest -m "not gpu"
