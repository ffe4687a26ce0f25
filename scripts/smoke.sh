#!/bin/sh
# Install the wheel in FOLDER (by default dist) into an empty environment with torch only, and train there.
set -eu
cd "$(dirname "$0")/.."
folder=$(cd "${1:-dist}" && pwd)
empty=build/smoke
"${PYTHON:-python3}" -m venv --clear "$empty"
"$empty/bin/python" -m pip install --quiet -c requirements/dev.txt "${TORCH:-torch==2.13.0}"
"$empty/bin/python" -m pip install --quiet --no-index "$folder"/dlion-*-manylinux*.whl
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cp scripts/smoke.py "$place"
python=$PWD/$empty/bin/python
export PYTHONWARNINGS="ignore:Failed to initialize NumPy" # which torch does without
cd "$place" && "$python" smoke.py
