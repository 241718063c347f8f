#!/usr/bin/env bash
# Builds a wheel with every Python that is named, else with those of 3.10 to 3.13 that are on PATH, and tries
# each in an environment of its own that has numpy and no torch: scripts/wheels.sh [PYTHON ...]
# The wheels are in dist/.
source "$(dirname "$0")/common.sh"

pythons=("$@")
if (($# == 0)); then
  for version in 3.10 3.11 3.12 3.13; do
    ! "python$version" -c '' 2>/dev/null || pythons+=("python$version")
  done
  ((${#pythons[@]} > 0)) || die "no python3.10 to python3.13 is on PATH" "name one: $0 /path/to/python3.12"
fi
for python in "${pythons[@]}"; do
  "$python" -c '' 2>/dev/null || die "$python does not run"
done

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir -p dist

# Tests that need neither torch nor an example.
tests=(tests/python/test_{import,install,lifetime,testing,typing}.py)

for python in "${pythons[@]}"; do
  version=$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])')
  env=$folder/$version
  say "Python $version: building"
  "$python" -m venv "$env"
  pip_in "$env" install -c requirements/dev.txt scikit-build-core pybind11 numpy pytest hypothesis ||
    die "pip could not install what Python $version needs" "$try_again"
  pip_in "$env" wheel --no-build-isolation --no-deps --wheel-dir "$env/wheels" \
    --config-settings='build-dir=build/wheel-{cache_tag}' . ||
    die "ep-moe does not build with Python $version: the compiler's lines are above"
  pip_in "$env" install --no-deps "$env"/wheels/*.whl
  say "Python $version: trying $(basename "$env"/wheels/*.whl)"
  "$env/bin/python" -m ep doctor || die "Python $version: what doctor found is above"
  "$env/bin/python" examples/two_ranks.py
  "$env/bin/python" -m pytest -q -k "not torch]" "${tests[@]}" || die "Python $version: the failures are above"
  mv "$env"/wheels/*.whl dist/
done
say "dist/ has $(find dist -name '*.whl' -newer "$folder" | wc -l) new wheels, each tried"
