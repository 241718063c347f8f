"""Programs of dispatches and combines, and what compiled forms of them do, in a process per rank.

Not in threads: torch's compiler may crash where several threads use it at once.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config

import ep
import ep.functional
from python.calls import recording
from python.functional_support import Case, leaf, make_buffer, make_inputs

CASE = Case(num_tokens=(3, 2), num_experts=4, num_topk=2, hidden=4)
IDLE = Case(num_tokens=(3, 0), num_experts=4, num_topk=2, hidden=4)  # and all ids are rank 0's
OPTIONS = {
    "fixed": {"layout": "expert", "exact": False},
    "exact": {"layout": "rank", "exact": True},
}


@dataclasses.dataclass(frozen=True)
class Program:
    """A step of dispatches and combines, and the calls that it is to make."""

    run: Callable[..., torch.Tensor]
    calls: str  # d, r, c: dispatch, replay, combine, each with the call that its routing is from
    case: Case = CASE


def layer(buf: ep.EPBuffer, x: Any, ids: Any, weights: Any, options: dict[str, Any]) -> Any:
    out = ep.functional.dispatch(buf, x, ids, weights, **options)
    return answer(buf, out, weights, options)


def answer(buf: ep.EPBuffer, out: Any, weights: Any, options: dict[str, Any]) -> Any:
    """Experts that double each row, and combine."""
    rows = out.x.masked_fill(out.source[:, :1] < 0, 0) * 2
    if options["layout"] == "rank":
        rows = rows * out.topk_weights.sum(1, keepdim=True)
        return ep.functional.combine(buf, rows, out.handle).x
    return ep.functional.combine(buf, rows, out.handle, weights=weights).x


def stacked(buf, x, ids, weights, options):
    return layer(buf, layer(buf, x, ids, weights, options).sin(), ids, weights, options)


def equal_calls(buf, x, ids, weights, options):
    first = layer(buf, x, ids, weights, options)
    return first + layer(buf, x, ids, weights, options)


def unused(buf, x, ids, weights, options):
    """Of three dispatches and two combines the last of each have a reader."""
    ep.functional.dispatch(buf, x, ids, weights, **options)
    layer(buf, x, ids, weights, options)
    return layer(buf, x, ids, weights, options)


def micro_batches(buf, x, ids, weights, options):
    """dispatch A, dispatch B, combine A, combine B, of routings of their own."""
    flipped, other = ids.flip(1), weights.flip(1)
    a = ep.functional.dispatch(buf, x, ids, weights, **options)
    b = ep.functional.dispatch(buf, x * 3, flipped, other, **options)
    return answer(buf, a, weights, options) + answer(buf, b, other, options).cos()


def everything(buf, x, ids, weights, options):
    return micro_batches(buf, unused(buf, x, ids, weights, options), ids, weights, options)


PROGRAMS = {
    "stacked layers": Program(stacked, "d0 c0 d2 c2  r2 c2 r0 c0"),
    "equal calls": Program(equal_calls, "d0 c0 d2 c2  r2 c2 r0 c0", IDLE),
    "unused results": Program(unused, "d0 d1 c1 d3 c3  r3 c3", IDLE),
    "micro-batches": Program(micro_batches, "d0 d1 c0 c1  r1 r0 c1 c0"),
}
PROGRAMS["everything"] = Program(
    everything, "d0 d1 c1 d3 c3  d5 d6 c5 c6  r6 r5 c6 c5  r3 c3", IDLE
)


@dataclasses.dataclass(frozen=True)
class Job:
    form: str
    program: str
    options: str


def run_jobs(comm: ep.Communicator, jobs: list[Job]) -> list[str]:
    """For each job "", or what was wrong on this rank."""
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # jobs share code, not graphs
    torch._inductor.config.compile_threads = 1  # no processes of its own
    return [_outcome(comm, job) for job in jobs]


def _outcome(comm: ep.Communicator, job: Job) -> str:
    program = PROGRAMS[job.program]
    with make_buffer(comm, program.case) as buf:
        try:
            _check(buf, job, program)
        except Exception as error:
            buf.abort(str(error))
            return traceback.format_exc()
        return ""


def _check(buf: ep.EPBuffer, job: Job, program: Program) -> None:
    """Three steps, whose calls are the program's and whose rows are those of an eager step."""
    mine, options = make_inputs(program.case)[buf.rank], OPTIONS[job.options]
    ids = mine.ids.clamp(max=1) if program.case is IDLE else mine.ids

    def run(x, weights):
        return program.run(buf, x, ids, weights, options)

    compiled = run if job.form == "eager" else torch.compile(run, backend=job.form, fullgraph=True)
    first = None
    for function in (run, compiled, compiled, compiled):
        x, weights = leaf(mine.x), leaf(mine.weights)
        with recording(buf) as calls:
            y = function(x, weights)
            y.backward(mine.grad)
        made = " ".join(f"{name[0]}{origin}" for name, origin in calls.sequence())
        assert made == " ".join(program.calls.split()), f"made {made}"
        tensors = [each for rows in calls.rows for each in rows]
        tensors += [y.detach(), x.grad, weights.grad]
        first = first or tensors
        for at, (got, want) in enumerate(zip(tensors, first, strict=True)):
            if job.form == "inductor":  # it may round otherwise where it fuses the experts
                torch.testing.assert_close(got, want)
            assert job.form == "inductor" or torch.equal(got, want), f"tensor {at}: {got} {want}"
