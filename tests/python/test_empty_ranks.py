"""Ranks that send or receive nothing; user-report numbers stand in brackets."""

import subprocess
import sys
import textwrap

import pytest

from python.compare import expect_combined, expect_received
from python.ranks import LAYOUTS, round_trip, run_cases, with_buffers
from python.trip import Case, combine_args, dispatch_args, make_trips

SHAPE = {"num_experts": 4, "num_topk": 2, "hidden": 128}


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_without_tokens(layout, kind):
    """[C1] T = [0, 2]: rank 0 gets its rows, and a [0, H] combine result."""
    run_cases(Case(num_tokens=(0, 2), **SHAPE, layout=layout, kind=kind))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_of_16_ranks_has_a_token(layout):
    """[C2] R = 16, E = 16, K = 8, T = [1, 0, .., 0]."""
    run_cases(Case(num_tokens=(1, *[0] * 15), num_experts=16, num_topk=8, hidden=8, layout=layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_idle_rank_rotates(layout):
    """[C3] A rank with nothing to send still takes part in the call."""
    counts = [(0, 2, 3), (2, 0, 3), (2, 3, 0)]
    run_cases([Case(num_tokens=t, **SHAPE, layout=layout) for t in counts])


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nobody_routes_to_rank_1(layout, exact):
    """[C4, C5] Dispatch, replayed dispatch and combine, 100 rounds."""
    rounds = 100
    shape = {**SHAPE, "offsets": (0, 4, 4), "exact": exact, "row_weights": True, "layout": layout}
    (trip,) = make_trips([Case(num_tokens=(3, 5), **shape)])

    def body(buf):
        rank = buf.rank
        for _ in range(rounds):
            out = round_trip(buf, trip)
            replay = buf.dispatch(dispatch_args(trip, rank)["x"], handle=out.handle)
            expect_received(replay, trip.sent.received[rank], trip.rules)
            y = buf.combine(handle=replay.handle, **combine_args(trip, rank))
            expect_combined(y, trip.back[rank])
        return out.num_rows if exact else int(out.num_rows_device[0])

    assert with_buffers(trip, body)[1] == 0


@pytest.mark.parametrize("num_tokens", [(0, 0), (0, 1), (1, 0)])
@pytest.mark.parametrize("quant", [None, "fp8_block128", "fp8_block128_ue8m0"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_mode_without_tokens(layout, quant, num_tokens):
    """[C7] Both layouts, fp8, exact and fixed sizes, with no token at all or a single one."""
    shape = {**SHAPE, "quant": quant, "layout": layout, "row_weights": True}
    alignment = 4 if layout == "expert" else 1
    run_cases(
        [
            Case(
                num_tokens=num_tokens, **shape, exact=exact, alignment=alignment, bias=("float32",)
            )
            for exact in (True, False)
        ]
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nobody_routes_anywhere(layout):
    """[C4, C7] All ids are -1: nobody receives, combine gives exact zeros, or the bias."""
    shape = {**SHAPE, "routing": "nobody", "layout": layout}
    run_cases([Case(num_tokens=(3, 4), **shape, bias=bias) for bias in ((), ("bfloat16",))])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_expert_here(layout):
    """[C4] More ranks than experts: the last rank can never receive."""
    cases = [
        Case(num_tokens=(2, 2, 2), num_experts=2, num_topk=2, hidden=8, layout=layout, exact=exact)
        for exact in (True, False)
    ]
    run_cases(cases)
    run_cases(cases, in_window=True)


def test_no_division_by_a_count_of_zero():
    """[C9] T = 0, zero rows and zero groups with division traps switched on."""
    program = """
        import ctypes, ctypes.util
        import numpy as np, ep
        FE_DIVBYZERO = 4  # x86-64
        libm = ctypes.CDLL(ctypes.util.find_library("m"))
        assert libm.feenableexcept(FE_DIVBYZERO) >= 0  # threads inherit it
        buf = ep.EPBuffer(
            ep.Communicator.single(), num_experts=2, num_topk=1, hidden=128, max_tokens_per_rank=2
        )
        for tokens in (0, 2):
            x, ids = np.zeros((tokens, 128), np.float32), np.zeros((tokens, 1), np.int64)
            for layout in ("rank", "expert"):
                for quant in (None, "fp8_block128", "fp8_block128_ue8m0"):
                    for exact in (True, False):
                        out = buf.dispatch(x, ids, layout=layout, quant=quant, exact=exact)
                        rows = np.zeros(out.x.shape, np.float32)
                        assert buf.combine(rows, out.handle).x.shape == (tokens, 128)
        buf.close()
        print("no trap")
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "no trap", (done.returncode, done.stderr)


def test_the_numbers_of_a_rank_that_gets_nothing():
    """[C4] Counts are zeros and empty tensors, not None."""

    (trip,) = make_trips([Case(num_tokens=(3, 0), **SHAPE, offsets=(0, 4, 4))])

    def body(buf):
        out = buf.dispatch(**dispatch_args(trip, buf.rank))
        return out.num_rows, out.tokens_per_expert, tuple(out.x.shape), out.expert_offsets.tolist()

    assert with_buffers(trip, body)[1] == (0, [], (0, 128), [0])
