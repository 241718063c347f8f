"""What an `EPBuffer` knows of itself: its place, its settings, its memory and its counts."""

from __future__ import annotations

from typing import Any

from ep import _C
from ep.records import Memory, MemoryUse, Stats


class Facts:
    """Of `EPBuffer`; nothing here is collective."""

    _core: _C.Buffer

    @property
    def rank(self) -> int:
        """This rank, in [0, R)."""
        return self._core.rank

    @property
    def num_ranks(self) -> int:
        """R."""
        return self._core.num_ranks

    @property
    def num_nodes(self) -> int:
        """Nodes that the ranks are on."""
        return self._core.num_nodes

    @property
    def device(self) -> str:
        """The device of the window, as a string that torch accepts."""
        return "cpu"

    @property
    def expert_offsets(self) -> list[int]:
        """R+1 ints: rank r owns the experts [o[r], o[r+1])."""
        return self._core.expert_offsets

    @property
    def local_experts(self) -> range:
        """The experts of this rank."""
        offsets = self._core.expert_offsets
        return range(offsets[self.rank], offsets[self.rank + 1])

    @property
    def num_sms(self) -> int:
        """Worker threads per operation; may be set at any time."""
        return self._core.num_sms

    @num_sms.setter
    def num_sms(self, value: int) -> None:
        self._core.num_sms = value

    @property
    def timeout_s(self) -> float:
        """Bound of every wait, in seconds; may be set at any time."""
        return self._core.timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        self._core.timeout_s = value

    @property
    def comm_stream(self) -> _C.Stream:
        """Where asynchronous calls run unless ``stream=`` says otherwise."""
        return self._core.comm_stream

    @staticmethod
    def bytes_needed(
        group: Any = None,
        *,
        num_ranks: int,
        num_experts: int,
        num_topk: int,
        hidden: int,
        max_tokens_per_rank: int,
        **options: Any,
    ) -> Memory:
        """Bytes that a buffer of these arguments (those of `EPBuffer`) registers on each rank.

        Arithmetic only; the group is not looked at.  num_ranks: R; num_experts, num_topk, hidden,
        max_tokens_per_rank and **options as of EPBuffer.  Raises InvalidArgument where it would.
        """
        options |= {
            "num_experts": num_experts,
            "num_topk": num_topk,
            "hidden": hidden,
            "max_tokens_per_rank": max_tokens_per_rank,
        }
        return Memory(*_C.bytes_needed(options, num_ranks))

    def memory(self) -> MemoryUse:
        """Bytes of the arena: in use, at most so far, and in the largest free extent."""
        return MemoryUse(*self._core.memory())

    def stats(self) -> Stats:
        """Counts since construction."""
        return Stats(*self._core.stats())

    def max_rows(
        self, layout: str, max_tokens: int | None = None, expert_alignment: int = 1
    ) -> int:
        """N of a fixed-size (exact=False) output of this layout on this rank.

        With B = `max_tokens` (None: max_tokens_per_rank), a = `expert_alignment`, M = R * B * K:
        "rank" R * B; "expert" a * (n + (M - n) // a) with n = min(L, M), 0 where L = 0.
        Raises InvalidArgument where dispatch would.
        """
        return self._core.max_rows(layout, max_tokens, expert_alignment)
