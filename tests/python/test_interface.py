"""Promises of the interface that an outside reader found broken; each test names the call."""

import pickle

import numpy as np
import pytest
import torch

import ep
from python.fault_support import (
    BY_EXPERT,
    DEFAULT,
    answer,
    caught,
    combine,
    dispatch,
    exact_again,
    run,
    says,
)

pytestmark = pytest.mark.torch_versions


@pytest.mark.parametrize("job", [DEFAULT, BY_EXPERT], ids=["rank", "expert"])
def test_a_handle_of_another_rank_is_refused(job):
    """A pickled handle taken to a rank with as many tokens and rows gave wrong sums in silence."""
    pickles = {}

    def rank(buf):
        handle = dispatch(buf, job).handle
        pickles[buf.rank] = pickle.dumps(handle)
        exact_again(buf)  # all ranks have put theirs there
        foreign = pickle.loads(pickles[1 - buf.rank])
        rows = answer(buf, job, foreign.num_rows_total)
        error = caught(ep.InvalidArgument, lambda: buf.combine(rows, foreign))
        says(error, f"rank {1 - buf.rank}", f"rank {buf.rank}")
        exact_again(buf)
        combine(buf, job, handle)

    run(rank, 2)


@pytest.mark.parametrize("dtype", ["uint64", "complex64", "complex128", "int16", "bool"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_extras_of_any_dtype_travel(dtype, library):
    values = np.arange(6).reshape(2, 3)

    def rank(buf):
        x = np.ones((2, 8), np.float32)
        topk_idx = np.array([[buf.rank], [1 - buf.rank]])
        extra = (values + 10 * buf.rank).astype(dtype)
        if library == "torch":
            x, topk_idx = torch.from_numpy(x), torch.from_numpy(topk_idx)
            extra = torch.from_numpy(extra)
        out = buf.dispatch(x, topk_idx, extras=[extra], expert_alignment=1)
        got, source = np.asarray(out.extras[0]), np.asarray(out.source)
        assert str(got.dtype) == dtype
        want = [(values[token] + 10 * rank).astype(dtype) for rank, token in source]
        np.testing.assert_array_equal(got, want)

    run(rank, 2, num_experts=2, num_topk=1, hidden=8)


def test_torch_s_streams_of_the_cpu_stand_for_the_calling_thread():
    def rank(buf):
        for stream in (torch.Stream("cpu"), torch.cpu.current_stream()):
            out = dispatch(buf, stream=stream)
            out.record_stream(stream)
            out.event.wait(stream)
        exact_again(buf)

    run(rank, 1)


def test_warm_takes_what_calls_take_and_refuses_what_they_refuse():
    def rank(buf):
        buf.warm(layout="expert", quant="fp8_block128", async_op=True, weights=None)
        for reserved in (
            {"mode": "latency"},
            {"layout": "batched"},
            {"quant": "mxfp8"},
            {"split": True},
            {"ready": object()},
        ):
            caught(ep.Unsupported, lambda arguments=reserved: buf.warm(**arguments))
        says(caught(TypeError, lambda: buf.warm(no_such=1)), "no_such")
        exact_again(buf)

    run(rank, 2)


def test_max_rows_knows_its_bounds():
    def rank(buf):
        assert buf.max_rows("rank", 1) == buf.num_ranks
        caught(ep.InvalidArgument, lambda: buf.max_rows("rank", 10**6))
        caught(ep.Unsupported, lambda: buf.max_rows("batched"))

    run(rank, 2)


def test_an_arena_too_small_says_which_size_would_do():
    def rank(buf):
        x = np.ones((64, 64), np.float32)
        everything_to_0 = np.zeros((64, 1), np.int64)
        error = caught(ep.CapacityError, lambda: buf.dispatch(x, everything_to_0))
        says(error, "rank 0", f"raise arena_bytes by {error.needed - error.available}")

    sizes = {"num_experts": 2, "num_topk": 1, "hidden": 64, "max_tokens_per_rank": 64}
    run(rank, 2, arena_bytes=4096, **sizes)


@pytest.mark.parametrize("name", ["async_op", "bias", "expert_offsets", "num_sms", "timeout_s"])
def test_supports_knows_every_argument(name):
    assert ep.supports("cpu", **{name: 1})


def test_bytes_needed_takes_the_arguments_of_the_constructor():
    comm = ep.Communicator.single()
    sizes = {"num_experts": 2, "num_topk": 1, "hidden": 64, "max_tokens_per_rank": 64}
    assert ep.EPBuffer.bytes_needed(comm, num_ranks=1, **sizes).total > 0
