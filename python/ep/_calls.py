"""What a collective call of `EPBuffer` has around it: its turn, its arguments, no lost gradients.

Whatever leaves a collective call spends this rank's turn in it.  The core sees to that once it has
the call; what fails before (a wrong keyword, Ctrl-C) is refused here, so that the other ranks raise
PeerError instead of waiting.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

from ep import _C
from ep.errors import InvalidArgument


@contextlib.contextmanager
def turn(buffer: Any, operation: str) -> Iterator[None]:
    """The block makes one collective call, "dispatch" or "combine", on the buffer."""
    turns = _C.turns_of_thread()
    try:
        yield
    except BaseException:
        _refuse_unless_spent(buffer, operation, turns)
        raise


def collective(method):
    """A method that is one collective call, named as the operation; cheaper than `turn`."""
    operation = method.__name__

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        turns = _C.turns_of_thread()
        try:
            return method(self, *args, **kwargs)
        except BaseException:
            _refuse_unless_spent(self, operation, turns)
            raise

    return call


def _refuse_unless_spent(buffer: Any, operation: str, turns: int) -> None:
    if _C.turns_of_thread() == turns:
        buffer._core.refuse(operation)


def given(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a method that are not None, without self."""
    del arguments["self"]
    return {name: value for name, value in arguments.items() if value is not None}


def refuse_gradients(operation: str, **tensors: Any) -> None:
    """The buffer's own operations are not differentiable: a graph cut in silence would be wrong."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return
    for name, value in tensors.items():
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if getattr(tensor, "requires_grad", False):
                raise InvalidArgument(
                    f"{name} requires grad: use ep.functional.{operation}, or torch.no_grad()"
                )
