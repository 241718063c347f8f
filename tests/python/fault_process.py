"""Ranks as processes of their own, which talk to the test by lines.

A rank runs a piece of Python with the names of `fault_support` and of this module's `child`
functions at hand.  `say(text)` sends a line, `hear()` waits for one.
"""

import contextlib
import os
import pathlib
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator

TESTS = pathlib.Path(__file__).parents[1]
BOUND_S = 60.0  # of a line or an end that comes earlier unless a test fails

PRELUDE = """\
import faulthandler, gc, os, signal, sys, threading, time
faulthandler.dump_traceback_later(90, exit=True)
rank, num_ranks, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def say(*words):
    print(*words, flush=True)

def hear():
    return sys.stdin.readline().strip()

def fork():
    faulthandler.cancel_dump_traceback_later()  # a child could not end its thread
    return os.fork()

"""
# What most ranks do first.
WITH_EP = """\
from python.fault_support import *

def make():
    return make_buffer(ep.Communicator.tcp(address, rank, num_ranks))

"""


class Port:
    """A TCP port of the loopback that nobody else is given while this lives."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))  # bound, but not listened at
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"


class Rank:
    """One process that runs `script` as `rank` of `num_ranks`."""

    def __init__(
        self,
        script: str,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        address: str = "",
        prelude: str = WITH_EP,
        options: tuple[str, ...] = (),
    ) -> None:
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        paths = [str(TESTS), *(path for path in sys.path if path)]
        command = [sys.executable, *options, "-c", PRELUDE + prelude + textwrap.dedent(script)]
        self.process = subprocess.Popen(
            [*command, str(rank), str(num_ranks), address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )
        self.rank = rank
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._lines.put(line.strip())
        self._lines.put(None)

    def line(self) -> str:
        """The next line the process says."""
        try:
            line = self._lines.get(timeout=BOUND_S)
        except queue.Empty:
            raise AssertionError(f"rank {self.rank} says nothing: {self.stderr()}") from None
        assert line is not None, f"rank {self.rank} ended early: {self.stderr()}"
        return line

    def expect(self, word: str) -> list[str]:
        """The next line, which must begin with `word`; returns the words behind it."""
        line = self.line()
        assert line.split()[:1] == [word], f"rank {self.rank}: {line!r} instead of {word!r}"
        return line.split()[1:]

    def rest(self) -> str:
        """Everything else it says until it ends."""
        lines = []
        while (line := self._lines.get(timeout=BOUND_S)) is not None:
            lines.append(line)
        return "\n".join(lines)

    def tell(self, word: str = "go") -> None:
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)

    def join(self, timeout_s: float = BOUND_S) -> int:
        """The exit status; fails if the process has not left by itself in time."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"rank {self.rank} does not end: {self.stderr()}") from None

    def good(self, timeout_s: float = BOUND_S) -> None:
        """Ends with status 0 and not a word on stderr."""
        status = self.join(timeout_s)
        said = self.stderr()
        assert (status, said) == (0, ""), f"rank {self.rank} ended with {status}: {said}"

    def stderr(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read()

    def session(self) -> list[int]:
        """Processes that this one started and left behind, itself included while it lives."""
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.process.pid and fields[0] != "Z":
                    found.append(int(entry.name))
        return found

    def end(self) -> None:
        """For clean-up: the process is gone afterwards."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self._reader.join()
        self.process.stdout.close()
        self._stderr.close()


@contextlib.contextmanager
def ranks(
    *scripts: str, port: Port | None = None, options: tuple[str, ...] = ()
) -> Iterator[list[Rank]]:
    """One process per script, which meet at a port; all are gone afterwards."""
    port = port or Port()
    started = []
    try:
        for rank, script in enumerate(scripts):
            started.append(
                Rank(
                    script,
                    rank=rank,
                    num_ranks=len(scripts),
                    address=port.address,
                    options=options,
                )
            )
        yield started
    finally:
        for rank in started:
            rank.end()


@contextlib.contextmanager
def alone(script: str, *, prelude: str = WITH_EP, options: tuple[str, ...] = ()) -> Iterator[Rank]:
    """One process; gone afterwards."""
    rank = Rank(script, prelude=prelude, options=options)
    try:
        yield rank
    finally:
        rank.end()


def run_alone(script: str, *, prelude: str = WITH_EP, options: tuple[str, ...] = ()) -> str:
    """Runs a script to its good end; returns what it printed."""
    with alone(script, prelude=prelude, options=options) as process:
        process.good()
        return process.rest()
