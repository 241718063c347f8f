"""Says what this machine has for ep, tries it, and names the one thing to do.

A line is ok, missing (exit status 1) or a note. The last lines are a real exchange: two ranks
dispatch and combine, as threads and as processes, and compare every value. Needs no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from ep.cli import machine, self_test

_LEAST_PYTHON = (3, 10)


class Check(NamedTuple):
    """One line: `state` is "ok", "missing" or "note"."""

    name: str
    state: str
    text: str
    do: str = ""  # of a missing one: what would do


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Prints the checks; returns 0 if nothing that ep needs is missing, else 1."""
    checks = []
    for check in _all():
        checks.append(check)
        if not args.json:
            print(f"{check.state:<8}{check.name}: {check.text}", flush=True)
    todo = next((check.do for check in checks if check.state == "missing"), None)
    if args.json:
        fields = ("name", "state", "text", "do")
        listed = [dict(zip(fields, check, strict=True)) for check in checks]
        print(json.dumps({"ok": todo is None, "do": todo, "checks": listed}, indent=2))
    else:
        print("all that ep needs is here" if todo is None else f"to do: {todo}")
    return 0 if todo is None else 1


def _all() -> Iterator[Check]:
    for name, look in _LOOKS:
        try:
            state, text, *do = look()
        except Exception as error:  # whatever it is, the other checks still tell something
            state, text = "missing", f"{type(error).__name__}: {error}"
            do = [f'see why "{name}" fails: {text}']
        yield Check(name, state, " ".join(text.split()), *do)


_Answer = tuple[str, ...]  # state, text and, where it is missing, what would do


def _package() -> _Answer:
    import ep

    return "ok", f"ep-moe {ep.__version__} in {Path(ep.__file__).parent}"


def _python() -> _Answer:
    text = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < _LEAST_PYTHON:
        return "missing", text, "install Python 3.10 or newer"
    return "ok", text


def _torch() -> _Answer:
    try:
        import torch
    except ImportError as error:
        return "note", f"{error}; ep takes numpy arrays, ep.functional and ep.nn need torch"
    has_exchange = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    path = "DLPack exchange API" if has_exchange else "no DLPack exchange API, __dlpack__ is slower"
    return "ok", f"{torch.__version__}, {path}"


def _numpy() -> _Answer:
    try:
        import numpy
    except ImportError as error:
        return "missing", f"{error}; the exchange below needs it", "pip install numpy"
    return "ok", numpy.__version__


def _ep_bench() -> _Answer:
    beside = Path(sys.executable).with_name("ep-bench")
    found = shutil.which("ep-bench") or (str(beside) if os.access(beside, os.X_OK) else None)
    if found is None:
        return "note", "not on PATH; python -m ep bench measures from Python"
    return "ok", found


def _gpu() -> _Answer:
    return "note", 'not in this version; device="cpu" works'


def _exchange(how: Literal["threads", "processes"]) -> Callable[[], _Answer]:
    def look() -> _Answer:
        return "ok", self_test.exchange(how)

    return look


_LOOKS: tuple[tuple[str, Callable[[], _Answer]], ...] = (
    ("package", _package),
    ("python", _python),
    ("platform", machine.platform_answer),
    ("kernel", machine.kernel_answer),
    ("cores", machine.cores_answer),
    ("memory", machine.memory_answer),
    ("address space", machine.address_space_answer),
    ("locked memory", machine.locked_memory_answer),
    ("open files", machine.open_files_answer),
    ("memfd", machine.memfd_answer),
    ("unix sockets", machine.unix_sockets_answer),
    ("/proc", machine.proc_answer),
    ("numpy", _numpy),
    ("torch", _torch),
    ("ep-bench", _ep_bench),
    ("GPU path", _gpu),
    ("2 ranks as threads", _exchange("threads")),
    ("2 ranks as processes", _exchange("processes")),
)
