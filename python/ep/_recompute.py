"""Contexts of checkpointing: handles are recorded in the forward and replayed at recompute."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ep import _C
from ep.buffer import EPBuffer
from ep.errors import InvalidArgument

_stacks = threading.local()


class Record:
    """The dispatches of one region, in order: of which buffer, and their handles."""

    def __init__(self) -> None:
        self.entries: list[tuple[EPBuffer, _C.Handle]] = []
        self.next: int | None = None  # at recompute: what the region's next dispatch replays

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        self.entries.clear()
        with self._active(None):
            yield

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        with self._active(0):
            yield

    @contextlib.contextmanager
    def _active(self, at: int | None) -> Iterator[None]:
        stack = _stack()
        before, self.next = self.next, at
        stack.append(self)
        try:
            yield
        finally:
            stack.remove(self)
            self.next = before

    def take(self, buf: EPBuffer) -> _C.Handle:
        at = self.next
        if at == len(self.entries):
            raise InvalidArgument(
                f"recompute_contexts: the region made {at} dispatches in its forward and makes one "
                f"more at its recomputation: both must do the same"
            )
        maker, handle = self.entries[at]
        if maker is not buf:
            raise InvalidArgument(
                f"recompute_contexts: dispatch {at} of the region was {maker!r}'s in the forward "
                f"and is {buf!r}'s at the recomputation: both must do the same"
            )
        self.next = at + 1
        return handle


def _stack() -> list[Record]:
    if not hasattr(_stacks, "records"):
        _stacks.records = []
    return _stacks.records


def is_recording() -> bool:
    """Is this thread in a region, in its forward or at its recomputation?"""
    return bool(_stack())


def recorded(buf: EPBuffer) -> _C.Handle | None:
    """What a new dispatch of this thread is to replay; None: it is new indeed.

    Of nested regions the innermost that is recomputed says so.
    """
    for record in reversed(_stack()):
        if record.next is not None:
            return record.take(buf)
    return None


def note(buf: EPBuffer, handle: _C.Handle) -> None:
    """A dispatch was made, or replayed in the place of one: regions in their forward record it.

    They keep a handle of their own, which hangs on no graph: the graph keeps them.
    """
    for record in reversed(_stack()):
        if record.next is not None:
            return  # regions around it have recorded this one when it ran first
        bare = _C.Handle.from_tensors(buf, handle.header, handle.tensors)
        record.entries.append((buf, bare))


class Again:
    """The context of recomputations, of which there may be several."""

    def __init__(self, record: Record) -> None:
        self._record, self._entered = record, []

    def __enter__(self) -> None:
        self._entered.append(self._record.replaying())
        self._entered[-1].__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        self._entered.pop().__exit__(*exc_info)


class Region:
    """A checkpointed function: its first call records, those of a backward replay."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        functools.update_wrapper(self, fn)
        self._fn, self._record, self._has_run = fn, Record(), False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._has_run:
            self._has_run = True
            with self._record.recording():
                return self._fn(*args, **kwargs)
        if torch._C._current_graph_task_id() == -1:
            raise InvalidArgument(
                "recompute_contexts(fn) belongs to one checkpoint() call and was called again "
                "outside of its backward: wrap fn anew in each"
            )
        with self._record.replaying():
            return self._fn(*args, **kwargs)
