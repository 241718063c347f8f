"""A dispatch and a combine of which every number is known, for tests of what goes wrong.

Token t of rank r is 1 + 32 * r + t in every column, its slot k has the weight 2 ** -k, and expert e
multiplies by e + 1: all results are small integers or halves of them, exact in fp32.  Needs numpy
only, so that processes which import this start fast.
"""

import pathlib
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

import ep

BOUND_S = 30.0  # of a wait that ends earlier unless a test fails
SHORT_S = 0.4  # a timeout that is reached on purpose
SLACK_S = 3.0  # what a loaded machine may add to a bound that the interface states


@dataclass(frozen=True)
class Job:
    """One round; rank r has num_tokens + r tokens (or, where `equal`, num_tokens)."""

    num_tokens: int = 5
    layout: str = "rank"
    shift: int = 0  # another shift, another routing
    num_topk: int = 2
    hidden: int = 32
    equal: bool = False
    kind: str = "numpy"  # or "torch"
    idx_dtype: str = "int64"

    def count(self, rank: int) -> int:
        return self.num_tokens + (0 if self.equal else rank)

    def x(self, rank: int) -> np.ndarray:
        values = 1.0 + 32 * rank + np.arange(self.count(rank), dtype=np.float32)
        return np.repeat(values[:, None], self.hidden, axis=1)

    def ids(self, rank: int, num_experts: int) -> np.ndarray:
        first = rank + self.shift + np.arange(self.count(rank))[:, None]
        step = max(1, num_experts // self.num_topk)
        ids = (first + step * np.arange(self.num_topk)) % num_experts
        return ids.astype(self.idx_dtype)

    def weights(self, rank: int) -> np.ndarray:
        return np.tile(np.float32(0.5) ** np.arange(self.num_topk), (self.count(rank), 1)).astype(
            np.float32
        )

    def tensor(self, array: np.ndarray) -> Any:
        if self.kind == "numpy":
            return array
        import torch

        return torch.from_numpy(array)


DEFAULT = Job()
BY_EXPERT = Job(layout="expert")


def make_buffer(comm: Any, **changes: Any) -> ep.EPBuffer:
    """A small buffer for any Job of up to 16 tokens; `changes` replace options."""
    options = {
        "num_experts": 2 * comm.num_ranks,
        "num_topk": 2,
        "hidden": 32,
        "max_tokens_per_rank": 16,
        "timeout_s": BOUND_S,
        "device": "cpu",
    }
    return ep.EPBuffer(comm, **(options | changes))


def num_experts(buf: ep.EPBuffer) -> int:
    return int(list(buf.expert_offsets)[-1])


def call(buf: ep.EPBuffer, job: Job = DEFAULT, **changes: Any) -> dict[str, Any]:
    """The arguments of this rank's dispatch; a change to `...` leaves an argument out."""
    arguments = {
        "x": job.tensor(job.x(buf.rank)),
        "topk_idx": job.tensor(job.ids(buf.rank, num_experts(buf))),
        "topk_weights": job.tensor(job.weights(buf.rank)),
        "layout": job.layout,
    }
    return {k: v for k, v in (arguments | changes).items() if v is not ...}


def dispatch(buf: ep.EPBuffer, job: Job = DEFAULT, **changes: Any) -> Any:
    return buf.dispatch(**call(buf, job, **changes))


def _rows(buf: ep.EPBuffer, job: Job) -> list[tuple[float, float]]:
    """Value of each row that this rank receives, and what its experts make of it in all."""
    offsets = list(buf.expert_offsets)
    begin, end = offsets[buf.rank], offsets[buf.rank + 1]
    routes = []  # (expert, source, token, slot)
    for source in range(buf.num_ranks):
        ids = job.ids(source, offsets[-1])
        routes += [
            (int(e), source, t, k)
            for t, row in enumerate(ids)
            for k, e in enumerate(row)
            if begin <= e < end
        ]
    if job.layout == "expert":
        return [(1.0 + 32 * s + t, (1.0 + 32 * s + t) * (e + 1)) for e, s, t, _ in sorted(routes)]
    sums: dict[tuple[int, int], float] = {}
    for e, source, t, k in routes:
        sums[source, t] = sums.get((source, t), 0.0) + (e + 1) * 0.5**k
    return [
        (1.0 + 32 * s + t, (1.0 + 32 * s + t) * factor) for (s, t), factor in sorted(sums.items())
    ]


def check_received(buf: ep.EPBuffer, job: Job, out: Any) -> None:
    """The rows of `out` are the right ones, in the right order."""
    values = np.array([value for value, _ in _rows(buf, job)], np.float32)
    got = np.asarray(out.x)[: len(values)]
    np.testing.assert_array_equal(got, np.repeat(values[:, None], job.hidden, axis=1))
    if out.num_rows is not None:
        assert out.num_rows == len(values) == len(np.asarray(out.x))


def answer(buf: ep.EPBuffer, job: Job, num_rows: int | None = None) -> np.ndarray:
    """What the experts of this rank answer: [num_rows, H], rows that nobody needs are NaN."""
    values = np.array([after for _, after in _rows(buf, job)], np.float32)
    rows = np.full((len(values) if num_rows is None else num_rows, job.hidden), np.nan, np.float32)
    rows[: len(values)] = values[:, None]
    return rows


def combine_call(buf: ep.EPBuffer, job: Job, handle: Any, /, **changes: Any) -> dict[str, Any]:
    """The arguments of this rank's combine; a change to `...` leaves an argument out."""
    arguments = {"x": job.tensor(answer(buf, job)), "handle": handle}
    if job.layout == "expert":
        arguments["weights"] = job.tensor(job.weights(buf.rank))
    return {k: v for k, v in (arguments | changes).items() if v is not ...}


def combine(buf: ep.EPBuffer, job: Job, handle: Any, /, **changes: Any) -> Any:
    return buf.combine(**combine_call(buf, job, handle, **changes))


def check_combined(buf: ep.EPBuffer, job: Job, y: Any) -> None:
    """`y.x` is the weighted sum of what the experts made of this rank's tokens."""
    factors = ((job.ids(buf.rank, num_experts(buf)) + 1) * job.weights(buf.rank)).sum(axis=1)
    want = job.x(buf.rank) * factors[:, None].astype(np.float32)
    np.testing.assert_array_equal(np.asarray(y.x), want)


def round_trip(buf: ep.EPBuffer, job: Job = DEFAULT, **changes: Any) -> Any:
    """Dispatches, combines, and checks both; returns the dispatch's output."""
    out = dispatch(buf, job, **changes)
    check_received(buf, job, out)
    check_combined(buf, job, combine(buf, job, out.handle))
    return out


def exact_again(buf: ep.EPBuffer) -> None:
    """Nothing is left of an earlier fault: no second report, and both layouts are exact."""
    buf.check()
    round_trip(buf, DEFAULT)
    round_trip(buf, BY_EXPERT)
    buf.check()


def caught(kind: type[BaseException] | tuple, action: Callable[[], Any]) -> Any:
    """Returns the exception of that kind which `action` must raise."""
    try:
        action()
    except kind as error:
        return error
    raise AssertionError(f"nothing was raised where {kind} was due")


def says(error: BaseException, *parts: str) -> None:
    for part in parts:
        assert part in str(error), f"{str(error)!r} lacks {part!r}"


def refused(
    buf: ep.EPBuffer, culprit: int, kind: Any, parts: Iterable[str], action: Callable[[], Any]
) -> None:
    """`action` raises `kind` with `parts` on the culprit, PeerError naming it on the others."""
    if buf.rank == culprit:
        says(caught(kind, action), *parts)
        return
    error = caught(ep.PeerError, action)
    assert list(error.peers) == [culprit]
    assert error.reason
    says(error, f"rank {culprit}", error.reason)


def await_blocked(tid: int, pid: int | str = "self", looks: int = 15) -> None:
    """Returns once thread `tid` has slept in the kernel for `looks` looks in a row, 1 ms apart.

    The caller makes sure that the thread's next wait is the one that is meant.
    """
    stat = pathlib.Path(f"/proc/{pid}/task/{tid}/stat")
    in_a_row, end = 0, time.monotonic() + BOUND_S
    while in_a_row < looks:
        assert time.monotonic() < end, f"thread {tid} does not block"
        state = stat.read_text().rpartition(")")[2].split()[0]
        in_a_row = in_a_row + 1 if state == "S" else 0
        time.sleep(0.001)


def in_thread(action: Callable[[], Any]) -> threading.Thread:
    """Starts `action` in a thread that does not keep the process alive."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


def run(function: Callable[[Any], Any], num_ranks: int = 3, **changes: Any) -> list[Any]:
    """Calls function(buf) in a thread per rank, each with a buffer; results by rank."""
    import ep.testing

    def rank(comm: Any) -> Any:
        with make_buffer(comm, **changes) as buf:
            return function(buf)

    return ep.testing.run(rank, num_ranks, how="threads")
