"""The oracle against small cases worked out by hand, and number formats against PyTorch's."""

import numpy as np
import pytest

from python import oracle
from python.compare import expect_same
from python.formats import (
    Array,
    e4m3_decode,
    e4m3_encode,
    encode,
    zeros,
)
from python.routing import ROUTINGS, draw_ids
from python.trip import Case, make_trip

# Two ranks; rank 0 owns experts 0 and 1, rank 1 owns 2. Tokens a, b on rank 0 and c on rank 1.
RULES = {"offsets": (0, 2, 3), "num_topk": 3, "max_tokens": 2}
IDS = [[[0, 2, 1], [2, 2, -1]], [[1, -1, 1]]]
X = [[[10.0], [20.0]], [[30.0]]]


def f32(values) -> Array:
    return Array(np.array(values, np.float32), "float32")


def tokens(weights=None, extras=((), ())) -> list[oracle.Tokens]:
    made = []
    for rank, ids in enumerate(IDS):
        w = None if weights is None else f32(weights[rank])
        idx = Array(np.array(ids, np.int32), "int32")
        made.append(oracle.Tokens(f32(X[rank]), idx, w, extras=extras[rank]))
    return made


def dispatch(weights=None, extras=((), ()), **rules):
    rules = oracle.Rules(**RULES, **rules)
    return rules, oracle.dispatch(tokens(weights, extras), rules)


def test_layout_rank_by_hand():
    weights = [[[0.5, 0.25, 2.0], [3.0, 4.0, 5.0]], [[6.0, 7.0, 8.0]]]
    _, sent = dispatch(weights)
    zero, one = sent.received
    assert zero.x.data.tolist() == [[10], [30]]  # a, c
    assert zero.source.data.tolist() == [[0, 0], [1, 0]]
    assert zero.idx.data.tolist() == [[0, -1, 1], [1, -1, 1]]
    assert zero.weights.data.tolist() == [[0.5, 0, 2], [6, 0, 8]]
    assert (zero.rank_offsets, zero.expert_offsets) == ([0, 1, 2], [0, 1, 4])
    assert zero.tokens_per_expert == [1, 3]
    assert one.x.data.tolist() == [[10], [20]]  # a, b
    assert one.idx.data.tolist() == [[-1, 0, -1], [0, 0, -1]]
    assert one.weights.data.tolist() == [[0, 0.25, 0], [3, 4, 0]]
    assert (one.rank_offsets, one.tokens_per_expert) == ([0, 2, 2], [3])
    assert sent.places[0].rank.tolist() == [[0, 1, 0], [1, 1, -1]]
    assert sent.places[0].row.tolist() == [[0, 0, 0], [1, 1, -1]]
    assert sent.places[1].rank.tolist() == [[0, -1, 0]]
    assert sent.places[1].row.tolist() == [[1, -1, 1]]


def test_layout_expert_by_hand_with_gaps():
    extras = ((Array(np.array([7, 8]), "int64"),), (Array(np.array([9]), "int64"),))
    weights = [[[0.5, 0.25, 2.0], [3.0, 4.0, 5.0]], [[6.0, 7.0, 8.0]]]
    _, sent = dispatch(weights, extras, layout="expert", alignment=2, global_ids=True)
    zero, one = sent.received
    assert zero.x.data.tolist() == [[10], [0], [10], [30], [30], [0]]
    assert zero.idx.data.tolist() == [0, -1, 1, 1, 1, -1]
    assert zero.weights.data.tolist() == [0.5, 0, 2, 6, 8, 0]
    assert zero.source.data.tolist() == [[0, 0], [-1, -1], [0, 0], [1, 0], [1, 0], [-1, -1]]
    assert zero.slot.tolist() == [0, -1, 2, 0, 2, -1]
    assert zero.extras[0].data.tolist() == [7, 0, 7, 9, 9, 0]
    assert (zero.tokens_per_expert, zero.expert_offsets) == ([1, 3], [0, 2, 6])
    assert (zero.num_rows, zero.rows_needed, zero.rank_offsets) == (6, 6, None)
    assert one.idx.data.tolist() == [2, 2, 2, -1]
    assert one.slot.tolist() == [1, 0, 1, -1]
    assert sent.places[0].row.tolist() == [[0, 0, 2], [1, 2, -1]]


def test_fixed_sizes_by_hand():
    _, sent = dispatch(exact=False)
    zero = sent.received[0]
    assert (zero.num_rows, len(zero.slot)) == (2, 2 * 2)  # R * B
    assert zero.idx.data.tolist() == [[0, -1, 1], [1, -1, 1], [-1] * 3, [-1] * 3]
    assert zero.source.data[2:].tolist() == [[-1, -1]] * 2
    rules, sent = dispatch(layout="expert", alignment=4, exact=False)
    # M = 2*2*3 = 12 routes; rank 0: 4 * (2 + 10 // 4), rank 1: 4 * (1 + 11 // 4).
    assert [rules.fixed_rows(r) for r in (0, 1)] == [16, 12]
    assert [r.num_rows for r in sent.received] == [8, 4]
    none = oracle.Rules(offsets=(0, 3, 3), num_topk=3, max_tokens=2, layout="expert")
    assert none.fixed_rows(1) == 0


def test_dropped_rows_by_hand():
    rules, sent = dispatch(layout="expert", max_rows=2, exact=False, drop=True)
    zero, one = sent.received
    assert (zero.rows_needed, zero.num_rows, sent.too_many) == (4, 2, False)
    assert (zero.tokens_per_expert, zero.expert_offsets) == ([1, 1], [0, 1, 2])
    assert (one.rows_needed, one.tokens_per_expert) == (3, [2])
    assert sent.places[0].rank.tolist() == [[0, 1, 0], [1, -1, -1]]
    assert sent.places[1].rank.tolist() == [[-1, -1, -1]]
    answers = [oracle.Answer(f32([[1.0], [2.0]])), oracle.Answer(f32([[4.0], [8.0]]))]
    back = oracle.combine(sent, rules, answers)
    assert back[0].x.data.tolist() == [[1 + 4 + 2], [8]]
    assert back[1].x.data.tolist() == [[0]]  # all its routes were dropped

    assert dispatch(layout="expert", max_rows=2, exact=False)[1].too_many


def test_sums_are_fp32_in_slot_order():
    """Layout "rank": 2^24 at slot 0, then 1 and 1 would vanish one by one, not as 2."""
    rules = oracle.Rules(offsets=(0, 1, 2, 3), num_topk=3, max_tokens=1)
    ids = [np.array([[0, 1, 2]]), np.zeros((0, 3), int), np.zeros((0, 3), int)]
    given = [oracle.Tokens(zeros("float32", len(i), 1), Array(i, "int64")) for i in ids]

    def total(order) -> float:
        given[0] = oracle.Tokens(given[0].x, Array(np.array([order]), "int64"))
        rows = [oracle.Answer(f32([[v]])) for v in (2.0**24, 1.0, 1.0)]
        return oracle.combine(oracle.dispatch(given, rules), rules, rows)[0].x.data[0, 0]

    assert total([0, 1, 2]) == 2**24
    assert total([1, 2, 0]) == 2**24 + 2


def test_weights_multiply_without_fma_then_biases_then_one_rounding():
    rules = oracle.Rules(offsets=(0, 2), num_topk=2, max_tokens=2, layout="expert")
    ids = Array(np.array([[0, 1], [-1, -1]]), "int64")
    sent = oracle.dispatch([oracle.Tokens(zeros("float32", 2, 1), ids)], rules)
    a, b = np.float32(1 + 2**-12), np.float32(1 - 2**-12)
    answer = oracle.Answer(
        f32([[a], [-1.0]]),
        weights=f32([[b, 1.0], [np.nan, np.nan]]),
        bias=(f32([[2.0**-30], [5.0]]), f32([[2.0**-30], [-0.0]])),
        row_weights=f32([3.0, 4.0]),
    )
    back = oracle.combine(sent, rules, [answer])[0]
    assert back.x.data[0, 0] == np.float32(-(2.0**-24) + 2.0**-29)  # a * b = 1 - 2^-24
    assert back.x.data[1, 0] == 5  # no route: the biases alone
    assert back.topk_weights.data.tolist() == [[3, 4], [0, 0]]


def test_a_product_is_rounded_before_it_is_added():
    rules = oracle.Rules(offsets=(0, 2), num_topk=2, max_tokens=1, layout="expert")
    ids = Array(np.array([[0, 1]]), "int64")
    sent = oracle.dispatch([oracle.Tokens(zeros("float32", 1, 1), ids)], rules)
    w = np.float32(1 + 2**-23)
    # w * w = 1 + 2^-22 + 2^-46: the last term is lost before -1 is added, an fma would keep it.
    answer = oracle.Answer(f32([[-1.0], [w]]), weights=f32([[1.0, w]]))
    assert oracle.combine(sent, rules, [answer])[0].x.data[0, 0] == np.float32(2**-22)


def test_nobody_gives_exact_zero_and_a_single_term_keeps_its_sign():
    rules = oracle.Rules(offsets=(0, 1), num_topk=1, max_tokens=2)
    ids = Array(np.array([[0], [-1]]), "int64")
    sent = oracle.dispatch([oracle.Tokens(zeros("float32", 2, 1), ids)], rules)
    back = oracle.combine(sent, rules, [oracle.Answer(f32([[-0.0]]), out_dtype="bfloat16")])[0]
    assert back.x.data.tolist() == [[0x8000], [0]]


def test_nan_leaves_as_the_quiet_one():
    for dtype, nan in (("bfloat16", 0x7FC0), ("float16", 0x7E00), ("float32", 0x7FC00000)):
        negative = np.array([0xFFFFFFFF, 0xFF800001], np.uint32).view(np.float32)
        assert encode(negative, dtype).bits().tolist() == [nan, nan]


def test_quantise_by_hand():
    x = np.zeros((3, 256), np.float32)
    x[0, :4] = [448, -448, 1, np.nan]  # scale exactly 1
    x[0, 128:130] = [3, np.inf]  # amax is FLT_MAX
    x[1, 0] = 1e-6  # below 1e-4, which the scale follows
    x[2, 0] = 450  # just above: the power of two is the next
    codes, scales = oracle.quantise(x, "fp8_block128")
    assert codes.data[0, :4].tolist() == [0x7E, 0xFE, 0x38, 0x7F]
    assert codes.data[0, 128:130].tolist() == [0, 0x7E]
    assert scales.data[0, 0] == 1
    assert scales.data[1].tolist() == [np.float32(1e-4) / np.float32(448)] * 2
    _, pow2 = oracle.quantise(x, "fp8_block128_pow2")
    assert pow2.data[:, 0].tolist() == [1, 2**-22, 2]
    _, packed = oracle.quantise(x, "fp8_block128_ue8m0")
    assert packed.shape == (3, 1)
    # Bytes: exponents of groups 0 and 1, then 127 for "no group".
    assert packed.data[2, 0] == 0x7F7F0000 | (127 - 22) << 8 | (127 + 1)


def test_e4m3fn_is_pytorchs():
    torch = pytest.importorskip("torch")
    codes = np.arange(256, dtype=np.uint8)
    values = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(e4m3_decode(codes), values, equal_nan=True)
    numbers = values[np.isfinite(values)].astype(np.float64)
    positive = np.sort(numbers[numbers >= 0])
    middles = (positive[1:] + positive[:-1]) / 2
    edges = np.concatenate([numbers, middles, -middles]).astype(np.float32)
    around = [edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(500))]
    edges = np.clip(np.concatenate(around), -448, 448)
    want = torch.from_numpy(edges).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(e4m3_encode(edges), want)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_halves_are_pytorchs(dtype):
    """Every code, every midpoint of neighbours, and what lies next to it."""
    torch = pytest.importorskip("torch")
    half = getattr(torch, dtype)
    codes = np.arange(0x10000, dtype=np.uint16).view(np.int16)
    values = torch.from_numpy(codes).view(half).float().numpy()
    values = values[np.isfinite(values)]
    middles = (np.sort(values)[1:] / 2 + np.sort(values)[:-1] / 2).astype(np.float32)
    edges = np.concatenate([values, middles, np.nextafter(middles, np.float32(np.inf))])
    want = torch.from_numpy(edges).to(half)
    expect_same(dtype, want, encode(edges, dtype))
    expect_same(dtype, want.float(), Array(encode(edges, dtype).values(), "float32"))


def test_ids_of_every_routing_are_ids():
    offsets = (0, 0, 5, 7)
    for routing in ROUTINGS:
        for k in (1, 3, 9):
            ids = draw_ids(routing, 1, 50, k, offsets, seed=3)
            assert ids.shape == (50, k) and ids.min() >= -1 and ids.max() < 7
            assert np.array_equal(ids, draw_ids(routing, 1, 50, k, offsets, seed=3))


@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_route_of_a_trip_arrives_once(layout, routing):
    """Seen from both ends: places lead to rows that name the token, and nothing else is live."""
    case = Case(
        num_tokens=(5, 0, 7), num_experts=7, num_topk=4, hidden=8, routing=routing, layout=layout
    )
    trip = make_trip(case)
    used = [set() for _ in trip.tokens]
    for rank, places in enumerate(trip.sent.places):
        ids = trip.tokens[rank].idx.data
        assert np.array_equal(places.rank >= 0, ids >= 0)
        for token, slot in np.argwhere(places.rank >= 0).tolist():
            to, row = places.rank[token, slot], places.row[token, slot]
            used[to].add(int(row))
            received = trip.sent.received[to]
            assert received.source.data[row].tolist() == [rank, token]
            id = received.idx.data[row] if layout == "expert" else received.idx.data[row, slot]
            assert id + trip.rules.offsets[to] == ids[token, slot]
            assert np.array_equal(received.x.data[row], trip.tokens[rank].x.data[token])
    assert [len(rows) for rows in used] == [r.num_rows for r in trip.sent.received]
