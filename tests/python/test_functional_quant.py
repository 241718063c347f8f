"""Straight-through gradients of quantised dispatches."""

from __future__ import annotations

import pytest
import torch

import ep
import ep.functional
import ep.quant
from python.functional_support import Case, assert_same, in_ranks, leaf, make_inputs

pytestmark = pytest.mark.torch_versions

FORMATS = ep.quant.formats()
HIDDEN = 640  # five groups: the second word of packed exponents is not full
CASE = Case(hidden=HIDDEN)


def exact_tokens(mine):
    """Small integers, and 448 in each group, so that scales are 1: nothing is rounded."""
    x = (mine.x * 4).round().clamp(-15, 15)
    x[:, ::128] = 448
    return x


def step(buf, mine, x, quant):
    x, weights = leaf(x), leaf(mine.weights)
    out = ep.functional.dispatch(buf, x, mine.ids, weights, layout="expert", quant=quant)
    y = ep.functional.combine(buf, out.dequantize() * 3, out.handle, weights=weights)
    y.x.backward(mine.grad)
    return out, y.x.detach(), x.grad, weights.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quant", FORMATS)
def test_values_that_fp8_holds_give_the_unquantised_step_s_bits(quant, dtype):
    """Results and all gradients; the fp8 rows themselves have none."""

    def both(buf, mine):
        mine.grad = mine.grad.to(dtype)
        x = exact_tokens(mine).to(dtype)
        out, *got = step(buf, mine, x, quant)
        assert out.x.dtype == torch.float8_e4m3fn and not out.x.requires_grad
        assert out.dequantize().requires_grad and out.dequantize().dtype == dtype
        assert not out.scales.requires_grad
        return got, step(buf, mine, x, None)[1:]

    for got, want in in_ranks(CASE, both):
        for name, mine, wanted in zip(("y", "x.grad", "weights.grad"), got, want, strict=True):
            assert_same(name, mine, wanted)


@pytest.mark.parametrize("quant", FORMATS)
def test_rounding_has_no_gradient_of_its_own(quant):
    """Values that fp8 rounds, up to infinity: x.grad is the number of rows, whatever x is."""
    case = Case(hidden=128, num_tokens=(2, 0))

    def rounded(buf, mine):
        x = leaf(mine.x * 1000)
        with torch.no_grad():
            x[:1, 0] = torch.inf
        out = ep.functional.dispatch(buf, x, mine.ids, layout="expert", quant=quant)
        values = out.dequantize(torch.bfloat16)
        assert values.dtype == torch.bfloat16
        plain = ep.quant.dequantize(out.x, out.scales, quant)
        assert_same("values", values.detach(), plain.to(torch.bfloat16))
        values.sum().backward()
        return x.grad

    for got, mine in zip(in_ranks(case, rounded), make_inputs(case), strict=True):
        routes = (mine.ids >= 0).sum(1, keepdim=True).float()
        assert_same("x.grad", got, routes.expand(-1, 128))


def test_gradients_of_two_readings_add_up():
    """dequantize() twice, in two dtypes, and never."""
    case = Case(hidden=128, num_topk=1)

    def readings(buf, mine):
        grads = []
        for count in (2, 0):
            x, weights = leaf(mine.x), leaf(mine.weights)
            out = ep.functional.dispatch(
                buf, x, mine.ids, weights, layout="expert", quant="fp8_block128"
            )
            dtypes = (torch.float32, torch.float16)[:count]
            sum(
                [out.dequantize(d).float().sum() for d in dtypes], out.topk_weights.sum()
            ).backward()
            grads += [x.grad, weights.grad]
        return grads

    for (twice, weights, never, same), mine in zip(
        in_ranks(case, readings), make_inputs(case), strict=True
    ):
        routed = (mine.ids >= 0).float()
        assert_same("read twice", twice, (2 * routed).expand(-1, 128))
        assert_same("never read", never, torch.zeros_like(never))
        assert_same("weights.grad", weights, routed)
        assert_same("weights.grad", same, routed)


def test_dequantize_without_gradients_and_of_opaque_rows():
    """Under no_grad it is the plain reading; rows with the caller's own scales have none."""
    case = Case(hidden=128, num_tokens=(3,))

    def plain(buf, mine):
        with torch.no_grad():
            out = ep.functional.dispatch(
                buf, leaf(mine.x), mine.ids, layout="expert", quant="fp8_block128"
            )
            values = out.dequantize()
        assert values.dtype == torch.float32 and not values.requires_grad
        assert_same("values", values, ep.quant.dequantize(out.x, out.scales, "fp8_block128"))
        opaque = ep.functional.dispatch(buf, mine.x, mine.ids, scales=torch.ones(3, 1))
        with pytest.raises(ep.InvalidArgument, match="dequantised"):
            opaque.dequantize()

    in_ranks(case, plain)
