"""ep.testing.run: results and failures, with ranks as threads and as processes."""

import os
import pathlib
import signal
import sys
import threading
import time

import numpy as np
import pytest

import ep
from ep import testing
from python.running import (
    BOTH,
    SIZES,
    Odd,
    eventually,
    gather_often,
    notes,
    one_row,
    one_token_each_way,
    raised_by,
)

# --- results --------------------------------------------------------------------------------------


def place(comm, *args):
    gathered = comm.all_gather(bytes([comm.rank]) * comm.rank)
    return comm.rank, comm.num_ranks, comm.timeout_s, gathered, args


@BOTH
def test_results_come_by_rank(how):
    gathered = [b"", b"\1", b"\2\2"]
    assert testing.run(place, 3, how=how, timeout_s=50, args=("a", [1])) == [
        (rank, 3, 50.0, gathered, ("a", [1])) for rank in range(3)
    ]


@BOTH
def test_one_rank(how):
    assert testing.run(place, 1, how=how)[0][:3] == (0, 1, 60.0)


@BOTH
def test_buffers_work_inside(how):
    results = testing.run(one_token_each_way, 2, how=how)
    for rank, (num_rows, y) in enumerate(results):
        assert num_rows == 2
        assert np.array_equal(y, np.full((2, 8), rank + 1, dtype=np.float32))


def pid(comm):
    return os.getpid(), threading.current_thread() is threading.main_thread()


def test_processes_are_processes_and_run_in_the_main_thread():
    ranks = testing.run(pid, 2, how="processes")
    assert len({os.getpid(), *(pid for pid, _ in ranks)}) == 3
    assert all(is_main for _, is_main in ranks)


def nested(comm):
    return testing.run(place, comm.rank + 1)


@BOTH
def test_a_rank_may_run_ranks(how):
    assert [len(ranks) for ranks in testing.run(nested, 2, how=how)] == [1, 2]


@BOTH
def test_calls_stay_apart(how):
    expected = [[bytes([0, i]), bytes([1, i])] for i in range(50)]
    assert testing.run(gather_often, 2, how=how, args=(50,)) == [expected, expected]


# --- failures -------------------------------------------------------------------------------------


def rank_1_fails_while_the_others_gather(comm):
    if comm.rank == 1:
        raise Odd("thirteen", 13)
    comm.all_gather(b"")


@BOTH
def test_the_failure_is_raised_with_its_rank(how):
    error = raised_by(rank_1_fails_while_the_others_gather, 3, how=how)
    assert type(error) is Odd and error.args[:2] == ("thirteen", 13) and error.number == 13
    assert error.ep_rank == 1
    assert "in rank 1 of 3" in notes(error)


def test_threads_raise_the_object_itself():
    odd = Odd("the very one", 1)

    def fail(comm):
        if comm.rank == 0:
            raise odd

    assert raised_by(fail, 2) is odd


def test_the_note_has_the_traceback_of_the_process():
    error = raised_by(rank_1_fails_while_the_others_gather, 2, how="processes")
    assert "in rank_1_fails_while_the_others_gather" in notes(error)


def test_before_notes_existed_the_rank_becomes_an_argument():
    class Old(Exception):
        add_note = property()  # raises AttributeError

    def fail(comm):
        raise Old("first")

    assert raised_by(fail, 1).args == ("first", "in rank 0 of 1")


def peers_error(comm):
    if comm.rank == 1:
        raise ValueError("no such expert")
    try:
        comm.all_gather(b"")
    except ep.PeerError as error:
        return error.peers, error.reason
    return None


def test_peers_that_gather_are_told_why():
    heard = []

    def fail(comm):
        heard.append(peers_error(comm))
        raise AssertionError("comes later")

    assert type(raised_by(fail, 3)) is ValueError
    assert heard == [([1], "ValueError: no such expert")] * 2


def test_peers_in_a_call_are_told_why():
    """Rank 1 raises between two calls: the others' dispatch ends, though nobody closes a buffer."""
    heard = []

    def fail(comm):
        buffer = ep.EPBuffer(comm, **SIZES)
        if comm.rank == 1:
            raise ValueError("out of ideas")
        try:
            one_row(buffer)
        except ep.PeerError as error:
            heard.append((error.peers, error.reason))
            raise

    error = raised_by(fail, 3)
    assert type(error) is ValueError and error.ep_rank == 1
    assert [peers for peers, _ in heard] == [[1], [1]]
    assert all("ValueError: out of ideas" in reason for _, reason in heard)


def rank_1_fails_in_a_buffer(comm, file):
    buffer = ep.EPBuffer(comm, **SIZES)
    if comm.rank == 1:
        raise ValueError("out of ideas")
    try:
        one_row(buffer)
    except ep.PeerError as error:
        pathlib.Path(file).write_text(error.reason, encoding="utf-8")
        raise


def test_peers_in_a_call_of_another_process_are_told_why(tmp_path):
    file = tmp_path / "reason"
    error = raised_by(rank_1_fails_in_a_buffer, 2, how="processes", args=(str(file),))
    assert type(error) is ValueError and error.ep_rank == 1
    assert "ValueError: out of ideas" in file.read_text(encoding="utf-8")


def rank_0_fails_after_rank_1(comm):
    if comm.rank == 1:
        raise ValueError("first")
    try:
        comm.all_gather(b"")
    except ep.PeerError:
        raise KeyError("second") from None


@BOTH
def test_the_first_of_two_failures_is_raised(how):
    error = raised_by(rank_0_fails_after_rank_1, 2, how=how)
    assert type(error) is ValueError and error.ep_rank == 1


@pytest.mark.parametrize("kind", [ep.PeerError, ep.PeerLost, ep.Timeout])
def test_what_follows_from_a_failure_does_not_hide_it(kind):
    """Rank 0 raises earlier, but as one who suffers from rank 1."""

    def fail(comm):
        if comm.rank == 0:
            raise kind("rank 1 did something")
        with pytest.raises(ep.PeerError):
            comm.all_gather(b"")
        raise ValueError("it did")

    error = raised_by(fail, 2)
    assert type(error) is ValueError and error.ep_rank == 1


def test_a_failure_that_only_looks_like_a_consequence_is_raised():
    def fail(comm):
        if comm.rank == 1:
            raise ep.PeerLost("on its own", peers=[7])

    error = raised_by(fail, 2)
    assert type(error) is ep.PeerLost and error.peers == [7]


def is_in_all_gather(thread: int) -> bool:
    """Whether the thread's innermost Python function is the hub's."""
    code = sys._current_frames()[thread].f_code
    return code.co_name == "all_gather" and code.co_filename.endswith("_session.py")


def test_a_rank_that_fails_after_a_timeout_releases_the_others():
    """Rank 1 keeps the Timeout of a call that rank 0 missed; rank 0 waits in the next one."""
    gave_up, knows, kept = threading.Event(), threading.Event(), []

    def fail(comm):
        if comm.rank == 0:
            kept.append(threading.get_ident())
            assert gave_up.wait(30)
            with pytest.raises(ep.PeerError):
                comm.all_gather(b"")
            knows.set()
            comm.all_gather(b"")
        with pytest.raises(ep.Timeout) as caught:
            comm.all_gather(b"", timeout_s=0.05)
        kept.append(caught)
        gave_up.set()
        assert knows.wait(30) and eventually(lambda: is_in_all_gather(kept[0]))
        raise ValueError("after that")

    error = raised_by(fail, 2)
    assert type(error) is ValueError
    assert "did not end" not in notes(error)


def leaves(comm):
    if comm.rank == 1:
        return None
    return comm.all_gather(b"")


@BOTH
def test_a_rank_that_returned_is_missed_at_once(how):
    """Rank 0 waits in a call that rank 1, which has returned, will never make."""
    error = raised_by(leaves, 2, how=how)
    assert type(error) is ep.PeerLost and error.peers == [1] and error.ep_rank == 0


def exits(comm):
    if comm.rank == 1:
        sys.exit(3)
    comm.all_gather(b"")


@BOTH
def test_sys_exit_does_not_end_the_caller(how):
    error = raised_by(exits, 2, how=how)
    assert type(error) is ep.PeerLost and error.peers == [1]
    assert "rank 1 called sys.exit(3)" in str(error)


def dies(comm, how, file):
    with ep.EPBuffer(comm, **SIZES) as buffer:
        if comm.rank == 1:
            pathlib.Path(file).write_text(repr(time.monotonic()), encoding="utf-8")
            os._exit(0) if how == "exit" else os.kill(os.getpid(), getattr(signal, how))
        if comm.rank == 0:
            comm.all_gather(b"")
        one_row(buffer)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("exit", "rank 1 exited with code 0"),
        ("SIGKILL", r"rank 1 was killed by SIGKILL \(9\)"),
        ("SIGSEGV", r"rank 1 was killed by SIGSEGV \(11\)"),
    ],
)
def test_a_process_that_dies_is_named_within_two_seconds(how, text, tmp_path):
    """Rank 0 waits in the communicator, rank 2 in a dispatch."""
    file = tmp_path / "when"
    with pytest.raises(ep.PeerLost, match=text) as caught:
        testing.run(dies, 3, how="processes", args=(how, str(file)))
    assert time.monotonic() - float(file.read_text(encoding="utf-8")) < 2.0
    assert caught.value.peers == [1] and caught.value.ep_rank == 1


def exits_badly_afterwards(comm):
    import atexit

    if comm.rank == 1:
        atexit.register(os._exit, 9)


def test_a_process_that_ends_badly_after_its_function_is_named():
    error = raised_by(exits_badly_afterwards, 2, how="processes")
    assert type(error) is ep.PeerLost and error.peers == [1]
    assert "rank 1 returned, then its process exited with code 9" in str(error)


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"num_ranks": 0}, ep.InvalidArgument, "num_ranks"),
        ({"num_ranks": -1}, ep.InvalidArgument, "num_ranks"),
        ({"num_ranks": 1025}, ep.InvalidArgument, "1024"),
        ({"num_ranks": 1.5}, TypeError, "float"),
        ({"num_ranks": 2, "how": "fibres"}, ep.InvalidArgument, "fibres"),
        ({"num_ranks": 2, "timeout_s": 0}, ep.InvalidArgument, "timeout_s=0"),
        ({"num_ranks": 2, "timeout_s": float("nan")}, ep.InvalidArgument, "timeout_s=nan"),
    ],
)
def test_wrong_arguments_are_named(options, error, text):
    with pytest.raises(error, match=text):
        testing.run(place, **options)
