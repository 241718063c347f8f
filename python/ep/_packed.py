"""What crosses a graph in place of what cannot: options as text, handles as tensors."""

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


def pack(handle: _C.Handle) -> list[Tensor]:
    return [torch.frombuffer(bytearray(handle.header), dtype=torch.uint8), *handle.tensors]


def unpack(buf: EPBuffer | None, packed: Sequence[Tensor]) -> _C.Handle:
    header, *tensors = packed
    return _C.Handle.from_tensors(buf, header.numpy().tobytes(), tensors)


def nothing(like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """For None, which results of operations cannot be."""
    return torch.empty(0, dtype=dtype, device=like.device)
