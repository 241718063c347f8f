"""dispatch(out=) and output_spec: results in arrays that the caller brings."""

import itertools

import numpy as np
import pytest
import torch

import ep
from python.compare import expect_received
from python.fault_support import call, caught, exact_again, refused, run, says
from python.ranks import LAYOUTS, with_buffers
from python.trip import Case, dispatch_args, make_trip

NAMES = (
    "x",
    "scales",
    "topk_idx",
    "topk_weights",
    "source",
    "num_rows_device",
    "rows_needed_device",
    "tokens_per_expert_device",
    "expert_offsets",
    "rank_offsets",
    "status",
)


def numpy_array(spec: ep.TensorSpec) -> np.ndarray:
    """numpy has no bfloat16 and no 8-bit floats: unsigned integers hold their bits."""
    bits = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"}
    dtype = np.dtype(bits.get(spec.dtype, spec.dtype))
    memory = np.zeros(spec.shape[0] * max(spec.strides[0], 1), dtype)
    strides = [stride * dtype.itemsize for stride in spec.strides]
    return np.lib.stride_tricks.as_strided(memory, spec.shape, strides, writeable=True)


def torch_array(spec: ep.TensorSpec) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.strides, dtype=getattr(torch, spec.dtype))


ARRAYS = {"numpy": numpy_array, "torch": torch_array}


def made(spec: dict, kind: str) -> dict:
    """Arrays for all results."""
    make = ARRAYS[kind]
    return {
        name: [make(one) for one in value] if name == "extras" else make(value)
        for name, value in spec.items()
    }


def address(array) -> int:
    return array.data_ptr() if isinstance(array, torch.Tensor) else array.ctypes.data


@pytest.mark.parametrize(
    ("kind", "layout", "exact", "quant"),
    itertools.product(ARRAYS, LAYOUTS, (True, False), (None, "fp8_block128_ue8m0")),
)
def test_every_result_lands_in_the_callers_array(kind, layout, exact, quant):
    case = Case(
        num_tokens=(9, 0, 4),
        num_experts=5,
        num_topk=3,
        hidden=128,
        kind=kind,
        layout=layout,
        exact=exact,
        quant=quant,
        extras=(("int16", (3,)),),
        seed=7,
    )
    trip = make_trip(case)

    def rank(buf):
        args = dispatch_args(trip, buf.rank)
        spec = buf.output_spec(**args)
        assert set(spec) - {"extras"} == {
            name for name in NAMES if getattr(buf.dispatch(**args), name) is not None
        }
        given = made(spec, kind)
        out = buf.dispatch(**args, out=given)
        expect_received(out, trip.sent.received[buf.rank], trip.rules)
        for name, array in given.items():
            for mine, theirs in zip(
                array if name == "extras" else [array],
                getattr(out, name) if name == "extras" else [getattr(out, name)],
                strict=True,
            ):
                if len(theirs):
                    assert address(mine) == address(theirs), name
                assert (mine is theirs) == (len(mine) == len(theirs)), name
        handle = out.handle
        again = buf.output_spec(args["x"], handle=handle, extras=args["extras"], quant=quant)
        assert again["x"].shape[0] == len(out.x)

    with_buffers([trip], rank)


def test_a_part_of_the_results_and_the_rest_as_ever():
    def rank(buf):
        x = torch.full((3, 32), float(buf.rank + 1))
        ids = torch.zeros((3, 2), dtype=torch.int32)
        spec = buf.output_spec(x, ids)
        assert spec["x"] == ep.TensorSpec((buf.max_rows("rank"), 32), "float32", (32, 1))
        mine = torch.empty(spec["x"].shape)
        out = buf.dispatch(x, ids, out={"x": mine, "scales": None})
        count = out.num_rows
        assert count == (6 if buf.rank == 0 else 0)  # expert 0 lives on rank 0
        assert torch.equal(out.x, mine[:count])
        assert out.source.tolist()[:1] == ([[0, 0]] if count else [])
        assert torch.equal(buf.combine(out.x, out.handle).x, x)
        exact_again(buf)

    run(rank, 2)


@pytest.mark.parametrize(
    ("out", "error", "words"),
    [
        ([], TypeError, ("out", "list", "dict")),
        ({"y": np.zeros(1, np.float32)}, TypeError, ("'y'", "topk_idx", "extras")),
        ({"x": 3}, TypeError, ("out.x", "int")),
        ({"x": np.zeros((1, 32), np.float32)}, ep.InvalidArgument, ("out.x", "[1, 32]")),
        ({"x": np.zeros((99, 32), np.float16)}, ep.InvalidArgument, ("out.x", "float16")),
        ({"scales": np.zeros((99, 1), np.float32)}, ep.InvalidArgument, ("out.scales",)),
        ({"extras": [np.zeros(1, np.int8)]}, ep.InvalidArgument, ("out.extras", "1")),
        ({"x": np.zeros((99, 33), np.float32)[:, 1:]}, ep.InvalidArgument, ("out.x", "stride")),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named_and_spends_the_turn(out, error, words):
    def rank(buf):
        arguments = call(buf) | ({"out": out} if buf.rank == 1 else {})
        refused(buf, 1, error, words, lambda: buf.dispatch(**arguments))
        exact_again(buf)

    run(rank, 2)


def test_a_read_only_array_is_refused():
    def rank(buf):
        mine = np.zeros((99, 32), np.float32)
        mine.flags.writeable = False
        arguments = call(buf) | ({"out": {"x": mine}} if buf.rank == 0 else {})
        refused(
            buf, 0, ep.InvalidArgument, ("out.x", "read-only"), lambda: buf.dispatch(**arguments)
        )

    run(rank, 2)


def test_output_spec_raises_what_dispatch_would_and_sends_nothing():
    def rank(buf):
        if buf.rank == 0:
            tall = np.ones((99999, 32), np.float32)
            ids = np.zeros((99999, 1), np.int64)
            wide = np.ones((2, 3), np.float64)
            says(caught(ep.InvalidArgument, lambda: buf.output_spec(wide, ids[:2])), "x", "float64")
            error = caught(ep.CapacityError, lambda: buf.output_spec(tall, ids))
            assert error.needed == 99999
            says(caught(TypeError, lambda: buf.output_spec(tall, ids, colour=1)), "colour")
        exact_again(buf)

    run(rank, 2)
