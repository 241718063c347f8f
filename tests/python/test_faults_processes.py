"""Ranks whose processes are killed, leave, stop or time out: the others raise and leave."""

import pathlib
import signal
import time

import pytest

from python.fault_process import Port, ranks
from python.fault_support import SLACK_S, await_blocked

# Waits in its second round, and says when it has noticed a loss.  `tell` lets it enter the call.
SURVIVOR = """
buf = make()
buf.timeout_s = 600.0
out = round_trip(buf)
say("ready", threading.get_native_id())
hear()
try:
    {call}
except ep.PeerLost as error:
    say("lost", time.monotonic(), *error.peers)
    check_received(buf, DEFAULT, out)  # what a dead rank sent stays readable
    again = caught(ep.Error, lambda: dispatch(buf))
    assert type(again) is ep.Error and "resync" in str(again)
    lost = caught(ep.PeerLost, buf.resync)
    assert list(lost.peers) == list(error.peers)
    raise
"""
VICTIM = """
buf = make()
round_trip(buf)
say("ready", threading.get_native_id())
hear()
{call}
hear()
"""
CALLS = {
    "dispatch": "dispatch(buf)",
    "fixed size": "dispatch(buf, exact=False)",
    "replay": 'buf.dispatch(call(buf)["x"], handle=out.handle)',
    "combine": "combine(buf, DEFAULT, out.handle)",
}


def _await_all_blocked(processes, tids):
    for process, tid in zip(processes, tids, strict=True):
        await_blocked(tid, process.process.pid)


def _expect_loss(survivors, lost, since):
    """Each says in time whom it lost, and leaves by itself with the traceback."""
    for process in survivors:
        when, *peers = process.expect("lost")
        assert [int(peer) for peer in peers] == [lost]
        noticed = float(when) - since
        print(f"noticed after {noticed:.3f} s (2 s promised)")
        assert noticed < 2.0 + SLACK_S / 3
    for process in survivors:
        assert process.join(5.0) == 1
        assert "PeerLost" in process.stderr() and f"rank {lost}" in process.stderr()
        assert process.session() == []


def _named_files(process):
    """What the process has mapped or opened that has a name others could meet."""
    root = pathlib.Path(f"/proc/{process.process.pid}")
    names = [line.split(maxsplit=5)[5:] for line in (root / "maps").read_text().splitlines()]
    names += [[str(fd.readlink())] for fd in (root / "fd").iterdir()]
    return [name for [name] in filter(None, names) if name.startswith("/dev/shm")]


@pytest.mark.parametrize("name", CALLS)
def test_sigkill_of_a_rank_while_the_others_wait_for_it(name):
    """A dead peer left every survivor spinning (DeepEP 370, vLLM 27774)."""
    survivor = SURVIVOR.format(call=CALLS[name])
    with ranks(survivor, VICTIM.format(call=""), survivor) as (first, victim, last):
        tids = [int(process.expect("ready")[0]) for process in (first, victim, last)]
        assert not any(_named_files(process) for process in (first, victim, last))
        first.tell()
        last.tell()
        _await_all_blocked([first, last], [tids[0], tids[2]])
        since = time.monotonic()
        victim.kill()
        _expect_loss([first, last], 1, since)
        assert victim.join() == -signal.SIGKILL


def test_sigkill_of_a_rank_in_the_middle_of_its_own_call_and_a_rerun_at_once():
    """Ranks 0 and 1 wait for rank 2; rank 1 is killed; the same port serves the next run."""
    port = Port()
    survivor = SURVIVOR.format(call=CALLS["dispatch"])
    script = "buf = make()\nexact_again(buf)\nbuf.close()"
    for _ in range(2):
        with ranks(survivor, VICTIM.format(call="dispatch(buf)"), survivor, port=port) as jobs:
            tids = [int(process.expect("ready")[0]) for process in jobs]
            jobs[0].tell()
            jobs[1].tell()
            _await_all_blocked(jobs[:2], tids[:2])
            since = time.monotonic()
            jobs[1].kill()
            jobs[2].tell()
            _expect_loss([jobs[0], jobs[2]], 1, since)
        with ranks(script, script, script, port=port) as jobs:
            for process in jobs:
                process.good()


def test_exit_0_without_close_is_a_loss_too():
    """A clean exit of a peer was not noticed (Mooncake 2182)."""
    leaver = "buf = make()\nround_trip(buf)\nsay('ready')\nhear()\nos._exit(0)"
    survivor = SURVIVOR.format(call=CALLS["dispatch"])
    with ranks(survivor, leaver, survivor) as (first, left, last):
        tid = int(first.expect("ready")[0])
        left.expect("ready")
        last.expect("ready")
        first.tell()
        await_blocked(tid, first.process.pid)
        since = time.monotonic()
        left.tell()
        last.tell()
        _expect_loss([first, last], 1, since)
        assert left.join() == 0


def test_close_is_a_goodbye_and_not_a_loss():
    leaver = "buf = make()\nround_trip(buf)\nbuf.close()"
    stayer = """
buf = make()
round_trip(buf)
say("ready")
hear()
error = caught(ep.PeerError, lambda: dispatch(buf))
assert list(error.peers) == [1] and "closed" in str(error)
buf.close()
"""
    with ranks(stayer, leaver, stayer) as (first, left, last):
        left.good()
        first.expect("ready")
        last.expect("ready")
        first.tell()
        last.tell()
        first.good()
        last.good()


def test_after_a_timeout_the_process_leaves_by_itself_with_a_traceback():
    """The process never exited, health checks returned 503 (vLLM 46509)."""
    waiter = """
buf = make()
round_trip(buf)
buf.timeout_s = 1.0
say("ready")
start = time.monotonic()
try:
    dispatch(buf)
except ep.Timeout as error:
    say("raised", time.monotonic() - start, *error.peers)
    raise
"""
    hung = "buf = make()\nround_trip(buf)\nsay('ready')\nhear()"
    with ranks(waiter, waiter, hung) as processes:
        for process in processes:
            process.expect("ready")
        for process in processes[:2]:
            seconds, *peers = process.expect("raised")
            assert 0.5 < float(seconds) < 1.0 + SLACK_S
            assert peers == ["2"]
        for process in processes[:2]:
            assert process.join(5.0) == 1
            assert "Timeout" in process.stderr()
            assert "rank 2 has not entered call 3" in process.stderr()
        assert processes[2].process.poll() is None  # nobody had to kill it


def test_a_stopped_process_is_late_and_not_lost_and_may_come_back():
    waiter = """
buf = make()
round_trip(buf)
say("ready")
hear()
buf.timeout_s = 0.5
assert list(caught(ep.Timeout, lambda: dispatch(buf)).peers) == [1]
say("timeout")
buf.timeout_s = 60.0
assert buf.resync() == 2
exact_again(buf)
"""
    stopped = """
buf = make()
round_trip(buf)
say("ready")
hear()
caught(ep.PeerError, lambda: dispatch(buf))
assert buf.resync() == 2
exact_again(buf)
"""
    with ranks(waiter, stopped) as (first, second):
        first.expect("ready")
        second.expect("ready")
        second.kill(signal.SIGSTOP)
        first.tell()
        first.expect("timeout")
        second.kill(signal.SIGCONT)
        second.tell()
        first.good()
        second.good()


def test_an_exception_in_one_process_ends_the_others_call_and_every_process():
    """Its own traceback is what its stderr ends with; a peer in a call does not wait in vain."""
    script = """
buf = make()
round_trip(buf)
say("ready", threading.get_native_id())
hear()
if rank == 0:
    raise ValueError("the first error")
dispatch(buf)
"""
    with ranks(script, script) as (first, second):
        first.expect("ready")
        tid = int(second.expect("ready")[0])
        second.tell()
        await_blocked(tid, second.process.pid)
        first.tell()
        assert first.join(5.0) == 1
        assert first.stderr().splitlines()[-1] == "ValueError: the first error"
        assert second.join(5.0) == 1
        assert "rank 0" in second.stderr().splitlines()[-1]


def test_a_process_whose_peer_never_appears_leaves_by_itself():
    """Connection loops without bound (NIXL 2216)."""
    script = """
start = time.monotonic()
try:
    ep.Communicator.tcp(address, rank, 2, timeout_s=0.5)
except ep.Timeout as error:
    say("raised", time.monotonic() - start, *error.peers)
    raise
"""
    with ranks(script) as [process]:
        seconds, *peers = process.expect("raised")
        assert float(seconds) < 0.5 + SLACK_S and peers == ["1"]
        assert process.join(5.0) == 1
        assert "Timeout" in process.stderr()
