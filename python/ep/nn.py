"""A small reference mixture-of-experts layer on `ep.functional`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ep import functional
from ep.buffer import EPBuffer
from ep.errors import InvalidArgument, Unsupported

__all__ = ["MoE", "expert_mlp"]

_SEEDS = 8192  # seeds of one layer: the router's and at most 4096 experts'


def expert_mlp(weights: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """One expert: ``relu(rows @ up.T) @ down.T``, all rows in one product.

    Args:
        weights: (up [F,H], down [H,F]).
        rows: [n,H] of the weights' dtype; n may be 0.

    Returns [n,H].
    """
    up, down = weights
    return F.linear(F.relu(F.linear(rows, up)), down)


class MoE(torch.nn.Module):
    """A mixture-of-experts layer whose experts are spread over the ranks of a buffer.

    The router, equal on all ranks, is a linear map in fp32 without bias; a token goes to the K
    experts with the largest logits, and its weights are the softmax over those K logits.  Each
    expert is `expert_mlp`.

    *One process gives the same bits.*  Layout "expert": a rank's experts run in ascending order,
    each on one block of rows, by source rank, then token, then slot; so the blocks are those
    of one process that holds all tokens, ranks in order.  A token's K results are multiplied by its
    weights, added in fp32 in slot order and rounded once.  In fp32, where the router's logits come
    out alike (they are a product over all tokens of a rank) and every rank's thread has called
    ``torch.set_num_threads(1)``, outputs and gradients of experts, weights and logits are bit for
    bit those of one rank.

    *Fixed sizes and graphs.*  With exact=False, and wherever torch.compile traces the layer (with
    fullgraph=True too, whatever `exact` is), the host knows no counts: every local expert then sees
    all N rows and answers its own.  That costs L times the products and rounds as they do; a layer
    for more than reference hands `expert_offsets` to a grouped product instead.

    *Training.*  Experts' gradients are complete; those of the router cover a rank's own tokens and
    must be summed over the ranks by the caller, as data parallelism does.

    Args:
        buf: made with at least these num_topk and hidden, and exactly num_experts.
        num_experts: E, of all ranks together.
        num_topk: K.
        hidden: H.
        ffn_hidden: F, the experts' inner size.
        layout: "expert", or "rank": then a row visits its local experts in ascending order, and
            their results, times the weights, are added in fp32 and rounded before they travel.
        quant: None, or a name of `ep.quant.formats()`: tokens travel quantised and are dequantised
            before the experts; gradients pass straight through.
        dtype: of the experts and of the rows; None: torch's default dtype.
        exact: exactly the received rows; False: fixed sizes, and the host never waits.
        seed: of the parameters.  Each expert has a stream of its own, so its values depend neither
            on R nor on who owns it.

    Attributes:
        router: torch.nn.Linear, weight [E,H] fp32.
        up: [L,F,H], down: [L,H,F]: this rank's experts, in order.
        tokens_per_expert: the routes that this rank's experts took in the last forward: list of L
            ints, or int32 [L] where the host does not know them (see above); None before.

    Raises:
        InvalidArgument: layout is neither "expert" nor "rank", or num_experts is not the buffer's.
        Unsupported: layout is "batched".
    """

    def __init__(
        self,
        buf: EPBuffer,
        num_experts: int,
        num_topk: int,
        hidden: int,
        ffn_hidden: int,
        layout: str = "expert",
        quant: str | None = None,
        *,
        dtype: torch.dtype | None = None,
        exact: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if layout not in ("expert", "rank"):
            raise (Unsupported if layout == "batched" else InvalidArgument)(
                f'layout={layout!r} is neither "expert" nor "rank"'
            )
        if num_experts != buf.expert_offsets[-1]:
            raise InvalidArgument(
                f"num_experts={num_experts}; the buffer has {buf.expert_offsets[-1]}"
            )
        self.buf, self.num_topk, self.hidden = buf, num_topk, hidden
        self.layout, self.quant, self.exact = layout, quant, exact
        self.tokens_per_expert: list[int] | torch.Tensor | None = None
        device = buf.device
        self.router = torch.nn.Linear(
            hidden, num_experts, bias=False, device=device, dtype=torch.float32
        )
        mine = list(buf.local_experts)
        up = torch.empty(len(mine), ffn_hidden, hidden, device=device, dtype=dtype)
        down = torch.empty(len(mine), hidden, ffn_hidden, device=device, dtype=dtype)
        with torch.no_grad():
            _draw(self.router.weight, seed, 0)
            for local, expert in enumerate(mine):
                _draw((up[local], down[local]), seed, 1 + expert)
        self.up, self.down = torch.nn.Parameter(up), torch.nn.Parameter(down)

    def extra_repr(self) -> str:
        return (
            f"experts {self.buf.local_experts} of {self.router.out_features}, "
            f"num_topk={self.num_topk}, layout={self.layout!r}, quant={self.quant!r}"
        )

    def route(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """topk_idx [T,K] int64 and topk_weights [T,K] fp32 of tokens [T,H].

        Raises RuntimeError, torch's own, for another H.
        """
        with torch.autocast(tokens.device.type, enabled=False):
            top = self.router(tokens.float()).topk(self.num_topk, dim=1)
            return top.indices, torch.softmax(top.values, dim=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output for x [...,H], of its shape and dtype; collective, also when empty.

        x is taken as [T,H].  Raises what `ep.functional.dispatch` and `combine` raise.
        """
        tokens = x.reshape(-1, self.hidden)
        topk_idx, topk_weights = self.route(tokens)
        out = functional.dispatch(
            self.buf,
            tokens.to(self.up.dtype),
            topk_idx,
            topk_weights,
            layout=self.layout,
            quant=self.quant,
            exact=self.exact,
        )
        rows = self._answers(out)
        weights = topk_weights if self.layout == "expert" else None
        y = functional.combine(self.buf, rows, out.handle, weights=weights)
        return y.x.to(x.dtype).reshape(x.shape)

    def _answers(self, out: functional.DispatchResult) -> torch.Tensor:
        """[N,H]: what the experts say to the rows."""
        rows = out.dequantize()
        if not self.exact or torch.compiler.is_compiling():
            self.tokens_per_expert = out.tokens_per_expert_device
            rows = rows.masked_fill(out.source[:, :1] < 0, 0)  # the tail is unspecified
            if not len(self.up):
                return self._no_experts(rows)
            if self.layout == "expert":
                return self._by_choice(rows, out.topk_idx)
            return self._by_weight(rows, out.topk_idx, out.topk_weights)
        self.tokens_per_expert = out.tokens_per_expert
        if self.layout == "expert":
            return self._by_block(rows, out.tokens_per_expert)
        return self._by_row(rows, out.topk_idx, out.topk_weights)

    def _experts(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(self.up.unbind(), self.down.unbind(), strict=True))

    def _by_block(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """[N,H] of rows that lie expert by expert."""
        blocks = [
            expert_mlp(weights, block)
            for weights, block in zip(self._experts(), rows.split(counts), strict=True)
        ]
        return torch.cat(blocks) if blocks else self._no_experts(rows)

    def _by_row(
        self, rows: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """[N,H]: for each row the weighted sum of its local experts."""
        total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        for local, weights in enumerate(self._experts()):
            chosen = topk_idx == local  # [N,K]
            at = chosen.any(1).nonzero().squeeze(1)
            weight = (topk_weights * chosen).sum(1)[at]
            answer = expert_mlp(weights, rows.index_select(0, at))
            total = total.index_add(0, at, answer.float() * weight[:, None])
        return total.to(rows.dtype) if len(self.up) else self._no_experts(rows)

    def _by_choice(self, rows: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
        """[N,H]: all experts answer all rows, and a row keeps its own expert's answer."""
        total = torch.zeros_like(rows)
        for local, weights in enumerate(self._experts()):
            chosen = (topk_idx == local)[:, None]
            total = torch.where(chosen, expert_mlp(weights, rows), total)
        return total

    def _by_weight(
        self, rows: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """[N,H]: all experts answer all rows; those that a row did not choose weigh 0."""
        total = torch.zeros_like(rows, dtype=torch.float32)
        for local, weights in enumerate(self._experts()):
            weight = (topk_weights * (topk_idx == local)).sum(1)
            total = total + expert_mlp(weights, rows).float() * weight[:, None]
        return total.to(rows.dtype)

    def _no_experts(self, rows: torch.Tensor) -> torch.Tensor:
        """No rows, that yet depend on the parameters as those of the other ranks do."""
        return rows + self.up.sum() + self.down.sum()


def _draw(tensors: Any, seed: int, stream: int) -> None:
    """Fills matrices [out,in] with normal numbers of variance 1/in; every stream is its own."""
    generator = torch.Generator().manual_seed(seed * _SEEDS + stream)
    for tensor in tensors if isinstance(tensors, tuple) else (tensors,):
        values = torch.randn(tensor.shape, generator=generator) * tensor.shape[1] ** -0.5
        tensor.copy_(values)
