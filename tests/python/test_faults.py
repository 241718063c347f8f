"""Waits that expire, and ranks that come late: who is told what, and the way back."""

import threading
import time

import numpy as np
import pytest

import ep
from python.fault_support import (
    BY_EXPERT,
    DEFAULT,
    SHORT_S,
    SLACK_S,
    Job,
    answer,
    call,
    caught,
    check_combined,
    combine,
    dispatch,
    exact_again,
    round_trip,
    run,
    says,
)

RANKS, LATE = 3, 2


def _expert_output(buf, job, handle):
    rows = buf.expert_output(handle, dtype="float32")
    np.asarray(rows)[:] = answer(buf, job)
    return combine(buf, job, handle, x=rows)


# What rank 2 does not take part in: (buffer, job, handle of an earlier dispatch) -> the call.
CALLS = {
    "dispatch": lambda buf, job, handle: dispatch(buf, job),
    "dispatch of fixed size": lambda buf, job, handle: dispatch(buf, job, exact=False),
    "replay": lambda buf, job, handle: buf.dispatch(call(buf, job)["x"], handle=handle),
    "combine": lambda buf, job, handle: combine(buf, job, handle),
    "combine of window memory": _expert_output,
}


@pytest.mark.parametrize("job", [DEFAULT, BY_EXPERT], ids=["rank", "expert"])
@pytest.mark.parametrize("name", CALLS)
def test_a_rank_that_does_not_call_is_named(name, job):
    """Users could not tell which rank was late, and the bound was compiled in (DeepEP 424, 678)."""
    gave_up = threading.Barrier(RANKS)

    def rank(buf):
        handle = dispatch(buf, job).handle  # call 1
        round_trip(buf, job)  # calls 2 and 3
        buf.timeout_s = SHORT_S

        def fail():
            CALLS[name](buf, job, handle)

        if buf.rank == LATE:
            gave_up.wait()
            error = caught(ep.PeerError, fail)
            says(error, "gave up on call 4")
            assert set(error.peers) <= {0, 1} and error.peers
        else:
            start = time.monotonic()
            error = caught(ep.Timeout, fail)
            assert SHORT_S / 2 < time.monotonic() - start < SHORT_S + SLACK_S
            assert list(error.peers) == [LATE]
            assert error.phase and isinstance(error.phase, str)
            says(error, "rank 2 has not entered call 4", error.phase)
            gave_up.wait()
        before = caught(ep.Error, fail)
        assert type(before) is ep.Error
        says(before, "resync()")
        buf.timeout_s = 30.0
        assert buf.resync() == 3
        exact_again(buf)
        check_combined(buf, job, combine(buf, job, handle))  # older handles stay valid

    run(rank, RANKS)


def test_a_timeout_is_a_timeout_error_and_an_error_of_ep():
    gave_up = threading.Event()

    def rank(buf):
        if buf.rank == 1:
            gave_up.wait()
            return
        error = caught(TimeoutError, lambda: dispatch(buf))
        assert isinstance(error, ep.Timeout) and isinstance(error, ep.Error)
        assert isinstance(error, RuntimeError)
        gave_up.set()

    run(rank, 2, timeout_s=SHORT_S)


def test_a_bound_that_is_raised_at_run_time_lets_a_late_rank_come():
    """Rank 1 comes later than the first bound allows (vLLM 53282: the first call compiles)."""
    waiting = threading.Event()

    def rank(buf):
        assert buf.timeout_s == SHORT_S
        buf.timeout_s = 60.0
        assert buf.timeout_s == 60.0
        if buf.rank == 1:
            waiting.wait()
            time.sleep(2 * SHORT_S)  # the lateness itself
        waiting.set()
        exact_again(buf)

    run(rank, 2, timeout_s=SHORT_S)


def test_the_shortest_bound_ends_the_call_for_all():
    gave_up = threading.Barrier(RANKS)

    def rank(buf):
        buf.timeout_s = SHORT_S if buf.rank == 0 else 60.0
        if buf.rank == LATE:
            gave_up.wait()
            says(caught(ep.PeerError, lambda: dispatch(buf)), "rank 0 gave up on call 1")
        else:
            assert list(caught(ep.Timeout, lambda: dispatch(buf)).peers) == [LATE]
            gave_up.wait()
        assert buf.resync() == 0
        exact_again(buf)

    run(rank, RANKS)


@pytest.mark.parametrize("bad", [0, -1.0, float("nan"), float("inf"), "long", None])
def test_a_bound_that_is_none_is_refused(bad):
    def rank(buf):
        error = caught((ep.InvalidArgument, TypeError), lambda: setattr(buf, "timeout_s", bad))
        says(error, "timeout_s")
        assert buf.timeout_s == 30.0
        round_trip(buf)

    run(rank, 1)


def test_a_timeout_of_an_async_call_comes_once_with_its_event():
    gave_up = threading.Event()

    def rank(buf):
        buf.timeout_s = SHORT_S
        if buf.rank == 1:
            gave_up.wait()
        out = dispatch(buf, exact=False, async_op=True)
        if buf.rank == 0:
            assert list(caught(ep.Timeout, out.event.synchronize).peers) == [1]
            out.event.synchronize()  # once
            assert int(np.asarray(out.status)[0]) != 0
            gave_up.set()
        else:
            caught(ep.PeerError, out.event.synchronize)
        says(caught(ep.Error, lambda: dispatch(buf)), "resync()")
        buf.timeout_s = 30.0
        buf.resync()
        exact_again(buf)

    run(rank, 2)


def test_resync_names_who_does_not_come_and_may_be_made_again():
    gave_up = threading.Barrier(RANKS)

    def rank(buf):
        round_trip(buf)
        buf.timeout_s = SHORT_S
        if buf.rank == LATE:
            gave_up.wait()
            caught(ep.PeerError, buf.resync)
        else:
            assert list(caught(ep.Timeout, buf.resync).peers) == [LATE]
            gave_up.wait()
        buf.timeout_s = 30.0
        assert buf.resync() == 2
        exact_again(buf)

    run(rank, RANKS)


def test_construction_names_a_rank_that_does_not_come():
    start = time.monotonic()
    comms = ep.Communicator.threads(2)
    options = {"num_experts": 4, "num_topk": 2, "hidden": 32, "max_tokens_per_rank": 4}
    error = caught(ep.Timeout, lambda: ep.EPBuffer(comms[0], timeout_s=SHORT_S, **options))
    assert list(error.peers) == [1]
    assert time.monotonic() - start < SHORT_S + SLACK_S


def test_fault_after_fault_leaves_an_exact_buffer_and_all_its_memory():
    both = threading.Barrier(2)

    def rank(buf):
        for i in range(6):
            buf.timeout_s = 0.1
            late = buf.rank == i % 2
            if not late:
                caught(ep.Timeout, lambda: dispatch(buf))
            both.wait()
            if late and i % 3 != 0:  # or it never makes the call
                caught(ep.PeerError, lambda: dispatch(buf))
            buf.timeout_s = 30.0
            buf.resync()
            exact_again(buf)
            assert buf.memory().used == 0

    run(rank, 2)


@pytest.mark.parametrize("counts", [[0, 4097], [1] + [0] * 7, [0, 0, 3, 0, 1, 0, 0, 2]], ids=str)
def test_uneven_counts_and_many_ranks_without_a_row(counts):
    """Ranks chose their path by their own size, or hung with few tokens (TensorRT-LLM 16207)."""

    def rank(buf):
        mine = counts[buf.rank]
        x = np.arange(1, 8 * mine + 1, dtype=np.float32).reshape(mine, 8)
        ids = np.zeros((mine, 1), np.int64)  # rank 0 gets every row
        for layout in ("rank", "expert") * 3:
            out = buf.dispatch(x, ids, layout=layout)
            assert out.num_rows == (sum(counts) if buf.rank == 0 else 0)
            y = buf.combine(np.asarray(out.x) * 2, out.handle)
            np.testing.assert_array_equal(np.asarray(y.x), 2 * x)

    run(rank, len(counts), hidden=8, num_topk=1, max_tokens_per_rank=4097)


def test_soak_over_token_counts_that_are_powers_of_two():
    """Hangs at the second layer, or only at 128 or 8192 tokens (vLLM 21306, DeepEP 423, 382)."""
    counts = [1, 2, 4, 8, 16, 32, 64, 128, 8192]
    jobs = [Job(n, hidden=8, equal=True, layout="rank") for n in counts]

    def rank(buf):
        calls = [call(buf, job) for job in jobs]
        factors = [
            ((c["topk_idx"] + 1) * c["topk_weights"]).sum(axis=1, keepdims=True) for c in calls
        ]
        for i in range(200):
            at = i % len(jobs)
            out = buf.dispatch(**calls[at])
            mine = np.asarray(out.topk_idx) >= 0
            ids = np.asarray(out.topk_idx) + buf.expert_offsets[buf.rank]
            scale = ((ids + 1) * np.asarray(out.topk_weights) * mine).sum(axis=1, keepdims=True)
            y = buf.combine(np.asarray(out.x) * scale.astype(np.float32), out.handle)
            np.testing.assert_array_equal(np.asarray(y.x), calls[at]["x"] * factors[at])

    run(rank, 2, hidden=8, max_tokens_per_rank=8192)
