"""Configures, builds and runs small projects against an installed ep, as its users do."""

from __future__ import annotations

import os
import pathlib
import shutil
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
BOUND_S = 240.0


class Failed(AssertionError):
    """A command that should have worked; the text is all that it said."""


def command(*words: object, cwd: pathlib.Path | None = None) -> str:
    """Runs a command and returns what it said; raises Failed with all of it."""
    done = attempt(*words, cwd=cwd)
    if done.returncode != 0:
        text = " ".join(map(str, words))
        raise Failed(f"{text}\nexit status {done.returncode}\n{done.stdout}")
    return done.stdout


def attempt(*words: object, cwd: pathlib.Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a command; standard output and error are one text."""
    return subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=BOUND_S,
        env=os.environ | {"LC_ALL": "C"},
    )


def configure(source: pathlib.Path, build: pathlib.Path, **defines: object) -> list[object]:
    """The command that configures a project: cheap to compile, warnings are errors."""
    defines.setdefault("CMAKE_CXX_FLAGS", "-O1 -Wall -Wextra -Wpedantic -Werror")
    defines.setdefault("CMAKE_BUILD_TYPE", "")
    settings = [f"-D{name}={value}" for name, value in defines.items()]
    if shutil.which("ccache"):
        settings.append("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
    return ["cmake", "-S", source, "-B", build, "-G", "Ninja", *settings]


def build(source: pathlib.Path, build: pathlib.Path, **defines: object) -> pathlib.Path:
    """Configures and builds a project; returns the folder of what it built."""
    command(*configure(source, build, **defines))
    command("cmake", "--build", build)
    return build


def python_package() -> pathlib.Path:
    """The folder that `python -m ep cmake-dir` prints."""
    said = subprocess.run(
        [sys.executable, "-m", "ep", "cmake-dir"], capture_output=True, text=True, timeout=BOUND_S
    )
    assert said.returncode == 0, said.stderr
    return pathlib.Path(said.stdout.rstrip("\n"))


def library_build() -> pathlib.Path | None:
    """A build folder of this repository with a library for users: the wheel's, else the newest."""

    def rank(archive: pathlib.Path) -> tuple[bool, float]:
        return archive.parents[1].name == "wheel", archive.stat().st_mtime

    for archive in sorted(ROOT.glob("build/*/csrc/libep.a"), key=rank, reverse=True):
        cache = archive.parents[1] / "CMakeCache.txt"
        if cache.is_file() and "EP_SANITIZE:STRING=\n" in cache.read_text():
            return archive.parents[1]
    return None


def free_port(host: str) -> int:
    """A port that was free a moment ago; raises OSError where there is no such host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        return listener.getsockname()[1]


def torch_packages() -> list[pathlib.Path]:
    """The torch folders of the environments that the repository keeps: one or more versions."""
    found = sorted(ROOT.glob(".venv*/lib/python3*/site-packages/torch/include"))
    return [path.parent for path in found]
