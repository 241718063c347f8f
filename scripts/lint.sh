#!/usr/bin/env bash
# Formats C++ and Python and reports what a formatter cannot fix; with --check, changes nothing.
source "$(dirname "$0")/common.sh"
[[ -x .venv/bin/ruff ]] || die "no .venv here: run scripts/setup.sh first"

case "${1:-}" in
  --check) cpp_mode=(--dry-run -Werror) ruff_lint=() ruff_format=(--check) ;;
  "") cpp_mode=(-i) ruff_lint=(--fix) ruff_format=() ;;
  *) die "usage: scripts/lint.sh [--check]" ;;
esac

failed=0
tracked() { git ls-files --cached --others --exclude-standard --deduplicate -- "$@" | while read -r f; do [[ ! -f $f ]] || echo "$f"; done; }
tracked '*.hpp' '*.cuh' '*.cpp' '*.cu' | xargs -r -d '\n' clang-format "${cpp_mode[@]}" || failed=1
ruff check "${ruff_lint[@]}" . || failed=1
ruff format "${ruff_format[@]}" . || failed=1
mypy || failed=1
tracked | python scripts/check_files.py || failed=1
((failed == 0)) || die "the lines above need attention; scripts/lint.sh without --check fixes the formatting"
echo "lint: clean"
