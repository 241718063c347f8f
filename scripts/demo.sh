#!/usr/bin/env bash
# The main job: dispatch and combine between four processes, every result checked bit by bit.
# Further arguments go to ep-bench, and the last one of a kind counts: scripts/demo.sh --tokens 4096
source "$(dirname "$0")/common.sh"
scripts/setup.sh
exec ep-bench --processes --verify --ranks 4 --tokens 1024 --format none,fp8_block128 --rounds 10 "$@"
