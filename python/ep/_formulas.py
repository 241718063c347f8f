"""The formulas of dispatch and combine: what their backwards send.

Written once, for two kinds of nodes (`ep._autograd`): those of eager calls, and those of the
operations of compiled graphs.  A formula makes its calls through a port, so that a graph of a
backward has operations in it and an eager backward has none.

Nodes keep a handle as its header and its tensors, through ``save_for_backward``: they are
freed with the graph, and a second backward through a freed graph fails instead of being sent.
Which collectives a backward makes depends on what the forward was given, which is equal on all
ranks, never on which gradients have come.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ep import _ops, _packing
from ep._calls import turn
from ep.buffer import EPBuffer

_THIN_ROW = 4  # fp32 columns of rows that only carry weights: 16 bytes, the least a row may have


# --- how a formula makes its calls ----------------------------------------------------------------


@dataclass
class _Replayed:
    rows: torch.Tensor
    weights: torch.Tensor | None
    source: torch.Tensor


class _Direct:
    """Calls of the buffer itself; the node keeps it alive."""

    def __init__(self, buf: EPBuffer) -> None:
        self._buf = buf

    def turn(self, operation: str) -> Any:
        return turn(self._buf, operation)

    def dispatch(self, ctx: Any, handle: Any, rows: Any, weights: Any) -> _Replayed:
        out = self._buf.dispatch(
            rows, handle=_packing.unpack(self._buf, handle), topk_weights=weights, outputs="caller"
        )
        return _Replayed(out.x, out.topk_weights, out.source)

    def combine(self, ctx: Any, handle: Any, rows: Any, row_weights: Any) -> tuple:
        y = self._buf.combine(rows, _packing.unpack(self._buf, handle), row_weights=row_weights)
        return y.x, y.topk_weights


class _Traced:
    """Operations of a graph, each after the one before."""

    def __init__(self, name: str) -> None:
        self._name = name

    def turn(self, operation: str) -> Any:
        return contextlib.nullcontext()  # the operation sees to it when it runs

    def dispatch(self, ctx: Any, handle: Any, rows: Any, weights: Any) -> _Replayed:
        options = {
            "layout": ctx.layout,
            "recorded_weights": ctx.recorded_weights,
            "outputs": "caller",
        }
        results = torch.ops.ep.dispatch(
            _ops.Chain.take(self._name, rows.device),
            self._name,
            rows,
            None,
            weights,
            None,
            [],
            list(handle),
            ctx.num_rows,
            _packing.encode(options),
        )
        got = _packing.named(results)
        _ops.Chain.give(self._name, got["token"])
        given = weights is not None or ctx.recorded_weights
        return _Replayed(got["x"], got["topk_weights"] if given else None, got["source"])

    def combine(self, ctx: Any, handle: Any, rows: Any, row_weights: Any) -> tuple:
        token, x, home, _ = torch.ops.ep.combine(
            _ops.Chain.take(self._name, rows.device),
            self._name,
            None,
            rows,
            None,
            None,
            row_weights,
            [],
            list(handle),
            "",
        )
        _ops.Chain.give(self._name, token)
        return x, None if row_weights is None else home


def _port(owner: EPBuffer | str) -> _Direct | _Traced:
    return _Traced(owner) if isinstance(owner, str) else _Direct(owner)


# --- the formulas ---------------------------------------------------------------------------------


def keep_dispatch(
    ctx: Any,
    owner: EPBuffer | str,
    handle: Sequence[torch.Tensor],
    given: tuple[torch.Tensor, torch.Tensor | None],
    rows: torch.Tensor,
    row_weights: torch.Tensor | None,
) -> None:
    """What a dispatch's backward needs: its arguments x and topk_weights, and their rows."""
    x, topk_weights = given
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*handle)
    ctx.owner, ctx.num_more, ctx.device = owner, 0, x.device
    ctx.x_dtype = x.dtype if x.requires_grad else None
    ctx.rows_shape = tuple(rows.shape)
    ctx.weights_dtype = ctx.weights_shape = None
    if topk_weights is not None:
        ctx.weights_dtype, ctx.weights_shape = topk_weights.dtype, tuple(row_weights.shape)


def dispatch_backward(ctx: Any, grad_rows: Any, grad_weights: Any) -> tuple:
    """Gradients of x and topk_weights: one combine, with the weights' as row_weights."""
    port = _port(ctx.owner)
    with port.turn("combine"):
        handle, _ = _kept(ctx)
        if ctx.x_dtype is None:
            rows = _thin_rows(ctx.rows_shape[0], ctx.device)
        else:
            rows = _as_rows(grad_rows, ctx.rows_shape, ctx.x_dtype, ctx.device)
        weights = None
        if ctx.weights_shape is not None:
            weights = _as_fp32(grad_weights, ctx.weights_shape, ctx.device)
        x, home = port.combine(ctx, handle, rows, weights)
    grad_x = None if ctx.x_dtype is None else x
    return grad_x, None if weights is None else home.to(ctx.weights_dtype)


@dataclass
class Combined:
    """What a combine's backward has to know of its handle and of how its weights are given."""

    layout: str
    exact: bool
    recorded_weights: bool
    by_row: bool  # the graph knows the weights as the rows' own, [N]; else as [T,K]


def keep_combine(
    ctx: Any,
    owner: EPBuffer | str,
    handle: Sequence[torch.Tensor],
    facts: Combined,
    given: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, Sequence[torch.Tensor]],
) -> None:
    """What a combine's backward needs; `given`: rows, weights, row_weights and biases."""
    rows, weights, row_weights, biases = given
    ctx.set_materialize_grads(False)
    ctx.wants_weights = weights is not None and weights.requires_grad
    ctx.save_for_backward(weights, rows if ctx.wants_weights else None, *handle)
    ctx.owner, ctx.num_more, ctx.device = owner, 2, rows.device
    ctx.layout, ctx.exact, ctx.by_row = facts.layout, facts.exact, facts.by_row
    ctx.recorded_weights = facts.recorded_weights
    ctx.num_rows, ctx.rows_dtype, ctx.row_shape = rows.shape[0], rows.dtype, tuple(rows.shape[1:])
    ctx.rows_want = rows.requires_grad
    ctx.has_row_weights = row_weights is not None
    ctx.bias_dtypes = [bias.dtype if bias.requires_grad else None for bias in biases]


def combine_backward(ctx: Any, grad_x: Any, grad_home: Any) -> tuple:
    """Gradients of rows, weights, row_weights and the list of biases: a replayed dispatch."""
    port = _port(ctx.owner)
    with port.turn("dispatch"):
        handle, (weights, rows) = _kept(ctx)
        topk_idx = handle[_packing.IDS]
    sent = _replay(ctx, port, handle, grad_x, weights, grad_home, tuple(topk_idx.shape))
    grad_rows, grad_weights = sent.rows, None
    if weights is not None and ctx.rows_want:
        # Scaled in fp32 by one rounding, as combine scales the rows.
        grad_rows = (sent.rows.float() * sent.weights[:, None]).to(ctx.rows_dtype)
    if ctx.wants_weights:
        # A row's sum does not depend on where the row lies: the same bits for any R.
        grad_weights = (sent.rows.float() * rows.float()).sum(1)
        if not ctx.by_row:
            grad_weights = _bring_home(ctx, port, handle, grad_weights).to(weights.dtype)
    grad_biases = [
        None if dtype is None or grad_x is None else grad_x.to(dtype) for dtype in ctx.bias_dtypes
    ]
    return grad_rows if ctx.rows_want else None, grad_weights, sent.row_weights, grad_biases


@dataclass
class _Sent:
    """What of a combine's backward has reached the experts' rank."""

    rows: torch.Tensor  # [N,H'] gradients of the result, in the rows' dtype; 0 in dead rows
    weights: torch.Tensor | None  # fp32 [N] that combine multiplied the rows by
    row_weights: torch.Tensor | None  # gradients of row_weights, fp32 [N,K] or [N]


def _replay(
    ctx: Any, port: Any, handle: Any, grad_x: Any, weights: Any, grad_home: Any, shape: tuple
) -> _Sent:
    """Sends the gradients of a combine's results to where its rows came from; shape is [T,K]."""
    to_send = None if ctx.by_row else weights
    with port.turn("dispatch"):
        grad_x = _as_rows(grad_x, (shape[0], *ctx.row_shape), ctx.rows_dtype, ctx.device)
        along = _as_fp32(grad_home, shape, ctx.device) if ctx.has_row_weights else to_send
        out = port.dispatch(ctx, handle, grad_x, along)
    rows = out.rows
    if not ctx.exact:  # the tail is unspecified, and experts without counts read all N rows
        rows = rows.masked_fill(out.source[:, :1] < 0, 0)
    if not ctx.has_row_weights:
        return _Sent(rows, weights if to_send is None else out.weights, None)
    if to_send is None:
        return _Sent(rows, weights, out.weights)
    # Gradients and weights are both [T,K]: the weights travel on their own.
    with port.turn("dispatch"):
        more = port.dispatch(ctx, handle, _thin_rows(shape[0], ctx.device), to_send)
    return _Sent(rows, more.weights, out.weights)


def _bring_home(ctx: Any, port: Any, handle: Any, row_weights: torch.Tensor) -> torch.Tensor:
    """Numbers of rows [N] as numbers of the source's slots [T,K]."""
    with port.turn("combine"):
        thin = _thin_rows(row_weights.shape[0], ctx.device)
        return port.combine(ctx, handle, thin, row_weights)[1]


def _kept(ctx: Any) -> tuple[list[torch.Tensor], Sequence[torch.Tensor | None]]:
    """The packed handle, and what else was saved before it."""
    saved = ctx.saved_tensors
    return list(saved[ctx.num_more :]), saved[: ctx.num_more]


# --- gradients as the buffer takes them -----------------------------------------------------------


def _as_rows(
    grad: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: Any
) -> torch.Tensor:
    """A gradient of any strides, or none, as rows that the buffer can send."""
    if grad is None:
        return torch.zeros((1, shape[1]), dtype=dtype, device=device).expand(*shape)
    grad = grad.to(dtype)
    return grad if grad.stride(1) == 1 else grad.contiguous()


def _as_fp32(grad: torch.Tensor | None, shape: Sequence[int], device: Any) -> torch.Tensor:
    if grad is None:
        return torch.zeros(shape, device=device)
    return grad.float()


def _thin_rows(num_rows: int, device: Any) -> torch.Tensor:
    """Rows of zeros, for calls in which only weights matter."""
    return torch.zeros((1, _THIN_ROW), device=device).expand(num_rows, _THIN_ROW)
