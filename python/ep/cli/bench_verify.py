"""What `bench --verify` compares results with: plain computations in numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import ep
from ep.cli.bench_case import SHIFTS

if TYPE_CHECKING:
    from ep.cli.bench_rounds import Exchange

_E4M3_HALF_STEP = 2.0**-4  # of a normal element, relative
_E4M3_HALF_LEAST = 2.0**-10  # of a subnormal one, in units of its scale


def dispatched(exchange: Exchange, out: Any) -> int:
    """Compares a dispatch's outputs; returns how many values. Raises ep.Error where one differs."""
    case, rows, array = exchange.case, exchange.rows, exchange.kind.array
    source = np.stack([rows.source, rows.token], 1)
    first = exchange.buffer.local_experts.start
    if case.layout == "rank":
        ids, weights = _sent(exchange)
        here = (ids >= first) & (ids < exchange.buffer.local_experts.stop)
        ids, weights = np.where(here, ids - first, -1), np.where(here, weights, 0)
    else:
        ids, weights = rows.expert - first, None
    if out.num_rows != len(rows.token):
        raise ep.Error(f"dispatch: num_rows is {out.num_rows}, not {len(rows.token)}")
    compared = _same("dispatch: source", array(out.source), source)
    compared += _same("dispatch: topk_idx", array(out.topk_idx), ids)
    if weights is not None:
        compared += _same("dispatch: topk_weights", array(out.topk_weights), weights)
    if case.quant is None:
        return compared + payload(exchange, array(out.x))
    values = ep.quant.dequantize(array(out.x), array(out.scales), case.quant)
    return compared + _near(exchange, case.quant, values)


def payload(exchange: Exchange, bits: np.ndarray) -> int:
    """Compares unquantised rows [N, H], bf16 as uint16."""
    compared = 0
    for mine, want in _payload_by_source(exchange):
        compared += _same("dispatch: x", bits[mine], want)
    return compared


def combined(exchange: Exchange, bits: np.ndarray) -> int:
    """Compares combined tokens [T, H], bf16 as uint16. Every sum is exact, whatever its order."""
    case, data, rank = exchange.case, exchange.data, exchange.rank
    topk_idx = data.topk_idx(rank)
    factor = np.zeros(case.tokens, np.float32)
    if case.layout == "rank":
        for r in range(case.num_ranks):
            factor += (data.owner[topk_idx] == r).any(1) * np.float32(2.0 ** -(r % SHIFTS))
    else:
        shift = np.ldexp(np.float32(1), -(topk_idx % SHIFTS))
        factor = (data.topk_weights(rank) * shift).sum(1, dtype=np.float32)
    exact = (data.x(rank).astype(np.uint32) << 16).view(np.float32) * factor[:, None]
    wide = exact.view(np.uint32)
    rounded = wide + 0x7FFF + (wide >> 16 & 1)  # to nearest, ties to even
    return _same("combine: x", bits, (rounded >> 16).astype(np.uint16))


def _sent(exchange: Exchange) -> tuple[np.ndarray, np.ndarray]:
    """Global ids and weights [N, K] of the received rows' tokens."""
    case, data, rows = exchange.case, exchange.data, exchange.rows
    ids = np.empty((len(rows.token), case.topk), np.int64)
    weights = np.empty(ids.shape, np.float32)
    for source in range(case.num_ranks):
        mine = rows.source == source
        ids[mine] = data.topk_idx(source)[rows.token[mine]]
        weights[mine] = data.topk_weights(source)[rows.token[mine]]
    return ids, weights


def _payload_by_source(exchange: Exchange) -> Any:
    """Which rows come from a source, and their bits."""
    for source in range(exchange.case.num_ranks):
        mine = exchange.rows.source == source
        yield mine, exchange.data.x(source)[exchange.rows.token[mine]]


def _near(exchange: Exchange, quant: str, values: np.ndarray) -> int:
    """Compares dequantised rows: each value is off by at most half a step of its format."""
    form = ep.quant.describe(quant)
    for mine, bits in _payload_by_source(exchange):
        want = (bits.astype(np.uint32) << 16).view(np.float32)
        groups = np.abs(want).reshape(len(want), -1, form.group).max(2)
        scale = np.maximum(groups, form.min_amax) / form.max_value
        if form.power_of_two:
            scale = np.exp2(np.ceil(np.log2(scale)))
        least = np.repeat(scale * _E4M3_HALF_LEAST, form.group, axis=1)
        slack = 1 + 2.0**-20  # of the reciprocal and the products, which are rounded
        bound = np.maximum(np.abs(want) * _E4M3_HALF_STEP, least) * slack
        wrong = np.argwhere(np.abs(values[mine] - want) > bound)
        if wrong.size:
            raise ep.Error(
                f"dispatch: x: {len(wrong)} values are off by more than {form.name} allows"
            )
    return values.size


def _same(what: str, got: np.ndarray, want: np.ndarray) -> int:
    if got.shape != want.shape:
        raise ep.Error(f"{what}: shape {list(got.shape)}, not {list(want.shape)}")
    if not np.array_equal(got, want):
        wrong = np.argwhere(got != want)
        at = [int(i) for i in wrong[0]]
        raise ep.Error(
            f"{what}: {len(wrong)} values differ, the first at {at}: "
            f"{got[tuple(at)]}, not {want[tuple(at)]}"
        )
    return got.size
