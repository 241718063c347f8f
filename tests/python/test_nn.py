"""ep.nn.MoE: the same layer for any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ep
import ep.nn
import ep.testing

pytestmark = pytest.mark.torch_versions

LAYOUTS = ("expert", "rank")
# H and F fill whole cache lines: the rows of an expert lie at the same alignment for any R.
E, K, H, F, T = 5, 2, 32, 48, 24


@pytest.fixture(autouse=True)
def one_thread():
    """A product's sums depend on the number of threads; each rank's thread says so again."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_layer(comm: Any, **options: Any) -> ep.nn.MoE:
    buf = ep.EPBuffer(
        comm,
        num_experts=options.get("num_experts", E),
        num_topk=K,
        hidden=options.get("hidden", H),
        max_tokens_per_rank=T,
        device="cpu",
    )
    sizes = {"num_experts": E, "num_topk": K, "hidden": H, "ffn_hidden": F, "seed": 3}
    return ep.nn.MoE(buf, **(sizes | options))


def tokens(*shape: int, seed: int = 7) -> torch.Tensor:
    """Multiples of 1/16 up to 1, whose products with such numbers add up exactly in fp32."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(-16, 17, shape, generator=rng) / 16


def run_layer(comm: Any, parts: list[int], **options: Any) -> dict[str, Any]:
    """One step of this rank's share of T tokens; `parts` are the ranks' numbers of tokens."""
    torch.set_num_threads(1)  # a new thread multiplies with as many as there are cores
    layer = make_layer(comm, **options)
    with torch.no_grad():  # logits that no order of adding changes
        layer.router.weight.copy_(tokens(E, H, seed=8))
    start = sum(parts[: comm.rank])
    x = tokens(T, H)[start : start + parts[comm.rank]].requires_grad_()
    logits: list[torch.Tensor] = []
    layer.router.register_full_backward_hook(lambda _module, _in, out: logits.append(out[0]))
    y = layer(x)
    y.backward(tokens(T, H, seed=9)[start : start + len(x)])
    layer.buf.close()
    return {
        "y": y.detach(),
        "x": x.grad,
        "logits": logits[0],
        "router": layer.router.weight.grad,
        "up": layer.up.grad,
        "down": layer.down.grad,
        "counts": layer.tokens_per_expert,
    }


def by_rank(parts: list[int], **options: Any) -> list[dict[str, Any]]:
    return ep.testing.run(lambda comm: run_layer(comm, parts, **options), len(parts))


PARTS = [[12, 12], [5, 0, 19], [4] * 6]


@pytest.mark.parametrize("parts", PARTS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_number_of_ranks_has_one_rank_s_bits(layout, parts):
    """fp32: results, gradients of tokens, logits and experts, which see whole blocks of rows. With
    layout "rank" a token's terms are added per rank first: equal up to that."""
    [one] = by_rank([T], layout=layout)
    ranks = by_rank(parts, layout=layout)
    for name in ("y", "x", "logits", "up", "down"):
        got = torch.cat([each[name] for each in ranks])
        if layout == "expert":
            assert torch.equal(got, one[name]), name
        else:
            torch.testing.assert_close(got, one[name])
    assert [count for each in ranks for count in each["counts"]] == one["counts"]


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_the_router_s_gradient_is_of_the_rank_s_own_tokens(parts):
    """The bits of the product of that share of one rank's tokens and logits' gradients."""
    [one] = by_rank([T])
    start = 0
    for each, count in zip(by_rank(parts), parts, strict=True):
        share = slice(start, start + count)
        want = one["logits"][share].t() @ tokens(T, H)[share]
        assert torch.equal(each["router"], want)
        start += count


@pytest.mark.parametrize("quant", [None, "fp8_block128"])
def test_both_layouts_agree(quant):
    """Only the order of adding differs; gradients of the experts too."""
    options = {"hidden": 128, "quant": quant}
    parts = [3, 4]

    def step(comm, layout):
        layer = make_layer(comm, layout=layout, **options)
        x = torch.randn(parts[comm.rank], 128, generator=torch.Generator().manual_seed(comm.rank))
        x.requires_grad_()
        y = layer(x)
        y.square().sum().backward()
        layer.buf.close()
        grads = [p.grad for p in layer.parameters()]
        assert all(grad is not None for grad in grads)
        return [y.detach(), x.grad, *grads]

    both = [ep.testing.run(step, 2, args=(layout,)) for layout in LAYOUTS]
    for first, second in zip(*both, strict=True):
        for got, want in zip(first, second, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_the_layer_is_what_its_docstring_says():
    """Softmax over the chosen logits, times each expert, for one rank, token by token."""

    def step(comm):
        layer = make_layer(comm)
        x = torch.randn(4, H, generator=torch.Generator().manual_seed(1))
        y = layer(x)
        layer.buf.close()
        return layer, x, y

    [(layer, x, y)] = ep.testing.run(step, 1)
    for token, got in zip(x, y, strict=True):
        top = (layer.router.weight @ token).topk(K)
        want = sum(
            p * (layer.down[e] @ torch.relu(layer.up[e] @ token))
            for p, e in zip(top.values.softmax(0), top.indices, strict=True)
        )
        torch.testing.assert_close(got, want)
    assert sum(layer.tokens_per_expert) == 4 * K


@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_ranks_than_experts_and_frozen_tokens(layout):
    """Ranks without experts take part in the backward, though only experts have gradients."""

    def step(comm):
        layer = make_layer(comm, num_experts=2, layout=layout)
        layer.router.requires_grad_(False)
        y = layer(torch.ones(2, H))
        y.sum().backward()
        layer.buf.close()
        return layer.up.grad

    grads = ep.testing.run(step, 3)
    assert [grad.shape[0] for grad in grads] == [1, 1, 0] and grads[0].any()


def test_shapes_and_dtypes_come_back_as_they_went_in():
    """[B,S,H] of bf16 through fp32 experts, fp32 through bf16 ones, and no tokens at all."""

    def shapes(comm):
        for dtype, experts in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
            layer = make_layer(comm, dtype=experts)
            for shape in ((2, 3, H), (0, H), (1, 0, H), (H,)):
                x = torch.ones(shape, dtype=dtype, requires_grad=True)
                y = layer(x)
                assert y.shape == x.shape and y.dtype == dtype
                y.sum().backward()
                assert x.grad.shape == x.shape and x.grad.dtype == dtype
            layer.buf.close()

    ep.testing.run(shapes, 2)


def test_parameters_do_not_depend_on_who_owns_them():
    def parameters(comm):
        layer = make_layer(comm)
        layer.buf.close()
        return layer.router.weight.detach(), layer.up.detach(), layer.down.detach()

    [one] = ep.testing.run(parameters, 1)
    three = ep.testing.run(parameters, 3)
    assert all(torch.equal(each[0], one[0]) for each in three)
    for i in (1, 2):
        assert torch.equal(torch.cat([each[i] for each in three]), one[i])
        assert len({value.item() for value in one[i].flatten()[:100]}) > 90


def test_wrong_arguments_are_named():
    def wrong(comm):
        with pytest.raises(ep.InvalidArgument, match="layout='columns'"):
            make_layer(comm, layout="columns")
        buf = ep.EPBuffer(comm, num_experts=E, num_topk=K, hidden=H, max_tokens_per_rank=T)
        with pytest.raises(ep.InvalidArgument, match=f"num_experts=3; the buffer has {E}"):
            ep.nn.MoE(buf, 3, K, H, F)

    ep.testing.run(wrong, 1)
