#!/bin/sh
# Environment, install, demo. Needs Python 3.10 or newer with pip and venv, nothing else; uses a GPU when there is one.
# Further arguments go to the demo: sh scripts/demo.sh --json
set -eu
cd "$(dirname "$0")/.."

[ -x .venv/bin/python ] || python3 -m venv .venv
rm -rf build ./*.egg-info # a build folder would bring back files that are gone
.venv/bin/python -m pip install --quiet --upgrade '.[cli]'

# cuda-python's bindings come in one release line a driver generation: the driver says which.
extra=$(.venv/bin/python - <<'PYTHON'
from kvferry.drivers.cuda import CudaDriver
from kvferry.drivers.errors import KVFerryError

try:
    print(f",cuda{CudaDriver().version // 1000}")
except KVFerryError:
    print("")
PYTHON
)
[ -z "$extra" ] || .venv/bin/python -m pip install --quiet --upgrade ".[cli$extra]"

exec .venv/bin/kvferry demo "$@"
