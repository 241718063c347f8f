"""doctor's last check: two ranks exchange tokens, and every value is compared."""

from __future__ import annotations

from typing import Any, Literal

_NUM_RANKS = 2
_TIMEOUT_S = 60.0
_NUM_TOKENS, _HIDDEN, _NUM_TOPK, _NUM_EXPERTS = 5, 64, 2, 4


def exchange(how: Literal["threads", "processes"]) -> str:
    """Runs the exchange with ranks as `how` ("threads" or "processes"); says what was compared.

    Raises what a rank raised, or ep.Error where a value differs.
    """
    from ep import testing

    counts = testing.run(_rank, _NUM_RANKS, how=how, timeout_s=_TIMEOUT_S)
    return f"dispatch and combine are exact ({sum(counts)} values compared)"


def _tokens(rank: int) -> Any:
    """x [T, H] of `rank`: small whole numbers, so that sums are exact in any order."""
    import numpy as np

    count = _NUM_TOKENS * _HIDDEN
    return (np.arange(count, dtype=np.float32) % 61 + 100 * int(rank)).reshape(_NUM_TOKENS, _HIDDEN)


def _routing() -> Any:
    """topk_idx [T, K], the same on all ranks: both ranks, one rank twice, and one slot unused."""
    import numpy as np

    return np.array([[0, 3], [2, 1], [0, 1], [3, -1], [2, 3]], np.int32)


def _rank(comm: Any) -> int:
    """One rank: expert e multiplies its rows by e + 1. Returns the number of values compared."""
    import numpy as np

    import ep

    routing = _routing()
    with ep.EPBuffer(
        comm,
        num_experts=_NUM_EXPERTS,
        num_topk=_NUM_TOPK,
        hidden=_HIDDEN,
        max_tokens_per_rank=_NUM_TOKENS,
        device="cpu",
    ) as buf:
        out = buf.dispatch(_tokens(comm.rank), routing, layout="expert")
        expert, source, token = _expected_rows(routing, buf.local_experts)
        rows = np.stack([_tokens(r)[t] for r, t in zip(source, token, strict=True)])
        _compare("source", out.source, np.stack([source, token], 1))
        _compare("dispatched rows", out.x, rows)
        y = buf.combine(rows * (1.0 + expert)[:, None].astype(np.float32), out.handle)
        factor = np.where(routing < 0, 0, routing + 1).sum(1, keepdims=True)
        want = _tokens(comm.rank) * factor.astype(np.float32)
        _compare("combined tokens", y.x, want)
        return rows.size + want.size


def _expected_rows(routing: Any, local_experts: range) -> tuple[Any, Any, Any]:
    """Expert, source rank and source token of each row, in layout "expert"'s order."""
    import numpy as np

    rows = [
        (expert, rank, token)
        for expert in local_experts
        for rank in range(_NUM_RANKS)
        for token in range(_NUM_TOKENS)
        for slot in range(_NUM_TOPK)
        if routing[token, slot] == expert
    ]
    return tuple(np.array(rows).T)


def _compare(what: str, got: Any, want: Any) -> None:
    import numpy as np

    import ep

    if got.shape != want.shape:
        raise ep.Error(f"{what}: shape {list(got.shape)}, not {list(want.shape)}")
    wrong = np.argwhere(np.asarray(got) != want)
    if wrong.size:
        at = tuple(int(i) for i in wrong[0])
        raise ep.Error(f"{what}: {len(wrong)} values differ, the first at {list(at)}")
