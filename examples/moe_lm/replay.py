"""The same training in one process, without `ep`: what --check compares with.

It plays the R ranks in turn.  Each has its own copy of what all ranks share, its own experts and
its own shard, and what it computes on its own has the shapes it has in its process.  Between them
is only what dispatch and combine promise, written with plain indexing:

* an expert's rows lie by source rank, then token, then slot;
* a token's results are multiplied by their weights in fp32 and added in slot order;
* backward, a token's gradient is the sum of its rows' gradients in slot order; a row's gradient is
  that of its token times its weight; a weight's is the dot product of row and token gradient.

In fp32 the losses are therefore those of the distributed run, bit for bit.
"""

import dataclasses
import itertools
import time

import torch

from moe_lm.config import Config
from moe_lm.model import LanguageModel, MoE, next_token_loss
from moe_lm.progress import Progress
from moe_lm.text import Shard, split
from moe_lm.train import (
    flat_gradients,
    make_optimizer,
    set_gradients,
    sum_in_rank_order,
    update,
)


@dataclasses.dataclass(frozen=True)
class Place:
    """What a model asks its buffer before anything travels: which experts are this rank's."""

    rank: int
    expert_offsets: list[int]
    device: str = "cpu"

    @property
    def local_experts(self) -> range:
        """This rank's experts."""
        return range(self.expert_offsets[self.rank], self.expert_offsets[self.rank + 1])


def places(config: Config) -> list[Place]:
    """One for each rank; the first E % R ranks own one expert more."""
    shares = torch.arange(config.experts).tensor_split(config.ranks)
    offsets = [0, *itertools.accumulate(map(len, shares))]
    return [Place(rank, offsets) for rank in range(config.ranks)]


def replay(config: Config, tokens: torch.Tensor) -> list[list[float]]:
    """Trains with fp32 exchange, whatever config.exchange says; returns losses [steps][ranks].

    Sets the number of torch's threads to one, as each rank's process has.
    """
    torch.set_num_threads(1)
    config = dataclasses.replace(config, exchange="fp32")
    training_text, _ = split(tokens)
    ranks = range(config.ranks)
    shards = [Shard(training_text, rank, config.ranks, config.seed) for rank in ranks]
    models = [LanguageModel(place, config) for place in places(config)]
    optimizers = [make_optimizer(model) for model in models]
    losses = []
    start = time.perf_counter()
    with Progress(config, "checking", shown=True) as progress:
        for step in range(config.steps):
            batches = [shard.next_batch(config.batch, config.context) for shard in shards]
            logits = forward(models, [inputs for inputs, _ in batches])
            step_losses = [
                next_token_loss(one, targets)
                for one, (_, targets) in zip(logits, batches, strict=True)
            ]
            totals = zip(step_losses, models, strict=True)
            torch.autograd.backward(
                [(loss + model.balance()) / config.ranks for loss, model in totals]
            )
            total = sum_in_rank_order([flat_gradients(model) for model in models])
            for model, optimizer in zip(models, optimizers, strict=True):
                set_gradients(model, total)
                update(optimizer, config, step)
            losses.append([loss.item() for loss in step_losses])
            progress.show(losses[-1][0], time.perf_counter() - start)
    return losses


def forward(models: list[LanguageModel], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """`LanguageModel.forward` of all ranks, layer by layer; lists are by rank."""
    xs = [model.embed(tokens) for model, tokens in zip(models, inputs, strict=True)]
    for blocks in zip(*(model.blocks for model in models), strict=True):
        xs = [block.attend(x) for block, x in zip(blocks, xs, strict=True)]
        normed = [block.moe_norm(x) for block, x in zip(blocks, xs, strict=True)]
        ys = moe_forward([block.moe for block in blocks], normed)
        xs = [x + y for x, y in zip(xs, ys, strict=True)]
    return [model.read_out(x) for model, x in zip(models, xs, strict=True)]


def moe_forward(layers: list[MoE], xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """`MoE.forward` of all ranks; lists are by rank."""
    tokens = [x.reshape(-1, x.shape[-1]) for x in xs]
    topk_idx, topk_weights = zip(
        *(layer.route(each) for layer, each in zip(layers, tokens, strict=True)), strict=True
    )
    routes = Routes(topk_idx, layers[0].buf.expert_offsets)
    received = Dispatch.apply(routes, *tokens, *topk_weights)
    rows, row_weights = received[: len(layers)], received[len(layers) :]
    results = [
        layer.apply_experts(each, counts)
        for layer, each, counts in zip(layers, rows, routes.counts, strict=True)
    ]
    ys = Combine.apply(routes, *results, *row_weights)
    return [y.reshape(x.shape) for y, x in zip(ys, xs, strict=True)]


class Routes:
    """Where every (source rank, token, slot) goes in one layer.

    All tokens are numbered through, rank by rank; so are their slots (token * K + slot) and, when
    all ranks' rows are laid end to end, the rows.
    """

    def __init__(self, topk_idx: tuple[torch.Tensor, ...], expert_offsets: list[int]) -> None:
        experts = torch.cat(topk_idx)  # [all tokens, K]
        num_experts = expert_offsets[-1]
        per_expert = experts.flatten().bincount(minlength=num_experts).tolist()
        owned = list(itertools.pairwise(expert_offsets))
        self.counts = [per_expert[first:last] for first, last in owned]  # of each rank's experts
        self.num_rows = [sum(counts) for counts in self.counts]  # of each rank
        self.num_tokens = [len(each) for each in topk_idx]  # of each rank
        # Sorted stably by expert, slots stay in order of source, token, slot.
        self.slot_of_row = experts.flatten().argsort(stable=True)
        self.token_of_row = self.slot_of_row // experts.shape[1]
        self.row_of_slot = self.slot_of_row.argsort().view(experts.shape)

    def to_rows(self, by_token: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Each rank's tokens [T,H] to each rank's rows [N,H]."""
        return torch.cat(by_token)[self.token_of_row].split(self.num_rows)

    def slots_to_rows(self, by_slot: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Each rank's [T,K] to each rank's rows [N]."""
        return torch.cat(by_slot).flatten()[self.slot_of_row].split(self.num_rows)

    def rows_to_slots(self, by_row: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The reverse: each rank's [N] to each rank's [T,K]."""
        return torch.cat(by_row)[self.row_of_slot].split(self.num_tokens)

    def add_up(self, rows: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Each rank's rows [N,H] to each rank's tokens [T,H]: their sums in slot order."""
        first, *others = torch.cat(rows)[self.row_of_slot].unbind(dim=1)
        for row in others:
            first = first + row
        return first.split(self.num_tokens)


def _halves(both: tuple) -> tuple[tuple, tuple]:
    return both[: len(both) // 2], both[len(both) // 2 :]


class Dispatch(torch.autograd.Function):
    """All ranks' tokens [T,H], then their weights [T,K] -> all ranks' rows [N,H], weights [N]."""

    @staticmethod
    def forward(ctx, routes: Routes, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.routes = routes
        tokens, weights = _halves(inputs)
        return *_own(routes.to_rows(tokens)), *_own(routes.slots_to_rows(weights))

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        rows, weights = _halves(gradients)
        return None, *ctx.routes.add_up(rows), *ctx.routes.rows_to_slots(weights)


class Combine(torch.autograd.Function):
    """All ranks' rows [N,H], then their weights [N] -> all ranks' tokens [T,H]."""

    @staticmethod
    def forward(ctx, routes: Routes, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.routes = routes
        ctx.save_for_backward(*inputs)
        return _own(routes.add_up(_scaled(*_halves(inputs))))

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        rows, weights = _halves(ctx.saved_tensors)
        sent = ctx.routes.to_rows(gradients)
        dots = [(grad * row).sum(1) for grad, row in zip(sent, rows, strict=True)]
        return None, *_scaled(sent, weights), *dots


def _scaled(rows: tuple[torch.Tensor, ...], weights: tuple) -> list[torch.Tensor]:
    return [each * weight[:, None] for each, weight in zip(rows, weights, strict=True)]


def _own(views: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Tensors of their own, aligned as those of a process of their own are."""
    return tuple(view.clone() for view in views)
