"""The Python face: the GIL, threads, input kinds, frozen results, life without torch."""

import threading

import numpy as np
import pytest

import ep
import ep.testing
from python.fault_support import (
    BY_EXPERT,
    DEFAULT,
    Job,
    answer,
    await_blocked,
    call,
    caught,
    check_combined,
    check_received,
    combine,
    combine_call,
    dispatch,
    exact_again,
    in_thread,
    make_buffer,
    round_trip,
    run,
)

pytestmark = pytest.mark.torch_versions

# --- the GIL ------------------------------------------------------------------------------------

WAITS = {
    "dispatch": lambda buf, out: dispatch(buf),
    "dispatch of fixed size": lambda buf, out: dispatch(buf, exact=False),
    "replay": lambda buf, out: buf.dispatch(call(buf)["x"], handle=out.handle),
    "combine": lambda buf, out: combine(buf, DEFAULT, out.handle),
    "event": lambda buf, out: dispatch(buf, exact=False, async_op=True).event.synchronize(),
    "resync": lambda buf, out: buf.resync(),
    "close": lambda buf, out: buf.close(),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_counter_thread_advances_while_a_rank_waits_for_a_late_peer(name):
    """Blocking dispatch held the GIL: another library's thread starved (DeepEP 142, 159, 555)."""
    counted = threading.Event()
    waiting = []

    def count():
        await_blocked(waiting[0])
        for _ in range(100_000):  # bytecode after bytecode, all of it while rank 0 waits
            pass
        counted.set()

    def rank(buf):
        out = dispatch(buf)
        if buf.rank == 0:
            waiting.append(threading.get_native_id())
            in_thread(count)
        elif name != "close":  # a bounded courtesy to peers; nobody needs to come for it
            assert counted.wait(25.0), "no other thread ran while rank 0 waited"
        WAITS[name](buf, out)
        if name == "close":
            assert counted.wait(25.0) or buf.rank == 1

    run(rank, 2)


@pytest.mark.parametrize("what", ["construction", "all_gather"])
def test_a_counter_thread_advances_while_a_rank_waits_in_set_up(what):
    counted = threading.Event()
    waiting = []

    def count():
        await_blocked(waiting[0])
        for _ in range(100_000):
            pass
        counted.set()

    def rank(comm):
        if comm.rank == 0:
            waiting.append(threading.get_native_id())
            in_thread(count)
        else:
            assert counted.wait(25.0), "no other thread ran while rank 0 waited"
        if what == "construction":
            make_buffer(comm).close()
        else:
            assert comm.all_gather(bytes([comm.rank])) == [b"\0", b"\1"]

    ep.testing.run(rank, 2)


def test_several_threads_call_one_buffer():
    """Equal calls pair up in whatever order they come."""
    per_thread, num_threads = 10, 4

    def rank(buf):
        outs, failures = [], []

        def in_threads(action):
            def guarded():
                try:
                    for _ in range(per_thread):
                        action()
                except BaseException as error:
                    failures.append(error)

            threads = [threading.Thread(target=guarded) for _ in range(num_threads)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not failures, failures

        in_threads(lambda: outs.append(dispatch(buf)))
        assert len(outs) == per_thread * num_threads
        for out in outs:
            check_received(buf, DEFAULT, out)
        in_threads(lambda: check_combined(buf, DEFAULT, combine(buf, DEFAULT, outs[0].handle)))

    run(rank, 2)


def test_queries_answer_while_another_thread_is_in_a_call():
    asked = threading.Event()

    def rank(buf):
        def ask():
            await_blocked(waiting[0])
            assert buf.num_ranks == 2 and buf.num_nodes == 1
            assert buf.memory().used > 0
            assert buf.max_rows("rank") == 32
            buf.stats(), buf.check()
            buf.timeout_s = 29.0
            buf.routing_layout(call(buf)["topk_idx"])
            asked.set()

        waiting = [threading.get_native_id()]
        if buf.rank == 0:
            in_thread(ask)
        else:
            assert asked.wait(25.0), "a query waited for the call of another thread"
        round_trip(buf)

    run(rank, 2)


# --- results ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_results_are_frozen_named_and_no_tuples(kind):
    """Callers unpacked a tuple of another length (SGLang 29523)."""
    job = Job(kind=kind)

    def rank(buf):
        out = dispatch(buf, job)
        y = combine(buf, job, out.handle)
        for result, names in ((out, ("x", "topk_idx", "handle")), (y, ("x", "status", "event"))):
            assert not isinstance(result, tuple)
            caught(TypeError, lambda r=result: tuple(r))
            for name in names:
                before = getattr(result, name)
                caught(AttributeError, lambda r=result, n=name: setattr(r, n, None))
                assert getattr(result, name) is not None
                del before
            caught(AttributeError, lambda r=result: setattr(r, "more", 1))
        if kind == "torch":
            assert out.x.data_ptr() == out.x.data_ptr()
            out.x.add_(1)  # the tensors themselves are the caller's
            assert float(out.x[0, 0]) == float(np.asarray(out.x)[0, 0])

    run(rank, 2)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_outputs_are_of_the_kind_of_x(kind):
    import torch

    wanted = {"numpy": np.ndarray, "torch": torch.Tensor}[kind]
    job = Job(kind=kind, layout="expert")

    def rank(buf):
        out = dispatch(buf, job)
        y = combine(buf, job, out.handle)
        for name in (
            "x",
            "topk_idx",
            "topk_weights",
            "num_rows_device",
            "rows_needed_device",
            "tokens_per_expert_device",
            "expert_offsets",
            "source",
            "status",
        ):
            assert isinstance(getattr(out, name), wanted), name
        assert isinstance(y.x, wanted) and isinstance(y.status, wanted)
        assert out.rank_offsets is None and out.scales is None and out.extras == []
        assert y.topk_weights is None

    run(rank, 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_numpy_and_torch_give_the_same_bytes(dtype):
    """bf16 has no numpy dtype: uint16 stands for it, both ways."""
    import torch

    bits = {"bfloat16": torch.int16, "float16": torch.int16, "float32": torch.int32}[dtype]

    def as_numpy(t):
        if t.dtype == torch.bfloat16:
            return t.view(torch.int16).numpy().view(np.uint16)
        return t.numpy()

    def rank(buf):
        torch.manual_seed(buf.rank)
        x = torch.randn(7, 32).to(getattr(torch, dtype))
        ids = torch.from_numpy(Job(7, equal=True).ids(buf.rank, 4))
        first = buf.dispatch(x, ids)
        second = buf.dispatch(as_numpy(x), ids.numpy())
        assert first.x.dtype == x.dtype
        assert second.x.dtype == as_numpy(x).dtype
        assert as_numpy(first.x).tobytes() == np.ascontiguousarray(second.x).tobytes()
        y = buf.combine(first.x, first.handle)
        z = buf.combine(second.x, second.handle)
        assert y.x.dtype == x.dtype and y.x.view(bits).numpy().tobytes() == z.x.tobytes()
        wide = buf.combine(second.x, second.handle, out_dtype="float32")
        assert wide.x.dtype == np.float32
        wide = buf.combine(first.x, first.handle, out_dtype=torch.float32)
        assert wide.x.dtype == torch.float32

    run(rank, 2)


# --- inputs of other kinds ----------------------------------------------------------------------


class OnlyDlpack:
    """An array of a library that nobody knows: `__dlpack__` and no more."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **arguments):
        return self._array.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


class OldDlpack(OnlyDlpack):
    """As of before DLPack 1.0: takes a stream and nothing else."""

    def __dlpack__(self, stream=None):
        return self._array.__dlpack__()


@pytest.mark.parametrize("wrap", [OnlyDlpack, OldDlpack])
def test_any_object_with_dlpack_is_an_input(wrap):
    def rank(buf):
        arguments = call(buf, BY_EXPERT)
        for name in ("x", "topk_idx", "topk_weights"):
            arguments[name] = wrap(arguments[name])
        out = buf.dispatch(**arguments)
        rows = np.from_dlpack(out.x) if hasattr(out.x, "__dlpack__") else np.asarray(out.x)
        assert rows.shape[1] == 32
        back = combine_call(buf, BY_EXPERT, out.handle)
        back["x"], back["weights"] = wrap(back["x"]), wrap(back["weights"])
        y = buf.combine(**back)
        got = np.from_dlpack(y.x) if hasattr(y.x, "__dlpack__") else np.asarray(y.x)
        want = combine(buf, BY_EXPERT, out.handle)
        np.testing.assert_array_equal(got, np.asarray(want.x))

    run(rank, 2)


def test_an_object_whose_dlpack_fails_spends_the_turn_and_keeps_its_error():
    class Broken(OnlyDlpack):
        def __dlpack__(self, **arguments):
            raise BufferError("no export today")

    def rank(buf):
        changes = {"x": Broken(np.zeros((5, 32), np.float32))} if buf.rank == 0 else {}
        if buf.rank == 0:
            error = caught(Exception, lambda: dispatch(buf, **changes))
            assert "no export today" in str(error) or isinstance(error, (TypeError, ep.Error))
        else:
            assert list(caught(ep.PeerError, lambda: dispatch(buf)).peers) == [0]
        exact_again(buf)

    run(rank, 2)


def test_read_only_and_foreign_memory_are_inputs():
    def rank(buf):
        arguments = call(buf)
        for name in ("x", "topk_idx", "topk_weights"):
            arguments[name].flags.writeable = False
        out = buf.dispatch(**arguments)
        check_received(buf, DEFAULT, out)
        x = np.frombuffer(arguments["x"].tobytes(), np.float32).reshape(-1, 32)
        out = dispatch(buf, x=x)
        check_received(buf, DEFAULT, out)
        rows = answer(buf, DEFAULT)
        rows.flags.writeable = False
        check_combined(buf, DEFAULT, combine(buf, DEFAULT, out.handle, x=rows))

    run(rank, 2)


def test_the_kinds_of_one_calls_inputs_may_mix():
    import torch

    def rank(buf):
        arguments = call(buf, BY_EXPERT)
        arguments["x"] = torch.from_numpy(arguments["x"])
        out = buf.dispatch(**arguments)
        assert isinstance(out.x, torch.Tensor)
        check_received(buf, BY_EXPERT, out)
        y = combine(buf, BY_EXPERT, out.handle)  # of numpy
        check_combined(buf, BY_EXPERT, y)

    run(rank, 2)


def test_the_callers_own_outputs_are_written_in_place():
    import torch

    def rank(buf):
        for kind in ("numpy", "torch"):
            job = Job(kind=kind)
            out = dispatch(buf, job)
            mine = job.tensor(np.full((job.count(buf.rank), 32), -1.0, np.float32))
            y = combine(buf, job, out.handle, out=mine)
            check_combined(buf, job, y)
            np.testing.assert_array_equal(np.asarray(mine), np.asarray(y.x))
            where = mine.data_ptr() if isinstance(mine, torch.Tensor) else mine.ctypes.data
            there = y.x.data_ptr() if isinstance(y.x, torch.Tensor) else y.x.ctypes.data
            assert where == there

    run(rank, 2)
