"""examples/gradcheck.py: the formulas of both backwards against finite differences."""

from __future__ import annotations

import pytest
import torch

import ep
import ep.testing
import gradcheck

pytestmark = pytest.mark.filterwarnings("ignore:Input #.*double precision")


@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("formula", [gradcheck.check_dispatch, gradcheck.check_combine])
def test_formulas_agree_with_finite_differences(formula, layout):
    with gradcheck.make_buffer(ep.Communicator.single()) as buf:
        formula(buf, gradcheck.routing(0), layout)


def test_a_round_trip_over_three_ranks_does():
    """Each rank moves its own inputs, all at once: a token's result depends on no other token."""

    def in_rank(comm):
        with gradcheck.make_buffer(comm) as buf:
            gradcheck.check_round_trip(buf, gradcheck.routing(comm.rank))

    ep.testing.run(in_rank, 3)


def test_a_wrong_formula_is_noticed(monkeypatch):
    """Gradients of weights that stay where they are."""
    from ep import _autograd

    def wrong(ctx, grad_rows, grad_weights):
        x, weights = right(ctx, grad_rows, grad_weights)
        return x, torch.zeros_like(weights)

    right = _autograd.dispatch_backward
    monkeypatch.setattr(_autograd, "dispatch_backward", wrong)
    with (
        gradcheck.make_buffer(ep.Communicator.single()) as buf,
        pytest.raises(RuntimeError, match="Jacobian mismatch"),
    ):
        gradcheck.check_dispatch(buf, gradcheck.routing(0), "expert")
