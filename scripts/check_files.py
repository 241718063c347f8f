"""Holds files to the repository's rules: length, leftovers, paths of one machine.

Reads file names from standard input, one a line; prints one line per violation and exits with 1
if there was any.
"""

import pathlib
import re
import sys

MAX_LINES = 400
LIMITED = re.compile(r"^(csrc|include|python|tests|bench)/.*\.(hpp|cuh|cpp|cu|h|py)$")
# The words are split so that this file does not report itself.
LEFTOVER = re.compile(r"\b(" + "TO" + "DO|FIX" + r"ME)\b")
MACHINE_PATH = re.compile(r"(?<![\w.}])/(home|root|Users|work)/")


def violations(name: str, text: str) -> list[str]:
    """Returns what is wrong with one file, as "path:line: message"."""
    lines = text.splitlines()
    found = []
    if LIMITED.match(name) and len(lines) > MAX_LINES:
        found.append(f"{name}:{len(lines)}: longer than {MAX_LINES} lines; split it by meaning")
    for number, line in enumerate(lines, start=1):
        if LEFTOVER.search(line):
            found.append(f"{name}:{number}: a leftover mark; do it or leave it out")
        if MACHINE_PATH.search(line):
            found.append(f"{name}:{number}: a path of one machine")
    return found


def main() -> int:
    bad = []
    for name in sys.stdin.read().splitlines():
        try:
            text = pathlib.Path(name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture or other data
        bad += violations(name, text)
    print("\n".join(bad), end="\n" if bad else "")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
