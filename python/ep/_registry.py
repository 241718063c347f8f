"""Open buffers by name, for what can carry a name but no object: the calls of a compiled graph."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from ep.errors import InvalidArgument

if TYPE_CHECKING:
    from ep.buffer import EPBuffer

_buffers: weakref.WeakValueDictionary[str, EPBuffer] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_listeners: list[Callable[[EPBuffer], None]] = []


def add(buffer: EPBuffer, sizes: str) -> str:
    """The buffer's name in this process; `sizes` are all that shapes of results depend on.

    Compiled graphs are cached by their text, also on disk: the name tells apart what they may not
    be shared by.
    """
    name = f"EPBuffer {next(_numbers)} ({sizes})"
    _buffers[name] = buffer
    for listener in _listeners:
        listener(buffer)
    return name


def find(name: str) -> EPBuffer:
    """Raises InvalidArgument where the buffer is gone."""
    buffer = _buffers.get(name)
    if buffer is None:
        raise InvalidArgument(
            f"{name} is gone: a compiled graph calls it by name and does not keep it alive; keep a "
            f"reference (ep.nn.MoE does, as .buf) until its last backward"
        )
    return buffer


def listen(listener: Callable[[EPBuffer], None]) -> None:
    """Calls `listener` with every buffer, those that are there and those to come."""
    _listeners.append(listener)
    for buffer in list(_buffers.values()):
        listener(buffer)
