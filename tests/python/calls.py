"""The collective calls that reach a buffer's core, in order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import ep


class Calls:
    """A core that notes what it is asked for and passes it on."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self.made: list[tuple[str, dict[str, Any], Any]] = []  # operation, arguments, result

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._core, name)
        if name not in ("dispatch", "combine"):
            return function

        def call(options: dict[str, Any]) -> Any:
            at = len(self.made)
            self.made.append((name, options, None))
            result = function(options)
            self.made[at] = (name, options, result)
            return result

        return call

    def names(self) -> list[str]:
        """ "dispatch", "replay" (a dispatch with a handle) or "combine" of each call."""
        return [_name(operation, options) for operation, options, _ in self.made]

    def sequence(self) -> list[tuple[str, int]]:
        """Each call's name, and the place of the dispatch that its routing comes from (-1: before).

        Handles are told apart by their routing's memory, which replays share.
        """
        routings: dict[int, int] = {}
        sequence = []
        for at, (operation, options, result) in enumerate(self.made):
            name = _name(operation, options)
            if name == "dispatch":
                if result is not None:
                    routings[_routing(result.handle)] = at
                sequence.append((name, at))
            else:
                sequence.append((name, routings.get(_routing(options["handle"]), -1)))
        return sequence


def _name(operation: str, options: dict[str, Any]) -> str:
    is_replay = operation == "dispatch" and options.get("handle") is not None
    return "replay" if is_replay else operation


def _routing(handle: Any) -> int:
    plan = handle.tensors[-1]  # never empty
    return plan.data_ptr() if hasattr(plan, "data_ptr") else plan.ctypes.data


@contextlib.contextmanager
def recording(buf: ep.EPBuffer) -> Iterator[Calls]:
    """What the buffer is asked for within the block."""
    calls = Calls(buf._core)
    buf._core = calls
    try:
        yield calls
    finally:
        buf._core = calls._core
