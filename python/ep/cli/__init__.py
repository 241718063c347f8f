"""The command line: `python -m ep doctor | bench | cmake-dir | jit`.

Exit status: 0 good, 1 something failed or is missing, 2 bad usage or not in this version, 130
interrupted. An error is one line on stderr.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

import ep
from ep.errors import Unsupported

_COMMANDS = ("doctor", "bench", "cmake-dir", "jit")


class Failure(Exception):
    """Ends a command with one line on stderr and exit status 1."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that `argv` (None: of the process) names; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ep", description=_first_line(ep))
    commands = parser.add_subparsers(dest="command", metavar="|".join(_COMMANDS))
    for name in _COMMANDS:
        module = importlib.import_module(f".{name.replace('-', '_')}", __name__)
        command = commands.add_parser(
            name,
            help=_first_line(module),
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run, usage_error=command.error)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        return args.run(args)
    except KeyboardInterrupt:
        return 130
    except Unsupported as error:
        return _report(args.command, error, 2)
    except (RuntimeError, OSError, MemoryError, Failure) as error:  # RuntimeError: gloo's too
        return _report(args.command, error, 1)


def _first_line(module: ModuleType) -> str:
    return (module.__doc__ or "").partition("\n")[0]


def _report(command: str, error: Exception, status: int) -> int:
    kind = "" if isinstance(error, Failure) else f"{type(error).__name__}: "
    print(f"python -m ep {command}: {kind}{' '.join(str(error).split())}", file=sys.stderr)
    return status
