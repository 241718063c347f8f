"""`ep::dispatch` and `ep::combine`: the two operations as torch knows them, in compiled graphs.

Eager `ep.functional` calls the buffer itself; under a tracer or a dispatch mode (`is_traced`) it
calls these.  Three things keep their number and order, as no one of them does in every version:

- An ordered effect, torch's own notion, keeps calls whose results nobody uses.
- A token, int64 [1], that every call takes and returns: `EPBuffer._token` is what the last traced
  call returned, so there is a chain through every graph and from graph to graph.  It has no
  gradient and keeps no graph alive.  In a backward the calls of one walk of the engine form a
  chain of their own (`Chain`).
- A link, fp32 [1], from a dispatch to the combines of its handle.  It has a gradient, so that a
  dispatch's backward follows those of its combines whatever their rows depend on.

A buffer goes by its name (`ep._registry`), a handle as five tensors: its header, uint8 and on the
CPU, and its own four.  Options go as text.  So nothing that changes per call is part of a graph.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import Tensor

from ep import _C, _arguments, _registry, _shapes
from ep import quant as _quant
from ep._calls import turn
from ep._packing import FACTS, decode, nothing, pack, unpack
from ep._recompute import is_recording, note, recorded
from ep.buffer import EPBuffer

library = torch.library.Library("ep", "FRAGMENT")
_TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)
library.define(
    "dispatch(Tensor token, str buffer, Tensor x, Tensor? topk_idx, Tensor? topk_weights, "
    "Tensor? scales, Tensor[] extras, Tensor[] handle, SymInt num_rows, str options) -> Tensor[]",
    tags=_TAGS,
)
library.define(
    "combine(Tensor token, str buffer, Tensor? link, Tensor x, Tensor? weights, Tensor? factors, "
    "Tensor? row_weights, Tensor[] biases, Tensor[] handle, str options) -> "
    "(Tensor token, Tensor x, Tensor topk_weights, Tensor status)",
    tags=_TAGS,
)


def is_traced() -> bool:
    """Is this call for a graph, or watched by a dispatch mode (selective checkpointing, say)?"""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


# --- the operations -------------------------------------------------------------------------------


def _dispatch(
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
    with turn(buf, "dispatch"):
        _arguments.refuse(given.pop("problem", None))
        given.pop("recorded_weights", None)
        if handle:
            given["handle"] = unpack(buf, handle)
        if scales is not None:
            given["scales"] = scales
        if extras:
            given["extras"] = extras
        again = None if handle else recorded(buf)  # this graph runs in a checkpointed region
        if again is not None:
            topk_idx, given["handle"] = None, again
        out = buf.dispatch(x, topk_idx, topk_weights, **given)
    edge = nothing(x)
    if given.get("quant") is not None:
        edge = torch.empty_strided(out.x.shape, (0, 0), dtype=x.dtype, device=x.device)
    return [
        torch.zeros_like(token),
        torch.zeros(1, device=x.device),
        out.x,
        edge,
        nothing(x) if out.scales is None else out.scales,
        out.topk_idx,
        nothing(x) if out.topk_weights is None else out.topk_weights,
        out.source,
        *(each.clone() for each in _counts(out)),  # they lie in one block: no one's own alignment
        *(_replayed(out.handle) if handle else _new(buf, out.handle)),
        *out.extras,
    ]


def _counts(out: _C.DispatchOutput) -> tuple[Tensor, ...]:
    offsets = out.rank_offsets
    return (
        out.num_rows_device,
        out.rows_needed_device,
        out.tokens_per_expert_device,
        out.expert_offsets,
        nothing(out.status, torch.int32) if offsets is None else offsets,
        out.status,
    )


def _new(buf: EPBuffer, handle: _C.Handle) -> list[Tensor]:
    """The tensors of a handle; with memory of their own where a checkpointed region keeps it."""
    packed = pack(handle)
    if is_recording():
        note(buf, handle)
        packed = [each.clone() for each in packed]
    return packed


def _replayed(handle: _C.Handle) -> list[Tensor]:
    """A replay's routing is the one that it was given, and no result may be an argument."""
    header, ids, weights, routes, _ = pack(handle)
    none = nothing(routes, torch.int32)
    return [header, nothing(ids, ids.dtype), weights.clone(), none, none.clone()]


def _combine(
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
    buf = _registry.find(buffer)
    given = decode(options)
    for fact in FACTS:
        given.pop(fact, None)
    with turn(buf, "combine"):
        _arguments.refuse(given.pop("problem", None))
        y = buf.combine(
            x,
            unpack(buf, handle),
            weights=weights,
            row_weights=row_weights,
            bias=biases or None,
            **given,
        )
    home = nothing(x) if y.topk_weights is None else y.topk_weights
    return torch.zeros_like(token), y.x, home, y.status.clone()


# --- quantised rows -------------------------------------------------------------------------------

library.define(
    "dequantize(Tensor edge, Tensor x, Tensor scales, str quant, ScalarType dtype) -> Tensor",
    tags=_TAGS,
)


def _dequantize(edge: Tensor, x: Tensor, scales: Tensor, quant: str, dtype: torch.dtype) -> Tensor:
    return _quant.dequantize(x, scales, quant).to(dtype)


# --- tokens ---------------------------------------------------------------------------------------


def _give_token(buf: EPBuffer) -> None:
    buf._token = torch.zeros(1, dtype=torch.int64, device=buf.device)


class Chain:
    """The tokens of the calls that one walk of autograd's engine makes on one buffer."""

    _tokens: ClassVar[dict[tuple[int, str], Tensor]] = {}

    @classmethod
    def take(cls, buffer: str, device: Any) -> Tensor:
        token = cls._tokens.get((torch._C._current_graph_task_id(), buffer))
        return torch.zeros(1, dtype=torch.int64, device=device) if token is None else token

    @classmethod
    def give(cls, buffer: str, token: Tensor) -> None:
        key = (torch._C._current_graph_task_id(), buffer)
        if key not in cls._tokens:
            forget = functools.partial(cls._tokens.pop, key, None)
            torch.autograd.Variable._execution_engine.queue_callback(forget)
        cls._tokens[key] = token


def _register(name: str, run: Any, fake: Any) -> None:
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ep::{name}", fake, lib=library)


def _register_effect(name: str) -> None:
    """Versions of torch without effects order calls by their tokens alone."""
    try:
        from torch._library.effects import EffectType

        library._register_effectful_op(f"ep::{name}", EffectType.ORDERED)
    except (ImportError, AttributeError):
        pass


_register("dispatch", _dispatch, _shapes.dispatch)
_register("combine", _combine, _shapes.combine)
_register("dequantize", _dequantize, _shapes.dequantize)
_register_effect("dispatch")
_register_effect("combine")
_registry.listen(_give_token)
