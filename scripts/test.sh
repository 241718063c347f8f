#!/usr/bin/env bash
# Runs every test, or the steps that are named: scripts/test.sh [lint|dev|torches|pytest|tsan|asan ...]
# All steps run; the exit status is 0 only if all of them passed.
source "$(dirname "$0")/common.sh"

all_steps=(lint dev torches pytest tsan asan) # pytest builds against both torches
steps=("${@:-${all_steps[@]}}")
[[ $# -gt 0 ]] || steps=("${all_steps[@]}")
for step in "${steps[@]}"; do
  [[ " ${all_steps[*]} " == *" $step "* ]] || die "no step '$step'; there are: ${all_steps[*]}"
done

logs=build/logs
rm -rf "$logs" && mkdir -p "$logs"
scripts/setup.sh

# ThreadSanitizer of older compilers cannot map its shadow under high address randomisation.
plain_addresses=()
! setarch "$(uname -m)" -R true 2>/dev/null || plain_addresses=(setarch "$(uname -m)" -R)

ctest_preset() {
  cmake --preset "$1" && cmake --build --preset "$1" && "${@:2}" ctest --preset "$1" --parallel "$(nproc)"
}
# The wheel that .venv has, as it is, beside another torch than it was built next to.
test_torches() {
  local env=.venv-torch-2.15
  prepare_environment "$env" requirements/torch-2.15.txt
  install_wheel "$env"
  "$env/bin/python" -m pytest -m torch_versions tests/python
}
run_step() {
  case $1 in
    lint) scripts/lint.sh --check ;;
    dev | asan) ctest_preset "$1" ;;
    tsan) ctest_preset tsan "${plain_addresses[@]}" ;;
    pytest) python -m pytest ;;
    torches) test_torches ;;
  esac
}

# ctest counts programs; this counts the cases in them, and says what the skipped ones lack.
count_cases() {
  local log=build/$1/Testing/Temporary/LastTest.log
  [[ -f $log ]] || return 0
  awk '/^\[==========\] [0-9]+ tests? from/ { ran += $2 }
       /^\[  SKIPPED \] [0-9]+ test/ { skipped += $4 }
       END { printf "           %d cases, %d of them skipped\n", ran, skipped }' "$log"
  grep -A 1 -E ': Skipped$' "$log" | grep -vE ': Skipped$|^--$' | sort | uniq -c | sort -rn | head -n 5 || true
}

verdicts=() closing=() failed=0
for step in "${steps[@]}"; do
  echo "== step: $step"
  start=$SECONDS verdict=passed
  # `if` would switch off errexit inside the step, hence the subshell of its own.
  set +e
  (set -e; run_step "$step") </dev/null 2>&1 | tee "$logs/$step.log"
  ((PIPESTATUS[0] == 0)) || verdict=FAILED failed=1
  set -e
  verdicts+=("$(printf '  %-8s %-7s %4d s' "$step" "$verdict" $((SECONDS - start)))")
  [[ $step == lint || $step == pytest || $step == torches ]] || verdicts+=("$(count_cases "$step")")
  line=$(grep -E '^[0-9]+% tests passed|^=+ .*(passed|failed|error|no tests ran).* =+$' "$logs/$step.log" | tail -n 1) || true
  [[ -z $line ]] || closing+=("$line")
done

echo "== summary"
printf '%s\n' "${verdicts[@]}"
printf '%s\n' "${closing[@]}" | tee "$logs/closing.txt"
exit "$failed"
