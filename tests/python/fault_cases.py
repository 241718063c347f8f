"""Calls that one rank gets wrong, as a table: what it does, what it learns.

A case is (name, error, parts of its message, changes), where `changes` makes keyword changes of a
good call from the buffer and the job; `...` leaves an argument out.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import ep
from python.fault_support import Job

Changes = Callable[[Any, Any], dict[str, Any]]


class Case(NamedTuple):
    name: str
    error: Any
    parts: tuple[str, ...]
    changes: Changes


def fixed(name: str, error: Any, parts: tuple[str, ...], /, **changes: Any) -> Case:
    return Case(name, error, parts, lambda buf, job: changes)


class Failing:
    """Not an event, and whatever is asked of it fails."""

    def __getattr__(self, name: str) -> Any:
        raise OSError(f"boom: {name}")


def with_id(token: int, slot: int, value: int) -> Changes:
    def changes(buf: Any, job: Job) -> dict[str, Any]:
        ids = job.ids(buf.rank, list(buf.expert_offsets)[-1])
        ids[token, slot] = value
        return {"topk_idx": job.tensor(ids)}

    return changes


def scaled_x(function: Callable[[np.ndarray], Any]) -> Changes:
    return lambda buf, job: {"x": function(job.x(buf.rank))}


INVALID = ep.InvalidArgument
WRONG_TYPE = (TypeError, ep.InvalidArgument)
LOWEST = -(2**63)

DISPATCH = [
    # A TypeError of Python's own, before the library sees anything.
    fixed("an unknown keyword", TypeError, ("use_fp8",), use_fp8=True),
    fixed("no x", TypeError, ("x",), x=...),
    fixed("x is a string", WRONG_TYPE, ("x",), x="tokens"),
    fixed("x is None", WRONG_TYPE, ("x",), x=None),
    fixed("x is a list", WRONG_TYPE, ("x",), x=[[1.0] * 32]),
    fixed("topk_idx is a list", WRONG_TYPE, ("topk_idx",), topk_idx=[[0, 1]]),
    fixed("weights are a number", WRONG_TYPE, ("topk_weights",), topk_weights=1.0),
    fixed("scales are a string", WRONG_TYPE, ("scales",), scales="no"),
    fixed("extras are a number", WRONG_TYPE, ("extras",), extras=5),
    fixed("extras hold a string", WRONG_TYPE, ("extras",), extras=["no"]),
    fixed("the handle is a string", WRONG_TYPE, ("handle",), handle="mine", topk_idx=...),
    fixed("the stream is a number", WRONG_TYPE, ("stream",), stream=5),
    fixed("the event is a string", WRONG_TYPE, ("wait_for",), wait_for="now"),
    fixed("the event fails", Exception, (), wait_for=Failing()),
    fixed("one of the events fails", Exception, (), wait_for=[ep.Event(), Failing()]),
    fixed("num_sms is a string", WRONG_TYPE, ("num_sms",), num_sms="two"),
    fixed("max_rows is a fraction", WRONG_TYPE, ("max_rows",), max_rows=1.5),
    fixed("max_tokens is negative", WRONG_TYPE, ("max_tokens",), max_tokens=-1),
    # Values.
    fixed("an unknown layout", INVALID, ("layout", "spiral", "expert"), layout="spiral"),
    fixed("an unknown format", INVALID, ("quant", "fp7", "fp8_block128"), quant="fp7"),
    fixed("unknown ids", INVALID, ("ids", "mine", "global"), ids="mine"),
    fixed("an unknown overflow", INVALID, ("overflow", "wrap", "drop"), overflow="wrap"),
    fixed("an unknown mode", INVALID, ("mode", "slow", "throughput"), mode="slow"),
    fixed("drop without max_rows", INVALID, ("max_rows",), overflow="drop"),
    fixed("alignment 0", INVALID, ("expert_alignment=0",), layout="expert", expert_alignment=0),
    fixed("max_tokens 17", INVALID, ("max_tokens=17", "16"), max_tokens=17),
    fixed("max_rows 0", INVALID, ("max_rows=0",), max_rows=0),
    fixed("max_rows and exact", INVALID, ("max_rows=5", "exact"), max_rows=5, exact=True),
    fixed("num_sms 65", INVALID, ("num_sms=65", "64"), num_sms=65),
    # Tensors.
    fixed("no topk_idx", WRONG_TYPE, ("topk_idx",), topk_idx=...),
    Case("x is a vector", INVALID, ("x has shape [160]",), scaled_x(lambda x: x[:5].ravel())),
    Case("x is int32", INVALID, ("x has dtype int32",), scaled_x(lambda x: x.astype("i4"))),
    Case("x[:, ::2]", INVALID, ("column stride 2",), scaled_x(lambda x: x.repeat(2, 1)[:, ::2])),
    Case("x.t()", INVALID, ("column stride",), scaled_x(np.asfortranarray)),
    Case("H of 7", INVALID, ("H=7",), scaled_x(lambda x: np.ascontiguousarray(x[:, :7]))),
    Case(
        "H of 40", INVALID, ("H=40", "hidden=32"), scaled_x(lambda x: np.zeros((len(x), 40), "f4"))
    ),
    Case(
        "ids of another length",
        INVALID,
        ("topk_idx has shape [1, 2]",),
        lambda buf, job: {"topk_idx": job.tensor(np.zeros((1, 2), "i8"))},
    ),
    Case(
        "ids are floats",
        INVALID,
        ("topk_idx has dtype float32",),
        lambda buf, job: {"topk_idx": job.tensor(np.zeros((job.count(buf.rank), 2), "f4"))},
    ),
    Case(
        "K of 3",
        INVALID,
        ("K=3", "num_topk=2"),
        lambda buf, job: {"topk_idx": job.tensor(np.zeros((job.count(buf.rank), 3), "i8"))},
    ),
    Case(
        "weights are integers",
        INVALID,
        ("topk_weights has dtype int32",),
        lambda buf, job: {"topk_weights": job.tensor(np.zeros((job.count(buf.rank), 2), "i4"))},
    ),
    # Ids are checked before narrowing, and named by token and slot.
    Case("id -2", INVALID, ("topk_idx[3, 1] = -2", "num_experts=6"), with_id(3, 1, -2)),
    Case("id E", INVALID, ("topk_idx[4, 0] = 6", "num_experts=6"), with_id(4, 0, 6)),
    Case("id 2^32 + 1", INVALID, ("topk_idx[0, 1] = 4294967297",), with_id(0, 1, 2**32 + 1)),
    Case("id 2^32 - 1", INVALID, ("topk_idx[0, 0] = 4294967295",), with_id(0, 0, 2**32 - 1)),
    Case("lowest id", INVALID, (f"topk_idx[2, 0] = {LOWEST}",), with_id(2, 0, LOWEST)),
]

COMBINE = [
    fixed("an unknown keyword", TypeError, ("topk_idx",), topk_idx=None),
    fixed("no handle", TypeError, ("handle",), handle=...),
    fixed("no x", TypeError, ("x",), x=...),
    fixed("the handle is None", WRONG_TYPE, ("handle",), handle=None),
    fixed("x is None", WRONG_TYPE, ("x",), x=None),
    fixed("x is a string", WRONG_TYPE, ("x",), x="rows"),
    fixed("bias is a number", WRONG_TYPE, ("bias",), bias=1.0),
    fixed("the event fails", Exception, (), wait_for=[Failing()]),
    fixed("an unknown out_dtype", WRONG_TYPE, ("out_dtype",), out_dtype="float33"),
    fixed("an out_dtype that nobody sums in", INVALID, ("int8",), out_dtype="int8"),
    fixed("an unknown partial", WRONG_TYPE, ("partial",), partial="fp7"),
    fixed("num_sms 65", INVALID, ("num_sms=65",), num_sms=65),
    fixed("x of 2 rows", INVALID, ("x has 2 rows",), x=np.zeros((2, 32), "f4")),
    Case(
        "x is int16",
        INVALID,
        ("x has dtype int16",),
        lambda buf, job: {"x": np.zeros((1, 32), "i2")},
    ),
    Case(
        "bias of another length",
        INVALID,
        ("bias has shape [1, 32]",),
        lambda buf, job: {"bias": [np.zeros((1, 32), "f4")]},
    ),
    Case(
        "three biases",
        INVALID,
        ("3 biases",),
        lambda buf, job: {"bias": [np.zeros((job.count(buf.rank), 32), "f4")] * 3},
    ),
    Case(
        "row_weights of another shape",
        INVALID,
        ("row_weights has shape [1, 1]",),
        lambda buf, job: {"row_weights": np.zeros((1, 1), "f4")},
    ),
    Case(
        "out of another shape",
        INVALID,
        ("out has shape [1, 32]",),
        lambda buf, job: {"out": np.zeros((1, 32), "f4")},
    ),
]
COMBINE_BY_RANK = Case(
    "weights where the experts multiply",
    INVALID,
    ("weights", 'layout "rank"', "expert"),
    lambda buf, job: {"weights": np.ones((job.count(buf.rank), 2), "f4")},
)
