"""`ep.functional` in a graph: arguments as the operations take them, results as users know them.

All of this is read by torch.compile, not run: plain code, which raises nothing.  What is wrong with
the arguments goes to the operation as text, which raises it in its turn, so that the other ranks
raise PeerError where otherwise they would wait.
"""

from __future__ import annotations

from typing import Any

import torch

from ep import _C, _ops
from ep.buffer import EPBuffer

_DISPATCH = (
    "quant scale_layout global_scale layout expert_alignment exact mode max_tokens max_rows "
    "overflow ids outputs num_sms num_qps split"
).split()
_COMBINE = "partial quant out_dtype ready num_sms num_qps split".split()
_SYNCHRONOUS = ("wait_for", "stream", "async_op", "out")


class TracedHandle:
    """`ep.Handle` of a dispatch in a graph; `EPBuffer`'s own calls take it too.

    Attributes:
        packed: its header and its four tensors.
        num_rows: N.
        layout, exact, has_weights: as `ep.Handle`'s.
        link: what the gradients of combines hang on.
        row_weights: topk_weights of the rows; None where they require no grad.
    """

    def __init__(
        self, packed: list[torch.Tensor], num_rows: Any, layout: str, exact: bool, has_weights: bool
    ) -> None:
        self.packed, self.num_rows = packed, num_rows
        self.layout, self.exact, self.has_weights = layout, exact, has_weights
        self.link = self.row_weights = None

    @property
    def header(self) -> bytes:
        return self.packed[0].numpy().tobytes()

    @property
    def tensors(self) -> list[torch.Tensor]:
        return self.packed[1:]

    @property
    def num_tokens(self) -> int:
        return self.packed[_ops.IDS].shape[0]

    @property
    def num_topk(self) -> int:
        return self.packed[_ops.IDS].shape[1]

    @property
    def num_rows_total(self) -> int:
        return self.num_rows

    def core(self) -> _C.Handle:
        """The same as the buffer knows it."""
        return _ops.unpack(None, self.packed)

    def __reduce__(self) -> Any:
        return self.core().__reduce__()


class TracedOutput:
    """What a dispatch in a graph returns: the names of `ep.DispatchOutput`."""

    def __init__(self, results: list[torch.Tensor], handle: TracedHandle, flags: tuple[bool, bool, bool]) -> None:
        is_quantised, has_scales, has_weights = flags
        got = dict(zip(_ops.RESULTS, results))
        self.x = got["x"]
        self.edge = got["edge"] if is_quantised else None
        self.scales = got["scales"] if has_scales else None
        self.topk_idx = got["topk_idx"]
        self.topk_weights = got["topk_weights"] if has_weights else None
        self.source = got["source"]
        self.num_rows_device, self.rows_needed_device = got["num_rows"], got["rows_needed"]
        self.tokens_per_expert_device = got["tokens_per_expert"]
        self.expert_offsets = got["expert_offsets"]
        self.rank_offsets = got["rank_offsets"] if handle.layout != "expert" else None
        self.status = got["status"]
        self.extras = results[len(_ops.RESULTS) :]
        self.handle = handle

    @property
    def num_rows(self) -> int | None:
        return self.x.shape[0] if self.handle.exact else None

    @property
    def tokens_per_expert(self) -> list[int] | None:
        """Reading it in a graph is a break, unless torch captures scalar outputs."""
        return self.tokens_per_expert_device.tolist() if self.handle.exact else None

    @property
    def event(self) -> _C.Event:
        return _C.Event()

    @property
    def inputs_done(self) -> _C.Event:
        return _C.Event()

    def record_stream(self, stream: Any) -> None:
        """Results of a graph are torch's own, or ready when it ends."""


class TracedCombined:
    """What a combine in a graph returns: the names of `ep.CombineOutput`."""

    def __init__(self, x: torch.Tensor, topk_weights: Any, status: torch.Tensor) -> None:
        self.x, self.topk_weights, self.status = x, topk_weights, status

    @property
    def event(self) -> _C.Event:
        return _C.Event()


def dispatch(
    buf: EPBuffer, x: torch.Tensor, topk_idx: Any, topk_weights: Any, options: dict[str, Any]
) -> TracedOutput:
    handle, scales, extras = options.get("handle"), options.get("scales"), options.get("extras")
    problem = _problem("dispatch", options, (*_DISPATCH, "handle", "scales", "extras"))
    plain = _plain(options, _DISPATCH)
    packed, num_rows, recorded = [], -1, False
    layout = plain.get("layout") or "rank"
    exact = plain.get("exact") is not False and plain.get("max_rows") is None
    if handle is not None:
        packed, num_rows, recorded = _packed(handle), handle.num_rows, handle.has_weights
        layout, exact = handle.layout, handle.exact
        plain = {"layout": layout} | plain
        plain["recorded_weights"] = recorded
    if problem is not None:
        plain["problem"] = problem
    has_weights = topk_weights is not None or recorded
    results = torch.ops.ep.dispatch(
        buf._token,
        buf._name,
        x,
        topk_idx,
        topk_weights,
        scales,
        [] if extras is None else list(extras),
        packed,
        num_rows,
        _ops.encode(plain),
    )
    got = dict(zip(_ops.RESULTS, results))
    buf._token = got["token"]
    given = [got[name] for name in ("header", "ids", "weights", "routes", "plan")]
    if handle is not None:
        given = [given[0], packed[1], given[2], packed[3], packed[4]]
    made = TracedHandle(given, got["x"].shape[0], layout, exact, has_weights)
    made.link = got["link"]
    if topk_weights is not None and topk_weights.requires_grad:
        made.row_weights = got["topk_weights"]
    is_quantised = plain.get("quant") is not None
    flags = (is_quantised, is_quantised or scales is not None, has_weights)
    return TracedOutput(results, made, flags)


def combine(
    buf: EPBuffer,
    x: torch.Tensor,
    handle: TracedHandle,
    tensors: tuple[Any, Any, tuple],
    options: dict[str, Any],
) -> TracedCombined:
    """tensors: weights, row_weights and biases."""
    weights, row_weights, biases = tensors
    problem = _problem("combine", options, _COMBINE)
    plain = _plain(options, _COMBINE)
    plain["layout"], plain["exact"] = handle.layout, handle.exact
    plain["recorded_weights"] = handle.has_weights
    if problem is not None:
        plain["problem"] = problem
    token, y, home, status = torch.ops.ep.combine(
        buf._token,
        buf._name,
        handle.link,
        x,
        weights,
        None if weights is None else handle.row_weights,
        row_weights,
        list(biases),
        _packed(handle),
        _ops.encode(plain),
    )
    buf._token = token
    return TracedCombined(y, None if row_weights is None else home, status)


def _packed(handle: Any) -> list[torch.Tensor]:
    return list(handle.packed)


def _plain(options: dict[str, Any], names: Any) -> dict[str, Any]:
    """Options that are given, as text can hold them; dtypes by name."""
    plain = {}
    for name in names:
        value = options.get(name)
        if isinstance(value, torch.dtype):
            plain[name] = str(value).removeprefix("torch.")
        elif isinstance(value, (str, int, float)):
            plain[name] = value
    return plain


def _problem(
    operation: str, options: dict[str, Any], known: Any
) -> tuple[str, str] | None:
    """(kind of error, text): what is wrong with the options, if anything."""
    for name, value in options.items():
        if name in _SYNCHRONOUS:
            if value is not None and value is not False:
                return "InvalidArgument", f"{name} in a compiled graph, whose calls are in its order: leave it out"
        elif name not in known:
            return "TypeError", f"{operation}() got an unexpected keyword argument '{name}'"
    return None
