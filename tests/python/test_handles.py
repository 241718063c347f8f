"""Handles: replays, snapshots, saved handles, several operations in flight, changing shapes."""

import copy
import pickle

import numpy as np
import pytest

import ep
import ep.testing
from python.fault_support import (
    BY_EXPERT,
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
    exact_again,
    make_buffer,
    num_experts,
    refused,
    round_trip,
    run,
)

pytestmark = pytest.mark.torch_versions

RANKS = 3
JOBS = [
    pytest.param(Job(layout=layout, kind=kind), id=f"{layout}-{kind}")
    for layout in ("rank", "expert")
    for kind in ("numpy", "torch")
]


def _same(a, b):
    """Equal bit for bit, with the same dtype and shape."""
    a, b = np.asarray(a), np.asarray(b)
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    np.testing.assert_array_equal(a, b)


def _same_routing(first, again):
    for name in ("topk_idx", "topk_weights", "source", "expert_offsets", "num_rows_device"):
        _same(getattr(first, name), getattr(again, name))
    assert again.num_rows == first.num_rows
    assert list(again.tokens_per_expert) == list(first.tokens_per_expert)
    if first.rank_offsets is not None:
        _same(first.rank_offsets, again.rank_offsets)


@pytest.mark.parametrize("job", JOBS)
def test_the_documented_minimum_of_a_replay(job):
    """`dispatch(x, handle=h)` raised TypeError (DeepEP 685), or gave other ids (DeepEP 729)."""

    def rank(buf):
        x = call(buf, job)["x"]
        first = dispatch(buf, job)
        for _ in range(3):
            again = buf.dispatch(x, handle=first.handle)
            check_received(buf, job, again)
            _same_routing(first, again)
            check_combined(buf, job, combine(buf, job, again.handle))
        check_combined(buf, job, combine(buf, job, first.handle))

    run(rank, RANKS)


def test_minimal_forms_of_every_documented_call():
    """One rank, nothing but what is required."""
    x, ids = np.ones((3, 32), np.float32), np.array([[0, 1], [1, -1], [-1, -1]])

    def rank(buf):
        out = buf.dispatch(x, ids)
        assert out.topk_weights is None
        rows = np.asarray(out.x)
        assert rows.shape == (2, 32)
        np.testing.assert_array_equal(np.asarray(buf.combine(rows, out.handle).x)[:2], x[:2])
        again = buf.dispatch(x, handle=out.handle)
        window = buf.expert_output(again.handle)
        assert window.shape == (2, 32)
        buf.routing_layout(ids)
        buf.check(), buf.stats(), buf.memory(), buf.max_rows("rank")
        assert buf.resync() == 3
        buf.warm()

    run(rank, 1)


@pytest.mark.parametrize("job", JOBS)
def test_a_replay_takes_other_dtypes_sizes_and_weights(job):
    def rank(buf):
        handle = dispatch(buf, job).handle
        r, count = buf.rank, job.count(buf.rank)
        wide = job.tensor(job.x(r).repeat(2, axis=1).astype(np.float16))
        out = buf.dispatch(wide, handle=handle)
        assert np.asarray(out.x).dtype == np.float16 and np.asarray(out.x).shape[1] == 64
        doubled = job.tensor(2 * job.weights(r))
        out = buf.dispatch(call(buf, job)["x"], None, doubled, handle=handle)
        first = buf.dispatch(call(buf, job)["x"], handle=handle)
        _same(np.asarray(out.topk_weights), 2 * np.asarray(first.topk_weights))
        extras = [job.tensor(np.arange(count, dtype=np.int32)[:, None].repeat(4, 1))]
        out = buf.dispatch(call(buf, job)["x"], handle=handle, extras=extras)
        _same(np.asarray(out.extras[0])[:, 0], np.asarray(out.source)[:, 1])
        check_combined(buf, job, combine(buf, job, out.handle))

    run(rank, RANKS, hidden=64, token_bytes=512)


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_handle_is_a_snapshot(job, is_async):
    """Everything the caller gave is edited after dispatch (DeepEP's copy can be switched off)."""

    def rank(buf):
        arguments = call(buf, job, async_op=is_async)
        x = job.tensor(job.x(buf.rank))
        first = buf.dispatch(**arguments)
        first.inputs_done.synchronize()
        for name, junk in (("x", -1.0), ("topk_idx", 0), ("topk_weights", 77.0)):
            arguments[name][:] = junk
        first.event.synchronize()
        check_received(buf, job, first)
        again = buf.dispatch(x, handle=first.handle)
        _same_routing(first, again)
        check_received(buf, job, again)
        check_combined(buf, job, combine(buf, job, first.handle))

    run(rank, RANKS)


def _pickled(buf, handle):
    return pickle.loads(pickle.dumps(handle))


def _rebuilt(buf, handle):
    """As an engine saves it: bytes, and copies of the tensors."""
    header = bytes(handle.header)
    assert isinstance(handle.header, bytes) and isinstance(handle.tensors, list)
    tensors = [
        t if t is None else (t.clone() if hasattr(t, "clone") else np.array(t))
        for t in handle.tensors
    ]
    return ep.Handle.from_tensors(buf, header, tensors)


def _copied(buf, handle):
    return copy.copy(handle)


@pytest.mark.parametrize("restore", [_pickled, _rebuilt, _copied], ids=lambda f: f.__name__[1:])
@pytest.mark.parametrize("idx_dtype", ["int32", "int64"])
@pytest.mark.parametrize("job", JOBS)
def test_a_saved_handle_serves_as_the_first(job, idx_dtype, restore):
    """A re-created handle forgot the index dtype: wrong gradients (TransformerEngine 3345)."""
    job = Job(layout=job.layout, kind=job.kind, idx_dtype=idx_dtype)

    def rank(buf):
        first = dispatch(buf, job)
        want = np.array(np.asarray(first.topk_idx))
        handle = restore(buf, first.handle)
        for name in ("num_tokens", "num_topk", "layout", "exact"):
            assert getattr(handle, name) == getattr(first.handle, name)
        check_combined(buf, job, combine(buf, job, handle))
        again = buf.dispatch(call(buf, job)["x"], handle=handle)
        assert np.asarray(again.topk_idx).dtype == np.dtype(idx_dtype)
        _same(want, again.topk_idx)
        check_received(buf, job, again)
        handle = restore(buf, again.handle)
        del first, again
        check_combined(buf, job, combine(buf, job, handle))

    run(rank, RANKS)


@pytest.mark.parametrize("spoil", ["header", "too few tensors", "a tensor of another shape"])
def test_a_handle_that_was_saved_badly_is_refused(spoil):
    def rank(buf):
        handle = dispatch(buf).handle

        def action():
            if buf.rank != 1:
                return buf.dispatch(call(buf)["x"], handle=handle)
            header, tensors = handle.header, list(handle.tensors)
            if spoil == "header":
                header = header[:-1]
            elif spoil == "too few tensors":
                tensors = tensors[:-1]
            else:
                tensors[0] = tensors[0][:-1]
            try:
                restored = ep.Handle.from_tensors(buf, header, tensors)
            except ep.InvalidArgument:
                restored = "refused when it was made"
            return buf.dispatch(call(buf)["x"], handle=restored)

        refused(buf, 1, (ep.InvalidArgument, TypeError), (), action)
        exact_again(buf)

    run(rank, 2)


@pytest.mark.parametrize("call_name", ["replay", "combine"])
def test_another_buffers_handle_is_refused(call_name):
    """Two nodes mixed 0.5-2 % of the tokens, one node hid it (mori 475)."""

    def rank(comm):
        with make_buffer(comm) as other, make_buffer(comm) as buf:
            own, foreign = dispatch(buf).handle, dispatch(other).handle

            def action():
                handle = foreign if buf.rank == 1 else own
                if call_name == "replay":
                    return buf.dispatch(call(buf)["x"], handle=handle)
                return combine(buf, DEFAULT, handle)

            refused(buf, 1, ep.InvalidArgument, ("another buffer",), action)
            exact_again(buf)
            exact_again(other)

    ep.testing.run(rank, 2)


@pytest.mark.parametrize("job", [DEFAULT, BY_EXPERT], ids=["rank", "expert"])
def test_rows_of_the_wrong_number_are_refused(job):
    """The received routing, or the source's tokens, given where rows are due (mori 475)."""

    def rank(buf):
        out = dispatch(buf, job)
        rows = answer(buf, job)
        for wrong in (rows[:-1], np.concatenate([rows, rows]), rows[:0]):
            refused(
                buf,
                0,
                ep.InvalidArgument,
                (f"x has {len(wrong)} rows", str(out.num_rows)),
                lambda w=wrong: combine(buf, job, out.handle, x=w if buf.rank == 0 else rows),
            )
        x = call(buf, job)["x"]
        refused(
            buf,
            0,
            ep.InvalidArgument,
            ("x has 4 rows, the handle 5",),
            lambda: buf.dispatch(x[:4] if buf.rank == 0 else x, handle=out.handle),
        )
        for name, other in (
            ("layout", "rank" if job.layout == "expert" else "expert"),
            ("exact", False),
        ):
            changes = {name: other} if buf.rank == 0 else {}
            refused(
                buf,
                0,
                ep.InvalidArgument,
                (name, "handle"),
                lambda c=changes: buf.dispatch(x, handle=out.handle, **c),
            )
        check_combined(buf, job, combine(buf, job, out.handle))

    run(rank, RANKS)


def test_an_old_handle_is_refused_by_the_buffer_that_comes_after_its_own():
    def rank(comm):
        with make_buffer(comm) as old:
            handle = dispatch(old).handle
        with make_buffer(comm) as buf:
            x = call(buf)["x"]
            caught(ep.InvalidArgument, lambda: buf.dispatch(x, handle=handle))
            exact_again(buf)

    ep.testing.run(rank, 2)


@pytest.mark.parametrize("exact", [True, False])
def test_three_operations_in_flight(exact):
    """A third one wiped the first (DeepEP 513: only two low-latency buffers)."""
    jobs = [Job(4 + i, shift=i, layout=("rank", "expert", "rank")[i]) for i in range(3)]

    def rank(buf):
        outs = [dispatch(buf, job, exact=exact, async_op=True) for job in jobs]
        backs = []
        for i in (2, 0, 1):
            rows = answer(buf, jobs[i], len(np.asarray(outs[i].x)))
            arguments = combine_call(buf, jobs[i], outs[i].handle, x=rows, async_op=True)
            backs.append((jobs[i], buf.combine(**arguments)))
        for job, y in reversed(backs):
            y.event.synchronize()
            check_combined(buf, job, y)
        for job, out in zip(jobs, outs, strict=True):
            check_received(buf, job, out)

    run(rank, RANKS)


def test_chunks_are_combined_out_of_order():
    """Several dispatches, then combines with the last state only (rtp-llm 977)."""
    jobs = [Job(3, shift=s, kind="torch", layout=("rank", "expert")[s % 2]) for s in range(5)]

    def rank(buf):
        outs = [dispatch(buf, job) for job in jobs]
        for i in (3, 1, 4, 0, 2, 3):
            check_combined(buf, jobs[i], combine(buf, jobs[i], outs[i].handle))
            check_received(buf, jobs[i], outs[i])
            again = buf.dispatch(call(buf, jobs[i])["x"], handle=outs[i].handle)
            check_received(buf, jobs[i], again)

    run(rank, RANKS)


def test_shapes_alternate_on_one_buffer():
    """Counters at offsets that depended on hidden and max read garbage (DeepEP 93, 152)."""
    rng = np.random.default_rng(1)
    jobs = [
        Job(
            int(rng.integers(0, 14)),
            hidden=int(rng.choice([8, 32, 64, 128, 256])),
            num_topk=int(rng.integers(1, 5)),
            shift=int(rng.integers(0, 6)),
            layout=str(rng.choice(["rank", "expert"])),
            idx_dtype=str(rng.choice(["int32", "int64"])),
            equal=bool(rng.integers(0, 2)),
        )
        for _ in range(60)
    ]

    def rank(buf):
        for i, job in enumerate(jobs):
            round_trip(buf, job, max_tokens=(16, None)[i % 2])

    run(rank, RANKS, num_topk=4, hidden=256, num_experts=8)


def test_forward_and_backward_twice():
    """A second dispatch on the same buffer, in backward, crashed (sgl-kernel-npu 801)."""

    def rank(buf):
        import torch

        job = Job(kind="torch", layout="expert")
        for _ in range(2):
            out = dispatch(buf, job)
            y = combine(buf, job, out.handle)
            check_combined(buf, job, y)
            # combine's backward: the gradient goes where the tokens went.
            gradient = torch.ones_like(y.x)
            rows = buf.dispatch(gradient, handle=out.handle)
            _same_routing(out, rows)
            # dispatch's backward: rows' gradients add up, the weights' come along.
            experts = out.topk_idx + buf.expert_offsets[buf.rank]
            row_weights = (100 * out.source[:, 1] + experts).float()
            back = buf.combine(rows.x, out.handle, row_weights=row_weights)
            ids = job.ids(buf.rank, num_experts(buf))
            np.testing.assert_array_equal(back.x, np.full((len(ids), 32), 2.0))
            want = 100 * np.arange(len(ids))[:, None] + ids
            np.testing.assert_array_equal(back.topk_weights, want)

    run(rank, RANKS)


def test_dropped_handles_events_and_outputs_leave_no_memory_behind():
    def rank(buf):
        for i in range(200):
            out = dispatch(buf, Job(1 + i % 9, shift=i), async_op=True, exact=i % 2 == 0)
            if i % 3 == 0:
                buf.combine(out.x, out.handle, async_op=True)
        buf.resync()
        del out
        assert buf.memory().used == 0
        exact_again(buf)

    run(rank, 2)


def test_a_handle_takes_attributes_and_can_be_a_key():
    """Engines hang their own notes on a handle."""

    def rank(buf):
        handle = dispatch(buf).handle
        handle.note = "layer 3"
        assert {handle: 1}[handle] == 1 and handle.note == "layer 3"
        assert (handle.num_tokens, handle.num_topk) == (5, 2)
        assert (handle.layout, handle.exact) == ("rank", True)

    run(rank, 1)
