"""Faults of one rank's compiled graph, in a process per rank; see test_compile_faults."""

from __future__ import annotations

import dataclasses
import re
import traceback
from collections.abc import Callable
from typing import Any

import torch

import ep
import ep.functional
from python.functional_support import Case, make_buffer, make_inputs

CASE = Case(num_tokens=(3, 2), num_experts=4, num_topk=2, hidden=8)


@dataclasses.dataclass(frozen=True)
class Fault:
    """What rank 0 gives otherwise, and how its error begins; rank 1's is PeerError."""

    error: type[Exception]
    text: str
    change: Callable[[dict[str, Any]], None]
    peer: type[Exception] = ep.PeerError


def _set(**values: Any) -> Callable[[dict[str, Any]], None]:
    def change(given: dict[str, Any]) -> None:
        for name, value in values.items():
            given[name] = value(given[name]) if callable(value) else value

    return change


def _bad_id(ids: torch.Tensor) -> torch.Tensor:
    ids = ids.clone()
    ids[1, 0] = 99
    return ids


INVALID = ep.InvalidArgument
FAULTS = {
    "an id that is no expert": Fault(INVALID, r"topk_idx\[1, ?0\].*99", _set(ids=_bad_id)),
    "ids of fp32": Fault(INVALID, "topk_idx", _set(ids=lambda ids: ids.float())),
    "ids of int32 here, int64 there": Fault(
        ep.Desync, "topk_idx", _set(ids=lambda ids: ids.int()), peer=ep.Desync
    ),
    "no ids": Fault(TypeError, "topk_idx is missing", _set(ids=None)),
    "ids in a list": Fault(TypeError, "topk_idx is a list", _set(ids=[[0, 1]] * 3)),
    "columns of x not next to each other": Fault(
        INVALID, "x ", _set(x=lambda x: x.t().contiguous().t())
    ),
    "x of fp64": Fault(INVALID, "x .*float64", _set(x=lambda x: x.double())),
    "x of three dimensions": Fault(INVALID, "x ", _set(x=lambda x: x[None])),
    "too many tokens": Fault(
        ep.CapacityError,
        "",
        _set(
            x=lambda x: x.repeat(9, 1),
            ids=lambda i: i.repeat(9, 1),
            weights=lambda w: w.repeat(9, 1),
        ),
    ),
    "a layout that is none": Fault(INVALID, "layout", _set(options={"layout": "columns"})),
    "a format that is none": Fault(
        INVALID, "quant", _set(options={"layout": "rank", "quant": "fp9"})
    ),
    "a name that is none": Fault(
        TypeError, "no_such", _set(options={"layout": "rank", "no_such": 1})
    ),
    "async_op": Fault(
        INVALID, "async_op=True: autograd", _set(options={"layout": "rank", "async_op": True})
    ),
    "an event": Fault(
        INVALID, "wait_for is given", _set(options={"layout": "rank", "wait_for": [1]})
    ),
    "a reserved option": Fault(
        ep.Unsupported, "split", _set(options={"layout": "rank", "split": True})
    ),
    "extras in no list": Fault(
        TypeError, "extras", _set(options={"layout": "rank", "extras": torch.zeros(3, 4)})
    ),
    "weights where experts apply them": Fault(INVALID, "weights", _set(combine_weights=True)),
    "too few rows to combine": Fault(INVALID, "x ", _set(rows=lambda rows: 1)),
}


def step(buf: ep.EPBuffer, given: dict[str, Any]) -> torch.Tensor:
    x, weights = given["x"], given["weights"]
    out = ep.functional.dispatch(buf, x, given["ids"], weights, **given["options"])
    rows = out.x.masked_fill(out.source[:, :1] < 0, 0)
    if given["rows"] is not None:
        rows = rows[: given["rows"]]
    more = {"weights": weights} if given["combine_weights"] else {}
    return ep.functional.combine(buf, rows * 2, out.handle, **more).x


def run_faults(comm: ep.Communicator, names: list[str]) -> list[str]:
    """By fault "", or what was wrong on this rank."""
    torch._dynamo.config.recompile_limit = 256
    outcomes: list[str] = []
    while len(outcomes) < len(names):
        with make_buffer(
            comm, CASE
        ) as buf:  # good for all faults, until one is not as it should be
            try:
                for name in names[len(outcomes) :]:
                    _check(buf, FAULTS[name])
                    outcomes.append("")
            except Exception as error:
                buf.abort(str(error))
                outcomes.append(traceback.format_exc())
    return outcomes


def _check(buf: ep.EPBuffer, fault: Fault) -> None:
    mine = make_inputs(CASE)[buf.rank]
    good = {
        "x": mine.x,
        "ids": mine.ids,
        "weights": mine.weights,
        "options": {"layout": "rank"},
        "combine_weights": False,
        "rows": None,
    }
    given = dict(good)
    if buf.rank == 0:
        fault.change(given)
    wanted, text = (fault.error, fault.text) if buf.rank == 0 else (fault.peer, "")
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    try:
        compiled(buf, given)
    except wanted as error:
        assert re.search(text, str(error)), f"wanted {text!r}, got {error!r}"
    else:
        raise AssertionError(f"no {wanted.__name__}")
    want = step(buf, good)
    assert torch.equal(compiled(buf, good), want)
