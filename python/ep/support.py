"""What this version of the package can do, asked before anything is built."""

from __future__ import annotations

from typing import Any, NamedTuple

from ep import quant as _quant
from ep._calls import arguments_of
from ep.buffer import EPBuffer
from ep.errors import InvalidArgument, Unsupported

_MAX_RANKS = 1024
_MAX_EXPERTS = 4096
_MAX_TOPK = 32
_MAX_HIDDEN = 1 << 24
_ROW_ALIGN_BYTES = 16
_ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_OPAQUE_BYTES = dict.fromkeys(
    ("float8_e4m3fn", "float8_e5m2", "int8", "uint8", "float4_e2m1fn_x2"), 1
)


def _later(what: str, instead: str) -> str:
    return f"{what} is not supported by this version: {instead}"


# Names that are known; a value that says why not is reserved for a later version.
_MODES = {"throughput": "", "latency": _later('mode="latency"', 'mode="throughput" does')}
_LAYOUTS = {
    "rank": "",
    "expert": "",
    "batched": _later('layout="batched"', '"expert" with expert_alignment does'),
}
_OVERFLOWS = {"raise": "", "drop": ""}
_OUTPUTS = {"auto": "", "window": "", "caller": ""}


class Support(NamedTuple):
    """An answer of `supports`: true exactly when `ok` is."""

    ok: bool
    why: str  # "" or what is missing and what would do

    def __bool__(self) -> bool:
        return self.ok


def _is_known(name: str) -> bool:
    """Is it an argument that every call takes, and that needs no answer of its own?"""
    return name in arguments_of(EPBuffer.__init__, EPBuffer.dispatch, EPBuffer.combine)


def supports(
    device: Any = "cpu",
    *,
    mode: str | None = "throughput",
    layout: str | None = "rank",
    quant: str | None = None,
    scale_layout: str = "row",
    global_scale: bool = False,
    exact: bool | None = True,
    overflow: str = "raise",
    outputs: str = "auto",
    num_nodes: int = 1,
    elastic: bool = False,
    expert_slot: bool = False,
    split: bool = False,
    ready: bool = False,
    combine_quant: str | None = None,
    num_ranks: int | None = None,
    num_experts: int | None = None,
    num_topk: int | None = None,
    hidden: int | None = None,
    dtype: Any = "bfloat16",
    **unknown: Any,
) -> Support:
    """Would a buffer on `device` take calls like these?

    Local: it asks no other rank, touches no GPU and imports nothing heavy. It judges what the
    version can do, not whether this machine has the memory.

    Args:
        device: as of EPBuffer: a torch.device, str or int (a GPU's index). One that is asked for by
            name never falls back, here as there.
        mode, layout, quant, scale_layout, exact, overflow, split: as of dispatch.
        outputs, elastic: as of EPBuffer.
        global_scale, expert_slot, ready: is one given (to dispatch, EPBuffer, combine)?
        combine_quant: as combine's quant.
        num_nodes: nodes that the ranks are spread over.
        num_ranks, num_experts, num_topk: R, E, K; None: not asked.
        hidden, dtype: H and the dtype of x; a row must be a multiple of 16 bytes, or with quant of
            128 elements. None: not asked.
        unknown: other arguments of EPBuffer, dispatch and combine work with every value that they
            take; a keyword that this version does not know is an answer too: not supported.

    Returns `Support`; never raises for a value.
    """
    reasons = (
        *(f"{name}: this version has no such feature" for name in unknown if not _is_known(name)),
        _device_reason(device),
        _name_reason("mode", mode, _MODES),
        _name_reason("layout", layout, _LAYOUTS),
        _name_reason("overflow", overflow, _OVERFLOWS),
        _name_reason("outputs", outputs, _OUTPUTS),
        _quant_reason(quant, scale_layout),
        _flag_reasons(
            {
                "elastic": (elastic, "a lost rank raises PeerLost, and a new buffer goes on"),
                "global_scale": (global_scale, "the fp8_block128 formats need none"),
                "expert_slot": (expert_slot, "mapping topk_idx before dispatch does"),
                "split": (split, "async_op=True does"),
                "ready": (ready, "combine after the whole GEMM does"),
                "combine_quant": (combine_quant is not None, "combine of bf16 rows does"),
            }
        ),
        _limit_reason("num_nodes", num_nodes, 1, "ranks on one node share memory"),
        _limit_reason("num_ranks", num_ranks, _MAX_RANKS),
        _limit_reason("num_experts", num_experts, _MAX_EXPERTS),
        _limit_reason("num_topk", num_topk, _MAX_TOPK),
        _hidden_reason(hidden, quant, dtype),
    )
    why = "; ".join(reason for reason in reasons if reason)
    return Support(not why, why)


def require(device: Any, arguments: dict[str, Any]) -> None:
    """Raises Unsupported where dispatch or combine would, for what is reserved."""
    names = ("mode", "layout", "quant", "scale_layout", "split")
    asked = {name: arguments[name] for name in names if arguments.get(name) is not None}
    given: dict[str, Any] = {
        name: arguments.get(name) is not None for name in ("global_scale", "ready")
    }
    support = supports(device, **asked, **given)
    if not support:
        raise Unsupported(support.why)


def _device_reason(device: Any) -> str:
    name = f"cuda:{device}" if isinstance(device, int) else str(device)
    kind = name.partition(":")[0]
    if name in ("auto", "cpu") or name.startswith("cpu:"):
        return ""
    if kind == "cuda":
        return _later(f'device="{name}"', 'device="cpu" does')
    return f'device="{name}" is neither "auto" nor "cpu" nor "cuda"'


def _name_reason(argument: str, value: str | None, known: dict[str, str]) -> str:
    if value is None:  # the default, which works
        return ""
    return known.get(value, f"{argument}={value!r} is none of {', '.join(known)}")


def _quant_reason(quant: str | None, scale_layout: str) -> str:
    try:
        # Without quant there are no scales of ours to lay out, but its name is checked too.
        _quant.describe(_quant.formats()[0] if quant is None else quant, scale_layout)
    except (Unsupported, InvalidArgument) as error:
        return str(error)
    return ""


def _flag_reasons(flags: dict[str, tuple[bool, str]]) -> str:
    return "; ".join(_later(name, instead) for name, (is_on, instead) in flags.items() if is_on)


def _limit_reason(argument: str, value: int | None, most: int, why: str = "") -> str:
    if value is None or 1 <= value <= most:
        return ""
    return f"{argument}={value} is outside [1, {most}]{why and ': '}{why}"


def _hidden_reason(hidden: int | None, quant: str | None, dtype: Any) -> str:
    element = str(dtype).removeprefix("torch.")
    known = _ELEMENT_BYTES if quant is not None else _ELEMENT_BYTES | _OPAQUE_BYTES
    if element not in known:
        return f"dtype={element} is none of {', '.join(known)}"
    if hidden is None:
        return ""
    if quant in _quant.formats():
        multiple = _quant.describe(quant).hidden_multiple
    else:
        multiple = _ROW_ALIGN_BYTES // known[element]
    if hidden % multiple:
        return f"hidden={hidden} is no multiple of {multiple}"
    return _limit_reason("hidden", hidden, _MAX_HIDDEN)
