"""`ep.functional` in a graph: arguments as the operations take them, results as users know them.

All of this is read by torch.compile, not run: plain code, which raises nothing.  What is wrong with
the arguments goes to the operation as text, which raises it in its turn, so that the other ranks
raise PeerError where otherwise they would wait.
"""

from __future__ import annotations

from typing import Any

import torch

from ep import _C, _arguments, _packing
from ep.buffer import EPBuffer


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
        return self.packed[_packing.IDS].shape[0]

    @property
    def num_topk(self) -> int:
        return self.packed[_packing.IDS].shape[1]

    @property
    def num_rows_total(self) -> int:
        return self.num_rows

    def core(self) -> _C.Handle:
        """The same as the buffer knows it."""
        return _packing.unpack(None, self.packed)

    @classmethod
    def of(cls, handle: _C.Handle, packed: list[torch.Tensor]) -> TracedHandle:
        """An eager dispatch's, which a combine of a graph may take (as the handle's `_traced`)."""
        n = handle.num_rows_total
        return cls(packed, n, handle.layout, handle.exact, handle.has_weights)

    def __reduce__(self) -> Any:
        return self.core().__reduce__()


class TracedOutput:
    """What a dispatch in a graph returns: the names of `ep.DispatchOutput`."""

    def __init__(
        self, results: list[torch.Tensor], handle: TracedHandle, flags: tuple[bool, bool, bool]
    ) -> None:
        is_quantised, has_scales, has_weights = flags
        got = _packing.named(results)
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
        self.extras = results[len(_packing.RESULTS) :]
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
    tensors = {"x": x, "topk_idx": topk_idx, "topk_weights": topk_weights}
    tensors["scales"] = options.get("scales")
    problem = _arguments.of_graph("dispatch", options, tensors) or _arguments.of_options(
        options, True
    )
    extras = options.get("extras")
    if extras is not None and not isinstance(extras, (list, tuple)):
        problem, extras = ("TypeError", "extras is no list of tensors"), None
    if not isinstance(x, torch.Tensor):
        x = torch.zeros(0, 4)  # refused
    problem = problem or _arguments.of_edges(x, options)
    plain, handle = _plain(options), options.get("handle")
    if isinstance(handle, _C.Handle):
        handle = handle._traced
    packed, num_rows, recorded = [], -1, False
    layout = plain.get("layout") or "rank"
    exact = plain.get("exact") is not False and plain.get("max_rows") is None
    if handle is not None:
        packed, num_rows, recorded = list(handle.packed), handle.num_rows, handle.has_weights
        layout, exact = handle.layout, handle.exact
        plain = {"layout": layout} | plain
        plain["recorded_weights"] = recorded
    if problem is not None:
        plain["problem"] = problem
    results = torch.ops.ep.dispatch(
        buf._token,
        buf._name,
        x,
        _tensor(topk_idx),
        _tensor(topk_weights),
        _tensor(options.get("scales")),
        [] if extras is None else list(extras),
        packed,
        num_rows,
        _packing.encode(plain),
    )
    got = _packing.named(results)
    buf._token = got["token"]
    given = [got[name] for name in ("header", "ids", "weights", "routes", "plan")]
    if handle is not None:
        given = [given[0], packed[1], given[2], packed[3], packed[4]]
    has_weights = topk_weights is not None or recorded
    made = TracedHandle(given, got["x"].shape[0], layout, exact, has_weights)
    made.link = got["link"]
    if _arguments.needs_grad(topk_weights):
        made.row_weights = got["topk_weights"]
    is_quantised = plain.get("quant") is not None
    has_scales = is_quantised or options.get("scales") is not None
    return TracedOutput(results, made, (is_quantised, has_scales, has_weights))


def combine(
    buf: EPBuffer, x: torch.Tensor, handle: Any, tensors: dict[str, Any], options: dict[str, Any]
) -> TracedCombined:
    """tensors: weights, row_weights and bias, of which there may be several."""
    weights, row_weights, bias = tensors["weights"], tensors["row_weights"], tensors["bias"]
    biases = list(bias) if isinstance(bias, (list, tuple)) else [] if bias is None else [bias]
    checked = {"x": x, "weights": weights, "row_weights": row_weights}
    checked |= {f"bias[{i}]": each for i, each in enumerate(biases)}
    problem = _arguments.of_graph("combine", options, checked) or _arguments.of_options(
        options, True
    )
    plain = _plain(options)
    if isinstance(handle, _C.Handle):
        handle = handle._traced
    plain["layout"], plain["exact"] = handle.layout, handle.exact
    plain["recorded_weights"] = handle.has_weights
    if problem is not None:
        plain["problem"] = problem
    token, y, home, status = torch.ops.ep.combine(
        buf._token,
        buf._name,
        handle.link,
        x if isinstance(x, torch.Tensor) else torch.zeros(0, 4),
        _tensor(weights),
        None if weights is None else handle.row_weights,
        _tensor(row_weights),
        [each for each in biases if isinstance(each, torch.Tensor)],
        list(handle.packed),
        _packing.encode(plain),
    )
    buf._token = token
    return TracedCombined(y, None if row_weights is None else home, status)


def _tensor(value: Any) -> torch.Tensor | None:
    return value if isinstance(value, torch.Tensor) else None


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """Options that are given, as text can hold them; dtypes by name."""
    plain: dict[str, Any] = {}
    for name in _arguments.TEXTS:
        value = options.get(name)
        if isinstance(value, torch.dtype):
            plain[name] = str(value).removeprefix("torch.")
        elif isinstance(value, (str, int, float)):
            plain[name] = value
    return plain
