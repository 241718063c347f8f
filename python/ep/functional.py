"""Differentiable dispatch and combine for torch: eager, and in graphs of torch.compile.

The backward of a dispatch is a combine, with the weights' gradients as row_weights; that of a
combine is a replayed dispatch.  So a backward pass is collective too:

*Equal on all ranks*, beside what the calls themselves need: which of ``x``, ``topk_weights``,
``weights``, ``bias`` and ``row_weights`` are given and which require grad, also with T = 0
(``x.requires_grad_()`` helps there); and which tensors ``backward()`` starts from.  Free are the
rows given to combine: a rank that received nothing may skip its experts, so long as ``x`` or
``topk_weights`` of the dispatch require grad.  An output that nothing depends on has a gradient of
zeros, and the collective is made all the same.

*Order.*  Autograd takes what is ready in reverse order of creation, so the operations of one
``backward()`` run in the reverse order of their calls, on every rank, where one thread made them
and the tensors are on one device.  A combine also hangs on its dispatch, whatever its rows depend
on.  Operations of different handles do not hang on each other: the graphs of two micro-batches
could then not be walked backward one after the other.

*Sizes.*  Gradients travel unquantised, in the dtype of ``x``: the buffer's ``hidden`` and
``token_bytes`` must hold the rows given to combine, its ``output_bytes`` those given to dispatch.

*Graphs.*  torch.compile traces both calls as `ep::dispatch` and `ep::combine`, with fullgraph=True
too; exact sizes are unbacked symbols.  Each takes the buffer's token and returns it:

- Forward, the token goes from call to call of a graph and, on the buffer, from graph to graph, and
  it has no gradient.  So a graph makes the calls of the traced code, all of them and in its order,
  also where their results are unused or equal; eager calls in between come where Python has them.
- Backward, the calls of one graph form a chain of their own, in the reverse order of the forward's.
  Nothing of one graph's backward hangs on another's: those of micro-batches run in any order that
  is the same on all ranks, and a graph dies with its results, as an eager one does.
- Ranks may compile differently, or not at all: what must be equal are the calls, and they are
  those of the code.  Compiling makes none, but takes its time: ``timeout_s`` must cover the slowest
  rank's first step.  torch's compiler is not safe in several threads at once: with ranks as threads
  of one process, let one compile after the other.
- A graph names the buffer and does not keep it: keep it as long as its backwards, else they raise
  InvalidArgument.  What is wrong with a call raises when the graph runs, as in eager mode, with
  PeerError on the other ranks.  Options are constants of a graph; wait_for, stream, async_op and
  out are refused.  ``out.tokens_per_expert`` (a list) breaks the graph, its ``_device`` twin and
  ``expert_offsets`` do not.
- Between graphs weights do not count as those that the dispatch got (see `combine`), which costs
  a collective more: breaks between a dispatch and its combine must be the same on all ranks.
- Dispatch modes (selective checkpointing) see the same two operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from ep import _C, _arguments, _ops, _traced
from ep import quant as _quant
from ep._autograd import CombineCall, DispatchCall, Origin, straight_through
from ep._calls import turn
from ep._recompute import Again, Record, Region, note, recorded
from ep._traced import TracedHandle
from ep.buffer import EPBuffer
from ep.errors import InvalidArgument

__all__ = ["CombineResult", "DispatchResult", "combine", "dispatch", "recompute_contexts"]


def dispatch(
    buf: EPBuffer,
    x: torch.Tensor,
    topk_idx: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    *,
    outputs: str = "caller",
    **options: Any,
) -> DispatchResult:
    """`EPBuffer.dispatch`, differentiable with respect to `x` and `topk_weights`.

    Args:
        buf: every rank makes the same calls; see the module's text.
        x: [T,H] bf16, fp16 or fp32.  With ``quant`` gradients pass straight through the rounding:
            read the rows with ``out.dequantize()``; out.x itself is fp8 and without gradient.
        topk_idx: [T,K] int32 or int64, -1 = no expert.
        topk_weights: [T,K] fp32, bf16 or fp16.
        outputs: "caller", since saved activations belong to torch's allocator; "window" spares a
            copy, and what the experts save for their backward then holds the arena.
        **options: those of `EPBuffer.dispatch` except async_op and out.  With ``handle`` (a
            replay) topk_idx is not given.

    Returns:
        A `DispatchResult`.  With grad mode on, its x requires grad where `x` does and its
        topk_weights where `topk_weights` do; scales, extras and counts never do.

    Raises:
        InvalidArgument: async_op or out is given; x requires grad, but travels as opaque bytes;
            scales or an extra require grad.  Otherwise as `EPBuffer.dispatch`.
    """
    options["outputs"] = outputs
    if _ops.is_traced():
        traced = _traced.dispatch(buf, x, topk_idx, topk_weights, options)
        return DispatchResult(traced, x, options, traced.edge)
    with turn(buf, "dispatch"):
        differentiable = _arguments.needs_grad(x, topk_weights)
        _arguments.refuse(_arguments.of_options(options, differentiable))
        _arguments.refuse(_arguments.of_edges(x, options))
        is_new = options.get("handle") is None
        again = recorded(buf) if is_new else None
        if again is not None:
            topk_idx, options["handle"] = None, again
        call = DispatchCall(buf, topk_idx, options)
        if not differentiable:
            call.run(x, topk_weights)
            if is_new:
                note(buf, call.out.handle)
            return DispatchResult(call.out, x, options)
        rows, row_weights, link = call.apply(x, topk_weights)
        if is_new:
            note(buf, call.out.handle)
        handle = call.out.handle
        handle._origin = Origin(link, row_weights, topk_weights)
        handle._traced = TracedHandle.of(handle, call.packed)
        handle._traced.link, handle._traced.row_weights = link, row_weights
        return DispatchResult(call.out, x, options, rows, row_weights)


def combine(
    buf: EPBuffer,
    x: torch.Tensor,
    handle: _C.Handle,
    *,
    weights: torch.Tensor | None = None,
    bias: torch.Tensor | Sequence[torch.Tensor] | None = None,
    row_weights: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **options: Any,
) -> CombineResult:
    """`EPBuffer.combine`, differentiable with respect to all tensors that it takes.

    Args:
        buf: every rank makes the same calls; see the module's text.
        x: [N,H'] bf16, fp16 or fp32, H' at most the buffer's hidden.  Saved for the backward where
            `weights` require grad.
        handle: of the dispatch; ``out.handle`` of `dispatch`, on which the graph hangs.
        weights: [T,K], layout "expert" only.  Where they are the very tensor that `dispatch` got
            as topk_weights their gradient travels with the dispatch's own backward; another tensor
            costs one more, small, collective there.
        bias: up to two [T,H'].
        row_weights: fp32 [N,K] (layout "rank") or [N] ("expert").
        out_dtype: of the result; None: x's.
        **options: those of `EPBuffer.combine` except async_op and out.

    Returns:
        A `CombineResult`: x [T,H'] and, with row_weights, topk_weights [T,K] fp32.

    Raises:
        InvalidArgument: async_op or out is given.  Otherwise as `EPBuffer.combine`.
    """
    options["out_dtype"] = out_dtype
    if _ops.is_traced():
        given = {"weights": weights, "row_weights": row_weights, "bias": bias}
        return CombineResult(_traced.combine(buf, x, handle, given, options))
    with turn(buf, "combine"):
        biases = _biases(bias)
        origin: Origin | None = getattr(handle, "_origin", None)
        if isinstance(handle, TracedHandle):
            origin, handle = Origin(handle.link, None, None), handle.core()
        link = None if origin is None else origin.link
        differentiable = _arguments.needs_grad(link, x, weights, row_weights, *biases)
        _arguments.refuse(_arguments.of_options(options, differentiable))
        call = CombineCall(buf, handle, weights, options)
        if not differentiable:
            return CombineResult(call.run(x, row_weights, biases))
        rows, home = call.apply(origin, x, row_weights, biases)
        return CombineResult(call.out, rows, home)


@torch.compiler.disable
def recompute_contexts(fn: Callable[..., Any] | None = None) -> Any:
    """Lets checkpointing replay dispatches at recompute, where it would make them anew.

    The region's dispatches (of `ep.functional`, so also of `ep.nn.MoE`) record their handles in the
    forward, and replay them, in order, when the region is recomputed in the backward: no counting,
    no host wait, the same routing and the same bits even if the router would decide otherwise.
    Combines are made again.  Every rank does the same, as for any other call.

    Both kinds of `torch.utils.checkpoint.checkpoint`::

        checkpoint(layer, x, use_reentrant=False, context_fn=ep.recompute_contexts)
        checkpoint(ep.recompute_contexts(layer), x, use_reentrant=True)  # takes no context_fn

    Args:
        fn: the checkpointed function, wrapped anew in every checkpoint() call (either kind).
            None: as context_fn.

    Returns:
        With `fn` a callable of its arguments; without, the two contexts that context_fn returns.

    With torch.compile, compile `layer`, not what calls checkpoint(): torch traces a checkpoint()
    around these calls in no version that both kinds and fullgraph=True work in.  Without fullgraph
    it breaks the graph there and all is as in eager mode; with it, it raises.

    Raises, at recompute, in the dispatch's turn:
        InvalidArgument: the region dispatches oftener than it did, or from another buffer.  A
            wrapped `fn` is called a second time outside of a backward.
    """
    if fn is not None:
        return Region(fn)
    record = Record()
    return record.recording(), Again(record)


class _Result:
    """A frozen view of a buffer's result: its attributes, of which some are differentiable here."""

    _base: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._base, name)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is frozen: {name} cannot be set")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._base)})


class DispatchResult(_Result):
    """What `dispatch` returns: all that `EPBuffer.dispatch` does, by the same names.

    Attributes:
        x: [N,H] rows; differentiable, unless quantised.
        topk_weights: fp32 [N,K] (layout "rank") or [N] ("expert"); differentiable; None if none
            were given.
        handle: for `combine`; keeps the dispatch in the graph.
    """

    def __init__(
        self,
        base: _C.DispatchOutput,
        source: torch.Tensor,
        options: dict[str, Any],
        rows: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
    ) -> None:
        quant = options.get("quant")
        self._set("_base", base)
        self._set("_dtype", source.dtype)
        self._set("_quant", quant)
        self._set("_edge", rows if quant is not None else None)
        self._set("x", base.x if rows is None or quant is not None else rows)
        self._set("topk_weights", base.topk_weights if topk_weights is None else topk_weights)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The rows' values [N,H] in `dtype`; None: that of the x that was dispatched.

        With quant: element times scale in fp32, rounded to `dtype`; the gradient passes to the
        dispatched x as it is, as if nothing had been rounded.  Without quant: x.

        Raises InvalidArgument when the rows are opaque bytes or have scales of the caller's own.
        """
        dtype = self._dtype if dtype is None else dtype
        if self._quant is None:
            if self.x.dtype not in _arguments.FLOATS or self.scales is not None:
                raise InvalidArgument(
                    f"the rows are {self.x.dtype} bytes of the caller's own meaning; only what "
                    f"quant= made can be dequantised"
                )
            return self.x.to(dtype)
        if self._edge is None:
            return _quant.dequantize(self.x, self.scales, self._quant).to(dtype)
        if _ops.is_traced():
            return torch.ops.ep.dequantize(self._edge, self.x, self.scales, self._quant, dtype)
        return straight_through(self._edge, self.x, self.scales, self._quant, dtype)


class CombineResult(_Result):
    """What `combine` returns: x [T,H'], topk_weights [T,K] or None, status [1], event."""

    def __init__(
        self,
        base: _C.CombineOutput,
        x: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
    ) -> None:
        self._set("_base", base)
        self._set("x", base.x if x is None else x)
        self._set("topk_weights", base.topk_weights if topk_weights is None else topk_weights)


def _biases(bias: Any) -> tuple[torch.Tensor, ...]:
    return () if bias is None else (bias,) if isinstance(bias, torch.Tensor) else tuple(bias)
