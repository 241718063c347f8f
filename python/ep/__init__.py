"""Dispatch and combine for mixture-of-experts layers with expert parallelism.

`EPBuffer` is the whole of it; `Communicator` says how ranks meet.  `ep.functional`, `ep.nn` and
`ep.testing` are loaded when they are first named: the first two need torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ep import _C, quant, routing
from ep._C import CombineOutput, DispatchOutput, Event, Handle, Stream
from ep.buffer import EPBuffer
from ep.communicator import Communicator
from ep.errors import (
    CapacityError,
    Desync,
    Error,
    InvalidArgument,
    PeerError,
    PeerLost,
    Timeout,
    Unsupported,
)
from ep.records import Memory, MemoryUse, RoutingLayout, Stats, TensorSpec
from ep.support import Support, supports

__version__: str = _C.version

__all__ = [
    "CapacityError",
    "CombineOutput",
    "Communicator",
    "Desync",
    "DispatchOutput",
    "EPBuffer",
    "Error",
    "Event",
    "Handle",
    "InvalidArgument",
    "Memory",
    "MemoryUse",
    "PeerError",
    "PeerLost",
    "RoutingLayout",
    "Stats",
    "Stream",
    "Support",
    "TensorSpec",
    "Timeout",
    "Unsupported",
    "__version__",
    "quant",
    "routing",
    "supports",
]

if TYPE_CHECKING:
    from ep import functional as functional
    from ep import nn as nn
    from ep import testing as testing
    from ep.functional import recompute_contexts as recompute_contexts

_LAZY_MODULES = ("functional", "nn", "testing")
_LAZY_NAMES = {"recompute_contexts": "functional"}


if not TYPE_CHECKING:  # for whom every name would then exist

    def __getattr__(name: str) -> Any:
        if name in _LAZY_MODULES:
            return importlib.import_module(f"ep.{name}")
        if name in _LAZY_NAMES:
            return getattr(importlib.import_module(f"ep.{_LAZY_NAMES[name]}"), name)
        raise AttributeError(f"module 'ep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *_LAZY_MODULES, *_LAZY_NAMES]
