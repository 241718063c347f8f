"""-1, padding rows, dead rows and bad ids; user-report numbers stand in brackets."""

import numpy as np
import pytest

import ep
from python.compare import expect_received
from python.formats import Array
from python.ranks import LAYOUTS, expect_errors, round_trip, run_cases, with_buffers
from python.trip import (
    Case,
    combine_args,
    dispatch_args,
    give,
    make_trip,
    make_trips,
    with_ids,
)

SHAPE = {"num_experts": 6, "num_topk": 3, "hidden": 16}
BAD_IDS = {
    "int32": [-2, 6, 7, -(2**31), 2**31 - 1],
    # The last three would be expert 1, -1 and 0 after narrowing.
    "int64": [-2, 6, 7, -(2**31), -(2**63), 2**63 - 1, 2**32 + 1, 2**32 - 1, 2**32],
}


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dead_rows_are_marked_however_the_memory_was_used(layout, kind):
    """[I1, I8] Rows past the count: id -1, weight 0, source -1, also after fuller calls."""
    full = {"num_tokens": (8, 8), **SHAPE, "layout": layout, "exact": False, "kind": kind}
    cases = [
        Case(**full),
        Case(**{**full, "num_tokens": (1, 0)}),
        Case(**full, routing="nobody"),
        Case(**full, routing="mixed", alignment=4 if layout == "expert" else 1),
    ]
    trips = make_trips(cases)

    def body(buf):
        for trip in trips:
            out = round_trip(buf, trip)
            used, given = int(out.num_rows_device[0]), np.asarray(out.topk_idx)
            assert used < len(given) or trip is trips[0]
            assert np.all(given[used:] == -1)
            assert np.all(np.asarray(out.topk_weights)[used:] == 0)
            assert np.all(np.asarray(out.source)[used:] == -1)

    with_buffers(trips, body)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_counts_without_host_sync_are_none(layout):
    """[I2] exact=False: num_rows and tokens_per_expert are None, not empty; combine works."""
    trip = make_trip(Case(num_tokens=(3, 4), **SHAPE, layout=layout, exact=False))

    def body(buf):
        out = round_trip(buf, trip)
        assert out.num_rows is None and out.tokens_per_expert is None
        assert out.tokens_per_expert_device.shape == (3,)

    with_buffers(trip, body)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_tokens_cause_no_traffic(layout, exact):
    """[I3] 3 real tokens and 5 whose ids are all -1: counts of 3, zeros back for the 5."""
    shape = {**SHAPE, "layout": layout, "exact": exact}
    padded = make_trip(Case(num_tokens=(8, 8), **shape))
    ids = [np.where(np.arange(8)[:, None] < 3, t.idx.data, -1) for t in padded.tokens]
    padded = with_ids(padded, ids)
    real = make_trip(Case(num_tokens=(3, 3), **shape))
    real = with_ids(real, [i[:3] for i in ids])
    pairs = zip(padded.sent.received, real.sent.received, strict=True)
    assert all(a.num_rows == b.num_rows for a, b in pairs)

    def body(buf):
        out = round_trip(buf, padded)
        y = buf.combine(handle=out.handle, **combine_args(padded, buf.rank))
        assert np.all(y.x[3:].float().numpy() == 0)
        return int(out.num_rows_device[0])

    assert with_buffers(padded, body) == [r.num_rows for r in real.sent.received]


@pytest.mark.parametrize("idx_dtype", ["int32", "int64"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropped_routes_carry_nothing(layout, idx_dtype):
    """[I4, I8] -1 in any slot, NaN in everything that belongs to it: no NaN comes out."""
    shape = {**SHAPE, "layout": layout, "idx_dtype": idx_dtype, "routing": "mixed"}
    cases = [
        Case(
            num_tokens=(40, 33),
            **shape,
            seed=seed,
            row_weights=True,
            combine_weights=layout == "expert",
            exact=seed % 2 == 0,
            ids=("local", "global")[seed % 2],
        )
        for seed in range(4)
    ]
    run_cases(cases)


def spoilt_ids(trip, rank: int, token: int, slot: int, bad: int):
    """The rank's ids with one that is neither -1 nor an expert."""
    ids = trip.tokens[rank].idx
    spoilt = ids.data.copy()
    spoilt[token, slot] = bad
    return give(Array(spoilt, ids.dtype), trip.case)


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("idx_dtype", BAD_IDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bad_id_is_named_by_token_and_slot(layout, idx_dtype, kind):
    """[I5, H9] -2, INT_MIN, E, E + 1 and what narrowing would hide; the next call is exact."""
    shape = {**SHAPE, "layout": layout, "idx_dtype": idx_dtype, "kind": kind}
    trip = make_trip(Case(num_tokens=(9, 9), **shape))

    def body(buf):
        for i, bad in enumerate(BAD_IDS[idx_dtype]):
            token, slot, culprit = i * 5 % 9, i % 3, i % 2
            args = dispatch_args(trip, buf.rank) | {"async_op": i % 2 == 1}
            if buf.rank == culprit:
                args["topk_idx"] = spoilt_ids(trip, culprit, token, slot, bad)
            texts = (f"topk_idx[{token}, {slot}] = {bad}", "num_experts=6")
            expect_errors(
                buf,
                lambda args=args: buf.dispatch(**args),
                {culprit: ep.InvalidArgument},
                *texts,
            )
            round_trip(buf, trip)

    with_buffers(trip, body)


@pytest.mark.parametrize("place", ["synchronize", "check", "dispatch", "combine"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bad_id_without_host_sync_counts_as_none(layout, place):
    """[I5] exact=False: as if -1, status is set, and the error comes once where it is asked for."""
    trip = make_trip(Case(num_tokens=(9, 9), **SHAPE, layout=layout, exact=False))
    # What all ranks must get: the id at [4, 2] of rank 1 is -1.
    ids = [t.idx.data.copy() for t in trip.tokens]
    ids[1][4, 2] = -1
    seen = with_ids(trip, ids)

    def body(buf):
        args = dispatch_args(trip, buf.rank)
        if buf.rank == 1:
            args["topk_idx"] = spoilt_ids(trip, 1, 4, 2, 77)
        out = buf.dispatch(**args, async_op=True)
        if buf.rank == 1:
            calls = {
                "synchronize": out.event.synchronize,
                "check": lambda: (_until_done(out), buf.check()),
                "dispatch": lambda: (_until_done(out), buf.dispatch(**args)),
                "combine": lambda: (
                    _until_done(out),
                    buf.combine(handle=out.handle, **combine_args(seen, 1)),
                ),
            }
            text = "topk_idx[4, 2] = 77"
            expect_errors(buf, calls[place], {1: ep.InvalidArgument}, text)
        out.event.synchronize()  # nothing is left to raise
        buf.check()
        assert (int(out.status[0]) != 0) == (buf.rank == 1)
        expect_received(out, seen.sent.received[buf.rank], seen.rules, status=None)
        round_trip(buf, trip)

    with_buffers(trip, body)


def _until_done(out) -> None:
    """Without raising what the event would."""
    while not out.event.query():
        pass


@pytest.mark.parametrize("quant", [None, *("fp8_block128", "fp8_block128_ue8m0")])
def test_gap_rows_are_defined(quant):
    """[I6] Gaps of alignment 8 after fuller calls: x is 0, our scales are 1, the caller's 0."""
    shape = {"num_experts": 6, "num_topk": 2, "hidden": 640, "layout": "expert", "quant": quant}
    given = {} if quant else {"scale_columns": 3, "extras": (("float64", (2,)),)}
    cases = [
        Case(num_tokens=(16, 16), **shape, **given),
        Case(num_tokens=(3, 2), **shape, **given, alignment=8),
        Case(num_tokens=(3, 2), **shape, **given, alignment=8, exact=False),
    ]
    ones = 0x7F7F7F7F if quant == "fp8_block128_ue8m0" else float(bool(quant))
    trips = make_trips(cases)

    def body(buf):
        for trip in trips:
            out = round_trip(buf, trip)
            gaps = np.flatnonzero(trip.sent.received[buf.rank].slot < 0)
            gaps = gaps[gaps < int(out.num_rows_device[0])]
            assert len(gaps) or trip.case.alignment == 1
            assert np.all(out.x[gaps].float().numpy() == 0)
            assert np.all(out.scales[gaps].numpy() == ones) or not quant

    with_buffers(trips, body)


@pytest.mark.parametrize(("layout", "alignment"), [("rank", 1), ("expert", 1), ("expert", 4)])
def test_the_used_rows_of_a_fixed_size_are_the_exact_rows(layout, alignment):
    """[I7] Worst-case output's prefix equals the exact output; it comes home the same."""
    shape = {**SHAPE, "layout": layout, "alignment": alignment, "kind": "numpy"}
    exact, fixed = (make_trip(Case(num_tokens=(7, 5), **shape, exact=e)) for e in (True, False))

    def body(buf):
        a = round_trip(buf, exact)
        b = buf.dispatch(**dispatch_args(fixed, buf.rank))
        n = a.num_rows
        for name in ("x", "topk_idx", "topk_weights", "source"):
            assert np.array_equal(getattr(a, name), getattr(b, name)[:n]), name
        round_trip(buf, fixed)

    with_buffers([exact, fixed], body)
