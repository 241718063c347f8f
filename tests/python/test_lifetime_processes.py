"""How processes end, and what a forked child may do."""

import time

import pytest

from python.fault_process import ranks, run_alone


@pytest.mark.parametrize("options", [(), ("-W", "always")], ids=["plain", "-W always"])
def test_a_forgotten_close_on_one_of_three_ranks_ends_all_with_status_0(options):
    """The destructor ran a collective at exit: finished jobs exited non-zero (SGLang 33578)."""
    script = """
    buf = make()
    out = round_trip(buf)
    if rank != 1:
        buf.close()
    say("done")
    """
    with ranks(script, script, script, options=options) as processes:
        for process in processes:
            process.expect("done")
        end = time.monotonic() + 5.0
        for process in processes:
            assert process.join(max(0.1, end - time.monotonic())) == 0
            said = process.stderr()
            warned = "ResourceWarning" in said
            assert warned == (process.rank == 1 and bool(options)), said
            if not options:
                assert said == ""


@pytest.mark.parametrize("holder", ["buffer", "output", "handle", "event", "cycle"])
def test_what_lives_until_the_interpreter_exits_ends_quietly(holder):
    run_alone(
        f"""
        buf = make_buffer(ep.Communicator.single())
        out = round_trip(buf)
        held = {{"buffer": buf, "output": out.x, "handle": out.handle, "event": out.event}}
        held["cycle"] = [buf, out]
        held["cycle"].append(held["cycle"])
        keep = held[{holder!r}]
        del buf, out, held
        """
    )


def test_a_call_in_flight_and_a_thread_in_a_call_do_not_hold_up_the_exit():
    """Daemon thread in dispatch, async dispatch queued, peer never comes: the process leaves."""
    run_alone(
        """
        comms = ep.Communicator.threads(3)
        buffers = [None] * 3
        def make(r):
            buffers[r] = make_buffer(comms[r])
        peers = [in_thread(lambda r=r: make(r)) for r in (1, 2)]
        make(0)
        for peer in peers:
            peer.join()
        tids = []
        def wait():
            tids.append(threading.get_native_id())
            dispatch(buffers[0])
        in_thread(wait)
        while not tids:
            pass
        await_blocked(tids[0])
        out = dispatch(buffers[1], exact=False, async_op=True)
        """
    )


def test_an_exception_in_the_middle_is_what_stderr_ends_with():
    """Warnings of the destructor hid the first error (DeepEP 368, 41)."""
    script = """
    buf = make()
    out = dispatch(buf)
    pending = dispatch(buf, exact=False, async_op=True)
    raise ValueError("the first error")
    """
    with ranks(script) as [process]:
        assert process.join(5.0) == 1
        assert process.stderr().splitlines()[-1] == "ValueError: the first error"
        assert process.stderr().count("Traceback") == 1


def test_a_process_group_may_go_before_or_after_the_buffer():
    """Destroying the group hung while the buffer lived (Automodel 2686)."""
    script = """
    import torch.distributed as dist
    # One store for both rounds: with one each, at the same port, a rank that is ahead may meet the
    # first round's, which is about to go.
    host, port = address.split(":")
    store = dist.TCPStore(host, int(port), 2, rank == 0)
    for steps in (("group", "buffer"), ("buffer", "group")):
        of_round = dist.PrefixStore(steps[0], store)
        dist.init_process_group("gloo", store=of_round, rank=rank, world_size=2)
        buf = make_buffer(ep.Communicator.from_group(dist.group.WORLD))
        out = round_trip(buf)
        for step in steps:
            dist.destroy_process_group() if step == "group" else buf.close()
        check_received(buf, DEFAULT, out)
    """
    with ranks(script, script) as processes:
        for process in processes:
            assert process.join(30.0) == 0, process.stderr()


def test_a_forked_childs_buffer_is_inert_and_the_parent_goes_on():
    """The child raises, closes, drops and exits as any interpreter; no rank notices."""
    script = """
    buf = make()
    out = round_trip(buf)
    say("forking")
    pid = fork()
    if pid == 0:
        os.close(0)
        assert "fork" in str(caught(ep.Error, lambda: dispatch(buf)))
        assert "fork" in str(caught(ep.Error, lambda: combine(buf, DEFAULT, out.handle)))
        caught(ep.Error, lambda: buf.expert_output(out.handle))
        caught(ep.Error, buf.resync)
        buf.check()
        buf.abort("from a child")
        copy = np.array(np.asarray(out.x))
        if rank == 1:
            buf.close()
        del buf, out
        gc.collect()
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    exact_again(buf)
    hear()
    exact_again(buf)
    buf.close()
    """
    with ranks(script, script) as processes:
        for process in processes:
            process.expect("forking")
        for process in processes:
            process.tell()
        for process in processes:
            process.good()


def test_a_forked_child_may_make_buffers_of_its_own():
    run_alone(
        """
        buf = make_buffer(ep.Communicator.single())
        round_trip(buf)
        pid = fork()
        if pid == 0:
            with make_buffer(ep.Communicator.single()) as own:
                exact_again(own)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        exact_again(buf)
        buf.close()
        """
    )


def test_workers_of_a_dataloader_hold_what_they_like_while_the_parent_dispatches():
    """Workers are forked with the buffer and all it gave: they cannot use it, hang or disturb."""
    loads = """
    import torch.utils.data

    buf = make()
    rows = dispatch(buf)
    stream = ep.Stream()
    pending = dispatch(buf, exact=False, async_op=True, stream=stream)  # rank 1 comes later

    class Items(torch.utils.data.Dataset):
        held = (buf, rows, pending, stream)

        def __len__(self):
            return 6

        def __getitem__(self, item):
            buf, rows, pending, stream = self.held
            comm = buf._communicator
            own = ep.Stream()
            for use in (
                lambda: dispatch(buf),
                lambda: combine(buf, DEFAULT, rows.handle),
                lambda: buf.expert_output(rows.handle),
                buf.resync,
                lambda: comm.all_gather(b"not the parent's"),
                lambda: make_buffer(comm),
                pending.event.wait,
                pending.event.synchronize,
                stream.synchronize,
                lambda: stream.wait(pending.event),
                lambda: own.wait(pending.event),
            ):
                assert "fork" in str(caught(ep.Error, use))
            assert not pending.event.query()
            own.wait(rows.event)  # it was reached before the fork
            own.synchronize()
            rows.event.synchronize()
            return len(rows.source)

    options = {"num_workers": 2, "multiprocessing_context": "fork"}
    batches = iter(torch.utils.data.DataLoader(Items(), batch_size=1, **options))
    assert next(batches).item() == rows.num_rows
    say("loading")
    for batch in batches:
        assert batch.item() == rows.num_rows
        exact_again(buf)
    pending.event.synchronize()
    buf.close()
    """
    joins = """
    buf = make()
    dispatch(buf)
    hear()
    dispatch(buf, exact=False)
    for _ in range(5):
        exact_again(buf)
    buf.close()
    """
    with ranks(loads, joins) as (first, second):
        first.expect("loading")
        second.tell()
        first.good()
        second.good()
