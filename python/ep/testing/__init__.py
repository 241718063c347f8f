"""Many ranks in one program, for tests and laptops."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from ep.errors import InvalidArgument, Timeout
from ep.testing._processes import ProcessRanks
from ep.testing._session import Outcome, Ranks, Session, rank_list
from ep.testing._threads import ThreadRanks

__all__ = ["run"]

_KINDS: dict[str, type[Ranks]] = {"threads": ThreadRanks, "processes": ProcessRanks}


def run(
    fn: Callable[..., Any],
    num_ranks: int,
    how: Literal["threads", "processes"] = "threads",
    timeout_s: float = 60.0,
    args: Sequence[Any] = (),
) -> list[Any]:
    """Calls ``fn(comm, *args)`` in every rank of a new group and returns the results, by rank.

    When a rank raises, the buffers it made with `comm` are aborted, so that the others' current or
    next call raises PeerError with the reason "<type>: <text>"; ranks that wait in `comm` are
    released in the same way.  A moment later the buffers of all ranks are aborted.  The first
    failure, without those that merely follow from it, is raised here as it was; its note (before
    Python 3.11 its last argument) names the rank, and so does its attribute ``ep_rank``.

    Buffers that `fn` leaves open are closed when all ranks are done; tensors that view their
    windows stay valid.  Nothing remains of a run, except a thread whose rank cannot be woken.

    Args:
        fn: gets this rank's :class:`ep.Communicator`, with `timeout_s` as its own, and `args`.
        num_ranks: R, in [1, 1024].
        how: "threads", one of this process per rank; or "processes", one per rank, started by
            multiprocessing's "spawn": `fn`, `args`, results and exceptions are pickled, and a
            script that calls this needs ``if __name__ == "__main__"``.
        timeout_s: bound in seconds of the whole run, and of every wait inside that has no other.
        args: further arguments of `fn`, the same for every rank.

    Returns:
        What `fn` returned, by rank.

    Raises:
        Timeout: the time is up; ``.peers`` are the ranks that still ran, and the text says where.
        PeerLost: a rank's process died or called sys.exit; the text says how.
        InvalidArgument: an argument is wrong, or `fn` or `args` cannot be pickled.
        Error: a result or an exception cannot be pickled.
        Exception: whatever `fn` raised.
    """
    num_ranks = operator.index(num_ranks)
    if how not in _KINDS:
        raise InvalidArgument(f'how={how!r} is neither "threads" nor "processes"')
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise InvalidArgument(f"timeout_s={timeout_s} must be a positive number of seconds")
    deadline = time.monotonic() + timeout_s
    session = Session(num_ranks, timeout_s)
    ranks = _KINDS[how](fn, tuple(args), session)
    timeout = None
    try:
        ranks.start()
        session.collect(ranks, deadline, until_failure=True)
        if session.running() and not session.failures():
            _wind_down(session, ranks, f"run() gave up after {timeout_s:g} s", at_once=True)
            timeout = _timeout(session, ranks, timeout_s)
        else:
            _wind_down(session, ranks, "another rank failed")
    except BaseException as error:
        # Ctrl-C, or no memory for another rank.
        _wind_down(session, ranks, f"run() was left by {type(error).__name__}", at_once=True)
        raise
    finally:
        ranks.finish()
    if timeout is not None:
        raise timeout
    failures = session.failures()
    if failures:
        _raise(min(failures, key=lambda each: (each.is_consequence, each.when)), session)
    return [session.ended[rank].value for rank in range(num_ranks)]


def _wind_down(session: Session, ranks: Ranks, reason: str, at_once: bool = False) -> None:
    """Ends the ranks that still run: wakes them, and gives them a moment."""
    if not session.running():
        return
    session.hub.close(None, reason)
    now = time.monotonic()
    if not at_once:
        # Peers of the rank that failed have its reason from it, which tells more than ours.
        session.collect(ranks, now + ranks.ABORT_AFTER_S)
    ranks.abort(session.running(), reason)
    session.collect(ranks, now + ranks.GIVE_UP_AFTER_S)


def _timeout(session: Session, ranks: Ranks, timeout_s: float) -> Timeout:
    late = sorted(session.late)
    where = "; ".join(f"rank {rank}: {ranks.where(rank)}" for rank in late)
    stuck = session.running()
    left = f"; could not wake {rank_list(stuck)}" if stuck and ranks.LEAVES_STUCK else ""
    return Timeout(
        f"run() timed out after {timeout_s:g} s; still running: {where}{left}",
        peers=late,
        phase="run",
    )


def _raise(first: Outcome, session: Session) -> None:
    """Raises the failure of a rank as the caller's own."""
    error = first.error
    assert error is not None
    note = f"in rank {first.rank} of {session.num_ranks}"
    stuck = session.running()
    if stuck:
        note += f"; {rank_list(stuck)} did not end"
    if first.traceback:
        note += f"\n\n{first.traceback}"
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.args = (*error.args, note)
    error.ep_rank = first.rank  # type: ignore[attr-defined]
    try:
        raise error
    finally:
        del error, first  # no cycle through this frame
