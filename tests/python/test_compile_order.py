"""Order and number of the collective calls that compiled graphs make, forward and backward.

Every program is one graph (fullgraph) on two ranks; what reaches the buffers' cores is compared
with a sequence written down in `compile_programs`, the rows of every call with those of eager ones.
"""

from __future__ import annotations

import functools

import pytest

import ep.testing
from python.compile_programs import OPTIONS, PROGRAMS, Job, run_jobs

pytestmark = pytest.mark.torch_versions

PARTS = [name for name in PROGRAMS if name != "everything"]
JOBS = [
    *(Job("eager", program, options) for program in PARTS for options in OPTIONS),
    *(
        Job("aot_eager", program, options)
        for program, options in zip(PARTS, [*OPTIONS] * 2, strict=True)
    ),
    *(Job("inductor", "everything", options) for options in OPTIONS),
]


@functools.cache
def outcomes() -> dict[Job, tuple[str, ...]]:
    """By job and rank, of one pair of processes, since starting one takes seconds."""
    by_rank = ep.testing.run(run_jobs, 2, how="processes", timeout_s=280, args=(JOBS,))
    return dict(zip(JOBS, zip(*by_rank, strict=True), strict=True))


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.program}-{job.form}-{job.options}")
def test_a_graph_makes_the_calls_of_its_code(job):
    """All of them, in order and once, though nobody reads a result, two are equal, or a rank has no
    tokens and receives none."""
    for rank, outcome in enumerate(outcomes()[job]):
        assert not outcome, f"rank {rank}:\n{outcome}"
