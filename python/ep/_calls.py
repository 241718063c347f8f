"""What a collective method of `EPBuffer` has around it."""

from __future__ import annotations

import functools
import sys
from typing import Any

from ep import _C
from ep.errors import InvalidArgument


def given(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a method that are not None, without self."""
    del arguments["self"]
    return {name: value for name, value in arguments.items() if value is not None}


def collective(method):
    """Whatever leaves the method spends the turn: what fails before the core sees the call (a wrong
    keyword, Ctrl-C) is refused here, and the other ranks raise PeerError instead of waiting."""
    operation = method.__name__

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        turns = _C.turns_of_thread()
        try:
            return method(self, *args, **kwargs)
        except BaseException:
            if _C.turns_of_thread() == turns:
                self._core.refuse(operation)
            raise

    return call


def refuse_gradients(operation: str, **tensors: Any) -> None:
    """The buffer's own operations are not differentiable: a graph cut in silence would be wrong."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if getattr(tensor, "requires_grad", False):
            raise InvalidArgument(
                f"{name} requires grad: use ep.functional.{operation}, or torch.no_grad()"
            )
