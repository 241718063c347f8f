#!/usr/bin/env bash
# Prepares .venv in the repository root, with this package and everything its tests need.
# Safe to repeat: what has not changed since the last run is left alone.
source "$(dirname "$0")/common.sh"

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
prepare_environment .venv requirements/dev.txt

# The build tools come from the system where it has them, else from wheels.
has_cmake() {
  command -v cmake >/dev/null && cmake --version |
    awk 'NR == 1 { split($3, v, "."); exit !(v[1] > 3 || (v[1] == 3 && v[2] >= 25)) }'
}
if ! has_cmake || ! command -v ninja >/dev/null; then
  say "installing requirements/build-tools.txt"
  pip_in .venv install -r requirements/build-tools.txt || die "pip could not install CMake and Ninja" "$try_again"
fi

# --- the package: one wheel, which other environments get too -----------------------------------------
package_id=$(hash_of pyproject.toml CMakeLists.txt README.md LICENSE LICENSES requirements/dev.txt cmake csrc include bench python)
if ! is_current build wheel "$package_id" || ! compgen -G 'build/wheels/*.whl' >/dev/null; then
  say "building ep-moe's wheel (build/wheel keeps what was compiled)"
  rm -rf build/wheels
  pip_in .venv wheel --no-build-isolation --no-deps --wheel-dir build/wheels . ||
    die "ep-moe does not build: the compiler's lines are above"
  set_stamp build wheel "$package_id"
fi
install_wheel .venv
say ".venv is ready"
