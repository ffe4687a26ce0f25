#!/bin/sh
# Make .venv ready: torch first, then the pinned versions, then this project, editable.
# Run by the Makefile, which hands over PYTHON, TORCH and ASKED_TORCH (TORCH if the user gave one, else empty).
set -eu
cd "$(dirname "$0")/.."

stop() {
    echo "make: $1" >&2
    exit 1
}

# .venv/ready exists only after a whole set-up. It records what a set-up depends on: this folder (a virtual
# environment cannot be moved), the pinned versions, the source of the kernels that were compiled, and the torch that
# was asked for.
ready=.venv/ready
place=$(pwd)
pins=$(cat requirements/dev.txt pyproject.toml scripts/setup.sh CMakeLists.txt dlion/ops/csrc/* | cksum)
torch=$TORCH
if [ -f "$ready" ] && .venv/bin/python -c "" 2>/dev/null; then
    was_place=$(sed -n 1p "$ready")
    was_pins=$(sed -n 2p "$ready")
    was_torch=$(sed -n 3p "$ready")
    if [ "$was_place" = "$place" ]; then
        torch=${ASKED_TORCH:-$was_torch}
        if [ "$was_pins" = "$pins" ] && [ "$was_torch" = "$torch" ]; then
            exit 0
        fi
    else
        rm -f "$ready"
    fi
else
    rm -f "$ready"
fi

how="install one (Debian: apt-get install python3 python3-venv) or name it, as in make PYTHON=/path/to/python3"
version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
    stop "dlion needs Python 3.11 or newer and '$PYTHON' does not run: $how."
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    stop "dlion needs Python 3.11 or newer and '$PYTHON' is Python $version: $how."
"$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
    stop "'$PYTHON' (Python $version) cannot make virtual environments: install the package python3-venv (Debian: \
apt-get install python3-venv) or name another Python, as in make PYTHON=/path/to/python3."

if [ ! -f "$ready" ]; then
    echo "Setting up .venv with Python $version (once; $torch may be a large download)"
    # --clear: what an interrupted set-up left is not trusted.
    "$PYTHON" -m venv --clear .venv || stop "'$PYTHON -m venv .venv' failed: see above."
fi
rm -f "$ready"

failed="the set-up did not finish because pip failed (see above): mend that and run make again"
# $torch unquoted: it may hold several words, such as a requirement and an option of pip.
# shellcheck disable=SC2086
.venv/bin/python -m pip install -c requirements/dev.txt $torch || stop "$failed."
.venv/bin/python -m pip install --quiet -r requirements/dev.txt || stop "$failed."
.venv/bin/python -m pip install --quiet --no-deps -e . || stop "$failed."

printf '%s\n%s\n%s\n' "$place" "$pins" "$torch" >"$ready.new"
mv "$ready.new" "$ready"
