"""The same exchange over torch.distributed's gloo, as one would write it by hand."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from ep.cli import bench_verify

if TYPE_CHECKING:
    from ep.cli.bench_rounds import Contender, Exchange


class Gloo:
    """Its two contenders; rows are bf16 whatever the format.

    dispatch: counts, x[index], then rows, ids and weights into fresh tensors. combine: rows back,
    index_add_ in fp32, one cast. What depends on the routing only (index, counts to send, the order
    of layout "expert") is made beforehand, to gloo's advantage.
    """

    def __init__(self, exchange: Exchange, folder: str, timeout_s: float) -> None:
        case = exchange.case
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/gloo",
            rank=exchange.rank,
            world_size=case.num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        self._exchange = exchange
        self._by_expert = case.layout == "expert"
        token, slot, send = _sends(exchange)
        self._index = torch.from_numpy(token)
        self._send = send.tolist()
        self._counts = torch.from_numpy(send)
        self._weights = exchange.topk_weights[self._index, torch.from_numpy(slot)][:, None]
        # Rows come by source, then expert; layout "expert" wants them by expert, then source.
        rows = exchange.rows
        arrival = np.lexsort((rows.token, rows.expert, rows.source))
        self._back = torch.from_numpy(arrival)
        self._order = torch.argsort(self._back)
        self._received = np.bincount(rows.source, minlength=case.num_ranks).tolist()
        self._rows = self._result = None

    def contenders(self) -> dict[str, Contender]:
        from ep.cli.bench_rounds import Contender

        return {
            "gloo_dispatch": Contender(self._release, self._dispatch, self._check_dispatch),
            "gloo_combine": Contender(self._release, self._combine, self._check_combine),
        }

    def close(self) -> None:
        dist.destroy_process_group()

    def _release(self) -> None:
        self._rows = self._result = None

    def _dispatch(self) -> None:
        exchange = self._exchange
        counts = torch.empty_like(self._counts)
        dist.all_to_all_single(counts, self._counts)
        received = counts.tolist()
        rows, ids, weights = (
            self._swap(t[self._index], received, self._send)
            for t in (exchange.x, exchange.topk_idx, exchange.topk_weights)
        )
        if self._by_expert:
            rows, ids, weights = rows[self._order], ids[self._order], weights[self._order]
        self._rows = rows

    def _combine(self) -> None:
        exchange = self._exchange
        rows = exchange.answers[self._back] if self._by_expert else exchange.answers
        rows = self._swap(rows, self._send, self._received).float()
        if self._by_expert:
            rows *= self._weights
        total = torch.zeros(exchange.x.shape, dtype=torch.float32)
        total.index_add_(0, self._index, rows)
        self._result = total.to(torch.bfloat16)

    @staticmethod
    def _swap(rows: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
        into = torch.empty((sum(received), *rows.shape[1:]), dtype=rows.dtype)
        dist.all_to_all_single(into, rows, received, sent)
        return into

    def _check_dispatch(self) -> int:
        return bench_verify.payload(self._exchange, self._exchange.kind.array(self._rows))

    def _check_combine(self) -> int:
        return bench_verify.combined(self._exchange, self._exchange.kind.array(self._result))


def _sends(exchange: Exchange) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token and slot of each row to send, in sending order, and how many go to each rank."""
    data, topk_idx = exchange.data, exchange.topk_idx.numpy()
    owner = data.owner[topk_idx]
    token, slot = np.nonzero(np.ones_like(owner, bool))
    to, expert = owner[token, slot], topk_idx[token, slot]
    if exchange.case.layout == "rank":  # one row for a token's slots of a rank
        _, first = np.unique(token * exchange.case.num_ranks + to, return_index=True)
        token, slot, to, expert = token[first], slot[first], to[first], np.zeros_like(first)
    order = np.lexsort((token, expert, to))
    return token[order], slot[order], np.bincount(to, minlength=exchange.case.num_ranks)
