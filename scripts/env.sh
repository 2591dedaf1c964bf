# Sourced by the other scripts: goes to the checkout and puts the tools of the project on PATH.
#
# Order: .venv of the checkout; else an environment that is active and has the project and its
# tools; else .venv is made now. A .venv that was never finished, or is older than pyproject.toml,
# is brought up to date first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Tests start hundreds of processes: what each imports is compiled once, not by each of them.
unset PYTHONDONTWRITEBYTECODE

if [ ! -e .venv ] && [ -n "${VIRTUAL_ENV:-}" ] &&
    "$VIRTUAL_ENV/bin/python" -c "import build, mypy, pytest, ruff, token_id_capture" 2>/dev/null; then
    PATH="$VIRTUAL_ENV/bin:$PATH"
else
    if [ ! -e .venv/.complete ] || [ pyproject.toml -nt .venv/.complete ]; then
        scripts/install
    fi
    PATH="$PWD/.venv/bin:$PATH"
fi
export PATH

# Tests wait for children and disks: one process more than there are processors keeps all of those busy.
TEST_PROCESSES=$(($(getconf _NPROCESSORS_ONLN) + 1))
