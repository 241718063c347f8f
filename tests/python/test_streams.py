"""Events, streams and calls in flight, as far as CPUs show them."""

import gc
import threading

import numpy as np
import pytest

import ep
import ep.testing
from python.fault_support import (
    DEFAULT,
    SHORT_S,
    Job,
    answer,
    call,
    caught,
    check_combined,
    check_received,
    combine,
    combine_call,
    dispatch,
    exact_again,
    make_buffer,
    round_trip,
    run,
)

pytestmark = pytest.mark.torch_versions

KINDS = pytest.mark.parametrize("kind", ["numpy", "torch"])


@pytest.mark.parametrize("exact", [True, False])
@KINDS
def test_an_async_call_returns_an_event_behind_which_its_result_is_right(kind, exact):
    """Users did not know which event to wait on (DeepEP 131, 412, 262)."""
    job = Job(kind=kind)

    def rank(buf):
        out = dispatch(buf, job, exact=exact, async_op=True)
        assert isinstance(out.event, ep.Event) and isinstance(out.inputs_done, ep.Event)
        out.event.synchronize()
        out.event.synchronize()  # waiting twice
        out.event.wait()
        assert out.event.query() and out.inputs_done.query()
        check_received(buf, job, out)
        rows = job.tensor(answer(buf, job, len(np.asarray(out.x))))
        y = buf.combine(rows, out.handle, async_op=True)
        y.event.synchronize(timeout_s=30.0)
        y.event.wait()
        assert y.event.query()
        check_combined(buf, job, y)
        assert int(np.asarray(out.status)[0]) == int(np.asarray(y.status)[0]) == 0

    run(rank, 3)


def test_a_synchronous_call_is_done_when_it_returns():
    def rank(buf):
        for exact in (True, False):
            out = dispatch(buf, exact=exact)
            assert out.event.query() and out.inputs_done.query()
            y = combine(buf, DEFAULT, out.handle, x=answer(buf, DEFAULT, len(np.asarray(out.x))))
            assert y.event.query()

    run(rank, 2)


@pytest.mark.parametrize("exact", [True, False])
@KINDS
def test_inputs_are_freed_right_after_an_async_call(kind, exact):
    """The rows of a peer that comes late are the old ones, whatever takes the memory."""
    job = Job(16, equal=True, kind=kind, hidden=1024)
    issued = threading.Event()

    def rank(buf):
        if buf.rank == 1 and not exact:
            issued.wait()  # so rank 0's inputs are freed before anybody can have read them
        arguments = call(buf, job, exact=exact, async_op=True)
        out = buf.dispatch(**arguments)
        del arguments
        gc.collect()
        junk = [np.full((16, 1024), 7.0, np.float32) for _ in range(8)]
        issued.set()
        rows = job.tensor(answer(buf, job, len(np.asarray(out.x))))
        y = buf.combine(rows, out.handle, async_op=True)
        del rows
        gc.collect()
        junk += [np.full((16, 1024), 8.0, np.float32) for _ in range(8)]
        y.event.synchronize()
        check_received(buf, job, out)
        check_combined(buf, job, y)

    run(rank, 2, hidden=1024)


@pytest.mark.parametrize("event", ["inputs_done", "event"])
def test_inputs_may_be_overwritten_behind(event):
    def rank(buf):
        for i in range(20):
            job = Job(10, shift=i)
            arguments = call(buf, job, async_op=True)
            out = buf.dispatch(**arguments)
            getattr(out, event).synchronize()
            arguments["x"][:] = np.nan
            arguments["topk_idx"][:] = 0
            arguments["topk_weights"][:] = np.nan
            out.event.synchronize()
            check_received(buf, job, out)
            check_combined(buf, job, combine(buf, job, out.handle))

    run(rank, 2)


def test_events_that_are_dropped_unwaited_leak_nothing_and_harm_nothing():
    def rank(buf):
        for i in range(100):
            out = dispatch(buf, Job(1 + i % 10), exact=i % 2 == 0, async_op=True)
            buf.combine(out.x, out.handle, async_op=True)
            del out
        buf.resync()
        gc.collect()
        assert buf.memory().used == 0
        exact_again(buf)

    run(rank, 2)


def test_two_combines_in_flight_are_read_each_behind_its_own_event():
    """Only the last event was waited for (prime-rl 3411)."""
    jobs = [Job(7, shift=1, layout="expert"), Job(9, shift=2)]

    def rank(buf):
        for order in ((0, 1), (1, 0)) * 10:
            outs = [dispatch(buf, job, async_op=True) for job in jobs]
            backs = [
                buf.combine(**combine_call(buf, job, out.handle, async_op=True))
                for job, out in zip(jobs, outs, strict=True)
            ]
            for i in order:
                backs[i].event.synchronize()
                check_combined(buf, jobs[i], backs[i])
                outs[i].event.synchronize()
                check_received(buf, jobs[i], outs[i])

    run(rank, 3)


def test_calls_on_several_streams_stay_in_issue_order():
    def rank(buf):
        streams = [ep.Stream("cpu"), ep.Stream("cpu"), None]
        for i in range(30):
            job = Job(1 + i % 9, shift=i)
            out = dispatch(buf, job, stream=streams[i % 3], async_op=True)
            y = buf.combine(
                **combine_call(buf, job, out.handle, stream=streams[(i + 1) % 3], async_op=True)
            )
            y.event.synchronize()
            check_received(buf, job, out)
            check_combined(buf, job, y)

    run(rank, 2)


def test_a_host_call_without_counts_never_waits_for_a_peer():
    """exact=False with async_op=True: rank 0's calls return before rank 1 makes its first."""
    released = threading.Event()

    def rank(buf):
        if buf.rank == 1:
            assert released.wait(25.0), "a call of rank 0 waited for rank 1"
        outs, backs = [], []
        for i in range(3):
            job = Job(6, shift=i)
            outs.append(dispatch(buf, job, exact=False, async_op=True))
            rows = answer(buf, job, len(np.asarray(outs[i].x)))
            backs.append(combine(buf, job, outs[i].handle, x=rows, async_op=True))
        x = Job(6).x(buf.rank)
        again = buf.dispatch(x, handle=outs[0].handle, async_op=True)
        if buf.rank == 0:
            assert not any(op.event.query() for op in (*outs, *backs, again))
            released.set()
        again.event.synchronize()
        for i, (out, y) in enumerate(zip(outs, backs, strict=True)):
            assert out.num_rows is None and out.tokens_per_expert is None
            assert int(np.asarray(out.status)[0]) == int(np.asarray(y.status)[0]) == 0
            check_received(buf, Job(6, shift=i), out)
            check_combined(buf, Job(6, shift=i), y)

    run(rank, 2, num_regions=8)


def test_num_sms_out_of_worker_threads_does_not_make_a_call_block():
    """More operations in flight than num_regions still return at once; they run in order."""
    released = threading.Event()

    def rank(buf):
        if buf.rank == 1:
            assert released.wait(25.0), "a call of rank 0 waited for rank 1"
        outs = [dispatch(buf, exact=False, async_op=True) for _ in range(6)]
        released.set()
        outs[-1].event.synchronize()
        for out in outs:
            check_received(buf, DEFAULT, out)

    run(rank, 2, num_regions=1)


class Blocked:
    """An event of rank 0 that comes only with join(): of a dispatch whose peer is late."""

    def __init__(self, comm):
        self.buffer = make_buffer(comm)
        self.out = None
        if comm.rank == 0:
            self.out = dispatch(self.buffer, exact=False, async_op=True)

    def join(self):
        """The other ranks come."""
        if self.out is None:
            self.out = dispatch(self.buffer, exact=False)
        self.out.event.synchronize()
        self.buffer.close()


@pytest.mark.parametrize("form", ["event", "list", "stream"])
def test_a_call_begins_only_behind_the_events_it_was_given(form):
    """x is written after the call was made, before the event it waits for."""
    blocked, done = threading.Event(), threading.Event()

    def rank(comm):
        gate = Blocked(comm)
        with make_buffer(comm) as buf:
            arguments = call(buf, exact=False, async_op=True)
            if buf.rank == 0:
                x = arguments["x"].copy()
                arguments["x"][:] = -1.0
                event = gate.out.event
                if form == "stream":
                    arguments["stream"] = ep.Stream("cpu")
                    event.wait(arguments["stream"])
                else:
                    both = [ep.Event(), event]
                    arguments["wait_for"] = event if form == "event" else both
            out = buf.dispatch(**arguments)
            if buf.rank == 0:
                assert not out.event.query()
                arguments["x"][:] = x
                blocked.set()
            blocked.wait()
            gate.join()
            out.event.synchronize()
            check_received(buf, DEFAULT, out)
            exact_again(buf)
            done.set()

    ep.testing.run(rank, 2)
    assert done.is_set()


def test_memory_that_a_recorded_stream_reads_is_not_handed_out_before():
    """rank 0's arena holds one output; its reader is slow; the next dispatch waits for it."""

    def rank(comm):
        gate = Blocked(comm)
        with make_buffer(comm, arena_bytes=8192, outputs="window") as buf:
            job, other = Job(9, equal=True), Job(9, equal=True, shift=1)
            out = dispatch(buf, job)
            if buf.rank == 0:
                reader = ep.Stream("cpu")
                gate.out.event.wait(reader)
                out.record_stream(reader)
            del out
            gc.collect()
            out = dispatch(buf, other, exact=False, async_op=True)
            if buf.rank == 0:
                caught(ep.Timeout, lambda: out.event.synchronize(timeout_s=SHORT_S))
                assert not out.event.query()
            comm.all_gather(b"")
            gate.join()
            out.event.synchronize()
            check_received(buf, other, out)

    ep.testing.run(rank, 2)


def test_an_events_own_timeout_ends_only_that_wait():
    released = threading.Event()

    def rank(buf):
        if buf.rank == 1:
            released.wait()
        out = dispatch(buf, exact=False, async_op=True)
        if buf.rank == 0:
            error = caught(ep.Timeout, lambda: out.event.synchronize(timeout_s=0.05))
            assert isinstance(error, TimeoutError)
            released.set()
        out.event.synchronize()
        check_received(buf, DEFAULT, out)
        exact_again(buf)

    run(rank, 2)


def test_an_event_that_records_now_and_torchs_own_events_are_accepted():
    import torch

    def rank(buf):
        now = ep.Event()
        assert now.query()
        now.synchronize()
        now.wait()
        out = dispatch(buf, wait_for=[now, torch.Event("cpu")] if _has_cpu_events() else now)
        check_received(buf, DEFAULT, out)
        round_trip(buf)

    run(rank, 2)


def _has_cpu_events():
    import torch

    try:
        torch.Event("cpu").record()
    except RuntimeError:  # this build of torch has none
        return False
    return True


def test_a_result_is_used_on_another_stream_behind_its_event():
    """dispatch on one stream, combine on another that waits for the event; 100 rounds."""

    def rank(buf):
        first, second = ep.Stream("cpu"), ep.Stream("cpu")
        for i in range(100):
            job = Job(1 + i % 9, shift=i)
            out = dispatch(buf, job, stream=first, async_op=True)
            arguments = combine_call(buf, job, out.handle, stream=second, async_op=True)
            y = buf.combine(**arguments, wait_for=out.event)
            y.event.synchronize()
            check_combined(buf, job, y)

    run(rank, 2)
