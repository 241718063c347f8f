"""Memory that is used again: soaks with skewed ranks, freed inputs and extreme settings."""

import random
import time

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


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_zeros_and_ones_to_8_experts_of_rank_0_come_back_as_8_times_x(layout):
    """Random rows were wrong when a stage was reused too early (DeepEP 621, nccl-extensions 8)."""
    tokens, hidden = 32, 64

    def rank(buf):
        rng = np.random.default_rng(buf.rank)
        ids = np.tile(np.arange(8), (tokens, 1))
        for _ in range(1024):
            x = rng.integers(0, 2, (tokens, hidden)).astype(np.float32)
            out = buf.dispatch(x, ids, layout=layout)
            rows = np.asarray(out.x)
            if layout == "rank":  # a row stands for all local experts of its token
                rows = rows * (np.asarray(out.topk_idx) >= 0).sum(axis=1, keepdims=True)
            y = buf.combine(rows.astype(np.float32), out.handle)
            np.testing.assert_array_equal(np.asarray(y.x), 8 * x)

    run(rank, 2, num_experts=16, num_topk=8, hidden=hidden, max_tokens_per_rank=tokens)


def test_24_workers_of_4_ranks_at_once():
    """Concurrent submission to one queue pair lost signals (DeepEP 181, 488)."""
    tokens, hidden = 1024, 64

    def rank(buf):
        rng = np.random.default_rng(buf.rank)
        x = rng.integers(-8, 8, (tokens, hidden)).astype(np.float32)
        for i in range(20):
            ids = (np.arange(tokens)[:, None] + 2 * np.arange(4) + i) % 8
            out = buf.dispatch(x, ids, num_sms=24, layout="expert")
            assert out.num_rows == 4 * tokens
            y = buf.combine(out.x, out.handle, num_sms=24)
            np.testing.assert_array_equal(np.asarray(y.x), 4 * x)

    run(rank, 4, num_experts=8, num_topk=4, hidden=hidden, max_tokens_per_rank=tokens)


@pytest.mark.parametrize("in_window", [False, True], ids=["ordinary", "expert_output"])
def test_a_fast_rank_does_not_overtake_a_slow_one(in_window):
    """A fast rank's combine overwrote what a slow one still copied from (mori 80)."""

    def rank(buf):
        rng = random.Random(7)
        for i in range(500):
            job = Job(1 + i % 12, shift=i, layout=("rank", "expert")[i % 2])
            if buf.rank == 1:
                time.sleep(rng.uniform(0, 0.005))  # the slowness itself
            out = dispatch(buf, job)
            if buf.rank == 1 and i % 3 == 0:
                time.sleep(rng.uniform(0, 0.005))
            rows = answer(buf, job)
            if in_window:
                window = buf.expert_output(out.handle, dtype="float32")
                np.asarray(window)[:] = rows
                rows = window
            y = combine(buf, job, out.handle, x=rows)
            check_received(buf, job, out)
            check_combined(buf, job, y)

    run(rank, 2)


def test_inputs_are_overwritten_and_freed_right_after_the_local_wait():
    """Random corruption from 128 tokens a rank, after a local sync (mori 610, 342)."""

    def rank(buf):
        rng = random.Random(11 + buf.rank)
        for i in range(300):
            job = Job(128, shift=i, equal=True, layout=("rank", "expert")[i % 2])
            arguments = call(buf, job, async_op=True)
            out = buf.dispatch(**arguments)
            out.inputs_done.synchronize()
            for array in (arguments["x"], arguments["topk_idx"], arguments["topk_weights"]):
                array[:] = -7
            del arguments, array
            if rng.random() < 0.3:
                time.sleep(rng.uniform(0, 0.003))
            back = combine_call(buf, job, out.handle, async_op=True)
            y = buf.combine(**back)
            y.event.synchronize()
            back["x"][:] = np.nan
            del back
            check_received(buf, job, out)
            check_combined(buf, job, y)

    run(rank, 2, max_tokens_per_rank=128)


def test_skewed_routing_of_2304_tokens_counts_as_numpy_counts():
    """The receive count was 9181 instead of 6888 (DeepEP 427)."""
    tokens, experts, topk = 2304, 64, 8

    def ids_of(rank, seed):
        rng = np.random.default_rng((seed, rank))
        weights = rng.lognormal(0, 3, experts)  # most of the mass on a few experts
        keys = rng.random((tokens, experts)) ** (1 / (weights / weights.max() + 1e-9))
        return np.argsort(-keys, axis=1)[:, :topk].astype(np.int64)

    def rank(buf):
        begin, end = buf.expert_offsets[buf.rank], buf.expert_offsets[buf.rank + 1]
        for seed in range(3):
            everybody = np.stack([ids_of(r, seed) for r in range(buf.num_ranks)])
            counts = np.bincount(everybody.ravel(), minlength=experts)[begin:end]
            here = ((everybody >= begin) & (everybody < end)).any(axis=2).sum(axis=1)
            x = np.zeros((tokens, 8), np.float32)
            out = buf.dispatch(x, everybody[buf.rank])
            assert list(out.tokens_per_expert) == counts.tolist()
            np.testing.assert_array_equal(
                np.asarray(out.rank_offsets), np.concatenate([[0], np.cumsum(here)])
            )
            assert out.num_rows == here.sum()
            out = buf.dispatch(x, everybody[buf.rank], layout="expert")
            assert list(out.tokens_per_expert) == counts.tolist()
            np.testing.assert_array_equal(
                np.asarray(out.expert_offsets), np.concatenate([[0], np.cumsum(counts)])
            )
            assert out.num_rows == counts.sum()

    sizes = {"num_experts": experts, "num_topk": topk, "hidden": 8}
    run(rank, 2, max_tokens_per_rank=tokens, **sizes)


def test_fifty_runs_in_random_order_are_equal_bit_for_bit():
    """Unit tests that failed now and then (Mooncake 1999): each variant runs 50 times."""
    variants = [
        {"layout": layout, "exact": exact, "outputs": outputs, "num_sms": num_sms}
        for layout in ("rank", "expert")
        for exact in (True, False)
        for outputs in ("window", "caller")
        for num_sms in (1, 3)
    ]

    def rank(buf):
        rng = np.random.default_rng(3)
        x = rng.standard_normal((16, 32)).astype(np.float32)
        ids = rng.integers(-1, 6, (16, 2))
        weights = rng.random((16, 2)).astype(np.float32)
        seen = {}
        order = list(range(len(variants))) * 50
        random.Random(5).shuffle(order)
        for i in order:
            out = buf.dispatch(x, ids, weights, **variants[i])
            used = int(np.asarray(out.num_rows_device)[0])
            by_expert = variants[i]["layout"] == "expert"
            y = buf.combine(out.x, out.handle, weights=weights if by_expert else None)
            got = [
                np.asarray(a)[:used].tobytes()
                for a in (out.x, out.topk_idx, out.topk_weights, out.source)
            ]
            got.append(np.asarray(y.x).tobytes())
            # Neither sizes, nor outputs' place, nor the number of workers may show in a bit.
            assert seen.setdefault(by_expert, got) == got

    run(rank, 3)


# (what is set when the buffer is made, what its error says if it may be refused)
TUNABLES = [
    ({"num_sms": 1}, None),
    ({"num_sms": 64}, None),
    ({"num_sms": 0}, "num_sms"),
    ({"num_sms": 65}, "num_sms"),
    ({"num_qps": 0}, "num_qps"),
    ({"num_qps": 1}, None),
    ({"num_regions": 0}, "num_regions"),
    ({"num_regions": 1}, None),
    ({"max_latency_tokens": 0}, "max_latency_tokens"),
    ({"max_latency_tokens": 1}, None),
    ({"timeout_s": 0}, "timeout_s"),
    ({"timeout_s": 1e6}, None),
    ({"arena_bytes": 0}, "arena_bytes"),
    ({"arena_bytes": 1}, "arena"),
    ({"token_bytes": 0}, "token_bytes"),
    ({"token_bytes": 1}, "token_bytes"),
    ({"output_bytes": 0}, "output_bytes"),
    ({"output_bytes": 1}, "output_bytes"),
    ({"ranks_per_node": 0}, "ranks_per_node"),
    ({"ranks_per_node": 2}, None),
    ({"max_tokens_per_rank": 0}, "max_tokens_per_rank"),
    ({"num_topk": 0}, "num_topk"),
    ({"hidden": 0}, "hidden"),
    ({"num_experts": 0}, "num_experts"),
    ({"num_experts": 4097}, "num_experts"),
    ({"num_sms": -1}, "num_sms"),
    ({"arena_bytes": -1}, "arena_bytes"),
    ({"max_tokens_per_rank": 2**40}, "max_tokens_per_rank"),
]


@pytest.mark.parametrize(("options", "word"), TUNABLES, ids=lambda value: str(value))
def test_extreme_settings_are_right_or_refused_by_name(options, word):
    """Zero queue pairs took a path that was 99.97 % wrong (awsome-distributed-ai 1234)."""

    def rank(comm):
        try:
            with make_buffer(comm, **options) as buf:
                round_trip(buf)
                round_trip(buf, BY_EXPERT)
        except (ep.InvalidArgument, ep.CapacityError) as error:
            assert word is not None, error
            says(error, word)

    ep.testing.run(rank, 2)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"num_sms": 1}, None),
        ({"num_sms": 64}, None),
        ({"num_sms": 0}, "num_sms"),
        ({"num_qps": 0}, "num_qps"),
        ({"num_qps": 1}, None),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_rows": 0}, "max_rows"),
        ({"max_rows": 1, "overflow": "drop"}, None),
        ({"expert_alignment": 0, "layout": "expert"}, "expert_alignment"),
        ({"expert_alignment": 1, "layout": "expert"}, None),
        ({"expert_alignment": 1 << 16, "layout": "expert"}, None),
    ],
    ids=lambda value: str(value),
)
def test_extreme_settings_of_a_call_are_right_or_refused_by_name(options, word):
    def rank(buf):
        try:
            out = dispatch(buf, **options)
            used = int(np.asarray(out.num_rows_device)[0])
            assert used <= len(np.asarray(out.x))
            valid = np.asarray(out.source)[:, 0] >= 0
            source = np.asarray(out.source)[valid]
            want = 1.0 + 32 * source[:, 0] + source[:, 1]
            np.testing.assert_array_equal(np.asarray(out.x)[valid][:, 0], want)
        except (ep.InvalidArgument, ep.CapacityError) as error:
            assert word is not None, error
            says(error, word)
        round_trip(buf, DEFAULT)

    run(rank, 2, arena_bytes=1 << 27)
