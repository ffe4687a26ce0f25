#!/bin/sh
# Build what is published: sh scripts/wheel.sh [FOLDER, by default dist]. A source distribution, and from it a wheel for Linux
# on x86-64 that runs with any glibc since 2.17 and needs no C++ library of the system: zig's clang links against the
# stubs of that glibc and puts its own C++ library in. auditwheel checks both and gives the wheel its manylinux tag.
set -eu
cd "$(dirname "$0")/.."
out=${1:-dist}
tools=build/wheel
mkdir -p "$out"
if ! cmp -s requirements/wheel.txt "$tools/ready"; then
    "${PYTHON:-python3}" -m venv --clear "$tools"
    "$tools/bin/python" -m pip install --quiet -r requirements/wheel.txt
    cp requirements/wheel.txt "$tools/ready"
fi
PATH="$PWD/$tools/bin:$PATH"
CXX="$PWD/$tools/bin/python -m ziglang c++ -target x86_64-linux-gnu.2.17"
export PATH CXX
raw=$(mktemp -d)
trap 'rm -rf "$raw"' EXIT
python -m build --no-isolation --outdir "$raw" .
auditwheel repair --only-plat --wheel-dir "$out" "$raw"/*.whl
cp "$raw"/*.tar.gz "$out"
for wheel in "$out"/*-manylinux*.whl; do auditwheel show "$wheel"; done
