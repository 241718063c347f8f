#!/usr/bin/env bash
# Prepares .venv in the repository root, with this package and everything its tests need.
# Safe to repeat: what has not changed since the last run is left alone.
source "$(dirname "$0")/common.sh"
say() { printf 'setup: %s\n' "$*"; }

# --- what only the system's package manager can bring ------------------------------------------
has_header() { printf '#if !__has_include(%s)\n#error\n#endif\n' "$1" | g++ -std=c++20 -E -x c++ - >/dev/null 2>&1; }
python_has() { python3 -c "import sys; sys.exit(not ($1))" 2>/dev/null; }

list_missing() {
  command -v python3 >/dev/null || echo python3
  python_has "__import__('venv') and __import__('ensurepip')" || echo python3-venv
  python_has "__import__('os').path.exists(__import__('sysconfig').get_path('include') + '/Python.h')" ||
    echo python3-dev
  has_header '<source_location>' || echo g++
  has_header '<gtest/gtest.h>' || echo libgtest-dev
  has_header '<benchmark/benchmark.h>' || echo libbenchmark-dev
  command -v git >/dev/null || echo git
}

missing=$(list_missing | xargs)
if [[ -n $missing ]]; then
  install="apt-get update && apt-get install -y --no-install-recommends ca-certificates $missing"
  command -v apt-get >/dev/null || die "this machine lacks: $missing" "install them, then run $0 again"
  [[ $(id -u) == 0 ]] || die "this machine lacks: $missing" "run this line, then $0 again:" "sudo sh -c '$install'"
  say "installing $missing"
  DEBIAN_FRONTEND=noninteractive sh -c "$install" </dev/null >&2
  missing=$(list_missing | xargs)
  [[ -z $missing ]] || die "still missing after the installation: $missing" \
    "g++ must know C++20 (11 or newer), and python3 must be the system's or bring its own venv and headers"
fi
python_has 'sys.version_info >= (3, 10)' || die "$(python3 --version) is too old: 3.10 or newer is needed"

# --- one environment -----------------------------------------------------------------------------
# A stamp holds the hash of what a step was made from; it is written when the step has succeeded.
stamps=.venv/stamps
is_current() { [[ -f $stamps/$1 && $(<"$stamps/$1") == "$2" ]]; }
set_stamp() { mkdir -p "$stamps" && printf '%s\n' "$2" >"$stamps/$1"; }
hash_of() { # files and folders, by path and content
  find "$@" -type f -not -path '*/__pycache__/*' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -d' ' -f1
}
pip_install() { .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@" </dev/null; }
try_again="check the network and the free space (6 GB), then run $0 again"

python_id=$(python3 -c 'import sys; print(sys.version.split()[0], sys.base_prefix)')
if ! is_current python "$python_id" || ! .venv/bin/python -c '' 2>/dev/null; then
  say "making .venv with Python ${python_id%% *}"
  python3 -m venv --clear .venv
  set_stamp python "$python_id"
fi

requirements_id=$(hash_of requirements)
if ! is_current requirements "$requirements_id"; then
  say "installing requirements/dev.txt (torch is large: a minute or more)"
  pip_install -r requirements/dev.txt || die "pip could not install requirements/dev.txt" "$try_again"
  set_stamp requirements "$requirements_id"
fi

# The build tools come from the system where it has them, else from wheels.
has_cmake() {
  command -v cmake >/dev/null && cmake --version |
    awk 'NR == 1 { split($3, v, "."); exit !(v[1] > 3 || (v[1] == 3 && v[2] >= 25)) }'
}
if ! has_cmake || ! command -v ninja >/dev/null; then
  say "installing requirements/build-tools.txt"
  pip_install -r requirements/build-tools.txt || die "pip could not install CMake and Ninja" "$try_again"
fi

# --- the package ---------------------------------------------------------------------------------
package_id="$(hash_of pyproject.toml CMakeLists.txt README.md LICENSE cmake csrc include bench python) $requirements_id"
if ! is_current package "$package_id"; then
  say "building and installing ep-moe (build/wheel keeps what was compiled)"
  pip_install --no-build-isolation --no-deps . || die "ep-moe does not build: the compiler's lines are above"
  set_stamp package "$package_id"
fi
say ".venv is ready"
