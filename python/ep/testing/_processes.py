"""Ranks as processes, seen from the one that started them.

Every child has a pipe.  Messages to a child:  ("gathered", id, [bytes]), ("failed", id, exception),
("abort", reason), ("finish",).  From a child:  ("gather", id, bytes, timeout_s), ("where", text),
("failing", reason), ("done", when, result), ("raised", when, exception, traceback).  Messages are
pickled; result and exception are pickled on their own before, so that each can fail on its own.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import multiprocessing.connection
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from ep.errors import Error, InvalidArgument, PeerLost, Timeout
from ep.testing import _child
from ep.testing._session import Outcome, Session

_LOOK_S = 0.2  # how often a thread that listens looks whether it should end
_EXIT_S = 30.0  # for a process to end once its rank has
_FAILED_EXIT_S = 0.4  # for all processes to end after a failure


class _Child:
    """One rank's process, and the pipe to it."""

    def __init__(self, rank: int, process: Any, pipe: Any) -> None:
        self.rank, self.process, self.pipe = rank, process, pipe
        self.where = "does not say where"
        self._sending = threading.Lock()

    def send(self, *message: Any) -> None:
        """Sends, unless the child is gone or does not listen."""
        if self._sending.acquire(timeout=_LOOK_S):
            try:
                with contextlib.suppress(OSError):
                    self.pipe.send_bytes(pickle.dumps(message))
            finally:
                self._sending.release()

    def end(self, deadline: float) -> bool:
        """Waits for the process to end; kills it after `deadline`, and returns False."""
        self.process.join(max(deadline - time.monotonic(), 0.0))
        if self.process.exitcode is not None:
            return True
        self.process.kill()
        self.process.join()
        return False

    def how_it_ended(self) -> str:
        code = self.process.exitcode
        if code >= 0:
            return f"exited with code {code}"
        try:
            return f"was killed by {signal.Signals(-code).name} ({-code})"
        except ValueError:
            return f"was killed by signal {-code}"


class ProcessRanks:
    """See Ranks."""

    ABORT_AFTER_S = 0.5
    GIVE_UP_AFTER_S = 1.2
    LEAVES_STUCK = False

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], session: Session) -> None:
        self._session = session
        self._task = _pack(fn, args)
        self._children: list[_Child] = []
        self._listeners: list[threading.Thread] = []
        self._is_over = False

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        session = self._session
        for rank in range(session.num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_child.main,
                args=(theirs, (rank, session.num_ranks, session.timeout_s), self._task),
                name=f"ep rank {rank}",
            )
            try:
                process.start()
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
            child = _Child(rank, process, ours)
            self._children.append(child)
            listener = threading.Thread(target=self._listen, args=(child,), daemon=True)
            self._listeners.append(listener)
            listener.start()

    def dead(self) -> Iterable[Outcome]:
        for child in self._children:
            if child.process.exitcode is not None:
                error = PeerLost(
                    f"rank {child.rank} {child.how_it_ended()} before its function returned",
                    peers=[child.rank],
                )
                yield Outcome(child.rank, error=error)

    def abort(self, ranks: Iterable[int], reason: str) -> None:
        wanted = set(ranks)
        for child in self._children:
            if child.rank in wanted:
                child.send("abort", reason)

    def where(self, rank: int) -> str:
        return self._children[rank].where

    def finish(self) -> None:
        ended = self._session.ended
        has_failed = bool(self._session.failures() or self._session.running())
        for child in self._children:
            if child.rank in ended:
                child.send("finish")
            else:
                child.process.terminate()
        deadline = time.monotonic() + (_FAILED_EXIT_S if has_failed else _EXIT_S)
        for child in self._children:
            ended_itself = child.end(deadline)
            if not has_failed:
                self._note_bad_end(child, ended_itself)
        self._is_over = True
        for listener in self._listeners:
            listener.join()
        for child in self._children:
            child.pipe.close()
            child.process.close()

    def _note_bad_end(self, child: _Child, ended_itself: bool) -> None:
        error: Error
        if not ended_itself:
            error = Timeout(
                f"rank {child.rank} returned, but its process did not end within {_EXIT_S:g} s",
                peers=[child.rank],
                phase="exit",
            )
        elif child.process.exitcode != 0:
            error = PeerLost(
                f"rank {child.rank} returned, then its process {child.how_it_ended()}",
                peers=[child.rank],
            )
        else:
            return
        self._session.ended[child.rank] = Outcome(child.rank, error=error)

    def _listen(self, child: _Child) -> None:
        """Serves one child until its pipe ends."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                # A process that the child started may hold the pipe open: no wait without an end.
                while not child.pipe.poll(_LOOK_S):
                    if self._is_over:
                        return
                self._answer(child, *pickle.loads(child.pipe.recv_bytes()))

    def _answer(self, child: _Child, kind: str, *body: Any) -> None:
        session = self._session
        if kind == "gather":
            number, mine, timeout_s = body
            try:
                child.send("gathered", number, session.hub.all_gather(child.rank, mine, timeout_s))
            except Error as error:
                child.send("failed", number, error)
        elif kind == "where":
            (child.where,) = body
        elif kind == "failing":
            session.hub.close(child.rank, *body)
        elif kind == "done":
            when, pickled = body
            session.report(_unpickled_result(child.rank, when, pickled))
        elif kind == "raised":
            when, pickled, text = body
            outcome = Outcome.of_error(child.rank, _unpickled_error(child.rank, pickled), text)
            outcome.when = when
            session.report(outcome)


def _unpickled_result(rank: int, when: float, pickled: bytes) -> Outcome:
    try:
        return Outcome(rank, value=pickle.loads(pickled), when=when)
    except Exception as error:
        text = f"the result of rank {rank} cannot be unpickled: {error}"
        return Outcome(rank, error=Error(text), when=when)


def _unpickled_error(rank: int, pickled: bytes) -> BaseException:
    try:
        return pickle.loads(pickled)
    except Exception as error:
        return Error(f"an exception of rank {rank} cannot be unpickled: {error}")


def _pack(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, str, bytes]:
    """fn and args as a child needs them: where fn's module is, and both pickled."""
    inner = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = getattr(inner, "__module__", None) or ""
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    try:
        return name, file, pickle.dumps((fn, args))
    except Exception as error:
        raise InvalidArgument(
            'how="processes" sends fn and args to other processes: fn must be a function at the '
            f"top of a module, and args must be picklable: {error}"
        ) from error
