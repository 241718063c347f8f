"""What a buffer costs: announced to the byte, flat over time, and an error where there is none."""

import gc
import pathlib
import threading
import time

import pytest

import ep
import ep.testing
from python.fault_process import run_alone
from python.fault_support import caught, dispatch, make_buffer, round_trip, says

PAGE = 4096


def _windows():
    """Bytes of every window that this process has mapped, by inode."""
    sizes = {}
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        if "memfd:ep-window" in line:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            sizes[line.split()[4]] = end - begin
    return sizes


SMALL = {"num_experts": 8, "num_topk": 2, "hidden": 64, "max_tokens_per_rank": 16}


@pytest.mark.parametrize("changes", [{}, {"arena_bytes": 100_000}, {"num_topk": 8}], ids=str)
def test_bytes_needed_is_what_is_registered(changes):
    """GBs were taken that nobody had announced (DeepEP 401, 510)."""
    options = SMALL | changes
    needed = ep.EPBuffer.bytes_needed(**options, num_ranks=1)
    assert needed.total == needed.control + needed.staging + needed.arena
    before = _windows()  # of other tests, which may go at any time
    buf = ep.EPBuffer(ep.Communicator.single(), **options)
    own = {inode: size for inode, size in _windows().items() if inode not in before}
    assert list(own.values()) == [-(-needed.total // PAGE) * PAGE]
    assert buf.memory().largest_free == needed.arena
    assert buf.memory().used == 0
    buf.close()
    del buf
    gc.collect()
    assert not own.keys() & _windows().keys()


def test_bytes_needed_of_three_ranks_is_what_each_registers():
    needed = ep.EPBuffer.bytes_needed(**SMALL, num_ranks=3)
    said = run_alone(
        f"""
        import pathlib
        def rank(comm):
            buffers[comm.rank] = ep.EPBuffer(comm, **{SMALL!r})
        buffers = [None] * 3
        threads = [threading.Thread(target=rank, args=(c,)) for c in ep.Communicator.threads(3)]
        for t in threads: t.start()
        for t in threads: t.join()
        for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
            if "memfd:ep-window" in line:
                begin, end = line.split()[0].split("-")
                print(int(end, 16) - int(begin, 16), line.split()[4])
        for buf in buffers: buf.close()
        """
    )
    windows = {line.split()[1]: int(line.split()[0]) for line in said.splitlines()}  # by inode
    assert list(windows.values()) == [-(-needed.total // PAGE) * PAGE] * 3


def test_bytes_needed_grows_with_what_is_asked_for_and_past_32_bits():
    """K unknown was sized as 32 (SGLang 24443); limits were crossed silently (vLLM 57894)."""

    def total(**changes):
        return ep.EPBuffer.bytes_needed(**({"num_ranks": 4} | SMALL | changes)).total

    for name, values in (
        ("num_topk", (1, 2, 8, 32)),
        ("max_tokens_per_rank", (1, 2, 16, 1000)),
        ("hidden", (8, 64, 7168)),
        ("num_ranks", (1, 2, 3, 64)),
        ("num_regions", (1, 2, 4)),
        ("token_bytes", (128, 1000)),
        ("output_bytes", (128, 1000)),
    ):
        totals = [total(**{name: value}) for value in values]
        assert totals == sorted(set(totals)), name
    assert total(num_topk=8, hidden=7168, max_tokens_per_rank=8192, num_ranks=8) > 2**33
    error = caught(ep.InvalidArgument, lambda: total(max_tokens_per_rank=2**24, hidden=7168))
    says(error, "bytes", "max_tokens_per_rank")


def _census():
    """Open files, threads and mapped windows of this process."""
    root = pathlib.Path("/proc/self")
    return (
        len(list((root / "fd").iterdir())),
        len(list((root / "task").iterdir())),
        len(_windows()),
    )


def test_200_buffers_leave_no_file_thread_or_mapping():
    """Create and destroy for each step, faults included (DeepEP 571)."""
    round_meets = threading.Barrier(2)
    seen = {}

    def rank(comm):
        for i in range(200):
            buf = make_buffer(comm)
            if i % 4 == 1:
                if comm.rank == 0:
                    buf.abort("fault")
                caught(ep.PeerError, lambda b=buf: dispatch(b))
            kept = round_trip(buf) if i % 2 else None
            buf.close()
            del buf, kept
            round_meets.wait()
            if comm.rank == 0 and i in (10, 199):
                seen[i] = _settled(seen.get(10))
            round_meets.wait()

    def _settled(wanted):
        """A joined thread leaves /proc a moment later."""
        gc.collect()
        end = time.monotonic() + 5.0
        while wanted is not None and _census() != wanted and time.monotonic() < end:
            time.sleep(0.01)
        return _census()

    ep.testing.run(rank, 2)
    assert seen[199] == seen[10]


def test_resident_memory_is_flat_over_2000_rounds():
    """Growth over hours (SGLang 6017).  The main thread sits in join(), as an engine's does."""
    said = run_alone(
        """
        import pathlib
        def resident():
            return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096
        comms = ep.Communicator.threads(2)
        marks, failures = {}, []
        def rank(r):
            try:
                buf = make_buffer(comms[r])
                for i in range(2000):
                    if r == 0 and i % 500 == 0:
                        marks[i] = resident()
                    if i % 50 == 0:
                        bad = {"x": "no tensor"} if r == 1 else {}
                        caught((ep.Error, TypeError), lambda: dispatch(buf, **bad))
                    out = dispatch(buf, async_op=i % 2 == 0, exact=i % 3 != 0)
                    y = buf.combine(out.x, out.handle, async_op=i % 4 == 0)
                    y.event.synchronize()
                    np.asarray(y.x), np.asarray(out.source), np.asarray(out.topk_idx)
            except BaseException as error:
                failures.append(error)
                raise
        threads = [threading.Thread(target=rank, args=(r,)) for r in range(2)]
        for t in threads: t.start()
        for t in threads: t.join()
        assert not failures
        print(resident() - marks[500], marks)
        """
    )
    assert int(said.split()[0]) < 2 << 20, said


def test_no_memory_for_a_window_says_so_and_how_much():
    """Out of memory was shown as "invalid argument" (SGLang 29942)."""
    run_alone(
        """
        import resource
        options = dict(num_experts=8, num_topk=8, hidden=7168, max_tokens_per_rank=1024)
        needed = ep.EPBuffer.bytes_needed(**options, num_ranks=1).total
        here = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (here + needed // 2, resource.RLIM_INFINITY))
        make = lambda: ep.EPBuffer(ep.Communicator.single(), **options)
        error = caught(ep.CapacityError, make)
        says(error, "out of memory", str(needed))
        assert error.rank == 0 and error.needed == needed
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        make().close()
        """
    )


@pytest.mark.parametrize("exact", [True, False])
def test_no_memory_for_an_output_is_that_ranks_capacity_error_and_the_others_peer_error(exact):
    """64 MB into rank 0's own memory, of which there is none.

    With exact=True it learns the size when rows are on their way: rank 1's call is good, and its
    next call ends.
    """
    run_alone(
        f"""
        import resource, ep.testing
        limit = threading.Barrier(2, timeout=30)
        def rank(comm):
            buf = make_buffer(comm, hidden=8192, max_tokens_per_rank=1024)
            x, ids = np.ones((1024, 8192), np.float32), np.zeros((1024, 2), np.int64)
            buf.dispatch(x, ids, outputs="window")
            small = Job(hidden=8192)
            round_trip(buf, small, outputs="caller")
            limit.wait()
            if comm.rank == 0:
                here = int(open("/proc/self/statm").read().split()[0]) * 4096
                soft = (here + (16 << 20), resource.RLIM_INFINITY)
                resource.setrlimit(resource.RLIMIT_AS, soft)
            limit.wait()
            place = "caller" if comm.rank == 0 else "window"
            action = lambda: buf.dispatch(x, ids, outputs=place, exact={exact})
            if comm.rank == 1 and {exact}:
                assert action().num_rows == 0
            if comm.rank == 0:
                error = caught(ep.CapacityError, action)
                says(error, "out of memory", "bytes")
                assert error.rank == 0 and error.needed >= 2048 * 8192 * 4
            else:
                assert list(caught(ep.PeerError, action).peers) == [0]
            limit.wait()
            if comm.rank == 0:
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
            limit.wait()
            round_trip(buf, small, outputs="caller")
            round_trip(buf, small, outputs="window")
            buf.close()
        ep.testing.run(rank, 2)
        """
    )
