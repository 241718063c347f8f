"""The shapes of what `ep::dispatch` and `ep::combine` return, known before the call.

What is wrong is the operation's to say, when it runs and can tell the other ranks: nothing here
raises but where the buffer is gone.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from ep import _C, _registry, errors
from ep import quant as _quant
from ep._packing import IDS, decode, nothing
from ep.buffer import EPBuffer

_PITCH = 16  # bytes that a row of scales is padded to


def dispatch(
    token: Tensor,
    buffer: str,
    x: Tensor,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    scales: Tensor | None,
    extras: list[Tensor],
    handle: list[Tensor],
    num_rows: int,
    options: str,
) -> list[Tensor]:
    buf = _registry.find(buffer)
    given = decode(options)
    ids = handle[IDS] if handle else topk_idx
    if ids is None or ids.dim() != 2:
        ids = x.new_empty((x.shape[0], 1), dtype=torch.int64)
    tokens, topk = ids.shape
    rows = num_rows if handle else _fixed_rows(buf, given)
    if rows is None:
        rows = _unknown_size()
    per_row = (rows, topk) if given.get("layout") != "expert" else (rows,)
    has_weights = topk_weights is not None or bool(given.get("recorded_weights"))

    def empty(*shape: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return x.new_empty(shape, dtype=dtype)

    received, edge, factors = _rows(x, scales, given.get("quant"), rows)
    offsets = buf.expert_offsets
    owned = [after - at for at, after in itertools.pairwise(offsets)]
    plan_size = 3 * buf.num_ranks + 2 * max(owned) + 6  # csrc/layout/plan.hpp
    ranks = 0 if given.get("layout") == "expert" else buf.num_ranks + 1
    return [
        torch.empty_like(token),
        empty(1, dtype=torch.float32),
        received,
        edge,
        factors,
        empty(*per_row, dtype=ids.dtype),
        empty(*(per_row if has_weights else (0,)), dtype=torch.float32),
        empty(rows, 2),
        *(empty(n) for n in (1, 1, owned[buf.rank], owned[buf.rank] + 1, ranks, 1)),
        torch.empty(_C.handle_header_bytes, dtype=torch.uint8),
        empty(0, dtype=ids.dtype) if handle else empty(tokens, topk, dtype=ids.dtype),
        empty(tokens if has_weights else 0, topk, dtype=torch.float32),
        empty(0) if handle else empty(tokens, topk, 2),
        empty(0) if handle else empty(plan_size),
        *(extra.new_empty((rows, *extra.shape[1:])) for extra in extras),
    ]


def _unknown_size() -> Any:
    """An unbacked size; also where torch would rather break a graph than have one in it.

    Outside of fullgraph it would, by default, between each exact dispatch and its combine.
    """
    context = torch.library.get_ctx()
    shape_env = getattr(context, "_shape_env", None)
    allocate = getattr(torch._library.fake_impl, "allocate_size", None)
    if shape_env is None or allocate is None:
        return context.new_dynamic_size()
    return allocate(shape_env)


def _fixed_rows(buf: EPBuffer, given: dict[str, Any]) -> int | None:
    """N where it is known before the call, else None."""
    if given.get("max_rows") is not None:
        return given["max_rows"]
    if given.get("exact") is not False:
        return None
    sizes = (given.get("layout") or "rank", given.get("max_tokens"))
    try:
        return buf.max_rows(*sizes, given.get("expert_alignment") or 1)
    except (errors.Error, TypeError):
        return None


def _rows(x: Tensor, scales: Tensor | None, quant: Any, rows: Any) -> tuple[Tensor, ...]:
    """Rows, their edge and their scales."""
    shape = (rows, *x.shape[-1:])
    if quant in _quant.formats() and x.dim() == 2 and not x.shape[1] % 128:
        form = _quant.describe(quant)
        return (
            x.new_empty(shape, dtype=getattr(torch, form.dtype)),
            x.new_empty_strided(shape, (0, 0)),
            x.new_empty_strided(
                form.scale_shape(rows, x.shape[1]),
                form.scale_strides(x.shape[1]),
                dtype=getattr(torch, form.scale_dtype),
            ),
        )
    if scales is None or scales.dim() != 2:
        return x.new_empty(shape), nothing(x), nothing(x)
    size = scales.element_size()
    pitch = math.ceil(scales.shape[1] * size / _PITCH) * _PITCH // size
    factors = scales.new_empty_strided((rows, scales.shape[1]), (pitch, 1))
    return x.new_empty(shape), nothing(x), factors


def combine(
    token: Tensor,
    buffer: str,
    link: Tensor | None,
    x: Tensor,
    weights: Tensor | None,
    factors: Tensor | None,
    row_weights: Tensor | None,
    biases: list[Tensor],
    handle: list[Tensor],
    options: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _registry.find(buffer)
    tokens, topk = handle[IDS].shape
    dtype = _dtype(decode(options).get("out_dtype")) or x.dtype
    home = x.new_empty((0,) if row_weights is None else (tokens, topk), dtype=torch.float32)
    y = x.new_empty((tokens, *x.shape[-1:]), dtype=dtype)
    return torch.empty_like(token), y, home, x.new_empty(1, dtype=torch.int32)


def _dtype(name: Any) -> torch.dtype | None:
    found = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else None
    return found if isinstance(found, torch.dtype) else None


def dequantize(edge: Tensor, x: Tensor, scales: Tensor, quant: str, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)
