"""The nodes of dispatch and combine in torch's graph; `ep.functional` is what users call.

Of two kinds, with the formulas of `ep._formulas`: those of eager calls, which hand on a result of
the buffer as it is, with its tensors made on first access, and those of the operations of compiled
graphs (`ep._ops`).  Eager calls do not go through the operations, since making all tensors of a
result and passing torch's dispatcher costs as much as a small call itself.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ep import _C, _ops, _packing
from ep import quant as _quant
from ep._formulas import Combined, combine_backward, dispatch_backward, keep_combine, keep_dispatch
from ep.buffer import EPBuffer

# --- nodes of eager calls -------------------------------------------------------------------------


class Origin:
    """What a handle keeps of the dispatch that made it, for the graph of its combines.

    It lies on the handle's Python object, which is why nodes do not keep that object: a node that
    did would keep itself.
    """

    def __init__(
        self,
        link: torch.Tensor | None,
        row_weights: torch.Tensor | None,
        weights: torch.Tensor | None,
    ) -> None:
        self.link = link  # fp32, an output of the dispatch's node that every combine takes
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
    packed: Any = None  # the result's handle, of `apply`

    def apply(self, x: torch.Tensor, topk_weights: torch.Tensor | None) -> tuple:
        """(rows, row weights, link) of `_Dispatch`."""
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
    by_row: bool = False
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
        link = None if origin is None else origin.link
        return _Combine.apply(self, link, x, weights, row_weights, *biases)

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
    """(x [T,H], topk_weights [T,K]) -> (rows, row weights, link); None for what has no gradient.

    Quantised rows have none themselves: in their place comes their edge, an [N,H] of x's dtype that
    takes no memory and that `_StraightThrough` hangs on.
    """

    @staticmethod
    def forward(ctx: Any, call: DispatchCall, x: torch.Tensor, topk_weights: Any) -> tuple:
        out = call.run(x, topk_weights)
        call.packed = _packing.pack(out.handle)
        keep_dispatch(ctx, call.buf, call.packed, (x, topk_weights), out.x, out.topk_weights)
        rows = weights = None
        if x.requires_grad:
            rows = out.x
            if call.options.get("quant") is not None:
                rows = torch.empty_strided(out.x.shape, (0, 0), dtype=x.dtype, device=x.device)
        if topk_weights is not None and topk_weights.requires_grad:
            weights = out.topk_weights
        return rows, weights, torch.zeros(1, device=x.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Any, grad_weights: Any, _grad_link: Any) -> tuple:
        return None, *dispatch_backward(ctx, grad_rows, grad_weights)


class _Combine(torch.autograd.Function):
    """(link, rows [N,H'], weights [N] or [T,K], row_weights, biases) -> (x, topk_weights)."""

    @staticmethod
    def forward(
        ctx: Any,
        call: CombineCall,
        link: Any,
        rows: torch.Tensor,
        weights: Any,
        row_weights: Any,
        *biases: torch.Tensor,
    ) -> tuple:
        y, handle = call.run(rows, row_weights, biases), call.handle
        facts = Combined(handle.layout, handle.exact, handle.has_weights, call.by_row)
        given = (rows, weights, row_weights, biases)
        keep_combine(ctx, call.buf, _packing.pack(handle), facts, given)
        return y.x, y.topk_weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Any, grad_home: Any) -> tuple:
        rows, weights, row_weights, biases = combine_backward(ctx, grad_x, grad_home)
        return None, None, rows, weights, row_weights, *biases


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


# --- nodes of operations --------------------------------------------------------------------------


def _setup_dispatch(ctx: Any, inputs: tuple, output: list[torch.Tensor]) -> None:
    _, buffer, x, _, topk_weights, _, extras, handle, _, _ = inputs
    got = _packing.named(output)
    kept = [got[name] for name in ("header", "ids", "weights", "routes", "plan")]
    if handle:
        kept = [kept[0], handle[1], kept[2], *handle[3:]]
    keep_dispatch(ctx, buffer, kept, (x, topk_weights), got["x"], got["topk_weights"])
    ctx.lengths = len(extras), len(handle)
    ctx.edge = "edge" if got["edge"].dim() == 2 else "x"
    edges = {"link"}
    if x.requires_grad:
        edges.add(ctx.edge)
    if topk_weights is not None and topk_weights.requires_grad:
        edges.add("topk_weights")
        # For combines in this graph; one in another graph takes the weights for others.
        got["link"].origin = Origin(None, got["topk_weights"], topk_weights)
    cut = [each for name, each in got.items() if name not in edges]
    ctx.mark_non_differentiable(*cut, *output[len(got) :])


def _dispatch_backward(ctx: Any, grads: list[Any]) -> tuple:
    grad_rows, grad_weights = grads[_packing.AT[ctx.edge]], grads[_packing.AT["topk_weights"]]
    x, weights = dispatch_backward(ctx, grad_rows, grad_weights)
    extras, handle = ([None] * length for length in ctx.lengths)
    return None, None, x, None, weights, None, extras, handle, None, None


def _setup_combine(ctx: Any, inputs: tuple, output: tuple) -> None:
    _, buffer, link, x, weights, factors, row_weights, biases, handle, options = inputs
    origin = getattr(link, "origin", None)
    by_row = factors is not None and origin is not None and origin.dispatched(weights)
    facts = _packing.facts_of(options)
    given = (x, factors if by_row else weights, row_weights, biases)
    keep_combine(ctx, buffer, handle, Combined(**facts, by_row=by_row), given)
    ctx.length = len(handle)
    ctx.mark_non_differentiable(output[3], *([output[2]] if row_weights is None else []))


def _combine_backward(ctx: Any, *grads: Any) -> tuple:
    x, weights, row_weights, biases = combine_backward(ctx, grads[1], grads[2])
    both = (None, weights) if ctx.by_row else (weights, None)
    return None, None, None, x, *both, row_weights, biases, [None] * ctx.length, None


def _register() -> None:
    for name, backward, setup in (
        ("dispatch", _dispatch_backward, _setup_dispatch),
        ("combine", _combine_backward, _setup_combine),
    ):
        torch.library.register_autograd(
            f"ep::{name}", backward, setup_context=setup, lib=_ops.library
        )
    torch.library.register_autograd(
        "ep::dequantize", lambda _ctx, grad: (grad, None, None, None, None), lib=_ops.library
    )


_register()
