"""Small results of `EPBuffer`, as named tuples."""

from __future__ import annotations

from typing import Any, NamedTuple


class Memory(NamedTuple):
    """Bytes that a buffer registers; ``total`` is exact."""

    control: int  # flags, records, counts
    staging: int  # rings towards other nodes; 0 on one node
    arena: int  # rows
    total: int


class MemoryUse(NamedTuple):
    """Bytes of the arena."""

    used: int
    peak: int
    largest_free: int


class Stats(NamedTuple):
    """Counts of what completed on this rank, and of what the outputs policy chose."""

    dispatches: int
    combines: int
    window_outputs: int
    caller_outputs: int
    faults: int


class TensorSpec(NamedTuple):
    """A tensor that there is not yet."""

    shape: tuple[int, ...]
    dtype: str  # torch's name of it
    strides: tuple[int, ...]  # elements


class RoutingLayout(NamedTuple):
    """Counts of one rank's routing."""

    tokens_per_rank: Any  # [R] int32; a token counts once per rank
    tokens_per_expert: Any  # [E] int32
    is_token_in_rank: Any  # [T,R] bool
    tokens_per_node: Any  # [nodes] int32
