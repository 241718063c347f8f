"""Shapes that some library refused, hung on or got wrong; user-report numbers stand in brackets."""

import itertools

import pytest

import ep
from python.ranks import LAYOUTS, expect_refused, run_cases, with_buffers
from python.routing import ROUTINGS
from python.trip import Case, give, make_trip, zeros

SMALL = {"num_tokens": (3, 3), "num_experts": 4, "num_topk": 2, "hidden": 16}
# The least H whose rows are a multiple of 16 bytes.
UNIT = {"bfloat16": 8, "float16": 8, "float32": 4, "uint8": 16}


def both_layouts(**case) -> list[Case]:
    return [Case(**{**SMALL, **case}, layout=layout) for layout in LAYOUTS]


@pytest.mark.parametrize(
    "hidden", [8, 64, 96, 200, 1536, 2688, 2880, 2888, 3072, 4096, 5120, 6144, 7168, 8192]
)
def test_hidden_of_any_model(hidden):
    """[A1, A2, A4] H is a run-time number: 2880 and 2888 are no multiples of 32 or 128."""
    run_cases(both_layouts(hidden=hidden))


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("multiple", [1, 3, 7, 65])
def test_hidden_of_any_multiple_of_16_bytes(dtype, multiple):
    """[A1, A4] Every dtype down to its own unit: 4 columns of fp32, 16 of uint8."""
    hidden = UNIT[dtype] * multiple
    run_cases(both_layouts(hidden=hidden, x_dtype=dtype, answer_hidden=8 * multiple))


@pytest.mark.parametrize(
    ("dtype", "hidden"),
    [(d, h) for d, unit in UNIT.items() for h in (0, 1, 7, 12, 20, 2881) if h == 0 or h % unit],
)
def test_hidden_that_no_format_allows_names_the_unit(dtype, hidden):
    """[A1] H = 0, or no multiple of 16 bytes: the unit is named, the next call is exact."""
    unit = UNIT[dtype]
    trip = make_trip(Case(**{**SMALL, "hidden": 4096}))
    change = {"x": give(zeros(dtype, 3, hidden), trip.case)}
    texts = (f"H={hidden}", f"multiple of {unit}")
    with_buffers(trip, lambda buf: expect_refused(buf, trip, 0, change, *texts))


@pytest.mark.parametrize("quant", ["fp8_block128", "fp8_block128_ue8m0"])
def test_hidden_of_21_groups(quant):
    """[A3] 2688 = 21 x 128: packed scales need no multiple of 512, they are padded to 6 words."""
    cases = both_layouts(hidden=2688, quant=quant)
    assert make_trip(cases[0]).sent.received[0].scales.shape[1] == (21 if quant[-1] == "8" else 6)
    run_cases(cases)


@pytest.mark.parametrize("hidden", [64, 200, 2880])
def test_hidden_that_has_no_whole_groups(hidden):
    """[A1] quant on H that is no multiple of 128: refused, naming 128."""
    trip = make_trip(Case(**{**SMALL, "hidden": hidden}))
    with_buffers(
        trip,
        lambda buf: expect_refused(buf, trip, 1, {"quant": "fp8_block128"}, f"H={hidden}", "128"),
    )


@pytest.mark.parametrize("num_topk", [*range(1, 18), 24, 31, 32])
def test_topk(num_topk):
    """[A5] K up to 32."""
    run_cases(both_layouts(num_experts=64, num_topk=num_topk, hidden=8))


def test_topk_beside_one_worker():
    """[A6] K = 8 with the fewest workers there are."""
    run_cases(both_layouts(num_experts=64, num_topk=8), num_sms=1)


@pytest.mark.parametrize("num_topk", [9, 32])
def test_topk_beyond_the_experts(num_topk):
    """[A7] K > E is legal: slots repeat experts or hold -1."""
    for routing in ("uniform", "mixed", "duplicates"):
        run_cases(both_layouts(num_experts=4, num_topk=num_topk, routing=routing))


@pytest.mark.parametrize("num_topk", [0, 33, 40])
def test_topk_past_the_limit(num_topk):
    """[A5, A7] K = 33 and 40: refused when the buffer is made, with the limit."""
    args = {"num_experts": 64, "hidden": 16, "max_tokens_per_rank": 4, "num_topk": num_topk}
    with pytest.raises(ep.InvalidArgument, match=rf"num_topk={num_topk}\b.*32"):
        ep.EPBuffer(ep.Communicator.single(), **args)
    with pytest.raises(ep.InvalidArgument, match=rf"num_topk={num_topk}\b.*32"):
        ep.EPBuffer.bytes_needed(num_ranks=2, **args)


@pytest.mark.parametrize("num_topk", [3, 32])
def test_topk_past_the_buffers(num_topk):
    """[A5] More slots in a call than the buffer was made for: both numbers."""
    trip = make_trip(Case(**SMALL))
    change = {
        "topk_idx": give(zeros("int64", 3, num_topk), trip.case),
        "topk_weights": give(zeros("float32", 3, num_topk), trip.case),
    }
    texts = (f"K={num_topk}", "num_topk=2")
    with_buffers(trip, lambda buf: expect_refused(buf, trip, 1, change, *texts))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
def test_ranks(num_ranks):
    """[A8, A12, C2] Any R, with ragged T; then only one rank has a token."""
    ragged = tuple(5 * r % 7 for r in range(num_ranks))
    one = (1, *[0] * (num_ranks - 1))
    shape = {"num_experts": 2 * num_ranks, "num_topk": min(8, 2 * num_ranks), "hidden": 8}
    cases = [*both_layouts(num_tokens=ragged, **shape), *both_layouts(num_tokens=one, **shape)]
    run_cases(cases)


def test_ranks_past_the_limit():
    """[A8] 1025 ranks: the message says what is possible."""
    args = {"num_experts": 4, "hidden": 16, "max_tokens_per_rank": 4, "num_topk": 2}
    with pytest.raises(ep.InvalidArgument, match=r"num_ranks=1025\b.*1024"):
        ep.EPBuffer.bytes_needed(num_ranks=1025, **args)


def test_defaults_are_valid_for_every_number_of_ranks():
    """[A14] 1 to 1024 ranks; arithmetic only."""
    args = {"num_topk": 8, "hidden": 7168, "max_tokens_per_rank": 128}
    before = 0
    for num_ranks in range(1, 1025):
        total = ep.EPBuffer.bytes_needed(num_ranks=num_ranks, num_experts=256, **args).total
        assert total > before
        before = total


@pytest.mark.parametrize("layout", LAYOUTS)
def test_token_counts_of_two_ranks(layout):
    """[A13] Odd counts: 4095 and 4095, 1 and 1, 4095 and 4094, one after the other."""
    counts = [(4095, 4095), (1, 1), (4095, 4094)]
    run_cases([Case(**{**SMALL, "hidden": 8, "num_tokens": t}, layout=layout) for t in counts])


@pytest.mark.parametrize(
    ("num_ranks", "num_experts", "offsets"),
    [
        (4, 10, None),  # 3, 3, 2, 2
        (3, 256, None),
        (4, 3, None),  # the last rank owns none
        (8, 1, None),
        (4, 9, (0, 0, 8, 8, 9)),  # ranks 0 and 2 own none
        (3, 5, (0, 5, 5, 5)),
        (2, 4096, None),
    ],
)
def test_experts_that_ranks_do_not_divide(num_ranks, num_experts, offsets):
    """[A15] Uneven ownership, empty ranges, fewer experts than ranks."""
    shape = {"num_tokens": tuple(5 + r for r in range(num_ranks)), "num_experts": num_experts}
    cases = [
        case
        for exact in (True, False)
        for case in both_layouts(**shape, num_topk=3, offsets=offsets, exact=exact)
    ]
    run_cases(cases)
    trip = make_trip(cases[0])

    def owned(buf):
        expected = range(*trip.rules.offsets[buf.rank : buf.rank + 2])
        return buf.local_experts == expected and list(buf.expert_offsets)

    assert with_buffers(trip, owned) == [list(trip.rules.offsets)] * num_ranks


@pytest.mark.parametrize(
    ("offsets", "texts"),
    [
        ([0, 2], ["2 entries", "3"]),
        ([0, 3, 2], ["expert_offsets[2]=2"]),
        ([0, 2, 5], ["5", "num_experts=4"]),
        ([1, 2, 4], ["1", "num_experts=4"]),
    ],
)
def test_experts_that_nobody_or_two_own(offsets, texts):
    """[A15] Wrong expert_offsets are refused when the buffer is made."""
    args = {"num_experts": 4, "hidden": 16, "max_tokens_per_rank": 4, "num_topk": 2}
    with pytest.raises(ep.InvalidArgument) as caught:
        ep.EPBuffer.bytes_needed(num_ranks=2, expert_offsets=offsets, **args)
    assert all(text in str(caught.value) for text in texts), caught.value


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing_in_every_dtype(routing):
    """All dtypes of x, topk_idx and topk_weights, from torch and from numpy."""
    formats = itertools.product(("int32", "int64"), ("torch", "numpy"), LAYOUTS)
    cases = []
    for i, (idx_dtype, kind, layout) in enumerate(formats):
        dtype = ("bfloat16", "float16", "float32")[i % 3]
        # numpy has no bfloat16 weights.
        weights = (None, "float32", "float16", "float32" if kind == "numpy" else "bfloat16")[i % 4]
        cases.append(
            Case(
                num_tokens=(4, 0, 9),
                num_experts=7,
                num_topk=3,
                hidden=24,
                routing=routing,
                seed=i,
                x_dtype=dtype,
                idx_dtype=idx_dtype,
                weights_dtype=weights,
                answer_dtype=dtype,
                layout=layout,
                row_weights=i % 2 == 0,
                combine_weights=layout == "expert",
                bias=("bfloat16", "float32")[: i % 3],
                out_dtype=(None, "float32", "bfloat16")[i % 3],
                kind=kind,
                strided=i % 3 == 1,
            )
        )
    run_cases(cases)
