"""Strides, dtypes and missing arguments of a call; user-report numbers stand in brackets."""

import numpy as np
import pytest

import ep
from python.compare import expect_combined, expect_received
from python.formats import Array
from python.ranks import (
    LAYOUTS,
    expect_errors,
    expect_refused,
    round_trip,
    run_cases,
    run_ranks,
    with_buffers,
)
from python.routing import seeded
from python.trip import Case, combine_args, dispatch_args, give, make_trip, numbers, zeros

SHAPE = {"num_tokens": (6, 6), "num_experts": 4, "num_topk": 2, "hidden": 16}
torch = pytest.importorskip("torch")


def every_second_row(x):
    wide = x.repeat_interleave(2, dim=0) if hasattr(x, "repeat_interleave") else x.repeat(2, 0)
    return wide[::2]


def backwards(x):
    """Negative row stride, which torch does not have."""
    return np.ascontiguousarray(x[::-1])[::-1]


def column_major(x):
    return x.t().contiguous().t() if hasattr(x, "t") else np.asfortranarray(x)


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_that_are_not_adjacent_pass(layout, kind):
    """[R1] x[::2], rows of a wider matrix; numpy also backwards."""
    trip = make_trip(Case(**SHAPE, layout=layout, kind=kind, bias=("float32",), row_weights=True))
    views = [every_second_row, *([backwards] if kind == "numpy" else [])]

    def body(buf):
        rank = buf.rank
        for view in views:
            args = dispatch_args(trip, rank)
            out = buf.dispatch(**args | {"x": view(args["x"])})
            expect_received(out, trip.sent.received[rank], trip.rules)
            args = combine_args(trip, rank)
            args |= {"x": view(args["x"]), "bias": [view(b) for b in args["bias"]]}
            expect_combined(buf.combine(handle=out.handle, **args), trip.back[rank])

    with_buffers(trip, body)
    run_cases(Case(**SHAPE, layout=layout, kind=kind, strided=True))


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_repeated_by_stride_0_passes(layout, kind):
    """[R1] expand over rows: every token is the same row."""
    trip = make_trip(Case(**SHAPE, layout=layout, kind=kind))
    for tokens in trip.tokens:
        tokens.x.data[:] = tokens.x.data[0]
    repeated = with_the_same_ids(trip)

    def body(buf):
        args = dispatch_args(repeated, buf.rank)
        row = args["x"][:1]
        args["x"] = row.expand(6, 16) if kind == "torch" else np.broadcast_to(row, (6, 16))
        out = buf.dispatch(**args)
        expect_received(out, repeated.sent.received[buf.rank], repeated.rules)

    with_buffers(trip, body)


def with_the_same_ids(trip):
    """The oracle's answers anew, after the tokens were changed in place."""
    from python.trip import with_ids

    return with_ids(trip, [t.idx.data for t in trip.tokens])


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_routing_weights_and_scales_of_any_stride_pass(kind):
    """[R1, J8] topk_idx, topk_weights, scales and combine's weights in column-major memory."""
    shape = {**SHAPE, "layout": "expert", "kind": kind, "scale_columns": 3}
    trip = make_trip(Case(**shape, combine_weights=True))

    def body(buf):
        rank, args = buf.rank, dispatch_args(trip, buf.rank)
        args |= {name: column_major(args[name]) for name in ("topk_idx", "topk_weights", "scales")}
        out = buf.dispatch(**args)
        expect_received(out, trip.sent.received[rank], trip.rules)
        args = combine_args(trip, rank)
        args["weights"] = column_major(args["weights"])
        expect_combined(buf.combine(handle=out.handle, **args), trip.back[rank])

    with_buffers(trip, body)


@pytest.mark.parametrize("num_tokens", [(1, 1), (0, 1)])
def test_strides_of_dimensions_of_size_1_mean_nothing(num_tokens):
    """[R1] One token with a row stride of 12345 and one slot with odd strides pass."""
    trip = make_trip(Case(**{**SHAPE, "num_tokens": num_tokens, "num_topk": 1}))

    def body(buf):
        args = dispatch_args(trip, buf.rank)
        rows = len(args["x"])
        args["x"] = args["x"].as_strided((rows, 16), (12345, 1))
        args["topk_idx"] = args["topk_idx"].as_strided((rows, 1), (777, 55))
        out = buf.dispatch(**args)
        expect_received(out, trip.sent.received[buf.rank], trip.rules)

    with_buffers(trip, body)


def _x(make):
    """x of [6, 16] made from a larger random matrix."""
    return make(numbers(seeded(1), "bfloat16", 32, 32, wild=False).torch())


@pytest.mark.parametrize(
    ("x", "stride"),
    [
        (_x(lambda m: m[:6, ::2]), 2),
        (_x(lambda m: m[:16, :6].t()), 32),
        (_x(lambda m: m[:6, :1].expand(6, 16)), 0),
        (_x(lambda m: m[:6, ::2].view(torch.int16).numpy().view(np.uint16)), 2),
        (_x(lambda m: m[:6, :16].view(torch.int16).numpy().view(np.uint16)[:, ::-1]), -1),
    ],
    ids=["every second column", "transposed", "expanded columns", "numpy", "numpy backwards"],
)
def test_columns_that_are_not_adjacent_are_named(x, stride):
    """[R1] x[:, ::2], x.t() and stride 0 in columns: the message names x and the stride."""
    trip = make_trip(Case(**SHAPE))
    text = f"x has column stride {stride};"
    with_buffers(trip, lambda buf: expect_refused(buf, trip, 0, {"x": x}, text))


@pytest.mark.parametrize(
    ("name", "change", "texts"),
    [
        ("x", {"x": zeros("int32", 6, 16)}, ("x has dtype int32", "bfloat16")),
        ("x", {"x": zeros("float64", 6, 16)}, ("x has dtype float64", "float32")),
        ("x", {"x": zeros("bool", 6, 16)}, ("x has dtype bool", "float16")),
        ("topk_idx", {"topk_idx": zeros("float32", 6, 2)}, ("topk_idx has dtype float32", "int64")),
        ("topk_idx", {"topk_idx": zeros("int16", 6, 2)}, ("topk_idx has dtype int16", "int32")),
        ("topk_weights", {"topk_weights": zeros("int32", 6, 2)}, ("topk_weights has dtype int32",)),
        ("topk_weights", {"topk_weights": zeros("float64", 6, 2)}, ("float64", "float32")),
        ("scales", {"scales": zeros("int64", 6, 1)}, ("scales", "int64", "4-byte")),
    ],
)
def test_dtypes_have_messages_of_their_own(name, change, texts):
    """[R2] A wrong dtype is not called a wrong layout."""
    trip = make_trip(Case(**SHAPE))
    change = {key: give(value, trip.case) for key, value in change.items()}

    def body(buf):
        args = dispatch_args(trip, buf.rank)
        if buf.rank == 1:
            args |= change
        error = expect_errors(
            buf, lambda: buf.dispatch(**args), {1: ep.InvalidArgument}, name, *texts
        )
        assert "stride" not in str(error) and "contiguous" not in str(error)
        round_trip(buf, trip)

    with_buffers(trip, body)


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        ({"x": zeros("bfloat16", 96)}, ("x has shape [96]", "2 dimensions")),
        ({"x": zeros("bfloat16", 2, 3, 16)}, ("x has shape [2, 3, 16]", "2 dimensions")),
        ({"topk_idx": zeros("int64", 12)}, ("topk_idx has shape [12]", "2 dimensions")),
        ({"topk_idx": zeros("int64", 5, 2)}, ("topk_idx has shape [5, 2]", "[6, 2]")),
        ({"topk_weights": zeros("float32", 6, 1)}, ("topk_weights has shape [6, 1]", "[6, 2]")),
        ({"scales": zeros("float32", 5, 1)}, ("scales has shape [5, 1]", "[6, S]")),
        ({"extras": zeros("int8", 5, 4)}, ("extras[0] has shape [5, 4]", "6 rows")),
    ],
)
def test_shapes_have_messages_of_their_own(change, texts):
    """[R2] A wrong shape: both shapes are told."""
    trip = make_trip(Case(**SHAPE))
    change = {key: give(value, trip.case) for key, value in change.items()}
    if "extras" in change:
        change["extras"] = [change["extras"]]
    with_buffers(trip, lambda buf: expect_refused(buf, trip, 1, change, *texts))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_int32_and_int64_ids_give_the_same(layout):
    """[R3] topk_idx comes back in its own dtype; all else is equal."""
    run_cases([Case(**SHAPE, layout=layout, idx_dtype=dtype) for dtype in ("int32", "int64")])


def test_ids_of_two_dtypes_are_a_desync():
    """[R3] int32 on one rank, int64 on the other: both learn the field and both values."""
    trip = make_trip(Case(**SHAPE))

    def body(buf):
        args = dispatch_args(trip, buf.rank)
        if buf.rank == 1:
            args["topk_idx"] = args["topk_idx"].to(torch.int32)
        everywhere = dict.fromkeys(range(2), ep.Desync)
        error = expect_errors(buf, lambda: buf.dispatch(**args), everywhere, "topk_idx")
        assert error.field == "dtype of topk_idx" and error.mine != error.theirs
        round_trip(buf, trip)

    with_buffers(trip, body)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_of_half_precision_are_converted(layout, dtype):
    """[R4] bf16 and fp16 weights come out as the fp32 numbers they are."""
    shape = {**SHAPE, "layout": layout, "weights_dtype": dtype}
    run_cases(Case(**shape, combine_weights=layout == "expert"))


def test_weights_of_other_dtypes_on_other_ranks():
    """[R4] The dtype of the weights is a rank's own choice."""
    trip = make_trip(Case(**SHAPE, weights_dtype="bfloat16"))

    def body(buf):
        args = dispatch_args(trip, buf.rank)
        if buf.rank == 1:
            args["topk_weights"] = args["topk_weights"].float()
        expect_received(buf.dispatch(**args), trip.sent.received[buf.rank], trip.rules)

    with_buffers(trip, body)


MISSING = (ep.InvalidArgument, TypeError)


@pytest.mark.parametrize("name", ["x", "topk_idx"])
def test_a_dispatch_that_lacks_an_argument_names_it(name):
    """[R5] dispatch() without x, and without topk_idx or handle; the others get PeerError."""
    trip = make_trip(Case(**SHAPE))
    with_buffers(trip, lambda buf: expect_refused(buf, trip, 0, {name: None}, name, error=MISSING))


@pytest.mark.parametrize("name", ["x", "handle"])
@pytest.mark.parametrize("how", ["left out", "None"])
def test_a_combine_that_lacks_an_argument_names_it(name, how):
    """[R5] combine() without x, or without handle."""
    trip = make_trip(Case(**SHAPE))

    def body(buf):
        out = buf.dispatch(**dispatch_args(trip, buf.rank))
        args = combine_args(trip, buf.rank) | {"handle": out.handle}
        if buf.rank == 1:
            args[name] = None
            if how == "left out":
                del args[name]
        expect_errors(buf, lambda: buf.combine(**args), {1: MISSING}, name)
        round_trip(buf, trip)

    with_buffers(trip, body)


@pytest.mark.parametrize("name", ["num_experts", "num_topk", "hidden", "max_tokens_per_rank"])
def test_a_buffer_that_lacks_an_argument_names_it(name):
    """[R5] All four are required, by name; also for bytes_needed."""
    args = {"num_experts": 4, "num_topk": 2, "hidden": 16, "max_tokens_per_rank": 8}
    del args[name]
    with pytest.raises(MISSING, match=name):
        ep.EPBuffer(ep.Communicator.single(), **args)
    with pytest.raises(MISSING, match=name):
        ep.EPBuffer.bytes_needed(num_ranks=2, **args)


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        ({"layout": "rows"}, ("layout", "rows", "expert")),
        ({"overflow": "ignore"}, ("overflow", "ignore", "drop")),
        ({"ids": "mine"}, ("ids", "mine", "global")),
        ({"quant": "fp8"}, ("quant", "fp8", "fp8_block128")),
        ({"max_tokens": 0}, ("max_tokens=0",)),
        ({"max_rows": 0}, ("max_rows=0",)),
        ({"max_rows": 5, "exact": True}, ("max_rows=5", "exact")),
        ({"overflow": "drop"}, ("overflow", "max_rows")),
        ({"expert_alignment": 8}, ("expert_alignment=8", "expert")),
        ({"num_sms": 65}, ("num_sms=65", "64")),
        ({"no_such_argument": 1}, ("no_such_argument",)),
    ],
)
def test_options_that_make_no_sense(change, texts):
    """[R5] The message names the option and its value; a TypeError spends the turn too."""
    trip = make_trip(Case(**SHAPE))
    with_buffers(trip, lambda buf: expect_refused(buf, trip, 1, change, *texts, error=MISSING))


@pytest.mark.parametrize("x", [None, "tokens", 3, [[1.0] * 16] * 6, object()])
def test_x_that_is_no_tensor(x):
    """[R5] None, a string, a number, a list, any object: named, and the others are told."""
    trip = make_trip(Case(**SHAPE))

    def body(buf):
        args = dispatch_args(trip, buf.rank)
        if buf.rank == 0:
            args["x"] = x
        expect_errors(buf, lambda: buf.dispatch(**args), {0: MISSING}, "x")
        round_trip(buf, trip)

    with_buffers(trip, body)


@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 0), (-1, 2), (2, 2)])
def test_rank_numbers_that_cannot_be(rank, num_ranks):
    """[R] rank and number of ranks are checked before anybody is contacted."""
    with pytest.raises(ep.InvalidArgument, match="rank"):
        ep.Communicator.tcp("127.0.0.1:9", rank, num_ranks, timeout_s=1)


def test_every_rank_may_err_in_the_same_call():
    """[R5] Each rank gets its own error; the next call is exact."""
    trip = make_trip(Case(**SHAPE))

    def body(buf):
        args = dispatch_args(trip, buf.rank)
        args["x"] = give(Array(np.zeros((6, 7), np.uint16), "bfloat16"), trip.case)
        expect_errors(
            buf,
            lambda: buf.dispatch(**args),
            dict.fromkeys(range(2), ep.InvalidArgument),
            "H=7",
        )
        round_trip(buf, trip)

    with_buffers(trip, body)
    assert run_ranks(lambda comm: comm.rank, 2) == [0, 1]
