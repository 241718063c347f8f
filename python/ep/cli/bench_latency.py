"""Host time of calls that move nothing: what a call costs, from Python, before its first byte."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import ep
from ep.cli.bench_rounds import Kind

_WARMUP_CALLS = 500


def measure(
    hidden: int, topk: int, experts: int, num_calls: int
) -> tuple[str, dict[str, list[float]]]:
    """Times `num_calls` calls of one rank with T = 0.

    Returns the library of the tensors, and microseconds of each call by what was timed.
    """
    import numpy as np

    kind = Kind()
    x = kind.bf16(np.zeros((0, hidden), np.uint16))
    topk_idx = kind.of(np.zeros((0, topk), np.int64))
    topk_weights = kind.of(np.zeros((0, topk), np.float32))
    with ep.EPBuffer(
        ep.Communicator.single(),
        num_experts=experts,
        num_topk=topk,
        hidden=hidden,
        max_tokens_per_rank=1,
        device="cpu",
        num_sms=1,
        outputs="window",
    ) as buffer:
        handle = buffer.dispatch(x, topk_idx, topk_weights).handle

        def dispatch(async_op: bool) -> object:
            return buffer.dispatch(x, handle=handle, async_op=async_op)

        def combine(async_op: bool) -> object:
            return buffer.combine(x, handle, async_op=async_op)

        return kind.name, {
            **_times("replayed dispatch", dispatch, num_calls),
            **_times("combine", combine, num_calls),
        }


def _times(what: str, call: Callable[[bool], Any], num_calls: int) -> dict[str, list[float]]:
    """Asynchronous calls to their return and to their end, and synchronous ones beside them."""
    returned, done, synchronous = [], [], []
    gc.collect()
    gc.disable()
    try:
        for number in range(_WARMUP_CALLS + num_calls):
            start = time.perf_counter_ns()
            result = call(True)
            after_return = time.perf_counter_ns()
            result.event.synchronize()
            after_end = time.perf_counter_ns()
            result = None
            before = time.perf_counter_ns()
            result = call(False)
            after = time.perf_counter_ns()
            result = None
            if number >= _WARMUP_CALLS:
                returned.append((after_return - start) / 1e3)
                done.append((after_end - start) / 1e3)
                synchronous.append((after - before) / 1e3)
    finally:
        gc.enable()
    return {
        f"{what}, async: call to return": returned,
        f"{what}, async: until it is done": done,
        f"{what}, synchronous": synchronous,
    }
