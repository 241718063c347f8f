"""Runs the Python blocks of one page, in order, as one program: a process of its own calls this.

Standard input: JSON, a list of {page, line, text, expected, any_order}.  Exit status 1 and a text
on standard error when a block raises, or prints something else than the page shows.
"""

import contextlib
import io
import json
import sys
import time

from docs.pages import Block


def main() -> int:
    namespace = {"__name__": "__main__"}
    for fields in json.load(sys.stdin):
        block = Block(language="python", tags="", **fields)
        # Lines count as in the page, so that a traceback names them.
        code = compile("\n" * (block.line - 1) + block.text, block.page, "exec")
        printed, start = io.StringIO(), time.monotonic()
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        print(f"{block.where}: {time.monotonic() - start:.2f} s")
        if not block.shows(printed.getvalue()):
            print(
                f"{block.where} prints\n{printed.getvalue()}but the page shows\n{block.expected}",
                file=sys.stderr,
            )
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
