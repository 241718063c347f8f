"""The error table of the interface, row by row: who raises what; then all is exact again."""

import gc

import numpy as np
import pytest

import ep
from python import fault_cases
from python.fault_support import (
    BY_EXPERT,
    DEFAULT,
    Job,
    call,
    caught,
    check_combined,
    combine,
    combine_call,
    dispatch,
    exact_again,
    refused,
    round_trip,
    run,
    says,
)

RANKS = 3


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("case", fault_cases.DISPATCH, ids=lambda case: case.name)
def test_a_dispatch_that_one_rank_gets_wrong(case, kind):
    """Every exception that leaves dispatch spends the turn: the others raise in the same call."""
    job = Job(kind=kind)

    def rank(buf):
        for culprit in (0, 2):
            changes = case.changes(buf, job) if buf.rank == culprit else {}
            arguments = call(buf, job, **changes)
            refused(buf, culprit, case.error, case.parts, lambda a=arguments: buf.dispatch(**a))
            exact_again(buf)

    run(rank, RANKS)


@pytest.mark.parametrize("job", [DEFAULT, BY_EXPERT], ids=["rank", "expert"])
def test_combines_that_one_rank_gets_wrong(job):
    cases = [*fault_cases.COMBINE]
    if job.layout == "rank":
        cases.append(fault_cases.COMBINE_BY_RANK)

    def rank(buf):
        handle = dispatch(buf, job).handle
        for i, case in enumerate(cases):
            culprit = i % RANKS
            changes = case.changes(buf, job) if buf.rank == culprit else {}
            arguments = combine_call(buf, job, handle, **changes)
            refused(buf, culprit, case.error, case.parts, lambda a=arguments: buf.combine(**a))
            check_combined(buf, job, combine(buf, job, handle))
        exact_again(buf)

    run(rank, RANKS)


def test_a_call_with_too_many_positional_arguments():
    def rank(buf):
        good = call(buf)
        extra = [good["x"], good["topk_idx"], good["topk_weights"], None, "rank"]

        def action():
            return buf.dispatch(*extra) if buf.rank == 1 else dispatch(buf)

        refused(buf, 1, TypeError, ("positional",), action)
        exact_again(buf)

    run(rank, RANKS)


@pytest.mark.parametrize("bound", [16, 9])
def test_too_many_tokens_names_both_numbers(bound):
    """`x.size(0) <= num_max_dispatch_tokens_per_rank` named neither (DeepEP 165, SGLang 6017)."""

    def rank(buf):
        limit = {} if bound == 16 else {"max_tokens": bound}
        for culprit in range(RANKS):
            job = Job(bound + (buf.rank == culprit), equal=True)
            action = lambda j=job: dispatch(buf, j, **limit)  # noqa: E731
            if buf.rank == culprit:
                error = caught(ep.CapacityError, action)
                assert (error.rank, error.needed, error.available) == (culprit, bound + 1, bound)
                says(error, str(bound + 1), str(bound), "max_tokens")
            else:
                error = caught(ep.PeerError, action)
                assert list(error.peers) == [culprit]
                says(error, f"{bound + 1} tokens", str(bound))
            exact_again(buf)

    run(rank, RANKS)


@pytest.mark.parametrize("place", ["event", "check", "next call"])
def test_too_many_rows_is_the_same_error_on_every_rank(place):
    """Demand 18, max_rows 10: nothing is sent, status is set, the demand is told."""
    job = Job(equal=True, num_tokens=6)

    def rank(buf):
        ids = np.zeros((6, 2), np.int64)  # everything to rank 0: 18 rows
        out = dispatch(buf, job, topk_idx=ids, max_rows=10, async_op=True)
        while not out.event.query():
            pass
        assert int(np.asarray(out.status)[0]) != 0
        assert int(np.asarray(out.rows_needed_device)[0]) == (18 if buf.rank == 0 else 0)
        look = {
            "event": out.event.synchronize,
            "check": buf.check,
            "next call": lambda: dispatch(buf),
        }[place]
        error = caught(ep.CapacityError, look)
        assert (error.rank, error.needed, error.available) == (0, 18, 10)
        says(error, "rank 0", "18", "10", "max_rows")
        out.event.synchronize()  # once; and it spent no turn
        exact_again(buf)

    run(rank, RANKS)


@pytest.mark.parametrize("exact", [True, False])
def test_rows_that_fit_no_free_extent_are_the_same_error_on_every_rank(exact):
    """Rank 1 keeps expert outputs until its arena is full."""
    seen = []

    def rank(buf):
        out = dispatch(buf)
        kept = []
        if buf.rank == 1:
            with pytest.raises(ep.CapacityError) as full:
                while len(kept) < 10000:
                    kept.append(buf.expert_output(out.handle, dtype="float32"))
            assert full.value.rank == 1 and full.value.needed > full.value.available
        error = caught(ep.CapacityError, lambda: dispatch(buf, exact=exact))
        says(error, "rank 1", str(error.needed), str(error.available), "arena")
        assert error.needed > error.available
        seen.append((error.rank, error.needed, error.available))
        kept.clear()
        gc.collect()
        exact_again(buf)

    run(rank, RANKS, arena_bytes=64 << 10, outputs="window")
    assert len(seen) == RANKS and len(set(seen)) == 1 and seen[0][0] == 1


@pytest.mark.parametrize("place", ["event", "check", "next dispatch", "next combine"])
def test_a_bad_id_of_a_fixed_size_dispatch_is_deferred(place):
    """exact=False: the id counts as -1, status is set, and the report spends no turn."""

    def rank(buf):
        changes = fault_cases.with_id(4, 1, -3)(buf, DEFAULT) if buf.rank == 1 else {}
        out = dispatch(buf, exact=False, async_op=True, **changes)
        while not out.event.query():
            pass
        assert (int(np.asarray(out.status)[0]) != 0) == (buf.rank == 1)
        rows = np.zeros(np.asarray(out.x).shape, np.float32)
        look = {
            "event": out.event.synchronize,
            "check": buf.check,
            "next dispatch": lambda: dispatch(buf),
            "next combine": lambda: buf.combine(rows, out.handle),
        }[place]
        if buf.rank == 1:
            says(caught(ep.InvalidArgument, look), "topk_idx[4, 1] = -3")
        if buf.rank != 1 or place.startswith("next"):
            look()
        out.event.synchronize()
        exact_again(buf)

    run(rank, RANKS)


@pytest.mark.parametrize("grad_mode", [True, False])
def test_inputs_that_require_grad_are_refused_while_grad_mode_is_on(grad_mode):
    """A silent dispatch would cut the graph (DeepSpeed 8213: router gradients were dropped)."""
    import torch

    job = Job(kind="torch")

    def rank(buf):
        arguments = call(buf, job)
        for name in ("x", "topk_weights"):
            good = arguments[name]
            if buf.rank == 1:
                arguments[name] = good.clone().requires_grad_()
            with torch.set_grad_enabled(grad_mode):
                if grad_mode:
                    refused(
                        buf,
                        1,
                        ep.InvalidArgument,
                        ("grad", "ep.functional"),
                        lambda: buf.dispatch(**arguments),
                    )
                else:
                    assert not buf.dispatch(**arguments).x.requires_grad
            arguments[name] = good
            exact_again(buf)
        out = dispatch(buf, job)
        rows = combine_call(buf, job, out.handle)
        if buf.rank == 2:
            rows["x"].requires_grad_()
        with torch.set_grad_enabled(grad_mode):
            if grad_mode:
                refused(
                    buf,
                    2,
                    ep.InvalidArgument,
                    ("grad", "ep.functional"),
                    lambda: buf.combine(**rows),
                )
            else:
                check_combined(buf, job, buf.combine(**rows))
        exact_again(buf)

    run(rank, RANKS)


def test_many_faults_of_many_kinds_leave_no_memory_behind():
    """One buffer takes every bad dispatch of the table in turn, a good call behind each."""

    def rank(buf):
        for i, case in enumerate(fault_cases.DISPATCH * 2):
            culprit = i % RANKS
            changes = case.changes(buf, DEFAULT) if buf.rank == culprit else {}
            arguments = call(buf, **changes)
            refused(buf, culprit, case.error, case.parts, lambda a=arguments: buf.dispatch(**a))
            round_trip(buf)
        gc.collect()
        assert buf.memory().used == 0

    run(rank, RANKS)


def test_construction_with_different_values_names_argument_and_both_values():
    """Unequal maxima were stuck silently (DeepEP 208)."""

    def rank(comm):
        good = {"num_experts": 6, "num_topk": 2, "hidden": 32, "max_tokens_per_rank": 16}
        for name, other in (("num_experts", 9), ("max_tokens_per_rank", 8), ("num_topk", 1)):
            options = good | ({name: other} if comm.rank == 2 else {})
            error = caught(ep.InvalidArgument, lambda o=options: ep.EPBuffer(comm, **o))
            says(error, name, str(good[name]), str(other), "rank 2")
            assert isinstance(error, ValueError)
        with ep.EPBuffer(comm, **good) as buf:
            exact_again(buf)

    import ep.testing

    ep.testing.run(rank, RANKS)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (TypeError, {"num_experts": "six"}),
        (ep.InvalidArgument, {"num_topk": 33}),
        (ep.InvalidArgument, {"outputs": "nowhere"}),
        (ep.InvalidArgument, {"device": "gpu"}),
        (ep.Unsupported, {"elastic": True}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value.__name__,
)
def test_construction_that_one_rank_gets_wrong_costs_nobody_a_timeout(kind, changes):
    def rank(comm):
        good = {
            "num_experts": 6,
            "num_topk": 2,
            "hidden": 32,
            "max_tokens_per_rank": 16,
            "timeout_s": 30.0,
        }
        options = good | (changes if comm.rank == 1 else {})
        name = next(iter(changes))
        if comm.rank == 1:
            says(caught((kind, ep.InvalidArgument), lambda: ep.EPBuffer(comm, **options)), name)
        else:
            error = caught((ep.InvalidArgument, ep.PeerError), lambda: ep.EPBuffer(comm, **options))
            says(error, "rank 1")
        with ep.EPBuffer(comm, **good) as buf:
            exact_again(buf)

    import ep.testing

    ep.testing.run(rank, RANKS)
