"""Communicator.from_group: torch's process groups and their stores."""

import _thread
import contextlib
import datetime
import gc
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ep
from ep import testing
from ep._store_group import StoreGroup
from ep.communicator import resolve_group
from python.running import SIZES, eventually
from python.torch_groups import gloo

pytestmark = pytest.mark.torch_versions


def in_processes(fn, num_ranks: int, *args) -> list:
    """Each imports torch, which takes its time on a busy machine."""
    return testing.run(fn, num_ranks, how="processes", timeout_s=200, args=args)


def there_and_back(group, **options) -> int:
    """A trip in a buffer of this group; returns how many rows came."""
    with ep.EPBuffer(group, **SIZES, **options) as buffer:
        x = torch.full((2, 8), float(buffer.rank))
        out = buffer.dispatch(x, torch.tensor([[0], [3]]))
        assert torch.equal(buffer.combine(out.x, out.handle).x, x)
        return out.num_rows


# --- process groups -------------------------------------------------------------------------------


def in_groups(comm, file):
    """Several groups of a gloo job, and what each gathered, in the order of the calls."""
    with gloo(comm, file, seconds=37) as world:
        mine = bytes([comm.rank])
        group = ep.Communicator.from_group(world)
        seen = [group.timeout_s, group.rank, group.all_gather(mine), group.all_gather(b"")]
        # Two groups of the same process group do not meet each other's keys.
        first, second = ep.Communicator.from_group(world), ep.Communicator.from_group(None)
        seen += [second.all_gather(b"2" + mine), first.all_gather(b"1" + mine)]
        members = dist.new_group([0, 2])
        if comm.rank == 1:
            with pytest.raises(ep.InvalidArgument, match="no member"):
                ep.Communicator.from_group(members)
            with pytest.raises(ep.InvalidArgument, match="no member"):
                ep.EPBuffer(members, **SIZES)
        else:
            pair = ep.Communicator.from_group(members)
            seen += [pair.rank, pair.num_ranks, pair.all_gather(mine)]
            seen.append(there_and_back(members))
        mesh = DeviceMesh("cpu", [0, 2])
        if comm.rank == 1:
            with pytest.raises(ep.InvalidArgument, match="no member"):
                ep.Communicator.from_group(mesh)
        else:
            seen.append(ep.Communicator.from_group(mesh).all_gather(mine))
        mesh = init_device_mesh("cpu", (3,))
        seen.append(ep.Communicator.from_group(mesh).all_gather(mine))
        seen += [there_and_back(world), there_and_back(mesh), there_and_back(None)]
        with pytest.raises(ep.InvalidArgument, match=r"shape \(3, 1\).*one dimension"):
            ep.Communicator.from_group(init_device_mesh("cpu", (3, 1), mesh_dim_names=("a", "b")))
        return seen


def test_groups_of_gloo(tmp_path):
    """Three processes; a group of ranks 0 and 2; a mesh."""
    ranks = in_processes(in_groups, 3, str(tmp_path / "store"))
    bytes_of_all = [b"\0", b"\1", b"\2"]
    for rank, seen in enumerate(ranks):
        expected = [37.0, rank, bytes_of_all, [b""] * 3]
        expected += [[b"2" + mine for mine in bytes_of_all], [b"1" + mine for mine in bytes_of_all]]
        if rank != 1:
            expected += [rank // 2, 2, [b"\0", b"\2"], 2, [b"\0", b"\2"]]
        assert seen == [*expected, bytes_of_all, *[3 * (rank != 1)] * 3]


def closes_around_the_group(comm, file, order):
    with gloo(comm, file) as world:
        buffer = ep.EPBuffer(world, **SIZES)
        x = torch.ones((1, 8))
        out = buffer.dispatch(x, torch.tensor([[3]]))
        buffer.combine(out.x, out.handle)
        del world
        begin = time.monotonic()
        if order == "buffer first":
            buffer.close()
            dist.destroy_process_group()
        else:
            dist.destroy_process_group()
            gc.collect()
            out = buffer.dispatch(x, torch.tensor([[0]]))  # the group is no longer needed
            assert torch.equal(buffer.combine(out.x, out.handle).x, x)
            assert buffer.resync() >= 0
            buffer.close()
        return time.monotonic() - begin


@pytest.mark.parametrize("order", ["buffer first", "group first"])
def test_the_group_may_be_destroyed_before_or_after_the_buffer(order, tmp_path):
    """Neither waits for the other: a hang would end with a timeout of minutes."""
    ends = in_processes(closes_around_the_group, 2, str(tmp_path / "store"), order)
    assert all(seconds < 10 for seconds in ends)


def late_rank(comm, file):
    """Rank 1 stays away from the buffer; rank 0 names it after the group's timeout."""
    with gloo(comm, file, seconds=2):
        text = ""
        if comm.rank == 0:
            with pytest.raises(ep.Timeout) as caught:
                ep.EPBuffer(None, **SIZES)
            text = f"{caught.value.peers} {caught.value}"
        comm.all_gather(b"")
        return text


def test_construction_names_the_rank_that_does_not_come(tmp_path):
    text, _ = in_processes(late_rank, 2, str(tmp_path / "store"))
    assert text.startswith("[1]") and "after 2 s" in text


def test_without_init_process_group_the_error_says_what_to_do():
    assert not dist.is_initialized()
    with pytest.raises(ep.InvalidArgument, match=r"init_process_group.*Communicator\.tcp"):
        ep.Communicator.from_group(None)


@contextlib.contextmanager
def one_rank_of_gloo():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_a_destroyed_group_is_refused():
    with one_rank_of_gloo() as world:
        group = dist.new_group([0])
        dist.destroy_process_group(group)
        with pytest.raises(ep.InvalidArgument, match="destroyed"):
            ep.Communicator.from_group(group)
        del world


def test_something_else_than_a_group_is_refused():
    for group in (5, "world", torch.ones(1)):
        with pytest.raises(TypeError, match=type(group).__name__):
            ep.Communicator.from_group(group)
        with pytest.raises(TypeError, match=type(group).__name__):
            resolve_group(group)


def test_no_group_is_the_default_group_if_there_is_one():
    with one_rank_of_gloo():
        assert resolve_group(None).timeout_s == 1800.0  # gloo's default
    assert resolve_group(None).timeout_s is None


def test_a_communicator_keeps_no_process_group_alive():
    with one_rank_of_gloo() as world:
        group = ep.Communicator.from_group(world)
        watched = weakref.ref(world)
        del world
        dist.destroy_process_group()
        gc.collect()
        assert watched() is None
        assert group.all_gather(b"x") == [b"x"]


# --- stores ---------------------------------------------------------------------------------------


def store_makers(tmp_path):
    hash_store = dist.HashStore()
    tcp = dist.TCPStore("127.0.0.1", 0, None, True, datetime.timedelta(seconds=20))

    def connect():
        return dist.TCPStore("127.0.0.1", tcp.port, None, False, datetime.timedelta(seconds=20))

    return {
        "hash": lambda: hash_store,
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 3),
        "tcp": connect,
    }, tcp


@pytest.fixture(params=["hash", "file", "tcp"])
def make_store(request, tmp_path):
    makers, server = store_makers(tmp_path)
    yield makers[request.param]
    del server


def join(make_store, num_ranks: int, prefix: str = "ep/0") -> list[StoreGroup]:
    def join_as(rank):
        return StoreGroup.join(make_store(), prefix, rank, num_ranks)

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(join_as, range(num_ranks)))


def gather(groups: list[StoreGroup], contributions: list[bytes], seconds: float = 20.0) -> list:
    """One call in every rank; results or errors, by rank."""

    def call(rank):
        try:
            return groups[rank].all_gather(contributions[rank], seconds)
        except ep.Error as error:
            return error

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(call, range(len(groups))))


def test_stores_gather_any_bytes(make_store):
    groups = join(make_store, 3)
    for contributions in ([b"", b"\0", b"\xff\0"], [b""] * 3, [b"x" * 100_000, b"", b"\n"]):
        assert gather(groups, contributions) == [contributions] * 3


def test_a_group_made_again_in_the_same_store_meets_no_old_keys(make_store):
    """The last round of the group before is in the store, under the same name."""
    for life in range(3):
        mine = [b"%d%d" % (life, rank) for rank in range(2)]
        assert gather(join(make_store, 2), mine) == [mine, mine]


def test_stores_are_cleaned_up():
    """However many rounds there were, the keys of the last two remain."""
    store = dist.HashStore()
    groups = join(lambda: store, 2)
    counts = []
    for i in range(6):
        gather(groups, [b"%d" % i] * 2)
        counts.append(store.num_keys())
    assert len(set(counts[1:])) == 1


def test_a_store_names_the_ranks_that_do_not_come(make_store):
    """Rank 1 of 3 is late: it is told once, and the group goes on."""
    groups = join(make_store, 3)
    with ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(lambda r: error_of(groups[r], 0.4), [0, 2]))
    for error in errors:
        assert type(error) is ep.Timeout and error.peers == [1], error
        assert error.phase == "all_gather" and "rank 1 did not come" in str(error)
    assert error_of(groups[0], 0.1).peers == [1, 2]
    late = error_of(groups[1], 0.4)
    assert type(late) is ep.PeerError and late.peers and "gave up" in late.reason
    assert type(error_of(groups[2], 0.4)) is ep.PeerError  # it missed what rank 0 tried alone
    assert gather(groups, [b"0", b"1", b"2"]) == [[b"0", b"1", b"2"]] * 3


def error_of(group: StoreGroup, seconds: float) -> ep.Error:
    with pytest.raises(ep.Error) as caught:
        group.all_gather(b"x", seconds)
    return caught.value


def test_a_store_tells_all_ranks_the_same_end(monkeypatch):
    """Rank 1 comes when rank 0 has run out of time but has not yet said so."""
    store = dist.HashStore()
    groups = join(lambda: store, 2)
    decide = groups[0]._decide
    with ThreadPoolExecutor(1) as pool:

        def decide_too_late(at, end):
            assert end["missing"] == [1]
            assert pool.submit(groups[1].all_gather, b"1", 30.0).result() == [b"0", b"1"]
            decide(at, end)

        monkeypatch.setattr(groups[0], "_decide", decide_too_late)
        assert groups[0].all_gather(b"0", 0.01) == [b"0", b"1"]


def test_ctrl_c_leaves_a_store_and_releases_the_others(monkeypatch):
    """Rank 0 is interrupted while it waits for rank 2; rank 1 does not wait out its time."""
    store = dist.HashStore()
    groups = join(lambda: store, 3)

    def interrupted(*args):
        assert eventually(lambda: store.check(["ep/0/3/0/0/1"]))  # rank 1 is in the call
        raise KeyboardInterrupt

    monkeypatch.setattr(groups[0], "_await_end", interrupted)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(error_of, groups[1], 30.0)
        with pytest.raises(KeyboardInterrupt):
            groups[0].all_gather(b"", 30.0)
        error = other.result()
    assert type(error) is ep.PeerError and error.peers == [0]
    assert error.reason == "rank 0 was interrupted"
    monkeypatch.undo()
    assert type(error_of(groups[2], 30.0)) is ep.PeerError
    assert gather(groups, [b"0", b"1", b"2"]) == [[b"0", b"1", b"2"]] * 3


def test_ctrl_c_leaves_a_construction():
    """Rank 1 does not exist; the signal comes while rank 0 waits for it."""
    store = dist.HashStore()
    group = StoreGroup.join(store, "ep/0", 0, 2)
    comm = ep.Communicator.callbacks(0, 2, group.all_gather)

    def interrupt():
        assert eventually(lambda: store.check(["ep/0/2/0/0/0"]))
        _thread.interrupt_main()

    with ThreadPoolExecutor(1) as pool:
        interrupting = pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            ep.EPBuffer(comm, **SIZES)
        interrupting.result()


def test_a_store_that_is_gone_is_a_lost_peer():
    server = dist.TCPStore("127.0.0.1", 0, None, True, datetime.timedelta(seconds=5))
    client = dist.TCPStore("127.0.0.1", server.port, None, False, datetime.timedelta(seconds=5))
    group = StoreGroup.join(client, "ep/0", 1, 2)
    del server
    gc.collect()
    error = error_of(group, 5.0)
    assert type(error) is ep.PeerLost and "store" in str(error)


def test_numpy_rows_through_a_group_over_a_store():
    """An EPBuffer of two threads that meet in a store only."""
    store = dist.HashStore()
    groups = join(lambda: store, 2)

    def trip(rank):
        comm = ep.Communicator.callbacks(rank, 2, groups[rank].all_gather)
        with ep.EPBuffer(comm, **SIZES) as buffer:
            x = np.full((1, 8), rank, dtype=np.float32)
            out = buffer.dispatch(x, np.array([[3]]))
            assert np.array_equal(buffer.combine(out.x, out.handle).x, x)
            return out.num_rows

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(trip, range(2))) == [0, 2]
