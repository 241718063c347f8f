"""One rank's process: runs the function, and talks to the process that started it.

The main thread runs the function; a second one listens, so that an abort reaches a rank that waits,
and so that the process ends when its parent does.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from typing import Any

from ep.communicator import Communicator
from ep.errors import Error
from ep.testing._session import abort_buffers, close_buffers, reason_of, where_is


class _Link:
    """The child's end of its pipe."""

    def __init__(self, pipe: Any) -> None:
        self.comm: Communicator | None = None
        self.finished = threading.Event()
        self._pipe = pipe
        self._sending = threading.Lock()
        self._answers: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._calls = 0
        threading.Thread(target=self._listen, daemon=True, name="ep parent").start()

    def send(self, *message: Any) -> None:
        data = pickle.dumps(message)
        with self._sending, contextlib.suppress(OSError):  # the listener sees a dead parent
            self._pipe.send_bytes(data)

    def all_gather(self, mine: bytes, timeout_s: float) -> list[bytes]:
        """Through the parent.  It answers always, and within the time."""
        self._calls += 1
        self.send("gather", self._calls, mine, timeout_s)
        while True:
            kind, call, body = self._answers.get()
            if call != self._calls:
                continue  # of a call that was interrupted
            if kind == "failed":
                raise body
            return body

    def _listen(self) -> None:
        while True:
            try:
                kind, *body = pickle.loads(self._pipe.recv_bytes())
            except (EOFError, OSError):
                os._exit(1)  # the parent is gone: nobody waits for anything here
            if kind == "abort":
                self._abort(*body)
            elif kind == "finish":
                self.finished.set()
            else:
                self._answers.put((kind, *body))

    def _abort(self, reason: str) -> None:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        self.send("where", where_is(frame))
        del frame
        if self.comm is not None:
            abort_buffers(self.comm, reason)


def main(pipe: Any, place: tuple[int, int, float], task: tuple[str, str, bytes]) -> None:
    """Runs the task as rank place[0] of place[1]; waits are bounded by place[2] seconds."""
    rank, num_ranks, timeout_s = place
    link = _Link(pipe)
    comm = link.comm = Communicator.callbacks(rank, num_ranks, link.all_gather, timeout_s)
    message = _run(link, comm, task)
    # Whatever it says has been said.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link.send(*message)
    link.finished.wait()
    close_buffers(comm)


def _run(link: _Link, comm: Communicator, task: tuple[str, str, bytes]) -> tuple[Any, ...]:
    """Calls the function and returns the message to the parent."""
    name, file, pickled = task
    try:
        _make_importable(name, file)
        fn, args = pickle.loads(pickled)
        return ("done", time.monotonic(), _dump_result(comm.rank, fn(comm, *args)))
    except BaseException as error:
        when = time.monotonic()
        link.send("failing", reason_of(error))
        abort_buffers(comm, reason_of(error))
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return ("raised", when, _dump_error(comm.rank, error), text)


def _make_importable(name: str, file: str) -> None:
    """Loads a module by its file if no path leads to it (pytest's "importlib" mode)."""
    if not file or name == "__main__":
        return
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


def _dump_result(rank: int, result: Any) -> bytes:
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise Error(
            f"rank {rank} returned a {type(result).__name__} that cannot be pickled: {error}"
        ) from error


def _dump_error(rank: int, error: BaseException) -> bytes:
    """Pickles an exception, or one that says that it cannot be."""
    try:
        dumped = pickle.dumps(error)
        pickle.loads(dumped)  # many pickle, and fail only here
        return dumped
    except Exception as failure:
        text = f"rank {rank} raised {reason_of(error)}, which cannot be pickled: {failure}"
        return pickle.dumps(Error(text))
