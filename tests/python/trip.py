"""One dispatch and one combine for all ranks: seeded inputs, the oracle's answers, the arguments.

What nobody may read is NaN: x of tokens without an expert, weights of slots without one, dead rows
of what the experts answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from python import oracle
from python.formats import FLOATS, Array, encode, holder, zeros
from python.routing import draw_ids, seeded

SPECIALS = np.array(
    [-0.0, np.inf, -np.inf, np.nan, 3e38, -3e38, 1e-40, 6e-8, -6e-8, 65519.0, 447.9, 0.0],
    np.float32,
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A round trip. Defaults are the package's where it has one."""

    num_tokens: tuple[int, ...]  # by rank
    num_experts: int
    num_topk: int
    hidden: int
    offsets: tuple[int, ...] | None = None  # even
    routing: str = "uniform"
    seed: int = 1
    # What is sent.
    x_dtype: str = "bfloat16"
    idx_dtype: str = "int64"
    weights_dtype: str | None = "float32"
    scale_columns: int = 0  # 0: no scales
    scales_dtype: str = "float32"
    extras: tuple[tuple[str, tuple[int, ...]], ...] = ()  # dtype and shape of one token
    # How.
    layout: str = "rank"
    alignment: int = 1
    exact: bool = True
    max_tokens: int | None = None  # not said in the call
    buffer_tokens: int | None = None  # max_tokens_per_rank; the most tokens of any rank
    max_rows: int | None = None
    overflow: str = "raise"
    quant: str | None = None
    ids: str = "local"
    # What comes back.
    answer_hidden: int | None = None  # hidden
    answer_dtype: str = "bfloat16"
    out_dtype: str | None = None
    combine_weights: bool = False
    row_weights: bool = False
    bias: tuple[str, ...] = ()
    # How tensors are given.
    kind: str = "torch"  # or "numpy"
    strided: bool = False  # as views with an element between rows that is nobody's

    @property
    def num_ranks(self) -> int:
        return len(self.num_tokens)

    @property
    def bound(self) -> int:
        return max(1, self.buffer_tokens or 0, self.max_tokens or 0, *self.num_tokens)

    def rules(self) -> oracle.Rules:
        return oracle.Rules(
            offsets=self.offsets or oracle.even_offsets(self.num_experts, self.num_ranks),
            num_topk=self.num_topk,
            max_tokens=self.max_tokens or self.bound,
            layout=self.layout,
            alignment=self.alignment,
            exact=self.exact and self.max_rows is None,
            max_rows=self.max_rows,
            drop=self.overflow == "drop",
            quant=self.quant,
            global_ids=self.ids == "global",
        )


@dataclass(frozen=True)
class Trip:
    case: Case
    rules: oracle.Rules
    tokens: list[oracle.Tokens]
    sent: oracle.Dispatched
    answers: list[oracle.Answer]
    back: list[oracle.Combined]


def make_trip(case: Case) -> Trip:
    rules = case.rules()
    return _complete(case, [_make_tokens(case, rules, r) for r in range(case.num_ranks)])


def with_ids(trip: Trip, ids: list[Any]) -> Trip:
    """The same tokens with this routing, [T, K] of each rank."""
    given = [np.array(i).reshape(t.idx.shape) for i, t in zip(ids, trip.tokens, strict=True)]
    tokens = [
        replace(t, idx=Array(i.astype(t.idx.data.dtype), t.idx.dtype))
        for i, t in zip(given, trip.tokens, strict=True)
    ]
    return _complete(trip.case, tokens)


def _complete(case: Case, tokens: list[oracle.Tokens]) -> Trip:
    rules = case.rules()
    sent = oracle.dispatch(tokens, rules)
    answers = [_make_answer(case, sent, rank) for rank in range(case.num_ranks)]
    return Trip(case, rules, tokens, sent, answers, oracle.combine(sent, rules, answers))


def make_trips(cases: list[Case]) -> list[Trip]:
    """For one buffer that can run all of them."""
    bound = max(case.bound for case in cases)
    return [make_trip(replace(case, buffer_tokens=bound)) for case in cases]


def numbers(rng: np.random.Generator, dtype: str, *shape: int, wild: bool = True) -> Array:
    """Seeded numbers of all signs and many sizes; a few specials among them where `wild`."""
    if dtype not in FLOATS:
        return raw_bytes(rng, dtype, *shape)
    values = rng.uniform(1, 2, shape) * np.exp2(rng.integers(-6, 7, shape))
    values = np.copysign(values, rng.uniform(-1, 1, shape)).astype(np.float32)
    if wild:  # rare, else every sum is NaN and every scale the greatest
        at = rng.random(shape) < 1 / 512
        values[at] = rng.choice(SPECIALS, int(at.sum()))
    return encode(values, dtype)


def raw_bytes(rng: np.random.Generator, dtype: str, *shape: int) -> Array:
    size = holder(dtype).itemsize
    most = 2 if dtype == "bool" else 256
    data = rng.integers(most, size=(*shape, size), dtype=np.uint8).view(holder(dtype))
    return Array(data.reshape(shape), dtype)


def poison(array: Array, where: np.ndarray) -> None:
    """All bits of these elements or rows become ones: NaN in every format of `FLOATS`."""
    bits = array.bits()
    bits[where] = np.iinfo(bits.dtype).max


def _make_tokens(case: Case, rules: oracle.Rules, rank: int) -> oracle.Tokens:
    num_tokens = case.num_tokens[rank]
    rng = seeded(case.seed, 4, rank)
    ids = draw_ids(case.routing, rank, num_tokens, case.num_topk, rules.offsets, seed=case.seed)
    x = numbers(rng, case.x_dtype, num_tokens, case.hidden)
    if case.x_dtype in FLOATS:
        poison(x, np.all(ids < 0, axis=1))
    weights = scales = None
    if case.weights_dtype is not None:
        weights = numbers(rng, case.weights_dtype, num_tokens, case.num_topk, wild=False)
        poison(weights, ids < 0)
    if case.scale_columns:
        scales = raw_bytes(rng, case.scales_dtype, num_tokens, case.scale_columns)
    extras = tuple(raw_bytes(rng, dtype, num_tokens, *shape) for dtype, shape in case.extras)
    idx = Array(ids.astype(case.idx_dtype), case.idx_dtype)
    return oracle.Tokens(x, idx, weights, scales, extras)


def _make_answer(case: Case, sent: oracle.Dispatched, rank: int) -> oracle.Answer:
    received = sent.received[rank]
    rng = seeded(case.seed, 5, rank)
    num_tokens, hidden = case.num_tokens[rank], case.answer_hidden or case.hidden
    x = numbers(rng, case.answer_dtype, len(received.slot), hidden)
    poison(x, received.slot < 0)
    row_weights = weights = None
    if case.row_weights:
        row_weights = numbers(rng, "float32", *received.idx.shape, wild=False)
        poison(row_weights, received.idx.data < 0)
    if case.combine_weights:
        dtype = case.weights_dtype or "float32"
        weights = numbers(rng, dtype, num_tokens, case.num_topk, wild=False)
        poison(weights, sent.places[rank].rank < 0)
    bias = tuple(numbers(rng, dtype, num_tokens, hidden) for dtype in case.bias)
    return oracle.Answer(x, row_weights, weights, bias, case.out_dtype)


def give(array: Array | None, case: Case) -> Any:
    """The array as an argument: of the case's kind, a copy, strided if asked."""
    if array is None:
        return None
    rows, *row = array.shape
    if case.strided and len(array.shape) == 2:
        wide = zeros(array.dtype, rows, row[0] + 1)
        wide.bits()[:] = np.iinfo(wide.bits().dtype).max if array.dtype != "bool" else 1
        wide.data[:, : row[0]] = array.data
        whole = wide.data if case.kind == "numpy" else wide.torch()
        return whole[:, : row[0]]
    return array.data.copy() if case.kind == "numpy" else array.torch()


def dispatch_args(trip: Trip, rank: int) -> dict[str, Any]:
    """Keyword arguments. What is the default is left out, so that defaults are tested too."""
    case, tokens = trip.case, trip.tokens[rank]
    args = {
        "x": give(tokens.x, case),
        "topk_idx": give(tokens.idx, case),
        "topk_weights": give(tokens.weights, case),
        "scales": give(tokens.scales, case),
        "extras": [give(extra, case) for extra in tokens.extras] or None,
        "quant": case.quant,
        "layout": None if case.layout == "rank" else case.layout,
        "expert_alignment": None if case.alignment == 1 else case.alignment,
        "exact": None if case.exact else False,
        "max_tokens": case.max_tokens,
        "max_rows": case.max_rows,
        "overflow": None if case.overflow == "raise" else case.overflow,
        "ids": None if case.ids == "local" else case.ids,
    }
    return {name: value for name, value in args.items() if value is not None}


def combine_args(trip: Trip, rank: int) -> dict[str, Any]:
    """Keyword arguments, but for `handle`."""
    case, answer = trip.case, trip.answers[rank]
    args = {
        "x": give(answer.x, case),
        "weights": give(answer.weights, case),
        "row_weights": give(answer.row_weights, case),
        "bias": [give(bias, case) for bias in answer.bias] or None,
        "out_dtype": answer.out_dtype,
    }
    return {name: value for name, value in args.items() if value is not None}


def buffer_args(trips: list[Trip]) -> dict[str, Any]:
    """Arguments of a buffer in which all of these can run."""
    first = trips[0].case
    hidden = max(max(t.case.hidden, t.case.answer_hidden or 0) for t in trips)
    row_bytes = max(_row_bytes(t) for t in trips)
    return {
        "num_experts": first.num_experts,
        "num_topk": max(t.case.num_topk for t in trips),
        "hidden": hidden,
        "max_tokens_per_rank": max(t.case.bound for t in trips),
        "token_bytes": row_bytes if row_bytes > 4 * hidden + 64 else None,
        "expert_offsets": first.offsets,
    }


def _row_bytes(trip: Trip) -> int:
    """Bytes of a dispatched row: x, scales, extras."""
    tokens, received = trip.tokens[0], trip.sent.received[0]
    arrays = [received.x, received.scales, *tokens.extras]
    return sum(array.row_bytes for array in arrays if array is not None)
