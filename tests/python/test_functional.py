"""Results and gradients of ep.functional, compared with plain torch in one process."""

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
    assert_same_steps,
    grad_of,
    in_ranks,
    leaf,
    make_inputs,
    reference_step,
    run_step,
)
from python.torch_reference import World, expert_rows

pytestmark = pytest.mark.torch_versions

CASES = {
    "one rank": Case(num_tokens=(5,)),
    "two ranks": Case(),
    "K of 1": Case(num_topk=1),
    "a rank without tokens": Case(num_tokens=(4, 0, 3), num_experts=7),
    "no tokens at all": Case(num_tokens=(0, 0)),
    "ranks without experts": Case(num_tokens=(3, 2, 4), num_experts=2),
    "many duplicates": Case(num_tokens=(4, 4), num_experts=2, num_topk=6),
}


@pytest.mark.parametrize("own_weights", [True, False], ids=["own weights", "other weights"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_a_step_in_fp32_has_the_reference_s_bits(name, layout, own_weights):
    """Ids of -1 and duplicates, uneven experts, ranks without tokens or experts (C8, H1, H3)."""
    case = replace(CASES[name], layout=layout, own_weights=own_weights)
    steps = in_ranks(case, lambda buf, mine: run_step(buf, case, mine))
    assert_same_steps(steps, reference_step(case, make_inputs(case)))


@pytest.mark.parametrize(("own_weights", "combines"), [(True, 2), (False, 3)])
def test_a_step_makes_as_few_collective_calls_as_it_can(own_weights, combines):
    """Weights that dispatch had come home with its gradient; others take one more combine."""
    case = Case(own_weights=own_weights)

    def count(buf, mine):
        run_step(buf, case, mine)
        return buf.stats()

    for stats in in_ranks(case, count):
        assert (stats.dispatches, stats.combines) == (2, combines)


def test_weights_edited_in_place_since_dispatch_count_as_other_weights():
    case = Case(own_weights=False)

    def edited(buf, mine):
        x, scale = leaf(mine.x), leaf(mine.others)
        weights = mine.weights.clone() + 0 * scale
        out = ep.functional.dispatch(buf, x, mine.ids, weights, layout="expert", ids="global")
        with torch.no_grad():
            weights.copy_(mine.others)
        rows = expert_rows(out.x, out.topk_idx)
        y = ep.functional.combine(buf, rows, out.handle, weights=weights)
        y.x.backward(mine.grad)
        return y.x.detach(), x.grad

    want = reference_step(case, make_inputs(case))
    for (y, x_grad), step in zip(in_ranks(case, edited), want, strict=True):
        assert_same("y", y, step.y)
        assert_same("x.grad", x_grad, step.x)


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_row_weights_and_biases(layout, weighted):
    """row_weights come home unmultiplied; two biases of different dtypes; other weights as well."""
    case = Case(layout=layout, num_tokens=(3, 0, 4))
    weighted = weighted and layout == "expert"
    inputs = make_inputs(case)
    bias_dtypes = (torch.bfloat16, torch.float32)

    def step(buf, mine):
        x, others = leaf(mine.x), leaf(mine.others)
        biases = [leaf(mine.x.to(dtype)) for dtype in bias_dtypes]
        out = ep.functional.dispatch(buf, x, mine.ids, layout=layout)
        assert out.topk_weights is None
        numbers = leaf(row_numbers(out.x, case))
        y = ep.functional.combine(
            buf,
            out.x,
            out.handle,
            weights=others if weighted else None,
            row_weights=numbers,
            bias=biases,
        )
        torch.autograd.backward([y.x, y.topk_weights], [mine.grad, mine.weights])
        grads = [grad_of(each) for each in (x, numbers, others, *biases)]
        return y.x.detach(), y.topk_weights.detach(), grads

    world = World([each.ids for each in inputs], case.num_experts, layout)
    xs, others = [leaf(each.x) for each in inputs], [leaf(each.others) for each in inputs]
    biases = [[leaf(each.x.to(dtype)) for dtype in bias_dtypes] for each in inputs]
    rows = world.dispatch(xs)
    numbers = [leaf(row_numbers(each, case)) for each in rows]
    ys = world.combine(rows, others if weighted else None, biases)
    homes = world.bring_home(numbers)
    given = [each.grad for each in inputs] + [each.weights for each in inputs]
    keep = [i for i, tensor in enumerate([*ys, *homes]) if tensor.requires_grad]
    torch.autograd.backward([[*ys, *homes][i] for i in keep], [given[i] for i in keep])

    wanted_names = ("x.grad", "row_weights.grad", "weights.grad", "bias[0].grad", "bias[1].grad")
    for rank, (y, home, grads) in enumerate(in_ranks(case, step)):
        assert_same("y", y, ys[rank].detach())
        assert_same("topk_weights", home, homes[rank].detach())
        wanted = [xs[rank], numbers[rank], others[rank], *biases[rank]]
        for what, got, want in zip(wanted_names, grads, wanted, strict=True):
            assert_same(what, got, grad_of(want))


def row_numbers(rows, case):
    """[N] or [N,K] numbers that depend on the row."""
    columns = rows.detach()[:, : case.num_topk]
    return columns.clone() if case.layout == "rank" else columns[:, 0].clone()


def test_weights_half_and_quarter_are_applied_exactly_once():
    """w = [.5, .25] gives .5 * y0 + .25 * y1, once, in both layouts (H1)."""
    case = Case(num_tokens=(2, 2), num_experts=4, num_topk=2)

    def once(buf, mine):
        x, ids = torch.full((2, 8), 4.0), torch.tensor([[0, 3], [2, 2]])
        weights = torch.tensor([[0.5, 0.25]] * 2)
        results = []
        for layout in LAYOUTS:
            out = ep.functional.dispatch(buf, x, ids, weights, layout=layout, ids="global")
            if layout == "expert":
                rows = out.x * (out.topk_idx + 1)[:, None]
                y = ep.functional.combine(buf, rows, out.handle, weights=weights)
            else:
                rows = out.x * (out.topk_weights * (out.topk_idx + 1)).sum(1, keepdim=True)
                y = ep.functional.combine(buf, rows, out.handle)
            results.append(y.x)
        return results

    want = torch.tensor([[0.5 * 4 * 1 + 0.25 * 4 * 4] * 8, [0.75 * 4 * 3] * 8])
    for results in in_ranks(case, once):
        for y in results:
            assert_same("y", y, want)


def test_router_gradients_agree_with_finite_differences():
    """loss = sum(w0 * y): the gradient of a weight is the sum over its row (H3)."""
    case = Case(num_tokens=(2, 3), num_topk=2, own_weights=True)
    eps = 2.0**-7  # of weights and sums near 1: errors of fp32 stay below 2^-23 / 2^-7

    def loss(buf, mine, weights):
        with torch.no_grad():
            out = ep.functional.dispatch(
                buf, mine.x, mine.ids, weights, layout="expert", ids="global"
            )
            rows = expert_rows(out.x, out.topk_idx)
            y = ep.functional.combine(buf, rows, out.handle, weights=weights)
            return (y.x * mine.grad).sum().item()

    def compare(buf, mine):
        grad = run_step(buf, case, mine).weights
        tokens = max(case.num_tokens)
        for at in range(tokens * case.num_topk):  # all ranks make the same calls
            shift = torch.zeros(tokens * case.num_topk)
            shift[at] = eps
            shift = shift.reshape(tokens, -1)[: len(mine.x)]
            up, down = (loss(buf, mine, mine.weights + s) for s in (shift, -shift))
            if shift.any():
                want = (up - down) / (2 * eps)
                assert abs(grad.reshape(-1)[at].item() - want) < 0.01 * (1 + abs(want))
        return grad

    assert any(grad.any() for grad in in_ranks(case, compare))


def _strided(kind, grad):
    tokens, hidden = grad.shape
    if kind == "transposed":
        return grad.t().contiguous().t()
    if kind == "every other column":
        return grad.repeat_interleave(2, dim=1)[:, ::2]
    if kind == "one row for all":
        return grad[:1].expand(tokens, hidden)
    if kind == "one number for all":
        return grad[0, 0].expand(tokens, hidden)
    return grad


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "kind", ["transposed", "every other column", "one row for all", "one number for all"]
)
def test_gradients_of_any_stride(kind, layout):
    """Of combine's result and of dispatch's rows: as those of a contiguous copy (R1)."""
    case = Case(num_tokens=(3, 5), layout=layout)

    def step(buf, mine):
        given = _strided(kind, mine.grad)
        assert given.stride() != mine.grad.stride()
        grads = []
        for grad in (given, given.contiguous()):
            strided = run_step(buf, case, replace(mine, grad=grad))
            x = leaf(mine.x)
            out = ep.functional.dispatch(buf, x, mine.ids, layout=layout)
            source = torch.randn(out.x.shape, generator=torch.Generator().manual_seed(1))
            rows = _strided(kind, source) if len(source) else source
            out.x.backward(rows if grad is given else rows.contiguous())
            grads.append((strided.x, strided.weights, x.grad))
        return grads

    for strided, plain in in_ranks(case, step):
        for got, want in zip(strided, plain, strict=True):
            assert_same("grad", got, want)


@pytest.mark.parametrize("options", [{"expert_alignment": 4}, {"exact": False}, {"max_rows": 40}])
def test_rows_that_nobody_reads_touch_no_gradient(options):
    """Gaps and the unspecified tail: poisoned forward and backward, sums are the reference's."""
    case = Case(num_tokens=(3, 4), num_experts=4)

    def step(buf, mine):
        x, weights = leaf(mine.x), leaf(mine.weights)
        out = ep.functional.dispatch(
            buf, x, mine.ids, weights, layout="expert", ids="global", **options
        )
        dead = (out.topk_idx < 0)[:, None]
        assert dead.any()
        seen = []
        rows = expert_rows(out.x, out.topk_idx)
        rows.register_hook(lambda grad: seen.append(grad))
        rows = rows.masked_fill(dead, torch.nan)
        rows.register_hook(lambda grad: seen.append(grad))
        y = ep.functional.combine(buf, rows, out.handle, weights=weights)
        y.x.backward(mine.grad)
        assert len(seen) == 2 and not seen[0][dead[:, 0]].any()
        return y.x.detach(), x.grad, weights.grad

    want = reference_step(case, make_inputs(case))
    for (y, x_grad, weights_grad), step_ in zip(in_ranks(case, step), want, strict=True):
        assert_same("y", y, step_.y)
        assert_same("x.grad", x_grad, step_.x)
        assert_same("weights.grad", weights_grad, step_.weights)


def test_dropped_routes_have_no_gradient():
    """max_rows = 2, overflow = "drop": the expert's third row is dropped, with its gradient."""
    case = Case(num_tokens=(3,), num_experts=1, num_topk=1)

    def step(buf, mine):
        x, weights = leaf(mine.x), leaf(torch.ones(3, 1))
        ids = torch.zeros(3, 1, dtype=torch.int64)
        out = ep.functional.dispatch(
            buf, x, ids, weights, layout="expert", max_rows=2, overflow="drop"
        )
        y = ep.functional.combine(buf, out.x, out.handle, weights=weights)
        y.x.sum().backward()
        return x.grad, weights.grad, mine.x

    [(x_grad, weights_grad, x)] = in_ranks(case, step)
    assert_same("x.grad", x_grad, torch.tensor([1.0, 1.0, 0.0])[:, None].expand(3, 8))
    kept = torch.tensor([1.0, 1.0, 0.0])
    assert_same("weights.grad", weights_grad[:, 0], x.sum(1) * kept)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("idx_dtype", [torch.int32, torch.int64])
def test_twenty_iterations_have_the_first_one_s_bits(layout, idx_dtype):
    """One buffer, equal inputs (K5, O6)."""
    case = Case(layout=layout, num_tokens=(6, 0, 5), num_experts=7)

    def steps(buf, mine):
        mine = replace(mine, ids=mine.ids.to(idx_dtype))
        first = run_step(buf, case, mine)
        for _ in range(19):
            assert_same_steps([run_step(buf, case, mine)], [first])

    in_ranks(case, steps)


def test_results_are_named_and_frozen():
    """Everything of the buffer's own result, by its name (H6)."""
    case = Case(num_tokens=(2,))

    def names(buf, mine):
        plain = buf.dispatch(mine.x, mine.ids, mine.weights)
        y = buf.combine(plain.x, plain.handle)
        out = ep.functional.dispatch(buf, leaf(mine.x), mine.ids, mine.weights)
        back = ep.functional.combine(buf, out.x, out.handle)
        for result, of in ((out, plain), (back, y)):
            public = {name for name in dir(of) if not name.startswith("_")}
            assert public <= set(dir(result))
            with pytest.raises(AttributeError, match="frozen"):
                result.x = None
            with pytest.raises(AttributeError):
                result.nonsense  # noqa: B018
        assert out.num_rows == plain.num_rows == len(out.x)
        assert torch.equal(out.rank_offsets, plain.rank_offsets)
        assert_same("topk_weights", out.topk_weights.detach(), plain.topk_weights)

    in_ranks(case, names)


def test_weights_are_refused_in_the_layout_where_experts_apply_them():
    """combine(weights=) with layout "rank", on both ranks (H5); the next step is exact."""
    case = Case(layout="rank")

    def refused(buf, mine):
        weights = leaf(mine.weights)
        out = ep.functional.dispatch(buf, leaf(mine.x), mine.ids, weights, layout="rank")
        with pytest.raises(ep.InvalidArgument, match="weights"):
            ep.functional.combine(buf, out.x, out.handle, weights=weights)
        return run_step(buf, case, mine)

    assert_same_steps(in_ranks(case, refused), reference_step(case, make_inputs(case)))


def test_weights_used_by_the_experts_and_by_combine():
    """y = w * (w * x): both uses of the same weights reach their gradient."""
    case = Case(num_topk=1)

    def step(buf, mine):
        x, weights = leaf(mine.x), leaf(mine.weights)
        out = ep.functional.dispatch(buf, x, mine.ids, weights, layout="expert")
        rows = out.topk_weights[:, None] * out.x
        y = ep.functional.combine(buf, rows, out.handle, weights=weights)
        y.x.backward(mine.grad)
        return x.grad, weights.grad, mine

    for x_grad, w_grad, mine in in_ranks(case, step):
        routed = (mine.ids >= 0).float()
        assert_same("x.grad", x_grad, mine.grad * mine.weights * mine.weights * routed)
        want = 2 * mine.weights * (mine.grad * mine.x).sum(1, keepdim=True) * routed
        torch.testing.assert_close(w_grad, want)
