"""Calls that somebody leaves on purpose: abort(reason), and Ctrl-C in a wait."""

import textwrap
import threading

import numpy as np
import pytest

import ep
from python.fault_process import run_alone
from python.fault_support import (
    BY_EXPERT,
    DEFAULT,
    await_blocked,
    caught,
    check_combined,
    combine,
    dispatch,
    exact_again,
    in_thread,
    run,
    says,
)

RANKS = 3


def _aborted(action, by, reason):
    error = caught(ep.PeerError, action)
    assert list(error.peers) == [by]
    assert reason in error.reason
    says(error, reason, f"rank {by}")


@pytest.mark.parametrize("job", [DEFAULT, BY_EXPERT], ids=["rank", "expert"])
def test_an_abort_while_all_are_idle_ends_the_next_call_on_every_rank(job):
    def rank(buf):
        for by in range(RANKS):
            reason = f"no more data on {by}: Ende"
            handle = dispatch(buf, job).handle
            if buf.rank == by:
                buf.abort(reason)
            _aborted(lambda: dispatch(buf, job), by, reason)
            exact_again(buf)
            if buf.rank == by:
                buf.abort(reason)
            _aborted(lambda h=handle: combine(buf, job, h), by, reason)
            check_combined(buf, job, combine(buf, job, handle))
            exact_again(buf)

    run(rank, RANKS)


def test_the_aborting_rank_may_learn_from_check():
    def rank(buf):
        if buf.rank == 0:
            buf.abort("stop")
            _aborted(buf.check, 0, "stop")
        else:
            _aborted(lambda: dispatch(buf), 0, "stop")
        exact_again(buf)

    run(rank, 2)


def test_a_refusal_in_the_turn_that_a_peer_aborts_is_followed_by_no_second_fault():
    """Rank 1 aborts call n, rank 0 refuses its arguments in it: one fault on each rank."""

    def rank(buf):
        if buf.rank == 1:
            buf.abort("stop")
        if buf.rank == 0:
            caught(TypeError, lambda: buf.dispatch("no tensor"))
        else:
            error = caught(ep.PeerError, lambda: dispatch(buf))
            assert set(error.peers) <= {0, 1}
        exact_again(buf)

    run(rank, RANKS)


def test_reasons_of_any_length_and_alphabet():
    def rank(buf):
        for reason in ("", "x", "ein Maß für Ärger", "r" * 5000):
            if buf.rank == 0:
                buf.abort(reason)
            error = caught(ep.PeerError, lambda: dispatch(buf))
            assert reason[:50] in error.reason
            exact_again(buf)

    run(rank, 2)


def test_a_reason_that_is_no_text_is_refused_and_ends_nothing():
    def rank(buf):
        if buf.rank == 0:
            caught(TypeError, lambda: buf.abort(5))
        exact_again(buf)

    run(rank, 2)


def test_an_abort_of_a_dispatch_in_flight_from_another_thread():
    """Rank 0 waits in dispatch for rank 2, which is late; a thread of rank 0 aborts."""
    ended = threading.Event()
    tids = {}

    def rank(buf):
        def stop():
            for waiting in (0, 1):
                while waiting not in tids:
                    pass
                await_blocked(tids[waiting])
            buf.abort("the user pressed stop")

        if buf.rank == 0:
            in_thread(stop)
        if buf.rank == 2:
            ended.wait()
        tids[buf.rank] = threading.get_native_id()
        _aborted(lambda: dispatch(buf), 0, "the user pressed stop")
        ended.set()
        exact_again(buf)

    run(rank, RANKS)


def test_an_abort_of_an_async_fixed_size_dispatch_comes_with_its_event():
    ended = threading.Event()

    def rank(buf):
        if buf.rank == 1:
            ended.wait()
        out = dispatch(buf, exact=False, async_op=True)
        if buf.rank == 0:
            buf.abort("later")
            ended.set()
        error = caught(ep.PeerError, out.event.synchronize)
        assert list(error.peers) == [0] and "later" in error.reason
        assert int(np.asarray(out.status)[0]) != 0
        out.event.synchronize()
        exact_again(buf)

    run(rank, 2)


def test_an_abort_of_a_closed_buffer_is_nothing():
    def rank(buf):
        buf.close()
        buf.abort("late")

    run(rank, 2)


# A process with two ranks as threads.  Rank 0 is the main thread, which Python interrupts; rank 1
# comes only when rank 0 has left.  The user's thread sends the signal once rank 0 sleeps in a wait.
INTERRUPT = """
comms = ep.Communicator.threads(2)
left, sent_at = threading.Event(), []
main = threading.get_native_id()

def user(may_send=lambda: True):
    await_blocked(main)
    sent_at.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGINT)

def interrupted(action):
    in_thread(user)
    caught(KeyboardInterrupt, action)
    print("ms", round(1000 * (time.monotonic() - sent_at.pop()), 1))
    left.set()

failures = []

def as_peer(function):
    def guarded():
        try:
            function()
        except BaseException as error:
            failures.append(error)
    thread = threading.Thread(target=guarded)
    thread.start()
    return thread

def peer_error(action):
    error = caught(ep.PeerError, action)
    assert list(error.peers) == [0], error.peers
    print("peer:", error)
"""
END = """
thread.join()
assert not failures, failures
"""
WITH_BUFFERS = """
buffers = [None, None]
def make(r):
    buffers[r] = make_buffer(comms[r])
thread = as_peer(lambda: make(1))
make(0)
thread.join()
buf, handles = buffers[0], [None, None]
def first(r):
    handles[r] = dispatch(buffers[r]).handle
"""
FIRST = """
thread = as_peer(lambda: first(1))
first(0)
thread.join()
"""


def _measured(script):
    """Runs the script; every Ctrl-C must have been honoured soon: 100 ms plus a loaded machine."""
    said = run_alone(INTERRUPT + textwrap.dedent(script) + END)
    latencies = [float(line.split()[1]) for line in said.splitlines() if line.startswith("ms")]
    print("Ctrl-C honoured after", latencies, "ms (100 ms promised)")
    assert latencies and max(latencies) < 1000
    return said


@pytest.mark.parametrize("exact", [True, False])
def test_ctrl_c_leaves_a_dispatch(exact):
    said = _measured(
        WITH_BUFFERS
        + f"""
def late():
    left.wait()
    peer_error(lambda: dispatch(buffers[1], exact={exact}))
    exact_again(buffers[1])
thread = as_peer(late)
interrupted(lambda: dispatch(buf, exact={exact}))
exact_again(buf)
"""
    )
    assert "interrupted" in said


def test_ctrl_c_leaves_a_combine():
    _measured(
        WITH_BUFFERS
        + FIRST
        + """
def late():
    left.wait()
    peer_error(lambda: combine(buffers[1], DEFAULT, handles[1]))
    buffers[1].resync()
    exact_again(buffers[1])
thread = as_peer(late)
interrupted(lambda: combine(buf, DEFAULT, handles[0]))
buf.resync()
exact_again(buf)
"""
    )


def test_ctrl_c_leaves_a_construction():
    _measured(
        """
def late():
    left.wait()
    start = time.monotonic()
    print("peer:", caught(ep.PeerError, lambda: make_buffer(comms[1])))
    assert time.monotonic() - start < 10, "the peer waited for its timeout"
    exact_again(make_buffer(comms[1]))
thread = as_peer(late)
interrupted(lambda: make_buffer(comms[0]))
exact_again(make_buffer(comms[0]))
"""
    )


def test_ctrl_c_leaves_a_resync():
    _measured(
        WITH_BUFFERS
        + """
def late():
    left.wait()
    start = time.monotonic()
    print("peer:", caught(ep.PeerError, lambda: buffers[1].resync()))
    assert time.monotonic() - start < 10, "the peer waited for its timeout"
    buffers[1].resync()
    exact_again(buffers[1])
thread = as_peer(late)
interrupted(buf.resync)
buf.resync()
exact_again(buf)
"""
    )


def test_ctrl_c_leaves_the_wait_for_an_event_and_ends_nothing():
    _measured(
        WITH_BUFFERS
        + """
def late():
    left.wait()
    dispatch(buffers[1], exact=False)
    exact_again(buffers[1])
thread = as_peer(late)
out = dispatch(buf, exact=False, async_op=True)
interrupted(out.event.synchronize)
out.event.synchronize()
check_received(buf, DEFAULT, out)
exact_again(buf)
"""
    )


def test_ctrl_c_leaves_a_tcp_meeting():
    said = run_alone(
        INTERRUPT
        + """
import socket
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
    free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    interrupted(lambda: ep.Communicator.tcp(f"127.0.0.1:{port}", 1, 2, timeout_s=30.0))
"""
    )
    assert float(said.split()[1]) < 1000


def test_a_signal_handler_that_does_not_raise_runs_during_a_wait_and_ends_nothing():
    """SIGUSR1 for a status line: its handler runs within the wait, which goes on."""
    said = run_alone(
        INTERRUPT
        + WITH_BUFFERS
        + """
signal.signal(signal.SIGUSR1, lambda *_: left.set())
def late():
    await_blocked(main)
    os.kill(os.getpid(), signal.SIGUSR1)
    left.wait()
    exact_again(buffers[1])
thread = as_peer(late)
exact_again(buf)
"""
        + END
    )
    assert said == ""


def test_a_signal_handler_that_raises_leaves_with_its_own_exception():
    said = run_alone(
        INTERRUPT
        + WITH_BUFFERS
        + """
class Deadline(Exception):
    pass
def handler(*_):
    raise Deadline
signal.signal(signal.SIGALRM, handler)
def late():
    await_blocked(main)
    os.kill(os.getpid(), signal.SIGALRM)
    left.wait()
    peer_error(lambda: dispatch(buffers[1]))
    exact_again(buffers[1])
thread = as_peer(late)
caught(Deadline, lambda: dispatch(buf))
left.set()
exact_again(buf)
"""
        + END
    )
    assert said.startswith("peer:")


def test_an_abort_from_a_signal_handler_ends_the_call_that_it_interrupts():
    """SIGTERM while rank 0 waits in dispatch: its handler aborts, on the thread that waits."""
    said = run_alone(
        INTERRUPT
        + WITH_BUFFERS
        + """
faulthandler.dump_traceback_later(20, exit=True)
signal.signal(signal.SIGTERM, lambda *_: (buf.abort("terminated"), left.set()))
def late():
    await_blocked(main)
    os.kill(os.getpid(), signal.SIGTERM)
    left.wait()
    peer_error(lambda: dispatch(buffers[1]))
    exact_again(buffers[1])
thread = as_peer(late)
error = caught(ep.PeerError, lambda: dispatch(buf))
assert "terminated" in error.reason, error
exact_again(buf)
"""
        + END
    )
    assert "terminated" in said
