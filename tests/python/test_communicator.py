"""ep.Communicator: what each kind gathers, whom it names, and what it refuses."""

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import ep
from ep import testing
from ep.communicator import resolve_group
from python.running import SIZES


def free_port(family=socket.AF_INET, host="127.0.0.1") -> int:
    """A port that nothing listened on a moment ago."""
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def has_ipv6() -> bool:
    try:
        free_port(socket.AF_INET6, "::1")
    except OSError:
        return False
    return True


def tcp_ranks(address: str, num_ranks: int, fn) -> list:
    """Calls `fn(comm)` in every rank of a tcp group, on a thread each."""
    with ThreadPoolExecutor(num_ranks) as pool:
        ranks = [
            pool.submit(lambda r: fn(ep.Communicator.tcp(address, r, num_ranks, 30.0)), rank)
            for rank in range(num_ranks)
        ]
        return [rank.result() for rank in ranks]


def lengths(comm: ep.Communicator) -> list[bytes]:
    """Gathers as many bytes as the rank's number, twice."""
    first = comm.all_gather(bytes([comm.rank]) * comm.rank)
    assert comm.all_gather(b"") == [b""] * comm.num_ranks
    return first


# --- every kind -----------------------------------------------------------------------------------


def test_single():
    comm = ep.Communicator.single()
    assert (comm.rank, comm.num_ranks, comm.timeout_s) == (0, 1, None)
    assert comm.all_gather(b"\0x") == [b"\0x"]


def test_threads():
    comms = ep.Communicator.threads(3)
    assert [(comm.rank, comm.num_ranks) for comm in comms] == [(0, 3), (1, 3), (2, 3)]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lengths, comms)) == [[b"", b"\1", b"\2\2"]] * 3


def test_threads_whose_rank_is_dropped():
    """Rank 1's object dies: rank 0 does not wait for it."""
    comms = ep.Communicator.threads(2)
    comms.pop()
    with pytest.raises(ep.PeerLost) as caught:
        comms[0].all_gather(b"", timeout_s=30)
    assert caught.value.peers == [1]


def test_threads_name_the_rank_that_does_not_come():
    comms = ep.Communicator.threads(2)
    with pytest.raises(ep.Timeout) as caught:
        comms[1].all_gather(b"", timeout_s=0.05)
    assert caught.value.peers == [0] and isinstance(caught.value, TimeoutError)
    with pytest.raises(ep.PeerError):
        comms[0].all_gather(b"", timeout_s=30)  # it comes too late, once
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lengths, comms)) == [[b"", b"\1"]] * 2


def test_tcp_on_ipv4():
    address = f"127.0.0.1:{free_port()}"
    assert tcp_ranks(address, 3, lengths) == [[b"", b"\1", b"\2\2"]] * 3


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")
def test_tcp_on_ipv6():
    address = f"[::1]:{free_port(socket.AF_INET6, '::1')}"
    assert tcp_ranks(address, 2, lengths) == [[b"", b"\1"]] * 2


def test_tcp_names_the_rank_that_never_comes():
    """Rank 2 of 3 does not exist."""
    address = f"127.0.0.1:{free_port()}"

    def meet(rank):
        with pytest.raises(ep.Timeout) as caught:
            ep.Communicator.tcp(address, rank, 3, timeout_s=0.5)
        return caught.value

    with ThreadPoolExecutor(2) as pool:
        hub, spoke = pool.map(meet, range(2))
    assert hub.peers == [2] and "2" in str(hub)
    assert spoke.peers and isinstance(spoke, TimeoutError)


def test_tcp_names_rank_0_when_it_never_comes():
    with pytest.raises(ep.Timeout) as caught:
        ep.Communicator.tcp(f"127.0.0.1:{free_port()}", 1, 2, timeout_s=0.3)
    assert caught.value.peers == [0]


def test_two_groups_of_threads_at_once_keep_to_themselves():
    """Two jobs with the same settings and different data."""

    def job(number):
        def trip(comm):
            with ep.EPBuffer(comm, **SIZES) as buffer:
                seen = []
                for i in range(5):
                    x = np.full((2, 8), 100 * number + 10 * i + comm.rank, dtype=np.float32)
                    out = buffer.dispatch(x, np.array([[0], [3]], dtype=np.int64))
                    seen.append(sorted(out.x[:, 0].tolist()))
                    assert np.array_equal(buffer.combine(out.x, out.handle).x, x)
                return seen

        return testing.run(trip, 2)

    with ThreadPoolExecutor(2) as pool:
        for number, ranks in enumerate(pool.map(job, range(2))):
            expected = [[100 * number + 10 * i + r for r in range(2)] for i in range(5)]
            assert ranks == [expected, expected]


JOB = """
import sys
import numpy as np
import ep
rank, base = int(sys.argv[1]), int(sys.argv[2])
comm = ep.Communicator.tcp(sys.argv[3], rank, 2)
sizes = {"num_experts": 4, "num_topk": 1, "hidden": 8, "max_tokens_per_rank": 4}
with ep.EPBuffer(comm, **sizes) as buffer:
    for i in range(200):
        x = np.full((2, 8), base + 2 * i + rank, dtype=np.float32)
        out = buffer.dispatch(x, np.array([[0], [3]]))
        assert sorted(out.x[:, 0].tolist()) == [base + 2 * i, base + 2 * i + 1], out.x
        assert np.array_equal(buffer.combine(out.x, out.handle).x, x)
print("right")
"""


def test_two_jobs_of_processes_at_once_keep_to_themselves():
    """Four processes, two jobs, the same settings, different data."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", JOB, str(rank), str(1000 * job), addresses[job]],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        for job in range(2)
        for rank in range(2)
    ]
    try:
        ends = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [end[0] for end in ends] == ["right\n"] * 4, [end[1] for end in ends]


# --- callbacks ------------------------------------------------------------------------------------


def test_callbacks_get_the_bytes_and_the_bound():
    seen = []

    def gather(mine, timeout_s):
        seen.append((mine, timeout_s))
        return [b"other", mine]

    comm = ep.Communicator.callbacks(1, 2, gather, timeout_s=7.5)
    assert comm.timeout_s == 7.5
    assert comm.all_gather(b"me") == [b"other", b"me"]
    assert comm.all_gather(b"", timeout_s=2) == [b"other", b""]
    assert seen == [(b"me", 7.5), (b"", 2.0)]


def test_callbacks_without_a_bound_wait_ten_minutes():
    bounds = []
    comm = ep.Communicator.callbacks(
        0, 1, lambda mine, timeout_s: [bounds.append(timeout_s) or mine]
    )
    assert comm.timeout_s is None
    assert comm.all_gather(b"") == [b""]
    assert bounds == [600.0]


def test_what_a_callback_raises_comes_back():
    class Mine(Exception):
        pass

    def gather(mine, timeout_s):
        raise Mine("no network")

    comm = ep.Communicator.callbacks(0, 2, gather)
    with pytest.raises(Mine, match="no network"):
        comm.all_gather(b"")
    with pytest.raises(Mine, match="no network"):
        ep.EPBuffer(comm, **SIZES)


@pytest.mark.parametrize("answer", [[b"x"], [b"x"] * 3])
def test_a_callback_that_gives_too_few_or_too_many(answer):
    comm = ep.Communicator.callbacks(0, 2, lambda mine, timeout_s: answer)
    with pytest.raises(ep.InvalidArgument, match=f"{len(answer)} "):
        comm.all_gather(b"x")


@pytest.mark.parametrize("answer", [None, [b"x", 3], [b"x", "text"], [b"x", None]])
def test_a_callback_that_gives_no_bytes(answer):
    comm = ep.Communicator.callbacks(0, 2, lambda mine, timeout_s: answer)
    with pytest.raises(TypeError):
        comm.all_gather(b"x")


def test_a_callback_that_gives_other_kinds_of_bytes():
    comm = ep.Communicator.callbacks(0, 2, lambda mine, t: (bytearray(mine), memoryview(b"y")))
    assert comm.all_gather(b"x") == [b"x", b"y"]


def test_a_callback_that_gives_another_order():
    """Rank 1 finds its own bytes in the place of rank 0."""
    comm = ep.Communicator.callbacks(1, 2, lambda mine, timeout_s: [mine, b"other"])
    with pytest.raises(ep.InvalidArgument, match=r"value 1 of 5 bytes .* rank 1 gave \(2 bytes\)"):
        comm.all_gather(b"me")


def test_a_callback_that_cannot_be_called():
    with pytest.raises(TypeError, match="all_gather"):
        ep.Communicator.callbacks(0, 2, [b"x"])


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 0), (-1, 2), (2, 2), (0, -1), (0, 1025)])
@pytest.mark.parametrize("kind", ["tcp", "callbacks"])
def test_a_rank_outside_the_group_is_refused(kind, rank, num_ranks):
    with pytest.raises(ep.InvalidArgument, match=r"rank"):
        if kind == "tcp":
            ep.Communicator.tcp("127.0.0.1:29999", rank, num_ranks)
        else:
            ep.Communicator.callbacks(rank, num_ranks, lambda mine, timeout_s: [])


@pytest.mark.parametrize("num_ranks", [0, -1, 1025])
def test_threads_of_no_group_are_refused(num_ranks):
    with pytest.raises(ep.InvalidArgument, match="num_ranks"):
        ep.Communicator.threads(num_ranks)


@pytest.mark.parametrize("address", ["", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:x", "::1:99999"])
def test_an_address_without_a_port_is_refused(address):
    with pytest.raises(ep.InvalidArgument, match=r"address|port"):
        ep.Communicator.tcp(address, 0, 2)


def test_two_ranks_with_one_number_are_refused():
    address = f"127.0.0.1:{free_port()}"

    def meet(rank):
        with pytest.raises(ep.Error) as caught:
            ep.Communicator.tcp(address, rank, 3, timeout_s=5.0)
        return caught.value

    with ThreadPoolExecutor(3) as pool:
        errors = list(pool.map(meet, [0, 1, 1]))
    assert any(isinstance(error, ep.InvalidArgument) and "1" in str(error) for error in errors)


def test_a_communicator_of_nothing_is_refused():
    with pytest.raises(TypeError, match=r"str.*threads"):
        ep.Communicator("127.0.0.1:29999")


# --- what an EPBuffer's group may be --------------------------------------------------------------


def test_a_communicator_is_its_own_group():
    comm = ep.Communicator.single()
    assert resolve_group(comm) is comm


@pytest.mark.parametrize("group", [5, "world", b"", object(), [0, 1]])
def test_other_groups_are_refused_by_type(group):
    with pytest.raises(TypeError, match=rf"{type(group).__name__}.*ProcessGroup.*Communicator"):
        resolve_group(group)


def test_the_core_of_a_communicator_is_no_group():
    with pytest.raises(TypeError, match=r"ep\.Communicator"):
        resolve_group(ep.Communicator.single()._core)


WITHOUT_TORCH = """
import sys
import ep
from ep.communicator import resolve_group
assert resolve_group(None).num_ranks == 1
try:
    resolve_group("world")
except TypeError as error:
    assert "ProcessGroup" in str(error)
else:
    raise AssertionError
assert "torch" not in sys.modules
"""


def test_resolving_a_group_imports_no_torch():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH], env=environment, check=True)


# --- waits ----------------------------------------------------------------------------------------


def test_other_threads_run_while_a_rank_waits():
    """Rank 1 never comes; this thread counts until rank 0 has given up."""
    comms = ep.Communicator.threads(2)
    count = 0
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(comms[0].all_gather, b"", 0.5)
        while not waiting.done():
            count += 1
    assert type(waiting.exception()) is ep.Timeout
    assert count > 1000


def test_buffers_of_a_group_are_known_to_it_while_they_live():
    comm = ep.Communicator.single()
    with ep.EPBuffer(comm, **SIZES) as buffer:
        assert list(comm._buffers) == [buffer]
    del buffer
    assert list(comm._buffers) == []
