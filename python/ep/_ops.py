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

import ast
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ep import _C, _arguments, _registry, errors
from ep import quant as _quant
from ep._calls import turn
from ep._recompute import is_recording, note, recorded
from ep.buffer import EPBuffer

Tensor = torch.Tensor

HANDLE_TENSORS = 5
IDS = 1  # of a packed handle: topk_idx [T,K]
_PITCH = 16  # bytes that a row of scales is padded to

library = torch.library.Library("ep", "FRAGMENT")
_TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)
# The results of dispatch are one list: inductor's sizes that only the call knows (exact) are right
# for an effectful operation of one result.  In this order, and then the extras:
RESULTS = (
    "token",
    "link",
    "x",
    "edge",
    "scales",
    "topk_idx",
    "topk_weights",
    "source",
    "num_rows",
    "rows_needed",
    "tokens_per_expert",
    "expert_offsets",
    "rank_offsets",
    "status",
    "header",
    "ids",
    "weights",
    "routes",
    "plan",
)
AT = {name: at for at, name in enumerate(RESULTS)}
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


def named(results: list[Tensor]) -> dict[str, Tensor]:
    """A dispatch's results without the extras."""
    return dict(zip(RESULTS, results, strict=False))


def is_traced() -> bool:
    """Is this call for a graph, or watched by a dispatch mode (selective checkpointing, say)?"""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def encode(options: dict[str, Any]) -> str:
    """Options as text; `decode` is the reverse.  Values are None, numbers, names and dtypes."""
    return ", ".join([f"{name}={value!r}" for name, value in options.items()])


@functools.lru_cache(maxsize=1024)
def _decode(text: str) -> dict[str, Any]:
    call = ast.parse(f"f({text})", mode="eval").body
    return {each.arg: ast.literal_eval(each.value) for each in call.keywords}


def decode(text: str) -> dict[str, Any]:
    return dict(_decode(text))


_FACTS = ("layout", "exact", "recorded_weights")  # of combine's handle, for its backward


def facts_of(options: str) -> dict[str, Any]:
    given = decode(options)
    return {name: given.get(name) for name in _FACTS}


# --- handles --------------------------------------------------------------------------------------


def pack(handle: _C.Handle) -> list[Tensor]:
    return [torch.frombuffer(bytearray(handle.header), dtype=torch.uint8), *handle.tensors]


def unpack(buf: EPBuffer, packed: Sequence[Tensor]) -> _C.Handle:
    header, *tensors = packed
    return _C.Handle.from_tensors(buf, header.numpy().tobytes(), tensors)


# --- the operations -------------------------------------------------------------------------------


def _nothing(like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """For None, which results of operations cannot be."""
    return torch.empty(0, dtype=dtype, device=like.device)


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
    edge = _nothing(x)
    if given.get("quant") is not None:
        edge = torch.empty_strided(out.x.shape, (0, 0), dtype=x.dtype, device=x.device)
    return [
        torch.zeros_like(token),
        torch.zeros(1, device=x.device),
        out.x,
        edge,
        _nothing(x) if out.scales is None else out.scales,
        out.topk_idx,
        _nothing(x) if out.topk_weights is None else out.topk_weights,
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
        _nothing(out.status, torch.int32) if offsets is None else offsets,
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
    none = _nothing(routes, torch.int32)
    return [header, _nothing(ids, ids.dtype), weights.clone(), none, none.clone()]


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
    for fact in _FACTS:
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
    home = _nothing(x) if y.topk_weights is None else y.topk_weights
    return torch.zeros_like(token), y.x, home, y.status.clone()


# --- their shapes ---------------------------------------------------------------------------------
# What is wrong is the operation's to say, when it runs and can tell the other ranks: nothing here
# raises but where the buffer is gone.


def _fake_dispatch(
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

    received, edge, factors = _fake_rows(x, scales, given.get("quant"), rows)
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


def _fake_rows(x: Tensor, scales: Tensor | None, quant: Any, rows: Any) -> tuple[Tensor, ...]:
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
        return x.new_empty(shape), _nothing(x), _nothing(x)
    size = scales.element_size()
    pitch = math.ceil(scales.shape[1] * size / _PITCH) * _PITCH // size
    factors = scales.new_empty_strided((rows, scales.shape[1]), (pitch, 1))
    return x.new_empty(shape), _nothing(x), factors


def _fake_combine(
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
    dtype = dtype_of(decode(options).get("out_dtype")) or x.dtype
    home = x.new_empty((0,) if row_weights is None else (tokens, topk), dtype=torch.float32)
    y = x.new_empty((tokens, *x.shape[-1:]), dtype=dtype)
    return torch.empty_like(token), y, home, x.new_empty(1, dtype=torch.int32)


def dtype_of(name: Any) -> torch.dtype | None:
    found = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else None
    return found if isinstance(found, torch.dtype) else None


# --- quantised rows -------------------------------------------------------------------------------

library.define(
    "dequantize(Tensor edge, Tensor x, Tensor scales, str quant, ScalarType dtype) -> Tensor",
    tags=_TAGS,
)


def _dequantize(edge: Tensor, x: Tensor, scales: Tensor, quant: str, dtype: torch.dtype) -> Tensor:
    return _quant.dequantize(x, scales, quant).to(dtype)


def _fake_dequantize(
    edge: Tensor, x: Tensor, scales: Tensor, quant: str, dtype: torch.dtype
) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


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


_register("dispatch", _dispatch, _fake_dispatch)
_register("combine", _combine, _fake_combine)
_register("dequantize", _dequantize, _fake_dequantize)
_register_effect("dispatch")
_register_effect("combine")
_registry.listen(_give_token)
