"""Inputs, one training step through `ep.functional`, and the same step of the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import ep
import ep.functional
import ep.testing
from python.torch_reference import World, expert_rows, expert_sums

Tensor = torch.Tensor
LAYOUTS = ("rank", "expert")


@dataclass(frozen=True, kw_only=True)
class Case:
    num_tokens: tuple[int, ...] = (3, 4)  # by rank
    num_experts: int = 5
    num_topk: int = 3
    hidden: int = 8
    layout: str = "expert"
    seed: int = 1
    x_dtype: torch.dtype = torch.float32
    weights_dtype: torch.dtype = torch.float32
    own_weights: bool = True  # combine gets what dispatch got, else a tensor of its own

    @property
    def num_ranks(self) -> int:
        return len(self.num_tokens)


@dataclass
class Inputs:
    """Of one rank."""

    x: Tensor  # [T,H]
    ids: Tensor  # [T,K]; -1 and duplicates among them
    weights: Tensor  # [T,K], for dispatch
    others: Tensor  # [T,K], for combine where it gets weights of its own
    grad: Tensor  # [T,H] of the loss with respect to the result


def make_inputs(case: Case) -> list[Inputs]:
    """Seeded, by rank; no tensor requires grad."""
    made = []
    for rank, tokens in enumerate(case.num_tokens):
        rng = torch.Generator().manual_seed(1000 * case.seed + rank)

        def draw(*shape: int, rng: torch.Generator = rng) -> Tensor:
            return torch.randn(shape, generator=rng)

        x = draw(tokens, case.hidden).to(case.x_dtype)
        ids = torch.randint(-1, case.num_experts, (tokens, case.num_topk), generator=rng)
        weights = draw(tokens, case.num_topk).to(case.weights_dtype)
        others = draw(tokens, case.num_topk).to(case.weights_dtype)
        made.append(Inputs(x, ids, weights, others, draw(tokens, case.hidden).to(case.x_dtype)))
    return made


def leaf(tensor: Tensor) -> Tensor:
    """A copy of its own that collects a gradient."""
    return tensor.detach().clone().requires_grad_()


def grad_of(tensor: Tensor) -> Tensor:
    """The gradient that a leaf has collected; zeros where nothing hangs on it."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


@dataclass
class Step:
    """Results of one rank; gradients are None where there are none."""

    y: Tensor
    x: Tensor | None
    weights: Tensor | None
    others: Tensor | None


def run_step(buf: ep.EPBuffer, case: Case, mine: Inputs, **options: Any) -> Step:
    """dispatch, experts, combine and backward of one rank."""
    x, weights, others = leaf(mine.x), leaf(mine.weights), leaf(mine.others)
    out = ep.functional.dispatch(
        buf, x, mine.ids, weights, layout=case.layout, ids="global", **options
    )
    y = combine_rows(buf, case, out, weights if case.own_weights else others)
    y.x.backward(mine.grad)
    return Step(y.x.detach(), x.grad, weights.grad, others.grad)


def combine_rows(buf: ep.EPBuffer, case: Case, out: Any, weights: Tensor) -> Any:
    """The experts of the reference, and combine."""
    if case.layout == "rank":
        rows = expert_sums(out.x, out.topk_idx, out.topk_weights)
        return ep.functional.combine(buf, rows, out.handle)
    rows = expert_rows(out.x, out.topk_idx)
    return ep.functional.combine(buf, rows, out.handle, weights=weights)


def forward(buf, case, x, mine, weights, *, skip=False):
    """The combined result; `skip`: rows without a graph where nothing was received."""
    out = ep.functional.dispatch(buf, x, mine.ids, weights, layout=case.layout, ids="global")
    if skip and len(out.x) == 0:
        rows, given = torch.zeros(out.x.shape), weights if case.layout == "expert" else None
        return ep.functional.combine(buf, rows, out.handle, weights=given)
    return combine_rows(buf, case, out, weights)


def to_rank_0(case, inputs):
    """The same inputs, with experts of rank 0 only."""
    return [replace(each, ids=each.ids.clamp(max=0)) for each in inputs]


def reference_step(case: Case, inputs: Sequence[Inputs]) -> list[Step]:
    """The same of all ranks in one process, in fp32."""
    xs = [leaf(each.x.float()) for each in inputs]
    weights = [leaf(each.weights.float()) for each in inputs]
    others = [leaf(each.others.float()) for each in inputs]
    world = World([each.ids for each in inputs], case.num_experts, case.layout)
    rows = world.dispatch(xs)
    ids = [world.row_ids(rank) for rank in range(case.num_ranks)]
    if case.layout == "rank":
        scales = world.row_weights(weights)
        ys = world.combine([expert_sums(*each) for each in zip(rows, ids, scales, strict=True)])
    else:
        answers = [expert_rows(*each) for each in zip(rows, ids, strict=True)]
        ys = world.combine(answers, weights if case.own_weights else others)
    # Where no rank has a token nothing of the reference hangs on anything.
    given = [(y, each.grad.float()) for y, each in zip(ys, inputs, strict=True) if y.requires_grad]
    if given:
        torch.autograd.backward(*zip(*given, strict=True))
    return [
        Step(y.detach(), grad_of(x), grad_of(w), o.grad)
        for y, x, w, o in zip(ys, xs, weights, others, strict=True)
    ]


def make_buffer(comm: Any, case: Case, **options: Any) -> ep.EPBuffer:
    sizes = {
        "num_experts": case.num_experts,
        "num_topk": case.num_topk,
        "hidden": case.hidden,
        "max_tokens_per_rank": max(1, *case.num_tokens),
        "device": "cpu",
    }
    return ep.EPBuffer(comm, **(sizes | options))


def in_ranks(case: Case, body: Callable[..., Any], **options: Any) -> list[Any]:
    """Calls `body(buf, inputs of the rank)` in a thread per rank; results by rank."""
    inputs = make_inputs(case)

    def in_rank(comm: Any) -> Any:
        with make_buffer(comm, case, **options) as buf:
            return body(buf, inputs[comm.rank])

    return ep.testing.run(in_rank, case.num_ranks)


def assert_same(what: str, got: Tensor | None, want: Tensor | None) -> None:
    """Equal to the bit, but for the sign of zero."""
    assert (got is None) == (want is None), f"{what} is {got}, want {want}"
    if got is None:
        return
    assert got.dtype == want.dtype, f"{what} is {got.dtype}, want {want.dtype}"
    assert got.shape == want.shape, f"{what} is {list(got.shape)}, want {list(want.shape)}"
    assert torch.equal(got, want), f"{what} differs:\n{got}\nwant\n{want}"


def assert_same_steps(got: Sequence[Step], want: Sequence[Step]) -> None:
    for rank, (mine, wanted) in enumerate(zip(got, want, strict=True)):
        for name in ("y", "x", "weights", "others"):
            have, wish = getattr(mine, name), getattr(wanted, name)
            if have is None and wish is not None:
                assert not wish.any(), f"rank {rank}: no gradient of {name}, want {wish}"
            elif wish is None and have is not None:
                assert not have.any(), f"rank {rank}: a gradient of {name}, want none: {have}"
            else:
                assert_same(f"rank {rank}: {name}", have, wish)
