"""How the ranks of a group find each other: set-up, agreement, recovery.  No payload passes."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ep import _C
from ep.errors import Error, InvalidArgument

if TYPE_CHECKING:
    from ep.buffer import EPBuffer

DEFAULT_TIMEOUT_S = 600.0

_lock = threading.Lock()
# How often from_group() was called in this process, by process group: a group of keys for each.
_calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class Communicator:
    """A group of ranks that can gather bytes from each other.

    Made with :meth:`threads`, :meth:`tcp`, :meth:`single`, :meth:`from_group` or :meth:`callbacks`.
    One call at a time per object; every rank makes the same calls in the same order.
    """

    def __init__(self, core: _C.Communicator) -> None:
        if not isinstance(core, _C.Communicator):
            raise TypeError(
                f"Communicator({type(core).__name__}): make one with Communicator.threads, tcp, "
                "single, from_group or callbacks"
            )
        self._core = core
        self._pid = os.getpid()
        self._buffers: weakref.WeakSet[EPBuffer] = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"<ep.Communicator rank {self.rank} of {self.num_ranks}>"

    @property
    def rank(self) -> int:
        """This rank, in [0, num_ranks)."""
        return self._core.rank

    @property
    def num_ranks(self) -> int:
        """R, the number of ranks."""
        return self._core.num_ranks

    @property
    def timeout_s(self) -> float | None:
        """The bound in seconds that this group was given for waits; None: none was given."""
        return self._core.timeout_s

    def all_gather(self, mine: bytes, timeout_s: float | None = None) -> list[bytes]:
        """Collective: gives some bytes and gets everybody's.

        Args:
            mine: this rank's bytes; lengths may differ between ranks and be 0.
            timeout_s: bound of the wait in seconds; None: the group's, else 600.

        Returns:
            R byte strings, by rank.

        Raises:
            Timeout: somebody did not come; ``.peers`` are the missing ranks.  The call has then
                ended for all ranks.
            PeerError: the others gave up on this call while they waited for this rank.
            PeerLost: a rank, or what connects it, is gone.
        """
        self._require_own_process()
        if timeout_s is None:
            timeout_s = DEFAULT_TIMEOUT_S if self.timeout_s is None else self.timeout_s
        return self._core.all_gather(mine, timeout_s)

    def _require_own_process(self) -> None:
        """A forked child has its parent's sockets: what it said would be taken for the parent's."""
        if os.getpid() != self._pid and self.num_ranks > 1:
            raise Error(
                f"this communicator of {self.num_ranks} ranks was made before fork(): a child is "
                "no rank, make a new one"
            )

    @staticmethod
    def single() -> Communicator:
        """One rank on its own."""
        return Communicator(_C.Communicator.single())

    @staticmethod
    def threads(num_ranks: int) -> list[Communicator]:
        """`num_ranks` ranks as threads of this process; element r belongs to rank r.

        Dropping an element means that its rank leaves for good: the others raise PeerLost.

        Raises:
            InvalidArgument: num_ranks is not in [1, 1024].
        """
        return [Communicator(core) for core in _C.Communicator.threads(num_ranks)]

    @staticmethod
    def tcp(address: str, rank: int, num_ranks: int, timeout_s: float = 60.0) -> Communicator:
        """Collective: ranks as processes that meet at `address`, where rank 0 listens.

        Args:
            address: "host:port" or "[ipv6]:port"; port 0 is refused, since every rank must know it.
            rank: this rank, in [0, num_ranks).
            num_ranks: R, the same on all ranks.
            timeout_s: bound in seconds of the meeting.

        Raises:
            InvalidArgument: the address or a number is wrong, or two ranks are the same.
            Timeout: somebody did not come; ``.peers`` names who, as far as this rank knows.
        """
        return Communicator(_C.Communicator.tcp(address, rank, num_ranks, timeout_s))

    @staticmethod
    def callbacks(
        rank: int,
        num_ranks: int,
        all_gather: Callable[[bytes, float], Sequence[bytes]],
        timeout_s: float | None = None,
    ) -> Communicator:
        """Bring your own: MPI_Allgatherv, a key-value store...

        Args:
            rank: this rank, in [0, num_ranks).
            num_ranks: R, the same on all ranks.
            all_gather: gets this rank's bytes and a bound in seconds and returns everybody's, by
                rank, as bytes, bytearray or memoryview.  What it raises leaves the call that
                needed it.
            timeout_s: the group's bound of waits in seconds; None: none.

        Raises:
            InvalidArgument: rank or num_ranks is out of range; later, in a call: `all_gather` gave
                another number of values, or in another order.
            TypeError: `all_gather` is not callable; later: it gave something else than bytes.
        """
        gather = _checked(all_gather, rank) if callable(all_gather) else all_gather
        return Communicator(_C.Communicator.callbacks(rank, num_ranks, gather, timeout_s))

    @staticmethod
    def from_group(pg: Any) -> Communicator:
        """Collective: the ranks of a torch process group, of any backend.

        Only the group's store is used, never a collective of the group, so no GPU is touched.  The
        process group may be destroyed before or after what was made with the result: only the store
        is held.  Every rank of the group must make the same calls of from_group in the same order.

        Args:
            pg: a ``torch.distributed.ProcessGroup``, or a ``DeviceMesh`` of one dimension; None:
                the default group.  Its ranks and its timeout become this group's.

        Raises:
            InvalidArgument: torch.distributed is not initialised, the group was destroyed, this
                rank is no member of it, or the mesh has several dimensions.
            TypeError: `pg` is something else.
        """
        from ep._store_group import StoreGroup

        pg = _process_group(pg)
        store = _store_of(pg)
        rank, num_ranks = pg.rank(), pg.size()
        with _lock:
            call = _calls.get(pg, 0)
            _calls[pg] = call + 1
        group = StoreGroup.join(store, f"ep/{call}", rank, num_ranks)
        return Communicator.callbacks(rank, num_ranks, group.all_gather, _timeout_of(pg))


def resolve_group(group: Any) -> Communicator:
    """The Communicator that an EPBuffer's `group` argument means.  Imports no torch.

    Args:
        group: a Communicator; a torch ProcessGroup or 1-D DeviceMesh (see
            :meth:`Communicator.from_group`); None: the default process group if torch.distributed
            is initialised, else a single rank.

    Raises:
        TypeError: `group` is something else.
        InvalidArgument: see :meth:`Communicator.from_group`.
    """
    if isinstance(group, Communicator):
        group._require_own_process()
        return group
    distributed = _distributed()
    if group is None:
        if distributed is not None and distributed.is_initialized():
            return Communicator.from_group(None)
        return Communicator.single()
    if distributed is None:
        raise _wrong_type(group)
    return Communicator.from_group(group)


def _checked(
    all_gather: Callable[[bytes, float], Sequence[bytes]], rank: int
) -> Callable[[bytes, float], list[bytes]]:
    """`all_gather`, with an answer that can be trusted to be bytes by rank."""

    def gather(mine: bytes, timeout_s: float) -> list[bytes]:
        by_rank = list(all_gather(mine, timeout_s))
        for at, each in enumerate(by_rank):
            if not isinstance(each, (bytes, bytearray, memoryview)):
                raise TypeError(
                    f"all_gather callback: value {at} is a {type(each).__name__}, not bytes"
                )
        # The commonest mistake of such a callback is another order.
        if rank < len(by_rank) and by_rank[rank] != mine:
            raise InvalidArgument(
                f"all_gather callback: value {rank} of {len(by_rank[rank])} bytes is not what rank "
                f"{rank} gave ({len(mine)} bytes)"
            )
        return [bytes(each) for each in by_rank]

    return gather


def _distributed() -> Any:
    """torch.distributed, if torch was imported and has it."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    return distributed if distributed is not None and distributed.is_available() else None


def _wrong_type(group: Any) -> TypeError:
    kind = f"{type(group).__module__}.{type(group).__qualname__}"
    return TypeError(
        f"group: got {kind}; give a torch.distributed.ProcessGroup, a DeviceMesh of one dimension, "
        "or an ep.Communicator"
    )


def _process_group(group: Any) -> Any:
    """The ProcessGroup behind what from_group() was given."""
    import torch.distributed as dist

    if not dist.is_available():
        raise InvalidArgument(
            "from_group: this torch is built without torch.distributed; use ep.Communicator.tcp"
        )
    mesh_type = getattr(sys.modules.get("torch.distributed.device_mesh"), "DeviceMesh", None)
    is_mesh = mesh_type is not None and isinstance(group, mesh_type)
    not_member = dist.GroupMember.NON_GROUP_MEMBER
    is_no_member = isinstance(group, type(not_member)) and group == not_member
    is_group = group is None or isinstance(group, dist.ProcessGroup)
    if not (is_group or is_mesh or is_no_member):
        raise _wrong_type(group)
    if not dist.is_initialized():
        raise InvalidArgument(
            "from_group: torch.distributed is not initialised; call "
            "torch.distributed.init_process_group(...) first, or use ep.Communicator.tcp(address, "
            "rank, num_ranks), or ep.Communicator.single() for one rank"
        )
    if is_mesh:
        if group.ndim != 1:
            raise InvalidArgument(
                f"from_group: the DeviceMesh has shape {tuple(group.shape)}; give one of one "
                'dimension: mesh["name"], or mesh.get_group("name")'
            )
        if group.get_coordinate() is None:
            raise _no_member()
        group = group.get_group()
    elif group is None:
        group = dist.group.WORLD
    # new_group() gives an integer to those that it leaves out.
    if is_no_member or group.rank() < 0:
        raise _no_member()
    return group


def _no_member() -> InvalidArgument:
    return InvalidArgument(
        "from_group: this rank is no member of the group; only its members may call"
    )


def _store_of(pg: Any) -> Any:
    from torch.distributed import distributed_c10d

    entry = distributed_c10d._world.pg_map.get(pg)
    if entry is not None:
        return entry[1]
    raise InvalidArgument(
        f"from_group: torch.distributed does not know the process group {pg.group_name!r}: it was "
        "destroyed, or not made by init_process_group, new_group or split_group"
    )


def _timeout_of(pg: Any) -> float | None:
    """The bound that the group's backend was given, as far as it tells."""
    for device in pg._device_types:
        # Not every backend has options, and one for a missing device may not exist.
        with contextlib.suppress(AttributeError, RuntimeError):
            return pg._get_backend(device).options._timeout.total_seconds()
    return None
