"""What `ep.functional` refuses on its own, since the buffer sees detached tensors.

Problems are (name of the error, text), not exceptions: in a graph the operation raises them, when
it runs.  torch.compile reads this code, so it is plain.
"""

from __future__ import annotations

from typing import Any

import torch

from ep import errors

Problem = tuple[str, str] | None

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_TEXTS = (
    "quant scale_layout global_scale layout expert_alignment exact mode max_tokens max_rows "
    "overflow ids outputs num_sms num_qps split partial out_dtype ready"
)
TEXTS = tuple(_TEXTS.split(" "))  # options that a graph holds as text


def refuse(problem: Problem) -> None:
    if problem is not None:
        name, text = problem
        raise (TypeError if name == "TypeError" else getattr(errors, name))(text)


def needs_grad(*tensors: Any) -> bool:
    return torch.is_grad_enabled() and any([getattr(t, "requires_grad", False) for t in tensors])


def of_options(options: dict[str, Any], differentiable: bool) -> Problem:
    """Of a dispatch or a combine."""
    if options.get("async_op"):
        return "InvalidArgument", (
            "async_op=True: autograd runs on the calling thread's stream and would not wait for "
            "the result's event; leave it out, or use EPBuffer's method under torch.no_grad()"
        )
    if differentiable and options.get("out") is not None:
        return "InvalidArgument", (
            "out is given, but autograd and graphs need results of their own: leave it out"
        )
    return None


def of_edges(x: Any, options: dict[str, Any]) -> Problem:
    """Of a dispatch: no gradient may be lost silently."""
    scales, extras = options.get("scales"), options.get("extras")
    if needs_grad(scales, *(extras if isinstance(extras, (list, tuple)) else [extras])):
        return "InvalidArgument", "scales and extras are not differentiable: give them detached"
    if needs_grad(x) and (scales is not None or x.dtype not in FLOATS):
        return "InvalidArgument", (
            f"x requires grad, but travels as opaque {x.dtype} bytes; gradients flow through "
            f"bfloat16, float16 and float32 without scales: let quant= do the rounding"
        )
    return None


def of_graph(operation: str, options: dict[str, Any], tensors: dict[str, Any]) -> Problem:
    """Of a call in a graph: `tensors` by name are to be tensors or None, and x one."""
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor) and (value is not None or name == "x"):
            return "TypeError", f"{name} is a {type(value).__name__}; a graph needs a torch.Tensor"
    for name, value in options.items():
        if value is None or value is False:
            continue
        if name in ("wait_for", "stream"):
            return "InvalidArgument", (
                f"{name} is given in a compiled graph, whose calls run in its order: leave it out"
            )
        if name in TEXTS and not isinstance(value, (str, int, float, torch.dtype)):
            return "TypeError", (
                f"{name} is a {type(value).__name__}; a graph needs a plain number or name"
            )
    known = (*TEXTS, "handle", "scales", "extras", "wait_for", "stream", "async_op", "out")
    for name in options:
        if name not in known:
            return "TypeError", f"{operation}() got an unexpected keyword argument {name!r}"
    return None
