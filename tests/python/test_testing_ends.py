"""ep.testing.run: what crosses processes, what takes too long, and what remains."""

import _thread
import functools
import gc
import multiprocessing
import os
import pathlib
import subprocess
import sys
import textwrap
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


def place(comm, *args):
    gathered = comm.all_gather(bytes([comm.rank]) * comm.rank)
    return comm.rank, comm.num_ranks, comm.timeout_s, gathered, args


# --- pickling -------------------------------------------------------------------------------------


class Stubborn(Exception):
    def __init__(self, first, second):
        super().__init__(first)  # cannot be unpickled: one argument is lost


def gives_what_cannot_be_pickled(comm, what):
    if comm.rank == 1 and what == "result":
        return lambda: None
    if comm.rank == 1:
        raise Stubborn("too", "bad")
    return None


def test_a_function_that_cannot_be_pickled():
    with pytest.raises(ep.InvalidArgument, match="at the top of a module"):
        testing.run(lambda comm: None, 2, how="processes")


def test_arguments_that_cannot_be_pickled():
    with pytest.raises(ep.InvalidArgument, match="args must be picklable"):
        testing.run(place, 2, how="processes", args=(threading.Lock(),))


def test_a_result_that_cannot_be_pickled():
    error = raised_by(gives_what_cannot_be_pickled, 2, how="processes", args=("result",))
    assert type(error) is ep.Error and error.ep_rank == 1
    assert "rank 1 returned a function that cannot be pickled" in str(error)


def test_an_exception_that_cannot_be_pickled():
    error = raised_by(gives_what_cannot_be_pickled, 2, how="processes", args=("error",))
    assert type(error) is ep.Error and error.ep_rank == 1
    assert "rank 1 raised Stubborn: too, which cannot be pickled" in str(error)
    assert "gives_what_cannot_be_pickled" in notes(error)


def raises_each_error(comm, kind, numbers):
    raise getattr(ep, kind)("text", **numbers)


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        ("CapacityError", {"rank": 1, "needed": 2, "available": 3}),
        ("Desync", {"field": "layout", "peer": 1, "mine": 2, "theirs": 3}),
        ("PeerError", {"peers": [1], "reason": "why"}),
    ],
)
def test_the_numbers_of_an_error_cross_processes(kind, numbers):
    error = raised_by(raises_each_error, 1, how="processes", args=(kind, numbers))
    assert type(error) is getattr(ep, kind)
    assert {name: getattr(error, name) for name in numbers} == numbers


def test_a_partial_function_is_sent():
    both = testing.run(functools.partial(gather_often, rounds=1), 2, how="processes")
    assert both == [[[b"\0\0", b"\1\0"]]] * 2


# --- time -----------------------------------------------------------------------------------------


def sleeps_in_rank_1(comm):
    if comm.rank == 1:
        time.sleep(100)


def test_processes_that_take_too_long_are_named_and_ended():
    for timeout_s in (4, 16, 64):  # a busy machine may not have started them by then
        error = raised_by(sleeps_in_rank_1, 3, how="processes", timeout_s=timeout_s)
        assert type(error) is ep.Timeout and 1 in error.peers
        assert multiprocessing.active_children() == []
        if error.peers == [1]:
            break
    assert error.peers == [1]
    assert "rank 1: in" in str(error) and "sleeps_in_rank_1 (" in str(error)


def test_threads_that_take_too_long_are_named():
    """Rank 1 waits for an event that nobody sets: it cannot be woken, and remains."""
    event = threading.Event()

    def wait_for_ever(comm):
        if comm.rank == 1:
            event.wait()

    try:
        error = raised_by(wait_for_ever, 3, timeout_s=0.3)
    finally:
        event.set()
    assert type(error) is ep.Timeout and error.peers == [1]
    assert "wait_for_ever (" in str(error) and "could not wake rank 1" in str(error)


def waits_for_rank_1(comm):
    """Rank 0 dispatches, rank 1 gathers: neither call can end."""
    with ep.EPBuffer(comm, timeout_s=100, **SIZES) as buffer:
        if comm.rank == 1:
            comm.all_gather(b"", timeout_s=100)
        one_row(buffer)


@BOTH
def test_ranks_that_wait_in_ep_are_woken_when_the_time_is_up(how):
    threads = set(threading.enumerate())
    error = raised_by(waits_for_rank_1, 2, how=how, timeout_s=3)
    assert type(error) is ep.Timeout and error.peers == [0, 1]
    assert "could not wake" not in str(error)
    assert set(threading.enumerate()) <= threads


def test_ctrl_c_in_the_caller_ends_all():
    """Rank 1 waits for a call that rank 0 does not make until rank 1 was released."""
    released = threading.Event()

    def interrupt(comm):
        comm.all_gather(b"")
        if comm.rank == 0:
            _thread.interrupt_main()
            assert released.wait(30)
            return
        try:
            comm.all_gather(b"")
        except ep.PeerError as error:
            assert "KeyboardInterrupt" in error.reason
            released.set()

    threads = set(threading.enumerate())
    assert type(raised_by(interrupt, 2)) is KeyboardInterrupt
    assert released.is_set()
    assert set(threading.enumerate()) <= threads


def waits_for_ever(comm, folder):
    (pathlib.Path(folder) / str(comm.rank)).touch()
    if comm.rank == 0:
        comm.all_gather(b"")
    time.sleep(100)


def test_ctrl_c_in_the_caller_ends_processes(tmp_path):
    """Rank 0 waits in the communicator, rank 1 for nothing that could be ended."""

    def interrupt():
        assert eventually(lambda: len(list(tmp_path.iterdir())) == 2, 50)
        _thread.interrupt_main()

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    error = raised_by(waits_for_ever, 2, how="processes", args=(str(tmp_path),))
    interrupting.join()
    assert type(error) is KeyboardInterrupt
    assert multiprocessing.active_children() == []


# --- leftovers ------------------------------------------------------------------------------------


def keeps_its_buffer_open(comm):
    buffer = ep.EPBuffer(comm, **SIZES)
    x = np.full((1, 8), comm.rank + 1, dtype=np.float32)
    out = buffer.dispatch(x, np.array([[3]], dtype=np.int64), outputs="window")
    return buffer, out.x


def test_buffers_that_were_left_open_are_closed_and_their_rows_stay():
    results = testing.run(keeps_its_buffer_open, 2)
    for buffer, _ in results:
        assert "closed" in repr(buffer)
    rows = results[1][1]
    del results, buffer
    gc.collect()
    assert rows.tolist() == [[1.0] * 8, [2.0] * 8]


def fails_with_an_open_buffer(comm):
    buffer = ep.EPBuffer(comm, **SIZES)
    comm.all_gather(b"")
    raise Odd(f"{buffer!r}", comm.rank)


def open_files() -> int:
    gc.collect()
    return len(list(pathlib.Path("/proc/self/fd").iterdir()))


@BOTH
@pytest.mark.parametrize("fn", [one_token_each_way, fails_with_an_open_buffer])
def test_nothing_remains(how, fn):
    """Threads, files and processes, after runs that succeed and runs that fail."""

    def run_once():
        try:
            testing.run(fn, 2, how=how)
        except Odd:
            return
        assert fn is one_token_each_way

    run_once()  # multiprocessing starts its resource tracker, once for all
    files, threads = open_files(), set(threading.enumerate())
    for _ in range(2):
        run_once()
    assert multiprocessing.active_children() == []
    assert set(threading.enumerate()) <= threads
    assert open_files() <= files


def writes_its_pid_and_waits(comm, folder):
    (pathlib.Path(folder) / str(comm.rank)).write_text(str(os.getpid()), encoding="utf-8")
    if comm.rank == 0:
        comm.all_gather(b"")
    time.sleep(60)


def is_running(pid: int) -> bool:
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_children_end_with_their_parent(tmp_path):
    """The parent is killed while rank 0 waits for it and rank 1 does not."""
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(f"""
            import importlib.util, sys
            spec = importlib.util.spec_from_file_location({__name__!r}, {__file__!r})
            module = sys.modules[{__name__!r}] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            if __name__ == "__main__":
                from ep import testing
                fn = module.writes_its_pid_and_waits
                testing.run(fn, 2, how="processes", args=({str(tmp_path)!r},))
        """),
        encoding="utf-8",
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    parent = subprocess.Popen([sys.executable, script], env=environment)
    try:
        files = [tmp_path / "0", tmp_path / "1"]
        assert eventually(lambda: all(f.exists() and f.read_text() for f in files), 30)
        pids = [int(f.read_text()) for f in files]
        assert all(map(is_running, pids))
    finally:
        parent.kill()
        parent.wait()
    assert eventually(lambda: not any(map(is_running, pids)))
