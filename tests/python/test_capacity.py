"""More tokens, rows or bytes than were declared; user-report numbers stand in brackets."""

import itertools

import numpy as np
import pytest

import ep
from python.ranks import (
    LAYOUTS,
    expect_errors,
    expect_refused,
    round_trip,
    run_cases,
    run_ranks,
    with_buffers,
)
from python.trip import (
    Case,
    buffer_args,
    dispatch_args,
    give,
    make_trip,
    make_trips,
    with_ids,
    zeros,
)

SHAPE = {"num_experts": 4, "num_topk": 2, "hidden": 16}


def too_many(trip, num_tokens):
    """Arguments with more tokens than the trip has."""
    case = trip.case
    return {
        "x": give(zeros("bfloat16", num_tokens, case.hidden), case),
        "topk_idx": give(zeros("int64", num_tokens, case.num_topk), case),
        "topk_weights": give(zeros("float32", num_tokens, case.num_topk), case),
    }


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("max_tokens", [None, 9])
def test_more_tokens_than_declared(max_tokens, culprit):
    """[D1] 16 are fine, 17 are not; a bound of the call is a bound too. Both numbers are told."""
    bound = max_tokens or 16
    case = Case(num_tokens=(bound, bound), **SHAPE, buffer_tokens=16, max_tokens=max_tokens)
    trip = make_trip(case)

    def body(buf):
        round_trip(buf, trip)
        args = dispatch_args(trip, buf.rank)
        if buf.rank == culprit:
            args.update(too_many(trip, bound + 1))
        numbers = (str(bound), str(bound + 1), "max_tokens")
        error = expect_errors(
            buf, lambda: buf.dispatch(**args), {culprit: ep.CapacityError}, *numbers
        )
        if buf.rank == culprit:
            assert (error.rank, error.needed, error.available) == (culprit, bound + 1, bound)
        else:
            assert str(bound + 1) in str(error)
        round_trip(buf, trip)

    with_buffers(trip, body)


def test_memory_needed_for_a_maximum():
    """[D2] The hint for 128 and 1024 tokens: a sum of parts, more for more."""
    args = {"num_experts": 8, "num_topk": 2, "hidden": 256}
    few, many = (
        ep.EPBuffer.bytes_needed(num_ranks=2, max_tokens_per_rank=n, **args) for n in (128, 1024)
    )
    for memory in (few, many):
        assert memory.total == memory.control + memory.staging + memory.arena
    assert few.arena < many.arena <= 8 * few.arena + 2**20


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens_per_rank", (8, 16)),
        ("num_experts", (4, 6)),
        ("num_topk", (2, 3)),
        ("hidden", (16, 32)),
        ("arena_bytes", (2**20, 2**21)),
        ("num_regions", (2, 3)),
        ("expert_offsets", ([0, 2, 4], [0, 3, 4])),
        ("token_bytes", (256, 512)),
        ("output_bytes", (256, 512)),
    ],
)
def test_ranks_declare_different_sizes(name, values):
    """[D3] Every rank refuses, naming the argument and both values."""

    def in_rank(comm):
        args = {"max_tokens_per_rank": 8, "arena_bytes": 2**20, **SHAPE, name: values[comm.rank]}
        with pytest.raises(ep.InvalidArgument) as caught:
            ep.EPBuffer(comm, **args)
        text = str(caught.value)
        told = (2, 3) if name == "expert_offsets" else values
        assert name in text and all(str(value) in text for value in told), text
        ep.EPBuffer(comm, max_tokens_per_rank=8, **SHAPE).close()  # the group is still usable

    run_ranks(in_rank, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("most", [1, 2, 31, 32, 33])
def test_a_small_maximum_all_to_one_expert(most, layout):
    """[D4] T = the maximum, every token to the same expert, in slots that vary."""
    shape = {**SHAPE, "layout": layout, "routing": "one_expert", "row_weights": True}
    run_cases([Case(num_tokens=(most,) * 3, **shape, exact=exact) for exact in (True, False)])


def test_batches_that_grow():
    """[D5] 4 tokens, then 9: fine in a buffer for 16, refused by one for 8, which stays usable."""
    run_cases([Case(num_tokens=(t, t), **SHAPE, buffer_tokens=16) for t in (4, 9, 4)])
    small = make_trip(Case(num_tokens=(4, 4), **SHAPE, buffer_tokens=8))
    change = too_many(small, 9)
    with_buffers(
        small,
        lambda buf: expect_refused(buf, small, 1, change, "9", "8", error=ep.CapacityError),
    )


def test_layers_of_different_formats():
    """[D6] fp8 of H = 256, then bf16 of H = 512 with more bytes per row, in turn."""
    cases = [
        Case(**{**SHAPE, "hidden": hidden}, num_tokens=(6, 3), quant=quant, layout=layout, seed=i)
        for i, layout in enumerate(LAYOUTS)
        for hidden, quant in ((256, "fp8_block128"), (512, None), (128, "fp8_block128_ue8m0"))
    ]
    run_cases(cases)


def test_a_row_of_more_bytes_than_declared():
    """[D6] The scales' bytes count: x of 32, scales of 16 in a buffer made for rows of 40."""
    trip = make_trip(Case(num_tokens=(3, 3), **SHAPE))
    change = {"scales": give(zeros("float32", 3, 4), trip.case)}
    with_buffers(
        trip,
        lambda buf: expect_refused(buf, trip, 0, change, "48 bytes", "token_bytes=40"),
        token_bytes=40,
    )


def test_a_combined_row_of_more_bytes_than_declared():
    """[D6] H' = 32 in bf16 in a buffer made for combined rows of 32 bytes."""
    trip = make_trip(Case(num_tokens=(3, 3), **SHAPE))

    def body(buf):
        out = buf.dispatch(**dispatch_args(trip, buf.rank))
        columns = 32 if buf.rank == 0 else 16
        x = give(zeros("bfloat16", out.num_rows, columns), trip.case)
        texts = ("64 bytes", "output_bytes=32")
        expect_errors(buf, lambda: buf.combine(x, out.handle), {0: ep.InvalidArgument}, *texts)
        round_trip(buf, trip)

    with_buffers(trip, body, output_bytes=32)


@pytest.mark.parametrize("num_ranks", range(2, 9))
def test_the_hint_covers_what_is_used(num_ranks):
    """[D7, M5] E = R^2 + R, every call as large as declared, two in flight: peak <= arena."""
    num_experts = num_ranks**2 + num_ranks
    cases = [
        Case(
            num_tokens=(16,) * num_ranks,
            num_experts=num_experts,
            num_topk=4,
            hidden=128,
            routing=routing,
            layout=layout,
            row_weights=True,
            exact=exact,
        )
        for routing, layout, exact in itertools.product(
            ("one_rank", "skewed"), LAYOUTS, (True, False)
        )
    ]
    trips = make_trips(cases)
    args = buffer_args(trips)
    memory = ep.EPBuffer.bytes_needed(num_ranks=num_ranks, **args)

    def body(buf):
        rank = buf.rank
        for trip in trips:
            first = buf.dispatch(**dispatch_args(trip, rank), async_op=True)
            round_trip(buf, trip)
            first.event.synchronize()
        return buf.memory().peak

    for peak in with_buffers(trips, body):
        assert 0 < peak <= memory.arena < memory.total


def skewed_trip(layout, **case):
    """14 rows for rank 0, which owns expert 0, and 2 for rank 1."""
    case = Case(
        num_tokens=(7, 9),
        num_experts=2,
        num_topk=1,
        hidden=16,
        layout=layout,
        row_weights=True,
        **case,
    )
    trip = with_ids(make_trip(case), [[[0]] * 7, [[1], [1], *[[0]] * 7]])
    assert [r.rows_needed for r in trip.sent.received] == [14, 2]
    return trip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_rows_than_there_is_room_for(layout):
    """[D8] Room for 10, demand 14, "raise": the same error on all ranks, at any of three places."""
    good, bad = skewed_trip(layout), skewed_trip(layout, max_rows=10)

    def body(buf):
        places = (
            lambda out: out.event.synchronize(),
            lambda out: buf.check(),
            lambda out: buf.dispatch(**dispatch_args(good, buf.rank)),
        )
        for place in places:
            out = buf.dispatch(**dispatch_args(bad, buf.rank))
            everywhere = dict.fromkeys(range(2), ep.CapacityError)
            error = expect_errors(
                buf, lambda place=place, out=out: place(out), everywhere, "14", "10", "rank 0"
            )
            assert (error.rank, error.needed, error.available) == (0, 14, 10)
            assert int(out.status[0]) != 0
            assert buf.rank != 0 or int(out.rows_needed_device[0]) == 14  # the true demand
            out.event.synchronize()  # each fault raises once
            buf.check()
            round_trip(buf, good)

    with_buffers([good, bad], body)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_past_the_room_are_dropped(layout):
    """[D8] Room for 10, demand 14, "drop": 10 kept, 4 contribute 0, nothing is renormalised."""
    trip = skewed_trip(layout, max_rows=10, overflow="drop")

    def body(buf):
        out = round_trip(buf, trip)
        return out.rows_needed_device.tolist(), out.tokens_per_expert_device.tolist()

    assert with_buffers(trip, body) == [([14], [10]), ([2], [2])]
    dropped = trip.back[1].x.values()[5:]  # the last 4 of rank 1's tokens for rank 0
    assert np.all(dropped == 0) and np.any(trip.back[1].x.values()[:5] != 0)


@pytest.mark.parametrize(("layout", "alignment"), [("rank", 1), ("expert", 1), ("expert", 4)])
def test_every_room_around_the_demand(layout, alignment):
    """[D8] Gaps count as rows: max_rows of 1, 3, 6, 7, 10, 24 on several routings."""
    run_cases(
        [
            Case(
                num_tokens=(7, 5),
                num_experts=5,
                num_topk=3,
                hidden=128,
                routing=routing,
                seed=max_rows,
                layout=layout,
                alignment=alignment,
                max_rows=max_rows,
                overflow="drop",
                combine_weights=layout == "expert",
                row_weights=True,
                quant="fp8_block128" if max_rows % 2 else None,
                ids="global" if max_rows > 6 else "local",
            )
            for routing in ("uniform", "duplicates", "mixed")
            for max_rows in (1, 3, 6, 7, 10, 24)
        ]
    )


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ragged_counts_and_an_odd_maximum(layout, exact):
    """[D9] T = [5, 19, 1] in a buffer for 19, no multiple of anything."""
    run_cases(Case(num_tokens=(5, 19, 1), **SHAPE, layout=layout, exact=exact))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bound_makes_the_output_smaller(layout):
    """[D10] One token in a buffer for 20: max_tokens=1 gives the same rows in less memory."""
    shape = {**SHAPE, "num_tokens": (1, 1), "layout": layout, "exact": False}
    whole, bound = (
        make_trip(Case(**shape, buffer_tokens=20, max_tokens=max_tokens))
        for max_tokens in (None, 1)
    )

    def body(buf):
        sizes = []
        for trip in (whole, bound):
            out = round_trip(buf, trip)
            sizes.append(out.x.shape[0])
            max_tokens = trip.case.max_tokens
            assert sizes[-1] == buf.max_rows(layout, max_tokens=max_tokens)
        return sizes

    for rows_of_whole, rows_of_bound in with_buffers([whole, bound], body):
        assert 0 < rows_of_bound * 10 <= rows_of_whole
    for a, b in zip(whole.sent.received, bound.sent.received, strict=True):
        assert np.array_equal(a.x.data[: a.num_rows], b.x.data[: b.num_rows])


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_max_rows_is_the_documented_formula(num_ranks):
    """[D10] buf.max_rows(layout, max_tokens, expert_alignment) is the size of the outputs."""
    case = Case(num_tokens=(3,) * num_ranks, num_experts=num_ranks + 2, num_topk=2, hidden=16)
    trip = make_trip(case)

    def body(buf):
        for layout, tokens, alignment in itertools.product(LAYOUTS, (1, 2, 3), (1, 4, 128)):
            if layout == "rank" and alignment != 1:
                continue
            args = {"layout": layout, "max_tokens": tokens, "alignment": alignment}
            rules = make_trip(Case(**{**vars(case), **args, "num_tokens": (1,) * num_ranks})).rules
            got = buf.max_rows(layout, max_tokens=tokens, expert_alignment=alignment)
            assert got == rules.fixed_rows(buf.rank)

    with_buffers(trip, body)


def test_an_arena_that_is_too_small():
    """[D1, D7] Rows that fit no free extent: CapacityError on every rank with the same numbers."""
    trip = make_trip(Case(num_tokens=(16, 16), **{**SHAPE, "hidden": 1024}, routing="one_rank"))

    def body(buf):
        everywhere = dict.fromkeys(range(2), ep.CapacityError)
        call = lambda: buf.dispatch(**dispatch_args(trip, buf.rank))  # noqa: E731
        error = expect_errors(buf, call, everywhere, "arena_bytes")
        return error.rank, error.needed, error.available

    first, second = with_buffers(trip, body, arena_bytes=2**14)
    assert first == second and first[1] > first[2]
