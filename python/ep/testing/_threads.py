"""Ranks as threads of this process."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from ep.communicator import Communicator
from ep.testing._session import (
    Outcome,
    Session,
    abort_buffers,
    close_buffers,
    open_buffers,
    reason_of,
    where_is,
)

_CLOSE_S = 5.0  # for all buffers together; each waits at most 2 s for its readers


class ThreadRanks:
    """See Ranks."""

    ABORT_AFTER_S = 0.5
    GIVE_UP_AFTER_S = 5.0
    LEAVES_STUCK = True

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], session: Session) -> None:
        self._fn, self._args, self._session = fn, args, session
        self._comms = [
            Communicator.callbacks(
                rank,
                session.num_ranks,
                functools.partial(session.hub.all_gather, rank),
                session.timeout_s,
            )
            for rank in range(session.num_ranks)
        ]
        self._threads = [
            threading.Thread(target=self._run, args=(rank,), daemon=True, name=f"ep rank {rank}")
            for rank in range(session.num_ranks)
        ]
        self._where: dict[int, str] = {}

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def dead(self) -> Iterable[Outcome]:
        return ()

    def abort(self, ranks: Iterable[int], reason: str) -> None:
        frames = sys._current_frames()
        aborts = []
        for rank in ranks:
            frame = frames.get(self._threads[rank].ident or 0)
            self._where[rank] = where_is(frame) if frame else "has not begun"
            aborts.append((abort_buffers, self._comms[rank], reason))
        del frames
        _side_by_side(aborts, self.GIVE_UP_AFTER_S)

    def where(self, rank: int) -> str:
        return self._where.get(rank, "has just ended")

    def finish(self) -> None:
        ended = [rank for rank in self._session.ended if self._threads[rank].ident is not None]
        for rank in ended:
            self._threads[rank].join()  # it has reported
        comms = [self._comms[rank] for rank in ended]
        _side_by_side([(close_buffers, comm) for comm in comms if open_buffers(comm)], _CLOSE_S)

    def _run(self, rank: int) -> None:
        comm = self._comms[rank]
        try:
            outcome = Outcome(rank, value=self._fn(comm, *self._args))
        except BaseException as error:
            outcome = Outcome.of_error(rank, error)
            reason = reason_of(error)
            self._session.hub.close(rank, reason)
            abort_buffers(comm, reason)
        self._session.report(outcome)


def _side_by_side(calls: list[tuple[Any, ...]], timeout_s: float) -> None:
    """Makes calls that may block each other, each on a thread of its own."""
    deadline = time.monotonic() + timeout_s
    threads = [threading.Thread(target=fn, args=args, daemon=True) for fn, *args in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
