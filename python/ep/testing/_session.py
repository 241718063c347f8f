"""What the ranks of one run() share, however they run."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ep import _C
from ep.communicator import Communicator
from ep.errors import PeerError, PeerLost, Timeout

_POLL_S = 0.1  # how often dead processes are looked for


@dataclass
class Outcome:
    """How a rank ended."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""  # of another process
    when: float = field(default_factory=time.monotonic)
    is_consequence: bool = False  # of another rank's failure, perhaps

    @staticmethod
    def of_error(rank: int, error: BaseException, traceback: str = "") -> Outcome:
        """The outcome of a rank whose fn raised `error`."""
        is_consequence = isinstance(error, (PeerError, PeerLost, Timeout))
        if isinstance(error, SystemExit):
            lost = PeerLost(f"rank {rank} called sys.exit({error.code!r})", peers=[rank])
            lost.__cause__ = error
            error = lost
        return Outcome(rank, error=error, traceback=traceback, is_consequence=is_consequence)


class Ranks(Protocol):
    """Ranks as threads or processes.  They report to the session."""

    ABORT_AFTER_S: float  # from the first failure until the others' buffers are aborted
    GIVE_UP_AFTER_S: float  # and until nobody waits for them any more
    LEAVES_STUCK: bool  # True: a rank that cannot be woken stays

    def __init__(self, fn: Any, args: tuple[Any, ...], session: Session) -> None: ...

    def start(self) -> None: ...

    def dead(self) -> Iterable[Outcome]:
        """Ranks that ended without a word, not only new ones."""

    def abort(self, ranks: Iterable[int], reason: str) -> None:
        """Ends the waits of these ranks, and notes where they are."""

    def where(self, rank: int) -> str:
        """Where the rank was when it was aborted."""

    def finish(self) -> None:
        """Closes open buffers and removes what can be removed.  Raises where that failed."""


class Hub:
    """Where the ranks of a run meet.

    The engines are Communicator.threads; an engine's only lasting reference is here, so dropping it
    means that its rank leaves, which releases those that wait for it.
    """

    def __init__(self, num_ranks: int) -> None:
        self._engines: list[Any] = list(_C.Communicator.threads(num_ranks))
        self._lock = threading.Lock()
        self._failure: tuple[int | None, str] | None = None

    def all_gather(self, rank: int, mine: bytes, timeout_s: float) -> list[bytes]:
        """See Communicator.all_gather; for `rank`, on any thread."""
        engine = self._engines[rank]
        try:
            if engine is None:
                raise self._closed()
            return engine.all_gather(mine, timeout_s)
        except PeerLost:
            if self._failure is None:
                raise
            raise self._closed() from None
        finally:
            del engine  # a traceback would keep it

    def leave(self, rank: int) -> None:
        """The rank takes part in no further call; the others raise PeerLost."""
        self._engines[rank] = None

    def close(self, rank: int | None, reason: str) -> None:
        """Ends all calls, now and later, because of `rank` (None: the caller of run())."""
        with self._lock:
            if self._failure is None:
                self._failure = (rank, reason)
        for each in range(len(self._engines)):
            self._engines[each] = None

    def _closed(self) -> PeerError | PeerLost:
        if self._failure is None:
            return PeerLost("all_gather: this rank has left", peers=[])
        rank, reason = self._failure
        who = "run()" if rank is None else f"rank {rank}"
        peers = [] if rank is None else [rank]
        return PeerError(f"all_gather: ended by {who}: {reason}", peers=peers, reason=reason)


class Session:
    """One run(): who has ended, and how."""

    def __init__(self, num_ranks: int, timeout_s: float) -> None:
        self.num_ranks, self.timeout_s = num_ranks, timeout_s
        self.hub = Hub(num_ranks)
        self.ended: dict[int, Outcome] = {}
        self.late: list[int] = []  # the ranks that ran when the time was up
        self._reports: queue.SimpleQueue[Outcome] = queue.SimpleQueue()

    def report(self, outcome: Outcome) -> None:
        """A rank has ended; from any thread."""
        if outcome.error is None:
            self.hub.leave(outcome.rank)
        else:
            self.hub.close(outcome.rank, reason_of(outcome.error))
        self._reports.put(outcome)

    def collect(self, ranks: Ranks, deadline: float, until_failure: bool = False) -> None:
        """Waits until all ranks have ended, until one has failed, or until `deadline`."""
        while self.running() and not (until_failure and self.failures()):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self.late = self.late or self.running()
                return
            try:
                outcome = self._reports.get(timeout=min(left_s, _POLL_S))
                self.ended.setdefault(outcome.rank, outcome)
            except queue.Empty:
                for outcome in ranks.dead():
                    if outcome.rank not in self.ended:
                        self.ended[outcome.rank] = outcome
                        self.hub.close(outcome.rank, str(outcome.error))

    def running(self) -> list[int]:
        """The ranks that have not ended."""
        return [rank for rank in range(self.num_ranks) if rank not in self.ended]

    def failures(self) -> list[Outcome]:
        """The outcomes that are none."""
        return [outcome for outcome in self.ended.values() if outcome.error is not None]


def reason_of(error: BaseException) -> str:
    """What the others are told."""
    return f"{type(error).__name__}: {error}"


def rank_list(ranks: list[int]) -> str:
    """ "rank 3" or "ranks 0, 2"."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def open_buffers(comm: Communicator) -> list[Any]:
    """The buffers made with `comm` that still live; other threads may be making some."""
    while True:
        try:
            return list(comm._buffers)
        except RuntimeError:  # the set grew meanwhile
            continue


def abort_buffers(comm: Communicator, reason: str) -> None:
    """Wakes all that wait in or for the buffers of this rank."""
    for buffer in open_buffers(comm):
        buffer.abort(reason)


def close_buffers(comm: Communicator) -> None:
    """Closes what fn left open."""
    for buffer in open_buffers(comm):
        buffer.close()


def where_is(frame: Any) -> str:
    """The innermost calls of a thread, outermost first."""
    calls: list[str] = []
    while frame is not None and len(calls) < 3:
        code = frame.f_code
        calls.append(f"{code.co_name} ({code.co_filename}:{frame.f_lineno})")
        frame = frame.f_back
    return "in " + " > ".join(reversed(calls))
