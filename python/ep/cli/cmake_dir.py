"""Prints the folder of the CMake package: find_package(ep) from the installed Python package.

    cmake -B build -Dep_DIR=$(python -m ep cmake-dir)

It works as an entry of CMAKE_PREFIX_PATH too. The target is ep::ep.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import ep
from ep.cli import Failure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`cmake-dir` takes none."""


def run(args: argparse.Namespace) -> int:
    """Prints the folder; returns 0. Raises Failure where this `ep` has no C++ library with it."""
    folder = Path(ep.__file__).resolve().parent / "lib" / "cmake" / "ep"
    if not (folder / "ep-config.cmake").is_file():
        raise Failure(
            f"{folder} does not exist: this ep is run from its sources; pip install . brings the "
            "C++ library, or cmake --install and -DCMAKE_PREFIX_PATH=<its prefix>"
        )
    print(folder)
    return 0
