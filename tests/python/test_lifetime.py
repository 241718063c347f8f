"""What may be dropped when: buffers, outputs, handles, with calls in flight and slow readers."""

import gc
import warnings

import numpy as np
import pytest

import ep
import ep.testing
from python.fault_support import (
    DEFAULT,
    Job,
    answer,
    call,
    caught,
    check_combined,
    check_received,
    combine,
    combine_call,
    dispatch,
    make_buffer,
    round_trip,
    run,
    says,
)


def test_close_may_come_twice_in_any_order_and_from_a_context_manager():
    def rank(comm):
        with make_buffer(comm) as buf:
            round_trip(buf)
            buf.close()
        buf.close()
        first, second = make_buffer(comm), make_buffer(comm)
        for one in (first, second) if comm.rank == 0 else (second, first):
            one.close()

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ep.testing.run(rank, 2)
        gc.collect()
    assert not [w for w in seen if "EPBuffer" in str(w.message)]


def test_every_call_on_a_closed_buffer_says_that_it_is_closed():
    def rank(buf):
        out = dispatch(buf)
        arguments, back = call(buf), combine_call(buf, DEFAULT, out.handle)
        buf.close()
        for action in (
            lambda: buf.dispatch(**arguments),
            lambda: buf.combine(**back),
            lambda: buf.expert_output(out.handle),
            buf.resync,
        ):
            says(caught(ep.Error, action), "closed")
        buf.abort("late")
        buf.check()
        check_received(buf, DEFAULT, out)
        assert buf.rank in (0, 1) and buf.num_ranks == 2

    run(rank, 2)


def test_a_context_manager_lets_the_first_error_through():
    def rank(comm):
        with pytest.raises(ZeroDivisionError), make_buffer(comm):
            raise ZeroDivisionError
        with make_buffer(comm) as buf:
            round_trip(buf)

    ep.testing.run(rank, 2)


def test_a_forgotten_close_is_a_resource_warning_when_the_buffer_is_dropped():
    def rank(buf_comm):
        buf = make_buffer(buf_comm)
        round_trip(buf)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            del buf
            gc.collect()
        assert [w.category for w in seen if issubclass(w.category, ResourceWarning)]

    ep.testing.run(rank, 1)


KEPT = {
    "x": lambda out, y: out.x,
    "a slice": lambda out, y: out.x[1:],
    "a view": lambda out, y: out.x.reshape(-1)[::2].reshape(2, -1),
    "ids": lambda out, y: out.topk_idx,
    "a combined row": lambda out, y: y.x[0],
    "the outputs": lambda out, y: (out, y),
}


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("name", KEPT)
def test_outputs_are_right_when_the_buffer_is_gone(name, kind):
    """A lost attribute unmapped memory in use (FlashInfer 3210)."""
    job = Job(6, equal=True, kind=kind)

    def bytes_of(kept):
        tensors = kept if not isinstance(kept, tuple) else (kept[0].x, kept[0].source, kept[1].x)
        return [np.array(np.asarray(t)) for t in (tensors if isinstance(kept, tuple) else [kept])]

    def rank(comm):
        buf = make_buffer(comm, outputs="window")
        out = dispatch(buf, job)
        y = combine(buf, job, out.handle)
        kept = KEPT[name](out, y)
        want = bytes_of(kept)
        buf.close()
        del buf, out, y
        gc.collect()
        with make_buffer(comm) as other:  # takes the memory that was freed
            round_trip(other, Job(16, equal=True, shift=3))
        for was, now in zip(want, bytes_of(kept), strict=True):
            np.testing.assert_array_equal(was, now)

    ep.testing.run(rank, 2)


def test_a_buffer_goes_with_a_call_in_flight():
    def rank(comm):
        buf = make_buffer(comm)
        out = dispatch(buf, exact=False, async_op=True)
        buf.close()
        out.event.synchronize()
        assert int(np.asarray(out.status)[0]) == 0
        check_received(buf, DEFAULT, out)

    ep.testing.run(rank, 2)


@pytest.mark.parametrize("in_window", [False, True], ids=["ordinary", "expert_output"])
def test_a_rank_that_closes_right_after_its_combine_disturbs_no_slow_reader(in_window):
    """The peers had not finished: segmentation fault (uccl 970)."""

    def rank(comm):
        for i in range(10):
            job = Job(16, shift=i, equal=True, hidden=2048, layout="expert")
            buf = make_buffer(comm, hidden=2048)
            out = dispatch(buf, job)
            rows = answer(buf, job)
            if in_window:
                window = buf.expert_output(out.handle, dtype="float32")
                np.asarray(window)[:] = rows
                rows = window
                del window
            y = combine(buf, job, out.handle, x=rows, async_op=comm.rank == 1)
            if comm.rank == 0:
                buf.close()
                del buf, out, rows
                gc.collect()
                continue
            y.event.synchronize()
            check_combined(buf, job, y)
            buf.close()

    ep.testing.run(rank, 2)
