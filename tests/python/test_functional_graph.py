"""Who takes part in the backward of ep.functional, and in which order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import ep
import ep.functional
from python.functional_support import (
    LAYOUTS,
    Case,
    assert_same,
    combine_rows,
    forward,
    in_ranks,
    leaf,
    make_inputs,
    reference_step,
    run_step,
    to_rank_0,
)

pytestmark = pytest.mark.torch_versions


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_received_nothing_may_skip_its_experts(layout):
    """Rank 1 combines rows of its own making, without a graph; its tokens' gradients are right."""
    case = Case(layout=layout)
    inputs = to_rank_0(case, make_inputs(case))

    def step(buf, _):
        mine = inputs[buf.rank]
        x, weights = leaf(mine.x), leaf(mine.weights)
        y = forward(buf, case, x, mine, weights, skip=True)
        y.x.backward(mine.grad)
        return y.x.detach(), x.grad, weights.grad

    for got, want in zip(in_ranks(case, step), reference_step(case, inputs), strict=True):
        for name, mine, wanted in zip(
            ("y", "x", "weights"), got, (want.y, want.x, want.weights), strict=True
        ):
            assert_same(name, mine, wanted)


def test_a_rank_may_ignore_what_it_received():
    """Rank 1 answers its rows with a constant: its experts' share of the gradients is zero."""
    case = Case(num_tokens=(2, 2), num_experts=2, num_topk=2)

    def step(buf, mine):
        x = leaf(mine.x)
        out = ep.functional.dispatch(buf, x, torch.tensor([[0, 1]] * 2), layout="expert")
        rows = out.x if buf.rank == 0 else torch.ones(out.x.shape)
        ep.functional.combine(buf, rows, out.handle).x.backward(mine.grad)
        return x.grad, mine.grad

    for got, want in in_ranks(case, step):
        assert_same("x.grad", got, want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_without_a_route_have_gradients_of_zero(layout):
    """All ids are -1 on both ranks (C8)."""
    case = Case(layout=layout)

    def step(buf, mine):
        return run_step(buf, case, replace(mine, ids=torch.full_like(mine.ids, -1)))

    for got, mine in zip(in_ranks(case, step), make_inputs(case), strict=True):
        assert_same("x.grad", got.x, torch.zeros_like(mine.x))
        assert_same("weights.grad", got.weights, torch.zeros_like(mine.weights))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("used", ["rows", "topk_weights", "home"])
def test_outputs_that_nothing_depends_on(used, layout):
    """Only the rows, only the rows' weights, or only combine's topk_weights have a gradient."""
    case = Case(layout=layout)

    def step(buf, mine):
        x, weights = leaf(mine.x), leaf(mine.weights)
        out = ep.functional.dispatch(buf, x, mine.ids, weights, layout=layout)
        if used == "rows":
            out.x.sum().backward()
        elif used == "topk_weights":
            (2 * out.topk_weights).sum().backward()
        else:
            y = ep.functional.combine(buf, out.x, out.handle, row_weights=out.topk_weights)
            (2 * y.topk_weights).sum().backward()
        return x.grad, weights.grad

    for (x_grad, w_grad), mine in zip(in_ranks(case, step), make_inputs(case), strict=True):
        routed = mine.ids >= 0
        if used == "rows":  # as many ones as rows the token became
            offsets = torch.tensor([3])
            where = torch.bucketize(mine.ids, offsets, right=True)
            rows = [
                sum(routed[t]) if layout == "expert" else len(set(where[t][routed[t]].tolist()))
                for t in range(len(mine.ids))
            ]
            assert_same("x.grad", x_grad, torch.tensor(rows).float()[:, None].expand(-1, 8))
            assert_same("weights.grad", w_grad, torch.zeros_like(w_grad))
        else:
            assert_same("x.grad", x_grad, torch.zeros_like(x_grad))
            assert_same("weights.grad", w_grad, 2 * routed.float())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("frozen", ["x", "weights"])
def test_one_of_the_inputs_is_frozen(frozen, layout):
    """The other one's gradient is the reference's, and the frozen one's rows need none."""
    case = Case(layout=layout)

    def step(buf, mine):
        x, weights = leaf(mine.x), leaf(mine.weights)
        (x if frozen == "x" else weights).requires_grad_(False)
        out = ep.functional.dispatch(buf, x, mine.ids, weights, layout=layout, ids="global")
        assert out.x.requires_grad == (frozen != "x")
        assert out.topk_weights.requires_grad == (frozen != "weights")
        combine_rows(buf, case, out, weights).x.backward(mine.grad)
        return x.grad, weights.grad

    for got, want in zip(
        in_ranks(case, step), reference_step(case, make_inputs(case)), strict=True
    ):
        assert_same("x.grad", got[0], None if frozen == "x" else want.x)
        assert_same("weights.grad", got[1], None if frozen == "weights" else want.weights)


@pytest.mark.parametrize("grad_mode", [True, False])
def test_without_gradients_nothing_is_differentiable(grad_mode):
    """Inputs that require no grad; inputs that do, under no_grad: the buffer's own results."""
    case = Case()

    def step(buf, mine):
        x = mine.x if grad_mode else leaf(mine.x)
        with torch.set_grad_enabled(grad_mode):
            out = ep.functional.dispatch(buf, x, mine.ids, mine.weights, layout="expert")
            y = ep.functional.combine(buf, out.x, out.handle, weights=mine.weights)
        plain = buf.dispatch(mine.x, mine.ids, mine.weights, layout="expert")
        back = buf.combine(plain.x, plain.handle, weights=mine.weights)
        assert not out.x.requires_grad and not y.x.requires_grad
        assert_same("rows", out.x, plain.x)
        assert_same("y", y.x, back.x)
        assert_same("dequantize", out.dequantize(torch.float16), plain.x.half())

    in_ranks(case, step)


# --- order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 1, 2), (2, 0, 1), "together"])
def test_micro_batches_go_backward_in_any_order(order, layout):
    """Forward of all, then backward of each, or of their sum; rank 1 skips its experts. Inputs come
    out of a graph of their own, as activations do, which each backward frees.
    """
    case = Case(layout=layout)
    inputs = to_rank_0(case, make_inputs(case))
    count = 2 if order == "together" else len(order)

    def steps(buf, _):
        mine = inputs[buf.rank]
        leaves = [leaf(mine.x) for _ in range(count)]
        weights = [leaf(mine.weights) for _ in range(count)]
        sources = [(x.tanh().tanh(), w.sigmoid()) for x, w in zip(leaves, weights, strict=True)]
        ys = [forward(buf, case, x, mine, w, skip=True) for x, w in sources]
        if order == "together":
            sum(((i + 1) * y.x * mine.grad).sum() for i, y in enumerate(ys)).backward()
        else:
            for i in order:
                ys[i].x.backward((i + 1) * mine.grad)
        return [(x.grad, w.grad) for x, w in zip(leaves, weights, strict=True)]

    for rank, got in enumerate(in_ranks(case, steps)):
        for i, grads in enumerate(got):
            for mine, first in zip(grads, got[0], strict=True):
                torch.testing.assert_close(mine, (i + 1) * first)
        assert rank == 1 or got[0][0].any()


def test_overlapped_operations_go_backward_in_one_order_on_all_ranks():
    """dispatch A, dispatch B, combine A, combine B, with routings that no call may mix up."""
    case = Case(num_tokens=(3, 4))

    def step(buf, mine):
        flipped = replace(mine, ids=mine.ids.flip(1), weights=mine.weights.flip(1))
        first, second = leaf(mine.x), leaf(mine.x)
        outs = [
            ep.functional.dispatch(buf, x, each.ids, each.weights, layout="expert", ids="global")
            for x, each in ((first, mine), (second, flipped))
        ]
        ys = [
            combine_rows(buf, case, out, each.weights)
            for out, each in zip(outs, (mine, flipped), strict=True)
        ]
        ((ys[0].x + ys[1].x) * mine.grad).sum().backward()
        return first.grad, second.grad

    want = reference_step(case, make_inputs(case))
    for (first, second), step_ in zip(in_ranks(case, step), want, strict=True):
        assert_same("first", first, step_.x)
        torch.testing.assert_close(second, step_.x)  # its slots are added in reverse order


def test_stacked_layers_chain_through_their_tokens():
    """Three layers, one rank without tokens, another without received rows."""
    case = Case(num_tokens=(3, 0))
    inputs = to_rank_0(case, make_inputs(case))

    def step(buf, _):
        mine = inputs[buf.rank]
        x, weights = leaf(mine.x), leaf(mine.weights)
        y = x
        for _ in range(3):
            y = forward(buf, case, y, mine, weights, skip=True).x.tanh()
        y.backward(mine.grad)
        return x.grad

    grad, none = in_ranks(case, step)
    assert grad.any() and none.shape == (0, 8)


def test_a_replayed_dispatch_has_a_gradient_of_its_own():
    """The same handle for other tokens; then combines of both, in reverse."""
    case = Case()

    def step(buf, mine):
        x, other = leaf(mine.x), leaf(2 * mine.x)
        out = ep.functional.dispatch(buf, x, mine.ids, layout="expert")
        again = ep.functional.dispatch(buf, other, handle=out.handle)
        y = ep.functional.combine(buf, 3 * again.x, again.handle)
        z = ep.functional.combine(buf, out.x, out.handle)
        (y.x + z.x).backward(mine.grad)
        return x.grad, other.grad, mine

    for x_grad, other_grad, mine in in_ranks(case, step):
        # Up to 5 fp32 additions in another order.
        want = mine.grad * (mine.ids >= 0).sum(1, keepdim=True)
        torch.testing.assert_close(x_grad, want)
        torch.testing.assert_close(other_grad, 3 * want)
