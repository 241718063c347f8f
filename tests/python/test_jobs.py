"""Several jobs on one machine, several buffers in one process: nobody meets anybody else."""

import pytest

import ep.testing
from python.fault_process import Port, Rank
from python.fault_support import (
    BY_EXPERT,
    DEFAULT,
    Job,
    check_combined,
    check_received,
    combine,
    dispatch,
    make_buffer,
    round_trip,
)


def test_two_jobs_at_once_with_the_same_defaults_and_other_data():
    """Two users' jobs gave each other's values, 100 % reproducible (Paddle 76090, 76091)."""
    script = """
    buf = make()
    job = Job(shift=int(hear()))
    say("ready")
    hear()
    for _ in range(50):
        round_trip(buf, job)
    buf.close()
    """
    ports, processes = [Port(), Port()], []
    try:
        for port in ports:
            for rank in range(2):
                processes.append(Rank(script, rank=rank, num_ranks=2, address=port.address))
        for i, process in enumerate(processes):
            process.tell(str(i // 2))
        for process in processes:
            process.expect("ready")
        for process in processes:  # all of them are there, so they run at the same time
            process.tell()
        for process in processes:
            process.good()
    finally:
        for process in processes:
            process.end()


def test_two_groups_of_threads_at_once_in_one_process():
    def job(shift):
        def rank(comm):
            with make_buffer(comm) as buf:
                for _ in range(50):
                    round_trip(buf, Job(shift=shift))

        return rank

    def both(comm):  # each rank of the outer group runs a whole job of its own
        ep.testing.run(job(comm.rank), 2)

    ep.testing.run(both, 2)


@pytest.mark.parametrize("order", ["first", "second"])
def test_two_buffers_alive_in_one_process_take_turns(order):
    """Normal and low-latency buffers crashed in either order (DeepEP 76)."""

    def rank(comm):
        first = make_buffer(comm)
        second = make_buffer(comm, max_tokens_per_rank=9, hidden=64, num_experts=7)
        for i in range(20):
            wide = Job(2, hidden=64, shift=i, layout="expert")
            of_first, of_second = dispatch(first), dispatch(second, wide)
            check_combined(second, wide, combine(second, wide, of_second.handle))
            check_combined(first, DEFAULT, combine(first, DEFAULT, of_first.handle))
            check_received(first, DEFAULT, of_first)
            check_received(second, wide, of_second)
        closed, kept = (first, second) if order == "first" else (second, first)
        closed.close()
        round_trip(kept, Job(2))
        round_trip(kept, Job(2, layout="expert"))
        kept.close()

    ep.testing.run(rank, 3)


def test_many_buffers_of_one_group_are_told_apart():
    def rank(comm):
        buffers = [make_buffer(comm) for _ in range(5)]
        outs = [dispatch(buf, Job(shift=i)) for i, buf in enumerate(buffers)]
        for i in (3, 0, 4, 1, 2):
            job = Job(shift=i)
            check_received(buffers[i], job, outs[i])
            check_combined(buffers[i], job, combine(buffers[i], job, outs[i].handle))
            round_trip(buffers[i], BY_EXPERT)
        for buf in buffers:
            buf.close()

    ep.testing.run(rank, 2)
