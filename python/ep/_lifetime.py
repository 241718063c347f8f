"""Buffers that nobody closed: a warning; at interpreter exit neither a wait nor an exception."""

from __future__ import annotations

import atexit
import warnings
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ep.buffer import EPBuffer

open_buffers: weakref.WeakSet[EPBuffer] = weakref.WeakSet()


def warn_unclosed(buffer: EPBuffer) -> None:
    text = f"EPBuffer of rank {buffer.rank} was not closed: call close(), or use `with`"
    warnings.warn(text, ResourceWarning, stacklevel=3, source=buffer)


@atexit.register
def _leave_open_buffers() -> None:
    for buffer in list(open_buffers):
        buffer._is_open = False
        try:
            warn_unclosed(buffer)
        finally:  # also where warnings are errors
            buffer._core.abandon()
