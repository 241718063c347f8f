"""A small model with an `ep.nn.MoE`, trained in one process and under torch's data parallelism."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ep
import ep.nn
from python.torch_groups import gloo

TOKENS, HIDDEN, STEPS = 12, 16, 4


class Model(torch.nn.Module):
    """linear, MoE with a way around it, linear; equal on all ranks but for the experts."""

    def __init__(self, buf: ep.EPBuffer) -> None:
        super().__init__()
        self.first = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.moe = ep.nn.MoE(buf, 4, 2, HIDDEN, 24, seed=3)
        self.last = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
        rng = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for linear in (self.first, self.last):
                linear.weight.copy_(torch.randn(HIDDEN, HIDDEN, generator=rng) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(x + self.moe(x))


def parallel(kind: str, model: Model, num_ranks: int) -> torch.nn.Module:
    """Experts are the ranks' own: neither kind may broadcast, shard or average them."""
    if kind == "ddp":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            model, ["moe.up", "moe.down"]
        )
        return DistributedDataParallel(model)
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (num_ranks,))
        return fully_shard(model, mesh=mesh, ignored_params={model.moe.up, model.moe.down})
    return model


def train(comm: ep.Communicator, kind: str, parts: list[int], file: str) -> list[float]:
    """The losses of this rank's tokens, as sums; `parts` are the ranks' numbers of tokens."""
    torch.set_num_threads(1)
    group = contextlib.nullcontext() if kind == "one process" else gloo(comm, file)
    with group, make_buffer(comm) as buf:
        model = Model(buf)
        experts = [model.moe.up, model.moe.down]
        wrapped = parallel(kind, model, comm.num_ranks)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        start = sum(parts[: comm.rank])
        losses = []
        for step in range(STEPS):
            x, y = (each[start : start + parts[comm.rank]] for each in batch(step))
            loss = (wrapped(x) - y).square().sum() / (TOKENS * HIDDEN)
            optimizer.zero_grad()
            # Both average what they reduce; a sum over all ranks' tokens is wanted.
            (loss * comm.num_ranks).backward()
            for expert in experts:  # complete already
                expert.grad /= comm.num_ranks
            optimizer.step()
            losses.append(loss.item())
    return losses


def make_buffer(comm: Any) -> ep.EPBuffer:
    return ep.EPBuffer(
        comm, num_experts=4, num_topk=2, hidden=HIDDEN, max_tokens_per_rank=TOKENS, device="cpu"
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(100 + step)
    return tuple(torch.randn(TOKENS, HIDDEN, generator=rng) for _ in range(2))
