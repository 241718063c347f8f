"""Gradients against closed forms in small integers, exact in fp32; user-report numbers in brackets.

Expert e answers (e + 1) * row.
"""

import numpy as np
import pytest

import ep
from python.ranks import LAYOUTS, run_ranks
from python.routing import draw_ids, seeded

pytestmark = pytest.mark.torch_versions

functional = pytest.importorskip("ep.functional", reason="needs torch")
torch = pytest.importorskip("torch")

ARGS = {"num_experts": 6, "num_topk": 3, "hidden": 16, "max_tokens_per_rank": 8}
OFFSETS = {"everybody receives": (0, 2, 4, 6), "rank 1 receives nothing": (0, 3, 3, 6)}
COUNTS = [(4, 4, 4), (0, 5, 1), (3, 0, 0), (0, 0, 0)]


def inputs(rank: int, num_tokens: int, offsets: tuple[int, ...]):
    """x, ids, w, dy: integers up to 7, ids with -1."""
    rng = seeded(6, rank)
    ids = draw_ids("mixed", rank, num_tokens, 3, offsets, seed=6)
    x, dy = (rng.integers(-7, 8, (num_tokens, 16)).astype(np.float32) for _ in range(2))
    return x, ids, rng.integers(-7, 8, (num_tokens, 3)).astype(np.float32), dy


def forward(buf, layout: str, x, ids, w):
    """y [T, H] = sum over k of w[t, k] * (e_k + 1) * x[t]; `w` is applied where `layout` says."""
    out = functional.dispatch(buf, x, ids, w, layout=layout)
    factor = out.topk_idx + buf.local_experts.start + 1
    if layout == "expert":
        return functional.combine(buf, out.x * factor[:, None], out.handle, weights=w).x
    sums = (out.topk_weights * torch.where(out.topk_idx < 0, 0, factor)).sum(1, keepdim=True)
    return functional.combine(buf, out.x * sums, out.handle).x


@pytest.mark.parametrize("num_tokens", COUNTS)
@pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_the_closed_forms(layout, offsets, num_tokens):
    """[C8, H3] Of x and of the router's weights, also where a rank sends or receives nothing."""

    def in_rank(comm):
        x, ids, w, dy = inputs(comm.rank, num_tokens[comm.rank], offsets)
        factor = np.where(ids < 0, 0, ids + 1)
        with ep.EPBuffer(comm, **ARGS, expert_offsets=list(offsets)) as buf:
            x_leaf, w_leaf = (torch.tensor(a, requires_grad=True) for a in (x, w))
            for _ in range(2):  # [K5] forward and backward, twice
                x_leaf.grad = w_leaf.grad = None
                y = forward(buf, layout, x_leaf, torch.tensor(ids), w_leaf)
                y.backward(torch.tensor(dy))
                total = (w * factor).sum(axis=1, keepdims=True)
                assert np.array_equal(y.detach().numpy(), total * x)
                assert np.array_equal(x_leaf.grad.numpy(), total * dy)
                dot = (x * dy).sum(axis=1, keepdims=True)
                assert np.array_equal(w_leaf.grad.numpy(), factor * dot)

    run_ranks(in_rank, 3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_finite_differences_agree(layout):
    """[H3] loss = sum(dy * y) is linear in w: w + 2 in one slot changes it by 2 * grad."""
    offsets = OFFSETS["everybody receives"]

    def in_rank(comm):
        x, ids, w, dy = inputs(comm.rank, 4, offsets)
        with ep.EPBuffer(comm, **ARGS) as buf:
            w_leaf = torch.tensor(w, requires_grad=True)
            args = (torch.tensor(x), torch.tensor(ids))
            loss = (forward(buf, layout, *args, w_leaf) * torch.tensor(dy)).sum()
            loss.backward()
            for token, slot in np.ndindex(w.shape):
                moved = w.copy()
                moved[token, slot] += 2
                with torch.no_grad():
                    y = forward(buf, layout, *args, torch.tensor(moved))
                change = (y * torch.tensor(dy)).sum() - loss
                assert change.item() == 2 * w_leaf.grad[token, slot].item()

    run_ranks(in_rank, 3)
