"""Numbers past 16, 31 and 32 bits; user-report numbers stand in brackets."""

import numpy as np
import pytest

import ep
from python.compare import bits_of, expect_combined, expect_received
from python.ranks import LAYOUTS, round_trip, run_cases, run_ranks, with_buffers
from python.routing import seeded
from python.trip import Case, combine_args, dispatch_args, make_trip

SHAPE = {"num_experts": 384, "num_topk": 8, "hidden": 7168}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("exact", [True, False])
def test_more_tokens_than_16_bits_count(layout, exact):
    """[M2] T = 65537 on two ranks, H = 8."""
    shape = {"num_experts": 4, "num_topk": 2, "hidden": 8, "layout": layout, "exact": exact}
    run_cases(Case(num_tokens=(65537, 65537), **shape, kind="numpy"))


def test_more_tokens_than_16_bits_count_all_to_one():
    """[M2, M3] 65537 identical routes to one expert, and replayed."""
    shape = {"num_experts": 2, "num_topk": 1, "hidden": 8, "layout": "expert"}
    trip = make_trip(Case(num_tokens=(65537, 1), **shape, routing="one_expert", kind="numpy"))

    def body(buf):
        rank = buf.rank
        out = round_trip(buf, trip)
        replay = buf.dispatch(dispatch_args(trip, rank)["x"], handle=out.handle)
        expect_received(replay, trip.sent.received[rank], trip.rules)
        y = buf.combine(handle=replay.handle, **combine_args(trip, rank))
        expect_combined(y, trip.back[rank])

    with_buffers(trip, body)


@pytest.mark.parametrize("past", [2**31, 2**32, 2**36])
def test_sizes_are_64_bit_and_monotone(past):
    """[M1, M4] Around a size that 31 or 32 bits, or bytes / 16 in 31 bits, cannot hold."""

    def total(max_tokens: int) -> int:
        args = {**SHAPE, "max_tokens_per_rank": max_tokens}
        return ep.EPBuffer.bytes_needed(num_ranks=8, **args).total

    low, high = 1, 2**16
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if total(middle) > past else (middle, high)
    around = [total(n) for n in range(max(1, low - 2), high + 3)]
    assert around == sorted(set(around)) and around[0] <= past < around[-1]
    steps = np.diff(around)
    assert steps.max() < 2 * steps.min()  # no jump: nothing wrapped


def test_more_experts_or_slots_need_more_or_equal():
    """[M4, N2] Redundant experts (448 for 384) and K = 32 for 8 never shrink the hint."""
    args = {**SHAPE, "max_tokens_per_rank": 2048, "num_ranks": 8}
    less = ep.EPBuffer.bytes_needed(**args).total
    assert less <= ep.EPBuffer.bytes_needed(**{**args, "num_experts": 448}).total
    assert less < ep.EPBuffer.bytes_needed(**{**args, "num_topk": 32}).total


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        ({"max_tokens_per_rank": 2**28 - 1}, ("bytes", "max_tokens_per_rank=268435455")),
        ({"max_tokens_per_rank": 2**31}, ("max_tokens_per_rank=2147483648", "268435455")),
        ({"hidden": 2**24 + 1}, ("hidden=16777217", "16777216")),
        ({"num_experts": 4097}, ("num_experts=4097", "4096")),
        ({"num_topk": 33}, ("num_topk=33", "32")),
        ({"num_experts": 0}, ("num_experts=0",)),
        ({"hidden": 0}, ("hidden=0",)),
        ({"max_tokens_per_rank": 0}, ("max_tokens_per_rank=0",)),
        ({"max_tokens_per_rank": -1}, ("max_tokens_per_rank",)),
        ({"num_experts": -4}, ("num_experts",)),
        ({"max_tokens_per_rank": 2**64}, ("max_tokens_per_rank",)),
        ({"arena_bytes": 2**62}, ("arena", str(2**62))),
    ],
)
def test_what_cannot_be_addressed_is_refused(change, texts):
    """[M4] Above a limit: an error with the value and the limit, before memory is asked for."""
    args = {**SHAPE, "max_tokens_per_rank": 128, "num_ranks": 8, **change}
    with pytest.raises(ep.InvalidArgument) as caught:
        ep.EPBuffer.bytes_needed(**args)
    assert all(text in str(caught.value) for text in texts), caught.value


def test_more_rows_than_31_bits_count_are_refused():
    """[M4] A fixed size of 2^31 rows or more: refused with the number, nothing is allocated."""
    trip = make_trip(Case(num_tokens=(2, 2), num_experts=4, num_topk=2, hidden=8, layout="expert"))

    def body(buf):
        args = dispatch_args(trip, buf.rank) | {"expert_alignment": 2**31 - 1, "exact": False}
        with pytest.raises(ep.InvalidArgument, match="2147483647"):
            buf.dispatch(**args)
        round_trip(buf, trip)

    with_buffers(trip, body)


NUM_RANKS, NUM_TOKENS, HIDDEN = 4, 131_073, 4096


def overlapping_rows(rank: int) -> np.ndarray:
    """[T, H] bf16 bits; row t starts 8 elements after row t - 1, so all differ in 2 MB."""
    size, infinity = 8 * NUM_TOKENS + HIDDEN, 0x7F80  # of NaN, combine keeps no payload
    line = seeded(7, rank).integers(infinity, size=size, dtype=np.uint16)
    return np.lib.stride_tricks.as_strided(line, (NUM_TOKENS, HIDDEN), (16, 2))


def available_gigabytes() -> float:
    with open("/proc/meminfo", encoding="ascii") as lines:  # noqa: PTH123 (no real file)
        kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return kilobytes["MemAvailable"] * 1024 / 1e9


def test_four_gigabytes_to_one_rank(big):
    """[M3] 4 ranks x 131073 tokens of H = 4096 in bf16, all to rank 0: more than 2^31 elements."""
    if available_gigabytes() < 16:
        pytest.skip(f"needs 16 GB of memory, {available_gigabytes():.1f} are available")
    args = {"num_experts": 4, "num_topk": 1, "hidden": HIDDEN, "max_tokens_per_rank": NUM_TOKENS}
    row_bytes = 2 * HIDDEN
    ids = np.zeros((NUM_TOKENS, 1), np.int32)

    def in_rank(comm):
        x = overlapping_rows(comm.rank)
        sizes = {"token_bytes": row_bytes, "output_bytes": row_bytes, "outputs": "window"}
        with ep.EPBuffer(comm, **args, **sizes, num_regions=1) as buf:
            out = buf.dispatch(x, ids)
            if comm.rank == 0:
                assert out.num_rows == NUM_RANKS * NUM_TOKENS
                assert out.num_rows * HIDDEN > 2**31
                for source in range(NUM_RANKS):
                    rows = out.x[source * NUM_TOKENS : (source + 1) * NUM_TOKENS]
                    _expect_equal_rows(rows, overlapping_rows(source))
            y = buf.combine(out.x, out.handle)  # an identity expert, in place
            _expect_equal_rows(y.x, x)
            return out.num_rows

    assert run_ranks(in_rank, NUM_RANKS, timeout_s=600) == [NUM_RANKS * NUM_TOKENS, 0, 0, 0]


def _expect_equal_rows(got, want: np.ndarray) -> None:
    """In slices, since a comparison of all would take another gigabyte."""
    assert got.shape == want.shape
    for first in range(0, len(want), 4096):
        part = slice(first, first + 4096)
        assert np.array_equal(bits_of(got[part]), want[part]), first
