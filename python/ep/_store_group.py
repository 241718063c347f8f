"""An all-gather over a torch.distributed store, which knows keys and values only.

State, per round i:  "<i>/<r>"     what rank r gave
                     "<i>/count"   how many ranks gave something
                     "<i>/decided" above 0 once somebody ends the round
                     "<i>/end"     how it ended: in success, or who gave up and who was missing
Writers:  a rank adds its bytes, then 1 to the count.  Who completes the count ends the round in
          success; who runs out of time ends it in failure.  Of several only the first to raise
          "decided" writes "end", so all ranks see the same end.
Readers:  everybody reads "end", and after a success everybody's bytes.
Pairing:  a rank that comes to a round that has failed raises PeerError once, however many rounds it
          missed, and goes on at the first one without an end, where the others are.
Clean-up: round i succeeds only if all ranks entered it, so nobody reads a round before it again.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

from ep.errors import Error, PeerError, PeerLost, Timeout

_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.02  # also how late Ctrl-C may be
_GRACE_S = 2.0  # for the end of a round that somebody else decided
_GAVE_UP = "gave up"


class StoreGroup:
    """One rank's side of a group that meets in a store.  One call at a time."""

    def __init__(self, store: Any, rank: int, num_ranks: int) -> None:
        self._store, self._rank, self._num_ranks = store, rank, num_ranks
        self._round = 0
        self._first_kept = 0  # rounds before it are cleaned up

    @staticmethod
    def join(store: Any, prefix: str, rank: int, num_ranks: int) -> StoreGroup:
        """Collective: a group with keys of its own below `prefix`.

        A later group of the same size and prefix gets keys of its own: a process group may be made
        again on the store of one that was destroyed.
        """
        from torch.distributed import PrefixStore

        with _reachable():
            joined = store.add(f"{prefix}/joined/{num_ranks}", 1)
        life = (joined - 1) // num_ranks
        return StoreGroup(PrefixStore(f"{prefix}/{num_ranks}/{life}", store), rank, num_ranks)

    def all_gather(self, mine: bytes, timeout_s: float) -> list[bytes]:
        """See Communicator.all_gather."""
        at = self._round
        try:
            with _reachable():
                end = self._take_part(at, mine, time.monotonic() + timeout_s)
                if "by" not in end:
                    by_rank = self._contributions(at)
                    self._round = at + 1
                    self._clean_up(before=at)
                    return by_rank
                self._skip_ended()
        except BaseException:
            # Interrupted, or the store is gone: the others need not wait for the time to run out.
            if self._round == at:
                self._round = at + 1
                with contextlib.suppress(RuntimeError):
                    self._decide(at, {"by": self._rank, "why": "was interrupted", "missing": []})
            raise
        raise self._failure(end, timeout_s)

    def _take_part(self, at: int, mine: bytes, deadline: float) -> dict[str, Any]:
        """Gives `mine` to the round and returns how it ended."""
        end = self._end(at)
        if end is not None:
            return {**end, "late": True}
        self._store.set(f"{at}/{self._rank}", b"+" + mine)  # some stores refuse empty values
        if self._store.add(f"{at}/count", 1) == self._num_ranks:
            self._decide(at, {})
        end = self._await_end(at, deadline)
        if end is not None:
            return end
        ranks = range(self._num_ranks)
        missing = [rank for rank in ranks if not self._store.check([f"{at}/{rank}"])]
        failure = {"by": self._rank, "why": _GAVE_UP, "missing": missing}
        self._decide(at, failure)
        end = self._await_end(at, time.monotonic() + _GRACE_S)
        # None: whoever decided died before it could say what.
        return failure if end is None else end

    def _await_end(self, at: int, deadline: float) -> dict[str, Any] | None:
        # Asking now and then instead of store.wait(): a TCPStore's wait that runs out of time logs
        # a warning, and keeps other threads off the store; a FileStore's lasts a second or more.
        pause = _FIRST_PAUSE_S
        while (end := self._end(at)) is None and time.monotonic() < deadline:
            time.sleep(min(pause, max(deadline - time.monotonic(), 0.0)))
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return end

    def _end(self, at: int) -> dict[str, Any] | None:
        if not self._store.check([f"{at}/end"]):
            return None
        return json.loads(self._store.get(f"{at}/end"))

    def _decide(self, at: int, end: dict[str, Any]) -> None:
        if self._store.add(f"{at}/decided", 1) == 1:
            self._store.set(f"{at}/end", json.dumps(end))

    def _contributions(self, at: int) -> list[bytes]:
        keys = [f"{at}/{rank}" for rank in range(self._num_ranks)]
        if self._store.has_extended_api():
            values = self._store.multi_get(keys)
        else:
            values = [self._store.get(key) for key in keys]
        return [bytes(value[1:]) for value in values]

    def _skip_ended(self) -> None:
        self._round += 1
        while self._store.check([f"{self._round}/end"]):
            self._round += 1

    def _clean_up(self, before: int) -> None:
        own = [str(self._rank)]
        shared = ["count", "decided", "end"] if self._rank == 0 else []
        # Not every store can delete.
        with contextlib.suppress(RuntimeError, NotImplementedError):
            for at in range(self._first_kept, before):
                for name in own + shared:
                    self._store.delete_key(f"{at}/{name}")
        self._first_kept = before

    def _failure(self, end: dict[str, Any], timeout_s: float) -> Error:
        by, why, missing = end["by"], end["why"], end["missing"]
        if why != _GAVE_UP or end.get("late") or self._rank in missing:
            reason = f"rank {by} {why}" + (" while it waited for this rank" if missing else "")
            return PeerError(
                f"all_gather (rank {self._rank} of {self._num_ranks}): {reason}",
                peers=[by],
                reason=reason,
            )
        who = ", ".join(map(str, missing)) or "whose arrival nobody confirmed"
        return Timeout(
            f"all_gather (rank {self._rank} of {self._num_ranks}) timed out after {timeout_s:g} s: "
            f"rank{'s' * (len(missing) != 1)} {who} did not come",
            peers=missing,
            phase="all_gather",
        )


@contextlib.contextmanager
def _reachable() -> Iterator[None]:
    """Turns what a store raises when it is gone into PeerLost."""
    try:
        yield
    except Error:
        raise
    except RuntimeError as error:
        raise PeerLost(
            f"the process group's store cannot be reached (is the process that holds it gone?): "
            f"{error}",
            peers=[],
        ) from error
