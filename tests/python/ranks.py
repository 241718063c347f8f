"""Runs trips in every rank, and calls that must fail alike on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

import ep
import ep.testing
from python.compare import expect_combined, expect_received
from python.trip import (
    Case,
    Trip,
    buffer_args,
    combine_args,
    dispatch_args,
    give,
    make_trips,
)

LAYOUTS = ("rank", "expert")


def run_ranks(fn: Callable[[Any], Any], num_ranks: int, *, timeout_s: float = 60) -> list[Any]:
    """Calls `fn(comm)` in a thread per rank; results by rank."""
    return ep.testing.run(fn, num_ranks, how="threads", timeout_s=timeout_s)


def with_buffers(
    trips: Trip | list[Trip], body: Callable[[ep.EPBuffer], Any], **options: Any
) -> list[Any]:
    """Calls `body(buf)` in every rank, with a buffer in which the trips fit."""
    trips = trips if isinstance(trips, list) else [trips]

    def in_rank(comm):
        with ep.EPBuffer(comm, **{**buffer_args(trips), **options}) as buf:
            return body(buf)

    return run_ranks(in_rank, trips[0].case.num_ranks)


def round_trip(buf: ep.EPBuffer, trip: Trip, *, in_window: bool = False) -> Any:
    """dispatch and combine, each compared with the oracle; returns the dispatch's result.

    `in_window`: the experts' rows are computed into `expert_output`.
    """
    rank, case = buf.rank, trip.case
    try:
        out = buf.dispatch(**dispatch_args(trip, rank))
        expect_received(out, trip.sent.received[rank], trip.rules)
        args = combine_args(trip, rank)
        if in_window:
            args["x"] = window_answer(buf, trip, out.handle)
        expect_combined(buf.combine(handle=out.handle, **args), trip.back[rank])
    except AssertionError as error:
        raise AssertionError(f"rank {rank}: {error}\n{case}") from None
    return out


def window_answer(buf: ep.EPBuffer, trip: Trip, handle: ep.Handle) -> Any:
    """The experts' rows in memory that combine reads where it is."""
    answer = trip.answers[buf.rank].x
    rows = buf.expert_output(handle, hidden=answer.shape[1], dtype=answer.dtype)
    rows[:] = give(answer, trip.case)
    return rows


def run_cases(cases: Case | Sequence[Case], *, in_window: bool = False, **options: Any) -> None:
    """In every rank: one buffer, all cases in order, each compared with the oracle."""
    cases = [cases] if isinstance(cases, Case) else list(cases)
    trips = make_trips(cases)

    def body(buf):
        for trip in trips:
            round_trip(buf, trip, in_window=in_window)

    with_buffers(trips, body, **options)


def expect_errors(
    buf: ep.EPBuffer,
    call: Callable[[], Any],
    errors: Mapping[int, type[BaseException] | tuple[type[BaseException], ...]],
    *texts: str,
    others: type[BaseException] = ep.PeerError,
) -> BaseException:
    """`call` raises errors[rank], with all texts in its message; on ranks not named, `others`.

    A `PeerError` must name one of the ranks in `errors` and give its reason. Returns the error.
    """
    wanted = errors.get(buf.rank, others)
    with pytest.raises(wanted) as caught:
        call()
    error = caught.value
    if buf.rank in errors:
        for text in texts:
            assert text in str(error), f"{error!r} lacks {text!r}"
    elif others is ep.PeerError:
        assert set(error.peers) <= set(errors) and error.peers, error
        assert error.reason and error.reason in str(error), error
    return error


def expect_refused(
    buf: ep.EPBuffer,
    trip: Trip,
    culprit: int,
    change: Mapping[str, Any],
    *texts: str,
    error: type[BaseException] | tuple[type[BaseException], ...] = ep.InvalidArgument,
) -> None:
    """A dispatch whose arguments `culprit` gets wrong; then the next call is exact.

    `change`: arguments of the culprit that differ from the trip's; None takes one away.
    """
    args = dispatch_args(trip, buf.rank)
    if buf.rank == culprit:
        args.update(change)
        args = {name: value for name, value in args.items() if value is not None}
    expect_errors(buf, lambda: buf.dispatch(**args), {culprit: error}, *texts)
    round_trip(buf, trip)
