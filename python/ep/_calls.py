"""What a collective call of `EPBuffer` has around it: its arguments and its turn.

Whatever leaves a collective call spends this rank's turn in it.  The core sees to that once it has
the call; what fails before (a wrong keyword, Ctrl-C) is refused here, so that the other ranks raise
PeerError instead of waiting.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from ep import _C

Method = TypeVar("Method", bound=Callable[..., Any])


@contextlib.contextmanager
def turn(buffer: Any, operation: str) -> Iterator[None]:
    """The block makes one collective call, "dispatch" or "combine", on the buffer."""
    turns = _C.turns_of_thread()
    try:
        yield
    except BaseException:
        _refuse_unless_spent(buffer, operation, turns)
        raise


def collective(*positional: str) -> Callable[[Method], Method]:
    """Makes a collective call of a method that has a signature and a docstring only.

    What is given goes to the core's operation of the same name, by name; None is as good as not
    given.  `positional` are the arguments that may come without their names.
    """

    def decorate(method: Method) -> Method:
        operation = method.__name__

        @functools.wraps(method)
        def call(self: Any, *args: Any, **options: Any) -> Any:
            turns = _C.turns_of_thread()
            try:
                if args:
                    _name(operation, positional, args, options)
                _core_handle(options)
                return getattr(self._core, operation)(options)
            except BaseException:
                _refuse_unless_spent(self, operation, turns)
                raise

        return cast(Method, call)

    return decorate


@functools.cache
def arguments_of(*methods: Callable[..., Any]) -> frozenset[str]:
    """Names of the arguments of some methods, without self."""
    import inspect  # half as slow to load as all of ep, and seldom needed

    names = {name for method in methods for name in inspect.signature(method).parameters}
    return frozenset(names - {"self"})


def _name(operation: str, names: tuple[str, ...], args: tuple, options: dict[str, Any]) -> None:
    if len(args) > len(names):
        raise TypeError(
            f"{operation}() takes {len(names)} positional arguments, {len(args)} were given"
        )
    for name, value in zip(names, args, strict=False):
        if name in options:
            raise TypeError(f"{operation}() got multiple values for argument {name!r}")
        options[name] = value


def _core_handle(options: dict[str, Any]) -> None:
    """The handle of a dispatch in a compiled graph (ep._traced) as the core knows it."""
    core = getattr(options.get("handle"), "core", None)
    if core is not None:
        options["handle"] = core()


def _refuse_unless_spent(buffer: Any, operation: str, turns: int) -> None:
    if _C.turns_of_thread() == turns:
        buffer._core.refuse(operation)
