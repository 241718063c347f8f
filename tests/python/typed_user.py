"""A user's program as a type checker reads it; scripts/lint.sh runs mypy over it.

Every `type: ignore` here is a mistake that must be found: mypy reports one that is not needed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import ep
import ep.testing

if TYPE_CHECKING:
    if sys.version_info >= (3, 11):
        from typing import assert_type
    else:
        from typing_extensions import assert_type
else:

    def assert_type(value: Any, kind: Any) -> Any:
        return value


def round_trip(buf: ep.EPBuffer) -> np.ndarray:
    """One token to every expert and back."""
    num_experts = buf.expert_offsets[-1]
    x = np.ones((num_experts, 8), np.float32)
    topk_idx = np.arange(num_experts)[:, None]
    out = buf.dispatch(x, topk_idx, layout="expert", extras=[topk_idx], num_sms=1)
    assert_type(out, ep.DispatchOutput)
    assert_type(out.num_rows, int | None)
    assert_type(out.tokens_per_expert, list[int] | None)
    assert_type(out.handle, ep.Handle)
    assert_type(out.event, ep.Event)
    assert_type(out.extras, list[Any])

    rows = buf.expert_output(out.handle, dtype="float32")
    rows[:] = 2 * out.x
    y = buf.combine(rows, out.handle, async_op=True)
    assert_type(y, ep.CombineOutput)
    assert_type(y.event.query(), bool)
    y.event.synchronize(timeout_s=10.0)
    combined: np.ndarray = y.x
    return combined


def describe(buf: ep.EPBuffer) -> None:
    assert_type(buf.rank, int)
    assert_type(buf.device, str)
    assert_type(buf.local_experts, range)
    assert_type(buf.comm_stream, ep.Stream)
    assert_type(buf.memory().largest_free, int)
    assert_type(buf.stats(), ep.Stats)
    assert_type(buf.max_rows("rank", max_tokens=4), int)
    buf.timeout_s = 10.0
    buf.num_sms = 1
    layout = buf.routing_layout(np.zeros((2, 1), np.int64))
    assert_type(layout, ep.RoutingLayout)


def keep(buf: ep.EPBuffer, handle: ep.Handle) -> ep.Handle:
    assert_type(handle.header, bytes)
    assert_type(handle.layout, str)
    return ep.Handle.from_tensors(buf, handle.header, handle.tensors)


def ask() -> None:
    support = ep.supports("cpu", layout="expert")
    assert_type(support, ep.Support)
    assert_type(support.why, str)
    assert_type(ep.quant.formats(), tuple[str, ...])
    assert_type(ep.quant.describe("fp8_block128").scale_shape(2, 256), tuple[int, int])
    assert_type(ep.__version__, str)


def meet(gather: Callable[[bytes, float], Sequence[bytes]]) -> list[ep.Communicator]:
    assert_type(ep.Communicator.tcp("localhost:1234", 0, 2), ep.Communicator)
    assert_type(ep.Communicator.callbacks(0, 1, gather), ep.Communicator)
    return ep.Communicator.threads(2)


def failed(error: ep.Error) -> list[int]:
    if isinstance(error, (ep.Timeout, ep.PeerError, ep.PeerLost)):
        return error.peers
    if isinstance(error, ep.CapacityError):
        assert_type(error.needed - error.available, int)
    return []


def mistakes(buf: ep.EPBuffer, out: ep.DispatchOutput) -> None:
    """None of it is ever run."""
    buf.dispatch(out.x, layuot="expert")  # type: ignore[call-arg]
    buf.dispatch(out.x, handle=out)  # type: ignore[arg-type]
    buf.combine(out.x)  # type: ignore[call-arg]
    out.num_rows + 1  # type: ignore[operator]
    out.num_rows = 3  # type: ignore[misc]
    buf.rank = 1  # type: ignore[misc]
    out.nmu_rows  # type: ignore[attr-defined]  # noqa: B018
    ep.Evnet()  # type: ignore[attr-defined]
    ep.EPBuffer(num_experts=4)  # type: ignore[call-arg]
    ep.Stream().wiat(out.event)  # type: ignore[attr-defined]


def run_rank(comm: ep.Communicator) -> float:
    with ep.EPBuffer(comm, num_experts=4, num_topk=1, hidden=8, max_tokens_per_rank=4) as buf:
        describe(buf)
        return float(round_trip(buf).sum())


def main() -> list[float]:
    ask()
    return ep.testing.run(run_rank, 2)
