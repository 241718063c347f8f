"""Conversions between ways to write down which token goes to which expert."""

from __future__ import annotations

import operator
import sys
from typing import Any

from ep.errors import InvalidArgument


def from_map(routing_map: Any, probs: Any, k: int) -> tuple[Any, Any]:
    """Turns a routing map, as Megatron-Core's routers give it, into top-k form.

    Args:
        routing_map: [T, E] bool, True where the token goes to the expert; a torch tensor or a
            numpy array.  T may be 0.
        probs: [T, E] of any floating-point dtype, of the same kind and on the same device.  Only
            the places that the map names are read.
        k: K, the slots per token in the result; may be larger than E.

    Returns:
        topk_idx [T, K] int64, a token's experts in ascending order, then -1; and topk_weights
        [T, K] fp32, 0 where topk_idx is -1.  Both are of the kind of the inputs; with torch
        topk_weights is differentiable with respect to `probs`.

    Raises:
        InvalidArgument: a shape or dtype is wrong, or a token has more than `k` experts.
        TypeError: the inputs are not both torch tensors or both numpy arrays.

    The form of the inputs is that of Megatron-Core's ``TopKRouter.forward``
    (megatron/core/transformer/moe/router.py).
    """
    k = operator.index(k)
    if k < 1:
        raise InvalidArgument(f"k={k} must be at least 1")
    if isinstance(routing_map, _array_type("numpy", "ndarray")):
        _check(routing_map, probs, _array_type("numpy", "ndarray"))
        return _from_numpy(routing_map, probs, k)
    if isinstance(routing_map, _array_type("torch", "Tensor")):
        _check(routing_map, probs, _array_type("torch", "Tensor"))
        return _from_torch(routing_map, probs, k)
    raise TypeError(
        f"routing_map: got {type(routing_map).__name__}; give a torch tensor or a numpy array"
    )


def _array_type(module: str, name: str) -> type:
    """A type of a library, if that was imported: who has an array has imported it."""
    return getattr(sys.modules.get(module), name, _Nothing)


class _Nothing:
    """Has no instances."""


def _check(routing_map: Any, probs: Any, kind: type[Any]) -> None:
    if not isinstance(probs, kind):
        raise TypeError(
            f"probs: got {type(probs).__name__}; routing_map is a {kind.__name__}, both must be"
        )
    if routing_map.ndim != 2 or tuple(probs.shape) != tuple(routing_map.shape):
        raise InvalidArgument(
            f"routing_map has shape {tuple(routing_map.shape)}, probs {tuple(probs.shape)}; both "
            "must be [T, E]"
        )
    if str(routing_map.dtype).removeprefix("torch.") != "bool":
        raise InvalidArgument(f"routing_map has dtype {routing_map.dtype}; it must be bool")
    is_float = probs.dtype.kind == "f" if kind.__name__ == "ndarray" else probs.is_floating_point()
    if not is_float:
        raise InvalidArgument(f"probs has dtype {probs.dtype}; it must be a floating-point one")
    if kind.__name__ == "Tensor" and probs.device != routing_map.device:
        raise InvalidArgument(
            f"routing_map is on {routing_map.device}, probs on {probs.device}; both must be on one"
        )


def _check_counts(counts: Any, k: int) -> None:
    """`counts` [T]: the experts of each token."""
    if len(counts) and int(counts.max()) > k:
        token = int((counts > k).nonzero()[0][0])
        raise InvalidArgument(
            f"routing_map: token {token} has {int(counts[token])} experts, more than k={k}"
        )


def _from_numpy(routing_map: Any, probs: Any, k: int) -> tuple[Any, Any]:
    import numpy as np

    counts = routing_map.sum(axis=1)
    _check_counts(counts, k)
    token, expert = np.nonzero(routing_map)  # by token, then expert
    slot = np.arange(len(token)) - (np.cumsum(counts) - counts)[token]
    topk_idx = np.full((len(counts), k), -1, dtype=np.int64)
    topk_idx[token, slot] = expert
    topk_weights = np.zeros((len(counts), k), dtype=np.float32)
    topk_weights[token, slot] = probs[token, expert]
    return topk_idx, topk_weights


def _from_torch(routing_map: Any, probs: Any, k: int) -> tuple[Any, Any]:
    import torch

    counts = routing_map.sum(dim=1)
    _check_counts(counts, k)
    token, expert = routing_map.nonzero(as_tuple=True)  # by token, then expert
    slot = torch.arange(len(token), device=token.device) - (counts.cumsum(0) - counts)[token]
    topk_idx = torch.full((len(counts), k), -1, dtype=torch.int64, device=token.device)
    topk_idx[token, slot] = expert
    blank = torch.zeros((len(counts), k), dtype=torch.float32, device=token.device)
    topk_weights = blank.index_put((token, slot), probs[token, expert].to(torch.float32))
    return topk_idx, topk_weights
