"""What dispatch, the experts and combine compute, for all ranks in one graph of one process.

Plain torch: rows are gathered, sums are written out, and autograd does the rest. In fp32 every sum
has the order that the package promises, so results and gradients are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

Tensor = torch.Tensor


def even_offsets(num_experts: int, num_ranks: int) -> list[int]:
    share, more = divmod(num_experts, num_ranks)
    return [r * share + min(r, more) for r in range(num_ranks + 1)]


@dataclass
class Row:
    """A row at its destination: where it came from; with layout "rank" `slot` is its first."""

    source: int
    token: int
    slot: int


@dataclass
class World:
    """The routing of all ranks, and the rows that it makes."""

    ids: Sequence[Tensor]  # by rank, [T,K]; -1 = no expert
    num_experts: int
    layout: str
    rows: list[list[Row]] = field(init=False)  # by destination, in layout order

    def __post_init__(self) -> None:
        self.offsets = even_offsets(self.num_experts, len(self.ids))
        self.num_topk = self.ids[0].shape[1]
        self.rows = [self._rows_of(rank) for rank in range(len(self.ids))]
        self.starts = [0]
        for rows in self.rows:
            self.starts.append(self.starts[-1] + len(rows))

    def is_local(self, expert: int, rank: int) -> bool:
        return self.offsets[rank] <= expert < self.offsets[rank + 1]

    def _rows_of(self, rank: int) -> list[Row]:
        routes = [
            (expert, Row(source, token, slot))
            for source, ids in enumerate(self.ids)
            for token, experts in enumerate(ids.tolist())
            for slot, expert in enumerate(experts)
            if self.is_local(expert, rank)
        ]
        if self.layout == "expert":
            return [row for _, row in sorted(routes, key=lambda each: each[0])]
        rows: dict[tuple[int, int], Row] = {}
        for _, row in routes:
            rows.setdefault((row.source, row.token), row)
        return list(rows.values())

    # --- dispatch ---------------------------------------------------------------------------------

    def dispatch(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Rows [N,H] by destination; the gradient of x is added up in ascending slot order."""
        slots = []
        for x in xs:
            # Autograd walks the newest first, so the copy of slot 0 is made last.
            copies = [x.clone() for _ in range(self.num_topk)][::-1]
            slots.append(torch.stack(copies))
        return [
            _stack([slots[row.source][row.slot, row.token] for row in rows], xs[0])
            for rows in self.rows
        ]

    def row_ids(self, rank: int) -> Tensor:
        """Global experts: [N] ("expert"), or [N,K] with -1 for those of other ranks."""
        rows = self.rows[rank]
        if self.layout == "expert":
            return torch.tensor([int(self.ids[r.source][r.token, r.slot]) for r in rows])
        table = [
            [e if self.is_local(e, rank) else -1 for e in self.ids[r.source][r.token].tolist()]
            for r in rows
        ]
        return torch.tensor(table, dtype=torch.int64).reshape(len(rows), self.num_topk)

    def row_weights(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """[N] or [N,K] by destination, as `row_ids`."""
        if self.layout == "expert":
            return [
                _stack([weights[r.source][r.token, r.slot] for r in rows], weights[0], ())
                for rows in self.rows
            ]
        by_rank = []
        for rank, rows in enumerate(self.rows):
            table = _stack([weights[r.source][r.token] for r in rows], weights[0])
            by_rank.append(torch.where(self.row_ids(rank) >= 0, table, 0.0))
        return by_rank

    # --- combine ----------------------------------------------------------------------------------

    def combine(
        self,
        rows: Sequence[Tensor],
        weights: Sequence[Tensor] | None = None,
        biases: Sequence[Sequence[Tensor]] = (),
        dtype: torch.dtype | None = None,
    ) -> list[Tensor]:
        """Sums [T,H] by source: fp32, ascending slots, multiply then add, one rounding."""
        nothing = rows[0].new_zeros(1, rows[0].shape[1])
        flat = torch.cat([*rows, nothing]).float()
        results = []
        for rank, ids in enumerate(self.ids):
            total = torch.zeros(len(ids), flat.shape[1])
            for slot, places in enumerate(self._places(rank)):
                term = flat[places]
                if weights is not None:
                    term = weights[rank][:, slot : slot + 1].float() * term
                total = total + term
            for bias in biases[rank] if biases else ():
                total = total + bias.float()
            results.append(total.to(dtype or rows[0].dtype))
        return results

    def _places(self, rank: int) -> list[list[int]]:
        """By slot: the row of each token among all ranks' rows, -1 where nothing is added."""
        places = [[-1] * len(self.ids[rank]) for _ in range(self.num_topk)]
        for dest, rows in enumerate(self.rows):
            for at, row in enumerate(rows):
                if row.source == rank:
                    places[row.slot][row.token] = self.starts[dest] + at
        return places

    def bring_home(self, row_weights: Sequence[Tensor]) -> list[Tensor]:
        """Numbers of rows, [N] or [N,K], as [T,K] by source."""
        homes = []
        for source, ids in enumerate(self.ids):
            cells = [[torch.zeros(()) for _ in range(self.num_topk)] for _ in range(len(ids))]
            for dest, rows in enumerate(self.rows):
                for at, row in enumerate(rows):
                    if row.source != source:
                        continue
                    if self.layout == "expert":
                        cells[row.token][row.slot] = row_weights[dest][at]
                        continue
                    for slot, expert in enumerate(ids[row.token].tolist()):
                        if self.is_local(expert, dest):
                            cells[row.token][slot] = row_weights[dest][at, slot]
            homes.append(
                torch.stack([torch.stack(c) for c in cells])
                if cells
                else torch.zeros(0, self.num_topk)
            )
        return homes


def _stack(rows: list[Tensor], like: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    if rows:
        return torch.stack(rows)
    return like.new_zeros((0, *(like.shape[1:] if shape is None else shape)))


# --- experts that treat every row on its own, so that no sum's order is left open -----------------


def expert_rows(rows: Tensor, experts: Tensor) -> Tensor:
    """A quadratic of each element, with the expert's own slope; experts [N], global."""
    slope = (experts + 1).to(rows.dtype)[:, None]
    return slope * rows + 0.5 * rows * rows


def expert_sums(rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Layout "rank": the weighted sum of a row's local experts, slot by slot; experts [N,K]."""
    total = torch.zeros_like(rows)
    for slot in range(experts.shape[1]):
        answer = expert_rows(rows, experts[:, slot])
        weight = torch.where(experts[:, slot] >= 0, weights[:, slot], 0.0)[:, None]
        total = total + weight.to(rows.dtype) * answer
    return total
