"""What dispatch and combine must give, for all ranks at once, from the public contract alone.

Plain numpy over whole columns; nothing here comes from the package under test. Results are exact to
the bit, dead rows included, except for what the contract leaves unspecified: x, scales and extras
of the tail (rows past `num_rows` of a fixed-size output).

R ranks; rank r has T_r tokens of hidden size H and owns experts [offsets[r], offsets[r+1]); K slots
per token; N rows received.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from python.formats import E4M3_MAX, Array, e4m3_encode, encode

GROUP = 128  # columns that share a scale
FP8_FORMATS = ("fp8_block128", "fp8_block128_pow2", "fp8_block128_ue8m0")


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What is equal on all ranks."""

    offsets: tuple[int, ...]  # [R+1]
    num_topk: int
    max_tokens: int  # the bound of T, which fixed sizes follow from
    layout: str = "rank"
    alignment: int = 1
    exact: bool = True
    max_rows: int | None = None  # implies exact=False
    drop: bool = False
    quant: str | None = None
    global_ids: bool = False

    @property
    def num_ranks(self) -> int:
        return len(self.offsets) - 1

    def fixed_rows(self, rank: int) -> int:
        """Rows of the output of a dispatch that does not learn its size."""
        if self.max_rows is not None:
            return self.max_rows
        tokens = self.num_ranks * self.max_tokens
        if self.layout == "rank":
            return tokens
        routes = tokens * self.num_topk
        num_local = self.offsets[rank + 1] - self.offsets[rank]
        groups = min(num_local, routes)
        full = self.alignment * (groups + (routes - groups) // self.alignment)
        return full if num_local else 0


def even_offsets(num_experts: int, num_ranks: int) -> tuple[int, ...]:
    """array_split: the first E % R ranks own one more."""
    sizes = [len(part) for part in np.array_split(np.arange(num_experts), num_ranks)]
    return (0, *np.cumsum(sizes).tolist())


@dataclass(frozen=True)
class Tokens:
    """What one rank gives to dispatch."""

    x: Array  # [T, H]
    idx: Array  # [T, K] int32 or int64
    weights: Array | None = None  # [T, K]
    scales: Array | None = None  # [T, S]
    extras: tuple[Array, ...] = ()  # [T, ...]


@dataclass
class Received:
    """What one rank gets from dispatch. Rows [0, num_rows) are used, the rest is the tail."""

    num_rows: int  # gaps included
    rows_needed: int  # the true demand
    too_many: bool  # more than there is room for, and nothing is dropped: CapacityError
    source: Array  # [N, 2] int32: source rank and token, -1 in dead rows
    slot: np.ndarray  # [N] the token's slot ("rank": its first of this rank), -1 in dead rows
    tokens_per_expert: list[int]  # [L] routes that were kept
    expert_offsets: list[int]  # [L+1]
    rank_offsets: list[int] | None  # [R+1], layout "rank" only
    x: Array = field(init=False)
    idx: Array = field(init=False)
    weights: Array | None = field(init=False)
    scales: Array | None = field(init=False)
    extras: list[Array] = field(init=False)


@dataclass(frozen=True)
class Places:
    """Where the slots of one rank's tokens went."""

    rank: np.ndarray  # [T, K], -1: no expert, or dropped
    row: np.ndarray  # [T, K]


@dataclass(frozen=True)
class Dispatched:
    received: list[Received]
    places: list[Places]

    @property
    def too_many(self) -> bool:
        return any(r.too_many for r in self.received)


def dispatch(ranks: list[Tokens], rules: Rules) -> Dispatched:
    """Every rank's outputs. A rank with too many rows under "raise" means: nothing is sent."""
    places = [Places(np.full(t.idx.shape, -1), np.full(t.idx.shape, -1)) for t in ranks]
    received = []
    quantised = None
    if rules.quant is not None:
        quantised = [quantise(tokens.x.values(), rules.quant) for tokens in ranks]
    for here in range(rules.num_ranks):
        out = _place_rows(ranks, rules, here)
        _fill_payload(out, ranks, rules, quantised)
        _fill_metadata(out, ranks, rules, here)
        _note_places(out, ranks, rules, here, places)
        received.append(out)
    return Dispatched(received, places)


def _is_local(ids: np.ndarray, rules: Rules, rank: int) -> np.ndarray:
    return (ids >= rules.offsets[rank]) & (ids < rules.offsets[rank + 1])


def _local_routes(ranks: list[Tokens], rules: Rules, here: int) -> np.ndarray:
    """[n, 4]: source, token, slot, local expert of every route to `here`, in that order."""
    parts = []
    for source, tokens in enumerate(ranks):
        token, slot = np.nonzero(_is_local(tokens.idx.data, rules, here))
        expert = tokens.idx.data[token, slot] - rules.offsets[here]
        parts.append(np.stack([np.full_like(token, source), token, slot, expert], axis=1))
    return np.concatenate(parts).astype(np.int64)


def _place_rows(ranks: list[Tokens], rules: Rules, here: int) -> Received:
    """The rows of one rank in order, clipped to what there is room for."""
    routes = _local_routes(ranks, rules, here)
    num_local = rules.offsets[here + 1] - rules.offsets[here]
    starts = None
    if rules.layout == "rank":
        is_new = np.ones(len(routes), bool)  # one row per (source, token): its first route
        is_new[1:] = np.any(routes[1:, :2] != routes[:-1, :2], axis=1)
        rows, row_of_route = routes[is_new], np.cumsum(is_new) - 1
        at, needed = np.arange(len(rows)), len(rows)
    else:
        rows = routes = routes[np.argsort(routes[:, 3], kind="stable")]
        counts = np.bincount(rows[:, 3], minlength=num_local)
        padded = -(-counts // rules.alignment) * rules.alignment
        starts, first = np.append(0, np.cumsum(padded)), np.cumsum(counts) - counts
        at = starts[rows[:, 3]] + np.arange(len(rows)) - first[rows[:, 3]]
        row_of_route, needed = at, int(starts[-1])
    limit = needed if rules.exact else rules.fixed_rows(here)
    kept = at < limit
    source, slot = np.full((limit, 2), -1, np.int32), np.full(limit, -1)
    source[at[kept]], slot[at[kept]] = rows[kept, :2], rows[kept, 2]
    # Routes, not rows; so layout "rank" counts every expert of a kept row.
    kept_routes = np.bincount(routes[row_of_route < limit, 3], minlength=num_local)
    if starts is None:
        starts = np.append(0, np.cumsum(kept_routes))
        before = np.searchsorted(rows[:, 0], np.arange(rules.num_ranks + 1))
        rank_offsets = np.minimum(before, limit).tolist()
    else:
        starts, rank_offsets = np.minimum(starts, limit), None
    return Received(
        num_rows=min(needed, limit),
        rows_needed=needed,
        too_many=needed > limit and not rules.drop,
        source=Array(source, "int32"),
        slot=slot,
        tokens_per_expert=kept_routes.tolist(),
        expert_offsets=starts.tolist(),
        rank_offsets=rank_offsets,
    )


def _gather(out: Received, per_rank: list[Array], gap: int | float) -> Array:
    """Rows of the sources; `gap` in dead rows."""
    like = per_rank[0]
    data = np.full((len(out.slot), *like.shape[1:]), gap, like.data.dtype)
    for source, array in enumerate(per_rank):
        rows = np.flatnonzero(out.source.data[:, 0] == source)
        data[rows] = array.data[out.source.data[rows, 1]]
    return Array(data, like.dtype)


def _fill_payload(
    out: Received,
    ranks: list[Tokens],
    rules: Rules,
    quantised: list[tuple[Array, Array]] | None,
) -> None:
    out.scales = None
    if quantised is not None:
        out.x = _gather(out, [x for x, _ in quantised], 0)
        ones = 0x7F7F7F7F if rules.quant == "fp8_block128_ue8m0" else 1.0
        out.scales = _gather(out, [scales for _, scales in quantised], ones)
    else:
        out.x = _gather(out, [tokens.x for tokens in ranks], 0)
        if ranks[0].scales is not None:
            out.scales = _gather(out, [tokens.scales for tokens in ranks], 0)
    out.extras = [
        _gather(out, [tokens.extras[i] for tokens in ranks], 0) for i in range(len(ranks[0].extras))
    ]


def _fill_metadata(out: Received, ranks: list[Tokens], rules: Rules, here: int) -> None:
    """topk_idx and topk_weights: -1 and 0 in dead rows and in slots of other ranks."""
    is_live = out.slot >= 0
    ids = _gather(out, [tokens.idx for tokens in ranks], -1).data
    weights = None
    if ranks[0].weights is not None:
        values = [Array(tokens.weights.values(), "float32") for tokens in ranks]
        weights = _gather(out, values, 0).data
    if rules.layout == "expert":
        slot = np.maximum(out.slot, 0)[:, None]
        ids = np.take_along_axis(ids, slot, axis=1)[:, 0]
        weights = None if weights is None else np.take_along_axis(weights, slot, axis=1)[:, 0]
        is_mine = is_live
    else:
        is_mine = is_live[:, None] & _is_local(ids, rules, here)
    base = 0 if rules.global_ids else rules.offsets[here]
    out.idx = Array(np.where(is_mine, ids - base, -1).astype(ids.dtype), ranks[0].idx.dtype)
    out.weights = None
    if weights is not None:
        out.weights = Array(np.where(is_mine, weights, np.float32(0)), "float32")


def _note_places(
    out: Received, ranks: list[Tokens], rules: Rules, here: int, places: list[Places]
) -> None:
    for source, place in enumerate(places):
        rows = np.flatnonzero(out.source.data[:, 0] == source)
        token = out.source.data[rows, 1]
        if rules.layout == "expert":
            place.rank[token, out.slot[rows]] = here
            place.row[token, out.slot[rows]] = rows
            continue
        row_of_token = np.full(len(place.row), -1)
        row_of_token[token] = rows
        here_too = _is_local(ranks[source].idx.data, rules, here) & (row_of_token >= 0)[:, None]
        place.rank[here_too] = here
        place.row[here_too] = np.broadcast_to(row_of_token[:, None], here_too.shape)[here_too]


def quantise(x: np.ndarray, quant: str) -> tuple[Array, Array]:
    """[T, H] fp32 into e4m3fn [T, H] and its scales: fp32 [T, H/128] or int32 [T, ceil(H/512)].

    The formula of the interface document, every operation rounded to fp32 on its own.
    """
    num_tokens, hidden = x.shape
    groups = x.reshape(num_tokens, hidden // GROUP, GROUP)
    amax = np.max(np.where(np.isnan(groups), np.float32(0), np.abs(groups)), axis=2)
    amax = np.minimum(amax, np.finfo(np.float32).max)
    scale = np.maximum(amax, np.float32(1e-4)) / np.float32(448)
    mantissa, exponent = np.frexp(scale)  # scale = mantissa * 2^exponent, mantissa in [0.5, 1)
    exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
    if quant != "fp8_block128":
        scale = np.ldexp(np.float32(1), exponent).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = groups * (np.float32(1) / scale)[:, :, None]
    codes = e4m3_encode(np.clip(scaled, -E4M3_MAX, E4M3_MAX)).reshape(x.shape)
    if quant != "fp8_block128_ue8m0":
        return Array(codes, "float8_e4m3fn"), Array(scale, "float32")
    num_words = -(-scale.shape[1] // 4)
    packed = np.full((num_tokens, 4 * num_words), 127, np.uint8)
    packed[:, : scale.shape[1]] = exponent + 127
    return Array(codes, "float8_e4m3fn"), Array(packed.view("<i4"), "int32")


@dataclass(frozen=True)
class Answer:
    """What one rank gives to combine: its experts' rows, and what concerns its own tokens."""

    x: Array  # [N, H']
    row_weights: Array | None = None  # fp32 [N, K] ("rank") or [N] ("expert")
    weights: Array | None = None  # [T, K], layout "expert" only
    bias: tuple[Array, ...] = ()  # [T, H'], in the order of adding
    out_dtype: str | None = None  # x's


@dataclass(frozen=True)
class Combined:
    x: Array  # [T, H']
    topk_weights: Array | None  # fp32 [T, K]


def combine(sent: Dispatched, rules: Rules, answers: list[Answer]) -> list[Combined]:
    """Every rank's sums: fp32 in ascending slot order, multiply then add, one rounding at the end.

    With layout "rank" a row is added once, at the slot of its first expert.
    """
    combined = []
    for rank, mine in enumerate(answers):
        places = sent.places[rank]
        acc = np.zeros((len(places.rank), mine.x.shape[1]), np.float32)
        has_term = np.zeros(len(places.rank), bool)
        for k in range(rules.num_topk):
            dest, row = places.rank[:, k], places.row[:, k]
            tokens = np.flatnonzero(dest >= 0)
            if rules.layout == "rank":
                is_first = np.all(places.rank[:, :k] != dest[:, None], axis=1)
                tokens = tokens[is_first[tokens]]
            term = _rows_at(answers, dest[tokens], row[tokens])
            if mine.weights is not None:
                with np.errstate(all="ignore"):
                    term = mine.weights.values()[tokens, k][:, None] * term
            _add(acc, has_term, tokens, term)
        for bias in mine.bias:
            _add(acc, has_term, np.arange(len(acc)), bias.values())
        weights = None
        if mine.row_weights is not None:
            weights = _row_weights_at(answers, places)
        combined.append(Combined(encode(acc, mine.out_dtype or mine.x.dtype), weights))
    return combined


def _rows_at(answers: list[Answer], rank: np.ndarray, row: np.ndarray) -> np.ndarray:
    """fp32 [n, H'] of the rows of those ranks."""
    rows = np.zeros((len(rank), answers[0].x.shape[1]), np.float32)
    for r, answer in enumerate(answers):
        at = rank == r
        rows[at] = Array(answer.x.data[row[at]], answer.x.dtype).values()
    return rows


def _add(acc: np.ndarray, has_term: np.ndarray, tokens: np.ndarray, term: np.ndarray) -> None:
    """The first term is taken as it is, so that -0 stays -0; the others are added."""
    with np.errstate(all="ignore"):
        total = acc[tokens] + term
    acc[tokens] = np.where(has_term[tokens, None], total, term)
    has_term[tokens] = True


def _row_weights_at(answers: list[Answer], places: Places) -> Array:
    """Unmultiplied: the row's weight of each slot, 0 where it went nowhere."""
    weights = np.zeros(places.rank.shape, np.float32)
    for r, answer in enumerate(answers):
        token, slot = np.nonzero(places.rank == r)
        row = places.row[token, slot]
        per_row = answer.row_weights.data
        weights[token, slot] = per_row[row] if per_row.ndim == 1 else per_row[row, slot]
    return Array(weights, "float32")
