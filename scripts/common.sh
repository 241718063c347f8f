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
say() { printf '%s: %s\n' "$(basename "$0" .sh)" "$*"; }

# --- environments --------------------------------------------------------------------------------
# A stamp in a folder holds the hash of what a step was made from; it is written when the step has succeeded.
is_current() { # folder, step, hash
  [[ -f $1/stamps/$2 && $(<"$1/stamps/$2") == "$3" ]]
}
set_stamp() { # folder, step, hash
  mkdir -p "$1/stamps" && printf '%s\n' "$3" >"$1/stamps/$2"
}
hash_of() { # files and folders, by path and content
  find "$@" -type f -not -path '*/__pycache__/*' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -d' ' -f1
}
pip_in() { # environment, then pip's arguments
  "$1/bin/python" -m pip --quiet --disable-pip-version-check "${@:2}" </dev/null
}
try_again="check the network and the free space (6 GB), then run $0 again"

# The environment $1, of this machine's python3, with the packages of the file $2.
prepare_environment() {
  local python_id requirements_id
  python_id=$(python3 -c 'import sys; print(sys.version.split()[0], sys.base_prefix)')
  if ! is_current "$1" python "$python_id" || ! "$1/bin/python" -c '' 2>/dev/null; then
    say "making $1 with Python ${python_id%% *}"
    python3 -m venv --clear "$1"
    set_stamp "$1" python "$python_id"
  fi
  requirements_id=$(hash_of "$2")
  if ! is_current "$1" requirements "$requirements_id"; then
    say "installing $2 (torch is large: a minute or more)"
    pip_in "$1" install -r "$2" || die "pip could not install $2 into $1" "$try_again"
    set_stamp "$1" requirements "$requirements_id"
  fi
}

# Installs the one wheel that scripts/setup.sh has built into the environment $1.
install_wheel() {
  local wheel_id
  wheel_id=$(hash_of build/wheels)
  if ! is_current "$1" package "$wheel_id"; then
    say "installing the wheel into $1"
    pip_in "$1" install --no-deps --force-reinstall build/wheels/*.whl || die "the wheel cannot be installed into $1"
    set_stamp "$1" package "$wheel_id"
  fi
}
