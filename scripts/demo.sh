#!/usr/bin/env bash
# The main job: dispatch and combine between four processes, every result checked.
# Further arguments go to ep-bench: scripts/demo.sh --tokens 512
source "$(dirname "$0")/common.sh"
scripts/setup.sh
exec ep-bench --ranks 4 --processes --verify "$@"
