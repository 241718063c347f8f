"""Ranks that make different calls: Desync on all of them, naming the field; then all is well."""

import numpy as np
import pytest

import ep
from python.fault_support import (
    BY_EXPERT,
    DEFAULT,
    Job,
    call,
    caught,
    check_combined,
    check_received,
    combine,
    combine_call,
    dispatch,
    exact_again,
    round_trip,
    run,
    says,
)

RANKS = 3
EVEN = Job(equal=True)
T, K = EVEN.num_tokens, EVEN.num_topk


def _out_of_step(buf, culprit, field, action):
    """Every rank raises Desync; the culprit sees any other rank's value, they see its."""
    error = caught(ep.Desync, action)
    assert error.field == field
    assert error.mine != error.theirs
    assert (error.peer == culprit) == (buf.rank != culprit)
    says(error, field, str(error.mine), str(error.theirs), f"rank {error.peer}")


def _scales(dtype, columns):
    return {"scales": np.zeros((T, columns), dtype)}


def _extras(*arrays):
    return {"extras": [np.zeros(shape, dtype) for dtype, shape in arrays]}


EXPERT = {"layout": "expert"}
# (field, what most ranks change of a dispatch, what one rank changes)
DISPATCHES = [
    ("layout", {}, EXPERT),
    ("quant", {}, {"quant": "fp8_block128"}),
    ("quant", {"quant": "fp8_block128"}, {"quant": "fp8_block128_pow2"}),
    ("exact", {}, {"exact": False}),
    ("overflow", {"max_rows": 48}, {"max_rows": 48, "overflow": "drop"}),
    ("max_tokens", {}, {"max_tokens": 12}),
    ("max_rows", {"max_rows": 48}, {"max_rows": 47}),
    ("expert_alignment", EXPERT, EXPERT | {"expert_alignment": 8}),
    (
        "K",
        {},
        {
            "topk_idx": np.zeros((T, 1), np.int64),
            "topk_weights": np.zeros((T, 1), np.float32),
        },
    ),
    ("dtype of x", {}, {"x": np.zeros((T, 256), np.float16)}),
    ("row bytes of x", {}, {"x": np.zeros((T, 64), np.float32)}),
    ("dtype of scales", {}, _scales("f4", 2)),
    ("dtype of scales", _scales("f4", 2), _scales("i4", 2)),
    ("row bytes of scales", _scales("f4", 2), _scales("f4", 3)),
    ("dtype of topk_idx", {}, {"topk_idx": np.zeros((T, K), np.int32)}),
    ("topk_weights", {}, {"topk_weights": ...}),
    ("number of extras", {}, _extras(("i4", (T, 2)))),
    (
        "dtype of an extra",
        _extras(("i4", (T, 2)), ("i4", (T, 2))),
        _extras(("i4", (T, 2)), ("f4", (T, 2))),
    ),
    ("row bytes of an extra", _extras(("i4", (T, 2))), _extras(("i4", (T, 3)))),
]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_dispatches_that_differ_in_an_agreed_field(kind):
    """Each rank decided from its own batch (TensorRT-LLM 6173), or int32 met int64 (DeepEP 422)."""
    job = Job(equal=True, hidden=128, kind=kind)

    def rank(buf):
        for i, (field, usual, changed) in enumerate(DISPATCHES):
            culprit = i % RANKS
            changes = changed if buf.rank == culprit else usual
            if kind == "torch":
                changes = {k: _as_torch(v) for k, v in changes.items()}
            _out_of_step(buf, culprit, field, lambda c=changes: dispatch(buf, job, **c))
            exact_again(buf)

    run(rank, RANKS, hidden=256, token_bytes=2048)


def _as_torch(value):
    import torch

    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, list):
        return [_as_torch(item) for item in value]
    return value


def test_combines_that_differ_in_an_agreed_field():
    def rank(buf):
        out = dispatch(buf, EVEN)
        rows = out.num_rows
        changes = {
            "dtype of x": {"x": np.zeros((rows, 32), np.float16)},
            "row bytes of x": {"x": np.zeros((rows, 64), np.float32)},
            "row_weights": {"row_weights": np.zeros((rows, K), np.float32)},
        }
        for culprit, (field, change) in enumerate(changes.items()):
            change = change if buf.rank == culprit else {}
            _out_of_step(buf, culprit, field, lambda c=change: combine(buf, EVEN, out.handle, **c))
            check_combined(buf, EVEN, combine(buf, EVEN, out.handle))

    run(rank, RANKS, output_bytes=1024)


@pytest.mark.parametrize("job", [DEFAULT, BY_EXPERT], ids=["rank", "expert"])
def test_a_dispatch_meets_a_combine(job):
    """Two halves of a node were in different collectives, and both hung (vLLM 21306)."""

    def rank(buf):
        handle = dispatch(buf, job).handle
        for culprit in range(RANKS):
            action = combine if buf.rank == culprit else lambda b, j, _: dispatch(b, j)
            _out_of_step(buf, culprit, "kind of operation", lambda a=action: a(buf, job, handle))
            check_combined(buf, job, combine(buf, job, handle))
            exact_again(buf)

    run(rank, RANKS)


def test_handles_that_differ_in_a_replay_and_in_a_combine():
    """Rank r replays one routing, the others another of the same shape."""
    first_job, second_job = Job(equal=True), Job(equal=True, shift=1)

    def rank(buf):
        first = dispatch(buf, first_job).handle
        second = dispatch(buf, second_job).handle
        x = call(buf, first_job)["x"]
        for culprit in range(RANKS):
            odd = buf.rank == culprit
            handle, job = (second, second_job) if odd else (first, first_job)
            field = "routing of the handle"
            _out_of_step(buf, culprit, field, lambda h=handle: buf.dispatch(x, handle=h))
            _out_of_step(buf, culprit, field, lambda h=handle, j=job: combine(buf, j, h))
            _out_of_step(
                buf,
                culprit,
                "handle (replay)",
                lambda o=odd: buf.dispatch(x, handle=first) if o else dispatch(buf, first_job),
            )
            exact_again(buf)

    run(rank, RANKS)


def test_a_desync_of_an_async_fixed_size_dispatch_comes_once():
    def rank(buf):
        changes = {"max_tokens": 10} if buf.rank == 2 else {}
        out = dispatch(buf, exact=False, async_op=True, **changes)
        _out_of_step(buf, 2, "max_tokens", out.event.synchronize)
        assert int(np.asarray(out.status)[0]) != 0
        out.event.synchronize()
        exact_again(buf)

    run(rank, RANKS)


def test_what_is_free_may_differ_on_every_rank():
    """T, strides, ids, weights' dtype, num_sms, async_op, stream, outputs, bias and out_dtype."""
    job = BY_EXPERT

    def rank(buf):
        r = buf.rank
        arguments = call(buf, job, num_sms=1 + r, async_op=r == 0)
        if r == 0:
            arguments["outputs"] = "caller"
            arguments["topk_weights"] = arguments["topk_weights"].astype(np.float16)
        if r == 1:
            arguments["ids"] = "global"
            arguments["x"] = np.repeat(arguments["x"], 2, axis=0)[::2]
            arguments["topk_idx"] = np.asfortranarray(arguments["topk_idx"])
        if r == 2:
            arguments["stream"] = ep.Stream("cpu")
            arguments["outputs"] = "window"
        out = buf.dispatch(**arguments)
        out.event.synchronize()
        check_received(buf, job, out)
        back = combine_call(buf, job, out.handle, num_sms=RANKS - r, async_op=r == 2)
        if r == 0:
            back["bias"] = [np.zeros((job.count(0), 32), np.float32)]
        if r == 1:
            back["out_dtype"] = "float32"
        if r == 2:
            back["weights"] = np.asfortranarray(back["weights"].astype(np.float16))
        y = buf.combine(**back)
        y.event.synchronize()
        check_combined(buf, job, y)
        round_trip(buf, job)

    run(rank, RANKS)
