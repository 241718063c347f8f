"""Bad input to compiled graphs: the errors of eager calls, and PeerError on the other rank."""

from __future__ import annotations

import functools

import pytest

import ep.testing
from python.compile_faults import FAULTS, run_faults

pytestmark = pytest.mark.torch_versions


@functools.cache
def outcomes() -> dict[str, tuple[str, ...]]:
    """By fault and rank, of one pair of processes, since starting one takes seconds."""
    names = list(FAULTS)
    by_rank = ep.testing.run(run_faults, 2, how="processes", timeout_s=250, args=(names,))
    return dict(zip(names, zip(*by_rank, strict=True), strict=True))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_graph_is_the_eager_call_s(name):
    """On rank 0; rank 1, whose graph waits in the same call, raises too; the next step is exact."""
    for rank, outcome in enumerate(outcomes()[name]):
        assert not outcome, f"rank {rank}:\n{outcome}"
