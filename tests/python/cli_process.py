"""`python -m ep ...` in a process of its own."""

from __future__ import annotations

import os
import pathlib
import resource
import subprocess
import sys
from collections.abc import Iterable

BOUND_S = 120.0


def hide(folder: pathlib.Path, *modules: str) -> pathlib.Path:
    """Makes `folder` one that, first on the path, hides modules as if they were not installed."""
    for name in modules:
        text = f'raise ModuleNotFoundError("No module named {name!r}", name="{name}")\n'
        (folder / f"{name}.py").write_text(text)
    return folder


def run_cli(
    *arguments: str,
    first_on_path: Iterable[pathlib.Path] = (),
    open_files: int | None = None,
    cwd: pathlib.Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs the command with its output captured; `open_files` is the limit of ulimit -n."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))

    paths = [*map(str, first_on_path), *(path for path in sys.path if path)]
    return subprocess.run(
        [sys.executable, "-m", "ep", *arguments],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        preexec_fn=limit if open_files else None,
    )
