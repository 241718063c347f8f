"""Duplicates, fixed order, skew and long sums; user-report numbers stand in brackets."""

import threading

import numpy as np
import pytest

from python.compare import bits_of
from python.ranks import LAYOUTS, round_trip, run_cases, with_buffers
from python.routing import seeded
from python.trip import Case, combine_args, dispatch_args, make_trip, with_ids


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("exact", [True, False])
def test_the_same_expert_twice_in_a_row_counts_twice(layout, exact):
    """[T1] topk_idx [[3, 3], [0, 0], [3, 0]]: legal, each slot on its own."""
    shape = {"num_experts": 4, "num_topk": 2, "hidden": 16, "layout": layout, "exact": exact}
    trip = make_trip(Case(num_tokens=(3, 3), **shape, row_weights=True))
    trip = with_ids(trip, [[[3, 3], [0, 0], [3, 0]]] * 2)

    def body(buf):
        return round_trip(buf, trip).tokens_per_expert_device.tolist()

    assert with_buffers(trip, body) == [[6, 0], [0, 6]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_twenty_runs_are_equal_bytes(layout):
    """[T2] Random delays on every rank: rows, their order and sums do not change by a bit."""
    shape = {"num_experts": 9, "num_topk": 4, "hidden": 64, "layout": layout, "row_weights": True}
    trip = make_trip(Case(num_tokens=(64, 64, 1), **shape, routing="skewed"))
    tensors = ("x", "topk_idx", "topk_weights", "source", "expert_offsets")

    def body(buf):
        delays = seeded(9, buf.rank).exponential(0.001, (20, 2))
        seen = set()
        for before_dispatch, before_combine in delays:
            threading.Event().wait(before_dispatch)  # perturbs, synchronises nothing
            out = buf.dispatch(**dispatch_args(trip, buf.rank))
            threading.Event().wait(before_combine)
            y = buf.combine(handle=out.handle, **combine_args(trip, buf.rank))
            results = [*(getattr(out, name) for name in tensors), y.x, y.topk_weights]
            seen.add(b"".join(bits_of(t).tobytes() for t in results))
        return len(seen)

    assert with_buffers(trip, body) == [1, 1, 1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(4))
def test_log_normal_popularity(layout, seed):
    """[T3, G7] A few experts take nearly everything; counts and rows are the oracle's."""
    shape = {"num_experts": 32, "num_topk": 4, "hidden": 16, "layout": layout, "row_weights": True}
    cases = [
        Case(num_tokens=(97, 31, 64, 3), **shape, routing="skewed", seed=seed, exact=exact)
        for exact in (True, False)
    ]
    counts = np.concatenate([r.tokens_per_expert for r in make_trip(cases[0]).sent.received])
    assert counts.max() > 4 * counts.mean()  # skewed indeed
    run_cases(cases)


@pytest.mark.parametrize("routing", ["uniform", "duplicates", "mixed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_are_in_slot_order(layout, routing):
    """[T2, T4] fp32 rows, of which every order of adding gives another sum; and biases last."""
    shape = {"num_experts": 8, "num_topk": 10, "hidden": 16, "layout": layout, "routing": routing}
    fp32 = {"x_dtype": "float32", "answer_dtype": "float32", "bias": ("float32", "float32")}
    weights = layout == "expert"
    run_cases(
        [
            Case(num_tokens=(20, 7, 12, 1), **shape, **fp32, seed=seed, combine_weights=weights)
            for seed in range(3)
        ]
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_long_sums_are_fp32(layout):
    """[T4] 1 and then 31 times 2^-8: bf16 additions would stay at 1, fp32 gives 1 + 31/256."""
    num_ranks = 32 if layout == "rank" else 1
    shape = {"num_experts": 32, "num_topk": 32, "hidden": 8, "layout": layout, "kind": "numpy"}
    trip = make_trip(Case(num_tokens=(1,) + (0,) * (num_ranks - 1), **shape, out_dtype="float32"))
    trip = with_ids(trip, [np.arange(32)] + [np.zeros((0, 32))] * (num_ranks - 1))

    def body(buf):
        out = buf.dispatch(**dispatch_args(trip, buf.rank))
        expert = out.topk_idx.max(axis=1) if layout == "rank" else out.topk_idx
        one, small = np.uint16(0x3F80), np.uint16(0x3B80)  # bf16 of 1 and 2^-8
        is_first = (expert + buf.local_experts.start == 0)[:, None]
        rows = np.broadcast_to(np.where(is_first, one, small), (len(expert), 8))
        return buf.combine(np.ascontiguousarray(rows), out.handle, out_dtype="float32").x

    assert with_buffers(trip, body)[0].tolist() == [[1 + 31 / 256] * 8]
