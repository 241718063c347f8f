"""The nodes that dispatch and combine are in torch's graph; `ep.functional` is what users call.

Nodes keep a handle as its header and its tensors, these through ``save_for_backward``: they are
freed with the graph, and a second backward through a freed graph fails instead of being sent.
Which collectives a backward makes depends on what the forward was given, which is equal on all
ranks, never on which gradients have come.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ep import _C
from ep import quant as _quant
from ep._calls import turn
from ep.buffer import EPBuffer

_THIN_ROW = 4  # fp32 columns of rows that only carry weights: 16 bytes, the least a row may have


class Origin:
    """What a handle keeps of the dispatch that made it, for the graph of its combines.

    It lies on the handle's Python object, which is why nodes do not keep that object: a node that
    did would keep itself.
    """

    def __init__(
        self,
        token: torch.Tensor,
        row_weights: torch.Tensor | None,
        weights: torch.Tensor | None,
    ) -> None:
        self.token = token  # fp32 [], an output of the dispatch's node that every combine takes
        self.row_weights = row_weights  # out.topk_weights; None where it does not require grad
        self._weights = None if row_weights is None else weakref.ref(weights)
        self._version = None if row_weights is None else weights._version

    def dispatched(self, weights: torch.Tensor | None) -> bool:
        """Are these the very weights that were dispatched, so that each row has its own?"""
        return (
            weights is not None
            and self._weights is not None
            and self._weights() is weights
            and weights._version == self._version
        )


@dataclass
class DispatchCall:
    """Arguments of a dispatch that are no part of the graph, and its result."""

    buf: EPBuffer
    topk_idx: torch.Tensor | None
    options: dict[str, Any]
    out: Any = None

    def apply(self, x: torch.Tensor, topk_weights: torch.Tensor | None) -> tuple:
        """(rows, row weights, token) of `_Dispatch`."""
        return _Dispatch.apply(self, x, topk_weights)

    def run(self, x: torch.Tensor, topk_weights: torch.Tensor | None) -> Any:
        self.out = self.buf.dispatch(x, self.topk_idx, topk_weights, **self.options)
        return self.out


@dataclass
class CombineCall:
    """As DispatchCall."""

    buf: EPBuffer
    handle: _C.Handle
    weights: torch.Tensor | None
    options: dict[str, Any]
    by_row: bool = False  # the graph knows the weights as the rows' own, [N]; else as [T,K]
    out: Any = None

    def apply(
        self,
        origin: Origin | None,
        x: torch.Tensor,
        row_weights: torch.Tensor | None,
        biases: tuple[torch.Tensor, ...],
    ) -> tuple:
        """(x, topk_weights) of `_Combine`."""
        self.by_row = origin is not None and origin.dispatched(self.weights)
        weights = origin.row_weights if self.by_row else self.weights
        token = None if origin is None else origin.token
        return _Combine.apply(self, token, x, weights, row_weights, *biases)

    def run(
        self,
        x: torch.Tensor,
        row_weights: torch.Tensor | None,
        biases: tuple[torch.Tensor, ...],
    ) -> Any:
        self.out = self.buf.combine(
            x,
            self.handle,
            weights=self.weights,
            bias=list(biases) or None,
            row_weights=row_weights,
            **self.options,
        )
        return self.out


class _Dispatch(torch.autograd.Function):
    """(x [T,H], topk_weights [T,K]) -> (rows, row weights, token); None for what has no gradient.

    Quantised rows have none themselves: in their place comes their edge, an [N,H] of x's dtype that
    takes no memory and that `_StraightThrough` hangs on.
    """

    @staticmethod
    def forward(ctx: Any, call: DispatchCall, x: torch.Tensor, topk_weights: Any) -> tuple:
        ctx.set_materialize_grads(False)
        out = call.run(x, topk_weights)
        _save_handle(ctx, call.buf, out.handle)
        ctx.x_dtype = x.dtype if x.requires_grad else None
        ctx.rows_shape = out.x.shape
        ctx.weights_dtype = ctx.weights_shape = rows = weights = None
        if x.requires_grad:
            rows = out.x
            if call.options.get("quant") is not None:
                rows = torch.empty_strided(out.x.shape, (0, 0), dtype=x.dtype, device=x.device)
        if topk_weights is not None:
            ctx.weights_dtype, ctx.weights_shape = topk_weights.dtype, out.topk_weights.shape
            weights = out.topk_weights if topk_weights.requires_grad else None
        return rows, weights, torch.zeros((), device=x.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Any, grad_weights: Any, _grad_token: Any) -> tuple:
        device = ctx.buf.device
        with turn(ctx.buf, "combine"):
            handle, _ = _saved_handle(ctx)
            if ctx.x_dtype is None:
                rows = _thin_rows(ctx.rows_shape[0], device)
            else:
                rows = _as_rows(grad_rows, ctx.rows_shape, ctx.x_dtype, device)
            weights = None
            if ctx.weights_shape is not None:
                weights = _as_fp32(grad_weights, ctx.weights_shape, device)
            y = ctx.buf.combine(rows, handle, row_weights=weights)
        grad_x = None if ctx.x_dtype is None else y.x
        return None, grad_x, None if weights is None else y.topk_weights.to(ctx.weights_dtype)


class _Combine(torch.autograd.Function):
    """(token, rows [N,H'], weights [N] or [T,K], row_weights, biases) -> (x, topk_weights)."""

    @staticmethod
    def forward(
        ctx: Any,
        call: CombineCall,
        token: Any,
        rows: torch.Tensor,
        weights: Any,
        row_weights: Any,
        *biases: torch.Tensor,
    ) -> tuple:
        ctx.set_materialize_grads(False)
        y = call.run(rows, row_weights, biases)
        ctx.wants_weights = weights is not None and weights.requires_grad
        _save_handle(ctx, call.buf, call.handle, weights, rows if ctx.wants_weights else None)
        ctx.by_row = call.by_row
        ctx.rows_dtype = rows.dtype
        ctx.x_shape = y.x.shape
        ctx.has_row_weights = row_weights is not None
        ctx.bias_dtypes = [bias.dtype if bias.requires_grad else None for bias in biases]
        return y.x, y.topk_weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Any, grad_home: Any) -> tuple:
        with turn(ctx.buf, "dispatch"):
            handle, (weights, rows) = _saved_handle(ctx)
        sent = _replay(ctx, handle, grad_x, weights, grad_home)
        grad_rows, grad_weights = sent.rows, None
        if weights is not None and ctx.needs_input_grad[2]:
            # Scaled in fp32 by one rounding, as combine scales the rows.
            grad_rows = (sent.rows.float() * sent.weights[:, None]).to(ctx.rows_dtype)
        if ctx.wants_weights:
            # A row's sum does not depend on where the row lies: the same bits for any R.
            grad_weights = (sent.rows.float() * rows.float()).sum(1)
            if not ctx.by_row:
                grad_weights = _bring_home(ctx, handle, grad_weights).to(weights.dtype)
        grad_biases = [
            None if dtype is None or grad_x is None else grad_x.to(dtype)
            for dtype in ctx.bias_dtypes
        ]
        return None, None, grad_rows, grad_weights, sent.row_weights, *grad_biases


@dataclass
class _Sent:
    """What of a combine's backward has reached the experts' rank."""

    rows: torch.Tensor  # [N,H'] gradients of the result, in the rows' dtype; 0 in dead rows
    weights: torch.Tensor | None  # fp32 [N] that combine multiplied the rows by
    row_weights: torch.Tensor | None  # gradients of row_weights, fp32 [N,K] or [N]


def _replay(
    ctx: Any, handle: _C.Handle, grad_x: Any, weights: torch.Tensor | None, grad_home: Any
) -> _Sent:
    """Sends the gradients of a combine's results to where its rows came from."""
    to_send = None if ctx.by_row else weights
    shape, device = (handle.num_tokens, handle.num_topk), ctx.buf.device
    with turn(ctx.buf, "dispatch"):
        grad_x = _as_rows(grad_x, ctx.x_shape, ctx.rows_dtype, device)
        along = _as_fp32(grad_home, shape, device) if ctx.has_row_weights else to_send
        out = ctx.buf.dispatch(grad_x, handle=handle, topk_weights=along, outputs="caller")
    rows = out.x
    if not handle.exact:  # the tail is unspecified, and experts without counts read all N rows
        rows.masked_fill_(out.source[:, :1] < 0, 0)
    if not ctx.has_row_weights:
        return _Sent(rows, weights if to_send is None else out.topk_weights, None)
    if to_send is None:
        return _Sent(rows, weights, out.topk_weights)
    # Gradients and weights are both [T,K]: the weights travel on their own.
    with turn(ctx.buf, "dispatch"):
        thin = _thin_rows(handle.num_tokens, device)
        more = ctx.buf.dispatch(thin, handle=handle, topk_weights=to_send, outputs="caller")
    return _Sent(rows, more.topk_weights, out.topk_weights)


def _bring_home(ctx: Any, handle: _C.Handle, row_weights: torch.Tensor) -> torch.Tensor:
    """Numbers of rows [N] as numbers of the source's slots [T,K]."""
    with turn(ctx.buf, "combine"):
        thin = _thin_rows(len(row_weights), ctx.buf.device)
        return ctx.buf.combine(thin, handle, row_weights=row_weights).topk_weights


def straight_through(
    edge: torch.Tensor, x: torch.Tensor, scales: torch.Tensor, quant: str, dtype: torch.dtype
) -> torch.Tensor:
    """The values of quantised rows; their gradient goes to `edge` as it is."""
    return _StraightThrough.apply(edge, x, scales, quant, dtype)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        edge: torch.Tensor,
        x: torch.Tensor,
        scales: torch.Tensor,
        quant: str,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        return _quant.dequantize(x, scales, quant).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return grad, None, None, None, None


# --- handles and gradients as the buffer takes them -----------------------------------------------


def _save_handle(ctx: Any, buf: EPBuffer, handle: _C.Handle, *more: torch.Tensor | None) -> None:
    ctx.save_for_backward(*more, *handle.tensors)
    ctx.buf, ctx.header, ctx.num_more = buf, handle.header, len(more)


def _saved_handle(ctx: Any) -> tuple[_C.Handle, Sequence[torch.Tensor | None]]:
    saved = ctx.saved_tensors
    tensors = saved[ctx.num_more :]
    return _C.Handle.from_tensors(ctx.buf, ctx.header, tensors), saved[: ctx.num_more]


def _as_rows(
    grad: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: str
) -> torch.Tensor:
    """A gradient of any strides, or none, as rows that the buffer can send."""
    if grad is None:
        return torch.zeros((1, shape[1]), dtype=dtype, device=device).expand(*shape)
    grad = grad.to(dtype)
    return grad if grad.stride(1) == 1 else grad.contiguous()


def _as_fp32(grad: torch.Tensor | None, shape: Sequence[int], device: str) -> torch.Tensor:
    if grad is None:
        return torch.zeros(shape, device=device)
    return grad.float()


def _thin_rows(num_rows: int, device: str) -> torch.Tensor:
    """Rows of zeros, for calls in which only weights matter."""
    return torch.zeros((1, _THIN_ROW), device=device).expand(num_rows, _THIN_ROW)
