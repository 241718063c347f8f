"""The collective calls that reach a buffer's core, in order, with the rows that went in and out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import ep


class Calls:
    """A core that notes what it is asked for and passes it on."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._names: list[str] = []
        self._origins: list[int] = []  # by call: the dispatch that its routing comes from
        self._routings: dict[int, int] = {}  # by the memory of a handle's plan, which replays share
        self.rows: list[tuple[Any, Any]] = []  # by call: copies of x and of the result's x

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._core, name)
        if name not in ("dispatch", "combine"):
            return function

        def call(options: dict[str, Any]) -> Any:
            at, handle = len(self._names), options.get("handle")
            is_new = handle is None
            self._names.append("replay" if name == "dispatch" and not is_new else name)
            self._origins.append(at if is_new else self._routings.get(_plan(handle), -1))
            given = _copy(options.get("x"))
            result = function(options)
            if is_new:
                self._routings[_plan(result.handle)] = at
            received = _copy(result.x)
            if name == "dispatch":
                received[result.source[:, 0] < 0] = 0  # dead rows are unspecified
            self.rows.append((given, received))
            return result

        return call

    def names(self) -> list[str]:
        """ "dispatch", "replay" (a dispatch with a handle) or "combine" of each call."""
        return list(self._names)

    def sequence(self) -> list[tuple[str, int]]:
        """Each call's name, and which call its routing comes from; -1: one before all."""
        return list(zip(self._names, self._origins, strict=True))


def _plan(handle: Any) -> int:
    plan = handle.tensors[-1]  # never empty
    return plan.data_ptr() if hasattr(plan, "data_ptr") else plan.ctypes.data


def _copy(rows: Any) -> Any:
    return rows.detach().clone() if hasattr(rows, "detach") else rows


@contextlib.contextmanager
def recording(buf: ep.EPBuffer) -> Iterator[Calls]:
    """What the buffer is asked for within the block."""
    calls = Calls(buf._core)
    buf._core = calls
    try:
        yield calls
    finally:
        buf._core = calls._core
