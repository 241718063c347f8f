"""Both backward formulas against finite differences, with torch.autograd.gradcheck.

    python examples/gradcheck.py

- The backward of a dispatch is a combine of the rows' gradients; those of the rows' weights travel
  along as row_weights.
- The backward of a combine is a replayed dispatch of the result's gradient, times the weights; a
  weight's gradient is the dot product of its row and that.

Both functions are linear in each argument and all numbers here are small multiples of powers of
two, so central differences are exact even in fp32, the widest type that travels.
"""

import torch

import ep
import ep.functional

TOKENS, TOPK, HIDDEN, EXPERTS = 4, 2, 4, 3
STEP = 2.0**-4


def numbers(*shape: int, seed: int) -> torch.Tensor:
    """Multiples of 1/4 up to 2, that want a gradient."""
    rng = torch.Generator().manual_seed(seed)
    return (torch.randint(-8, 9, shape, generator=rng) / 4).requires_grad_()


def check(function, *inputs: torch.Tensor) -> None:
    torch.autograd.gradcheck(function, inputs, eps=STEP, atol=1e-5, rtol=0, nondet_tol=0.0)


def check_dispatch(buf: ep.EPBuffer, ids: torch.Tensor, layout: str) -> None:
    """x [T,H] and topk_weights [T,K] to the rows and their weights; of one rank's own tokens."""

    def dispatch(x, weights):
        out = ep.functional.dispatch(buf, x, ids, weights, layout=layout)
        return out.x, out.topk_weights

    check(dispatch, numbers(TOKENS, HIDDEN, seed=1), numbers(TOKENS, TOPK, seed=2))


def check_combine(buf: ep.EPBuffer, ids: torch.Tensor, layout: str) -> None:
    """Rows [N,H], their numbers, a bias and (layout "expert") weights [T,K] to the tokens."""
    tokens = numbers(TOKENS, HIDDEN, seed=1)
    with torch.no_grad():
        out = ep.functional.dispatch(buf, tokens, ids, layout=layout)
    rows = numbers(*out.x.shape, seed=3)
    per_row = numbers(*out.topk_idx.shape, seed=4)
    bias = numbers(TOKENS, HIDDEN, seed=5)
    weights = [numbers(TOKENS, TOPK, seed=6)] if layout == "expert" else [None]

    def combine(rows, per_row, bias, weights):
        y = ep.functional.combine(
            buf, rows, out.handle, weights=weights, row_weights=per_row, bias=bias
        )
        return y.x, y.topk_weights

    check(combine, rows, per_row, bias, *weights)


def check_round_trip(buf: ep.EPBuffer, ids: torch.Tensor) -> None:
    """Tokens to experts that square them and back: on any number of ranks, each its own tokens."""

    def round_trip(x, weights):
        out = ep.functional.dispatch(buf, x, ids, weights, layout="expert", ids="global")
        rows = out.x * out.x * (out.topk_idx[:, None] + 1)
        return ep.functional.combine(buf, rows, out.handle, weights=weights).x

    check(round_trip, numbers(TOKENS, HIDDEN, seed=1), numbers(TOKENS, TOPK, seed=2))


def make_buffer(comm: ep.Communicator) -> ep.EPBuffer:
    sizes = {"num_experts": EXPERTS, "num_topk": TOPK, "hidden": HIDDEN}
    return ep.EPBuffer(comm, **sizes, max_tokens_per_rank=TOKENS, device="cpu")


def routing(rank: int) -> torch.Tensor:
    """A token without experts, one with the same twice, and others."""
    return torch.tensor([[-1, -1], [2, 2], [0, 1], [1, -1]]).roll(rank, 0)


def main() -> None:
    with make_buffer(ep.Communicator.single()) as buf:
        for layout in ("rank", "expert"):
            check_dispatch(buf, routing(0), layout)
            check_combine(buf, routing(0), layout)
            print(f'layout "{layout}": dispatch and combine agree with finite differences')


if __name__ == "__main__":
    main()
