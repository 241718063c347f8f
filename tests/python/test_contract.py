"""What the results are and who multiplies by what; user-report numbers stand in brackets."""

import dataclasses

import numpy as np
import pytest

import ep
from python.compare import (
    bits_of,
    dtype_name,
    expect_combined,
    expect_received,
    expect_same,
)
from python.formats import Array
from python.ranks import LAYOUTS, expect_errors, round_trip, run_cases, with_buffers
from python.trip import Case, Trip, combine_args, dispatch_args, give, make_trip, with_ids

pytestmark = pytest.mark.torch_versions

SHAPE = {"num_experts": 6, "num_topk": 3, "hidden": 128}
WEIGHTS = [0.5, 0.25]


def two_experts(layout: str) -> Trip:
    """One token on each of two ranks, for expert 0 on rank 0 and expert 1 on rank 1."""
    shape = {"num_tokens": (1, 1), "num_experts": 2, "num_topk": 2, "hidden": 8}
    trip = with_ids(make_trip(Case(**shape, layout=layout, kind="numpy")), [[[0, 1]]] * 2)
    for tokens in trip.tokens:
        tokens.weights.data[:] = WEIGHTS
    return trip


@pytest.mark.parametrize(
    ("layout", "who"), [("expert", "combine"), ("expert", "expert code"), ("rank", "expert code")]
)
def test_weights_are_applied_once(layout, who):
    """[H1] w = [.5, .25] gives .5 * y0 + .25 * y1, whoever multiplies."""
    trip = two_experts(layout)

    def body(buf):
        args = dispatch_args(trip, buf.rank)
        out = buf.dispatch(**args)
        y = np.full((2, 8), 4 + buf.rank, np.float32)  # y0 = 4, y1 = 5
        if who == "combine":
            return buf.combine(y, out.handle, weights=args["topk_weights"]).x
        weights = out.topk_weights.reshape(2, -1).sum(axis=1, keepdims=True)
        return buf.combine(y * weights, out.handle).x

    for y in with_buffers(trip, body):
        assert y.tolist() == [[0.5 * 4 + 0.25 * 5] * 8]


def test_weights_in_combine_by_rank_are_an_error():
    """[H1, H5] combine(weights=) with layout "rank": refused, saying who multiplies."""
    trip = make_trip(Case(num_tokens=(3, 4), **SHAPE))

    def body(buf):
        out = buf.dispatch(**dispatch_args(trip, buf.rank))
        args = combine_args(trip, buf.rank)
        if buf.rank == 1:
            args["weights"] = dispatch_args(trip, buf.rank)["topk_weights"]
        expect_errors(
            buf,
            lambda: buf.combine(handle=out.handle, **args),
            {1: ep.InvalidArgument},
            "weights",
            '"rank"',
            '"expert"',
        )
        y = buf.combine(handle=out.handle, **combine_args(trip, buf.rank))
        expect_combined(y, trip.back[buf.rank])

    with_buffers(trip, body)


def test_rows_of_ranks_expand_to_rows_of_experts():
    """[H2] Rows of layout "rank", repeated by topk_idx, in the order of experts: "expert"."""
    shape = {"num_tokens": (9, 5), **SHAPE, "kind": "numpy"}
    by_rank, by_expert = (make_trip(Case(**shape, layout=layout)) for layout in LAYOUTS)

    def body(buf):
        rows = buf.dispatch(**dispatch_args(by_rank, buf.rank))
        want = buf.dispatch(**dispatch_args(by_expert, buf.rank))
        row, slot = np.nonzero(rows.topk_idx >= 0)
        order = np.argsort(rows.topk_idx[row, slot], kind="stable")
        row, slot = row[order], slot[order]
        for name in ("topk_idx", "topk_weights"):
            assert np.array_equal(getattr(rows, name)[row, slot], getattr(want, name))
        for name in ("source", "x"):
            assert np.array_equal(getattr(rows, name)[row], getattr(want, name))

    with_buffers([by_rank, by_expert], body)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_the_router(layout):
    """[H3] With row_weights = sum over h of dy * y, combine gives d loss / d w to the source.

    loss = sum over t, k, h of dy[t, h] * w[t, k] * y_k[t, h], and expert e answers (e + 1) * x.
    """
    case = Case(num_tokens=(4, 3), **SHAPE, layout=layout, kind="numpy", x_dtype="float32")
    trip = make_trip(case)
    for tokens in trip.tokens:  # small integers, so that every sum is exact
        tokens.x.data[:] = np.arange(tokens.x.data.size).reshape(tokens.x.shape) % 7

    def body(buf):
        args = dispatch_args(trip, buf.rank)
        out = buf.dispatch(**args)
        dy = np.where(np.arange(128) < 5, np.float32(1), np.float32(2))
        gradient = buf.dispatch(np.tile(dy, (len(args["x"]), 1)), handle=out.handle)
        dot = (gradient.x * out.x).sum(axis=1).reshape(-1, *[1] * (out.topk_idx.ndim - 1))
        expert = out.topk_idx + buf.local_experts.start
        row_weights = np.where(out.topk_idx >= 0, (expert + 1) * dot, np.nan).astype(np.float32)
        y = buf.combine(out.x, out.handle, row_weights=row_weights)
        want = (args["topk_idx"] + 1) * (args["x"] @ dy)[:, None]
        assert np.array_equal(y.topk_weights, want)

    with_buffers(trip, body)


def test_true_and_padded_counts():
    """[H4] Alignment 4, true counts [1, 3, 0, 5]: padded [4, 4, 0, 8], offsets [0, 4, 8, 8, 16]."""
    shape = {"num_experts": 4, "num_topk": 1, "hidden": 16, "alignment": 4, "layout": "expert"}
    trip = make_trip(Case(num_tokens=(9,), **shape))
    trip = with_ids(trip, [[3, 1, 3, 0, 1, 3, 1, 3, 3]])

    def body(buf):
        out = round_trip(buf, trip)
        offsets = out.expert_offsets.tolist()
        assert out.tokens_per_expert == [1, 3, 0, 5] == out.tokens_per_expert_device.tolist()
        assert offsets == [0, 4, 8, 8, 16] and out.num_rows == 16
        assert np.diff(offsets).tolist() == [4, 4, 0, 8]

    with_buffers(trip, body)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_are_named_and_frozen(layout):
    """[H6] The same names whatever the layout; no tuple to unpack; nothing can be assigned."""
    trip = make_trip(Case(num_tokens=(3,), **SHAPE, layout=layout))
    names = (
        "x scales extras topk_idx topk_weights num_rows num_rows_device rows_needed_device "
        "tokens_per_expert tokens_per_expert_device expert_offsets rank_offsets source status "
        "handle event inputs_done"
    )

    def body(buf):
        out = buf.dispatch(**dispatch_args(trip, 0))
        y = buf.combine(handle=out.handle, **combine_args(trip, 0))
        assert all(hasattr(out, name) for name in names.split())
        assert all(hasattr(y, name) for name in ("x", "topk_weights", "status", "event"))
        for result in (out, y):
            with pytest.raises(TypeError):
                iter(result)
            with pytest.raises(AttributeError):
                result.x = None
        assert out.x is out.x  # made once

    with_buffers(trip, body)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("quant", [None, "fp8_block128"])
def test_one_rank_is_no_special_case(layout, quant):
    """[H7] R = 1 through the same API."""
    shape = {**SHAPE, "layout": layout, "quant": quant, "row_weights": True}
    run_cases([Case(num_tokens=(5,), **shape, exact=exact) for exact in (True, False)])


def expected_outputs(case: Case, num_tokens: int, rows: int) -> dict:
    """Shape and dtype of every output of the case below, written out, not taken from the oracle."""
    is_torch, by_rank = case.kind == "torch", case.layout == "rank"
    per_row = (rows, 3) if by_rank else (rows,)
    expected = {
        "x": ((rows, 128), "float8_e4m3fn" if is_torch else "uint8"),
        "scales": ((rows, 1), "float32"),
        "extra": ((rows, 2, 3), "int16"),
        "flag": ((rows,), "bool"),
        "topk_idx": (per_row, case.idx_dtype),
        "topk_weights": (per_row, "float32"),
        "num_rows_device": ((1,), "int32"),
        "rows_needed_device": ((1,), "int32"),
        "tokens_per_expert_device": ((2,), "int32"),
        "expert_offsets": ((3,), "int32"),
        "source": ((rows, 2), "int32"),
        "status": ((1,), "int32"),
        "combine's x": ((num_tokens, 128), "bfloat16" if is_torch else "uint16"),
        "combine's topk_weights": ((num_tokens, 3), "float32"),
        "combine's status": ((1,), "int32"),
    }
    return expected | ({"rank_offsets": ((4,), "int32")} if by_rank else {})


@pytest.mark.parametrize("idx_dtype", ["int32", "int64"])
@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shape_and_dtype_of_every_output(layout, exact, kind, idx_dtype):
    """[H8] Host counts are a list of int, or None; everything else is a tensor of x's kind."""
    case = Case(
        num_tokens=(4, 2, 0),
        **SHAPE,
        layout=layout,
        exact=exact,
        kind=kind,
        idx_dtype=idx_dtype,
        quant="fp8_block128",
        extras=(("int16", (2, 3)), ("bool", ())),
        row_weights=True,
    )
    trip = make_trip(case)
    fixed_rows = {"rank": 3 * 4, "expert": 3 * 4 * 3}

    def body(buf):
        args = dispatch_args(trip, buf.rank)
        out = buf.dispatch(**args)
        rows = fixed_rows[layout]
        if exact:
            rows = out.num_rows
            assert {type(n) for n in (rows, *out.tokens_per_expert)} == {int}
            assert type(out.tokens_per_expert) is list
        else:
            assert out.num_rows is None and out.tokens_per_expert is None
        assert layout == "rank" or out.rank_offsets is None
        y = buf.combine(handle=out.handle, **combine_args(trip, buf.rank))
        expected = expected_outputs(case, len(args["x"]), rows)
        tensors = {name: getattr(out, name) for name in expected if hasattr(out, name)}
        tensors |= {"extra": out.extras[0], "flag": out.extras[1], "combine's x": y.x}
        tensors |= {"combine's topk_weights": y.topk_weights, "combine's status": y.status}
        assert {n: (tuple(t.shape), dtype_name(t)) for n, t in tensors.items()} == expected
        assert {type(t) for t in tensors.values()} == {type(args["x"])}

    with_buffers(trip, body)


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_routing_layout_counts_this_ranks_tokens(kind):
    """[H8] buf.routing_layout: shapes, dtypes and numbers; a token counts once per rank."""
    trip = make_trip(Case(num_tokens=(9, 4), **SHAPE, routing="mixed", kind=kind))

    def body(buf):
        ids = trip.tokens[buf.rank].idx.data
        layout = buf.routing_layout(dispatch_args(trip, buf.rank)["topk_idx"])
        is_in = np.stack([np.any(ids // 3 == r, axis=1) for r in range(2)], axis=1)
        wanted = {
            "tokens_per_rank": is_in.sum(axis=0),
            "tokens_per_expert": np.bincount(ids[ids >= 0], minlength=6),
            "tokens_per_node": [is_in.any(axis=1).sum()],
        }
        expect_same("is_token_in_rank", layout.is_token_in_rank, Array(is_in, "bool"))
        for name, want in wanted.items():
            expect_same(name, getattr(layout, name), Array(np.array(want, np.int32), "int32"))

    with_buffers(trip, body)


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_outputs_are_of_the_kind_of_x(kind):
    """[H8] Ids and weights may come from another library."""
    case = Case(num_tokens=(4, 3), **SHAPE, kind=kind)
    trip = make_trip(case)
    other = dataclasses.replace(case, kind={"torch": "numpy", "numpy": "torch"}[kind])

    def body(buf):
        args, tokens = dispatch_args(trip, buf.rank), trip.tokens[buf.rank]
        args |= {"topk_idx": give(tokens.idx, other), "topk_weights": give(tokens.weights, other)}
        out = buf.dispatch(**args)
        expect_received(out, trip.sent.received[buf.rank], trip.rules)
        outputs = (out.x, out.topk_idx, out.topk_weights, out.source, out.status)
        assert {type(t) for t in outputs} == {type(args["x"])}

    with_buffers(trip, body)


def with_routing_of(trip: Trip, recorded: Trip) -> Trip:
    """The trip's rows with the recorded routing and weights."""
    tokens = [
        dataclasses.replace(t, weights=r.weights)
        for t, r in zip(trip.tokens, recorded.tokens, strict=True)
    ]
    return with_ids(dataclasses.replace(trip, tokens=tokens), [r.idx.data for r in recorded.tokens])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_replay_takes_any_dtype_and_hidden_size(layout):
    """[K2, K3] dispatch(x, handle=h) is enough: recorded ids and weights, other rows and H."""
    shape = {"num_tokens": (4, 6), "layout": layout}
    trip = make_trip(Case(**shape, **SHAPE, answer_hidden=264, out_dtype="float32"))
    other = Case(**shape, **{**SHAPE, "hidden": 64}, x_dtype="float32", seed=2, row_weights=True)
    replayed = with_routing_of(make_trip(other), trip)

    def body(buf):
        rank = buf.rank
        first = round_trip(buf, trip)
        out = buf.dispatch(give(replayed.tokens[rank].x, other), handle=first.handle)
        expect_received(out, replayed.sent.received[rank], replayed.rules)
        y = buf.combine(handle=out.handle, **combine_args(replayed, rank))
        expect_combined(y, replayed.back[rank])
        assert np.array_equal(bits_of(out.topk_weights), bits_of(first.topk_weights))

    with_buffers([trip, replayed], body)


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_combine_writes_into_out(layout, kind):
    """[H6] out=: strided rows of the caller's own, whose dtype is the result's; y.x is it."""
    shape = {**SHAPE, "layout": layout, "kind": kind, "bias": ("float32",)}
    trip = make_trip(Case(num_tokens=(4, 0), **shape, out_dtype="float32"))

    def body(buf):
        sent = buf.dispatch(**dispatch_args(trip, buf.rank))
        args = combine_args(trip, buf.rank)
        del args["out_dtype"]  # out's
        args["bias"] = args["bias"][0]  # one bias needs no list
        sevens = np.full((trip.case.num_tokens[buf.rank], 160), 7, np.float32)
        wide = give(Array(sevens, "float32"), trip.case)
        y = buf.combine(handle=sent.handle, **args, out=wide[:, :128])
        expect_combined(y, trip.back[buf.rank])
        assert np.array_equal(bits_of(wide[:, :128]), trip.back[buf.rank].x.bits())
        assert wide[:, 128:].tolist() == sevens[:, 128:].tolist()

    with_buffers(trip, body)
