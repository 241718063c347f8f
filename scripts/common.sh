# Sourced by the other scripts: strict mode, the repository root, the environment's programs first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH"

die() { # what is wrong, then lines that say what to do
  printf 'error: %s\n' "$1" >&2
  shift
  (($# == 0)) || printf '  %s\n' "$@" >&2
  exit 1
}
