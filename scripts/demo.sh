#!/usr/bin/env bash
# The main job, in two steps.  First dispatch and combine between four processes, every result checked
# bit by bit; then a mixture-of-experts language model that trains over four processes, and once more in
# one: the losses must be the same.  About two minutes on two cores.
# Arguments go to examples/train_moe.py (--help lists them): scripts/demo.sh --steps 20 --exchange fp8
source "$(dirname "$0")/common.sh"
scripts/setup.sh
ep-bench --processes --verify --ranks 4 --tokens 256 --format none,fp8_block128 --rounds 3
echo
exec python examples/train_moe.py --check "$@"
