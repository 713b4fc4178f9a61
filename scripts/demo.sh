#!/bin/sh
# Environment, install, demo. Needs Python 3.10 or newer with pip and venv, nothing else; uses a GPU when there is one.
# Further arguments go to the demo: sh scripts/demo.sh --json
set -eu
cd "$(dirname "$0")/.."

[ -x .venv/bin/python ] || python3 -m venv .venv
rm -rf build ./*.egg-info # a build folder would bring back files that are gone
.venv/bin/python -m pip install --quiet --upgrade '.[cli]'

# What launches kernels comes in one package a vendor, cuda-python's in one release line a driver generation.
extra=$(.venv/bin/python - <<'PYTHON'
from kvferry.drivers.cuda import CudaDriver
from kvferry.drivers.errors import KVFerryError
from kvferry.drivers.hip import HipDriver

try:
    print(f",cuda{CudaDriver().version // 1000}")
except KVFerryError:
    try:
        print(",rocm" if HipDriver().device_count() else "")
    except KVFerryError:
        print("")
PYTHON
)
[ -z "$extra" ] || .venv/bin/python -m pip install --quiet --upgrade ".[cli$extra]"

exec .venv/bin/kvferry demo "$@"
