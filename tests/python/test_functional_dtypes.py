"""Gradients of ep.functional in bf16 and fp16, and between dtypes."""

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
    in_ranks,
    leaf,
    make_inputs,
    reference_step,
    run_step,
)

pytestmark = pytest.mark.torch_versions


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_gradients_are_within_their_roundings(layout, dtype):
    """Half ulps by dtype u = eps / 2: each product in the experts and each row that travels is
    rounded; with at most 12 roundings on the way of a term its error is below 12 * u of the sum of
    the terms' magnitudes, for which the reference with all numbers positive stands.
    """
    case = Case(layout=layout, x_dtype=dtype, num_tokens=(4, 0, 3))
    inputs = make_inputs(case)
    steps = in_ranks(case, lambda buf, mine: run_step(buf, case, mine))
    sizes = [
        replace(each, x=each.x.abs(), weights=each.weights.abs(), grad=each.grad.abs())
        for each in inputs
    ]
    bound = 12 * torch.finfo(dtype).eps / 2
    want, most = reference_step(case, inputs), reference_step(case, sizes)
    for got, exact, size in zip(steps, want, most, strict=True):
        assert got.y.dtype == got.x.dtype == dtype and got.weights.dtype == torch.float32
        for name in ("y", "x", "weights"):
            error = (getattr(got, name).float() - getattr(exact, name)).abs()
            limit = bound * getattr(size, name)
            assert torch.all(error <= limit), (name, error, limit)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_reach_weights_of_16_bits_with_one_rounding(layout, dtype):
    """Weights of bf16 and fp16 (R4)."""
    case = Case(layout=layout, weights_dtype=dtype)
    steps = in_ranks(case, lambda buf, mine: run_step(buf, case, mine))
    for got, want in zip(steps, reference_step(case, make_inputs(case)), strict=True):
        assert_same("weights.grad", got.weights, want.weights.to(dtype))
        assert_same("x.grad", got.x, want.x)
        assert_same("y", got.y, want.y)


def test_other_hidden_and_out_dtype_have_their_gradients():
    """Rows of H' = 4 from tokens of H = 8; bf16 rows summed into fp32, whose gradient is sent as
    bf16."""
    case = Case(num_topk=1, x_dtype=torch.bfloat16)

    def step(buf, mine):
        x = leaf(mine.x)
        out = ep.functional.dispatch(buf, x, mine.ids, layout="expert")
        y = ep.functional.combine(buf, out.x[:, :8] * 2, out.handle, out_dtype=torch.float32)
        half = leaf(mine.x[:, :4].float())
        other = ep.functional.dispatch(buf, half, handle=out.handle)
        back = ep.functional.combine(buf, other.x, out.handle)
        assert y.x.dtype == torch.float32 and back.x.shape[1] == 4
        torch.autograd.backward(
            [y.x, back.x], [mine.grad.float() + 2.0**-12, mine.grad[:, :4].float()]
        )
        routed = (mine.ids >= 0).to(torch.bfloat16)
        sent = (mine.grad.float() + 2.0**-12).to(torch.bfloat16)
        return x.grad, half.grad, sent * 2 * routed, mine.grad[:, :4].float() * routed

    for x_grad, half_grad, want_x, want_half in in_ranks(case, step):
        assert_same("x.grad", x_grad, want_x)
        assert_same("half.grad", half_grad, want_half)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_taken_in_fp32_and_rounded_once(dtype):
    """Rows come home as they are: each row's gradient w * g is rounded once, their sum once more;
    a weight's gradient is a dot product in fp32 of 16-bit numbers, whose products are exact."""
    case = Case(x_dtype=dtype, num_tokens=(4, 3))

    def step(buf, mine):
        x, weights = leaf(mine.x), leaf(mine.weights)
        out = ep.functional.dispatch(buf, x, mine.ids, weights, layout="expert")
        y = ep.functional.combine(buf, out.x, out.handle, weights=weights)
        y.x.backward(mine.grad)
        return x.grad, weights.grad, mine

    for x_grad, w_grad, mine in in_ranks(case, step):
        grad, total = mine.grad.float(), torch.zeros(mine.x.shape)
        dots = (grad * mine.x.float()).sum(1)
        for slot in range(case.num_topk):
            routed = (mine.ids[:, slot] >= 0).float()[:, None]
            total += (mine.weights[:, slot : slot + 1] * grad).to(dtype).float() * routed
            assert_same("weights.grad", w_grad[:, slot], dots * routed[:, 0])
        assert_same("x.grad", x_grad, total.to(dtype))
