"""Manages compiled GPU kernels; comes with the GPU path."""

from __future__ import annotations

import argparse

from ep.errors import Unsupported


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`jit` takes none."""


def run(args: argparse.Namespace) -> int:
    """Raises Unsupported: kernels of the CPU path are compiled with the package."""
    raise Unsupported(
        "jit is not supported by this version: it comes with the GPU path; "
        "the CPU path needs no compiler at run time"
    )
