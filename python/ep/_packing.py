"""What `ep::dispatch` and `ep::combine` take and return, as graphs hold it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ep import _C
from ep.buffer import EPBuffer

HANDLE_TENSORS = 5
IDS = 1  # of a packed handle: topk_idx [T,K]

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


def named(results: list[Tensor]) -> dict[str, Tensor]:
    """A dispatch's results without the extras."""
    return dict(zip(RESULTS, results, strict=False))


def nothing(like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """For None, which results of operations cannot be."""
    return torch.empty(0, dtype=dtype, device=like.device)


# --- options --------------------------------------------------------------------------------------


def encode(options: dict[str, Any]) -> str:
    """Options as text; `decode` is the reverse.  Values are None, numbers, names and dtypes."""
    return ", ".join([f"{name}={value!r}" for name, value in options.items()])


@functools.lru_cache(maxsize=1024)
def _decode(text: str) -> dict[str, Any]:
    call = ast.parse(f"f({text})", mode="eval").body
    assert isinstance(call, ast.Call)
    return {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}


def decode(text: str) -> dict[str, Any]:
    return dict(_decode(text))


FACTS = ("layout", "exact", "recorded_weights")  # of combine's handle, for its backward


def facts_of(options: str) -> dict[str, Any]:
    given = decode(options)
    return {name: given.get(name) for name in FACTS}


# --- handles --------------------------------------------------------------------------------------


def pack(handle: _C.Handle) -> list[Tensor]:
    return [torch.frombuffer(bytearray(handle.header), dtype=torch.uint8), *handle.tensors]


def unpack(buf: EPBuffer | None, packed: Sequence[Tensor]) -> _C.Handle:
    header, *tensors = packed
    return _C.Handle.from_tensors(buf, header.numpy().tobytes(), tensors)
