"""ep.recompute_contexts: at recompute, dispatches replay what they were in the forward."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ep
import ep.functional
from python.calls import recording
from python.functional_support import (
    LAYOUTS,
    Case,
    assert_same,
    assert_same_steps,
    forward,
    in_ranks,
    leaf,
    make_inputs,
    reference_step,
    run_step,
    to_rank_0,
)

CASE = Case(num_tokens=(3, 0, 4))  # rank 1 has no tokens; with `to_rank_0` ranks 1, 2 get no rows


def non_reentrant(fn, *args):
    return checkpoint(fn, *args, use_reentrant=False, context_fn=ep.recompute_contexts)


def reentrant(fn, *args):
    return checkpoint(ep.recompute_contexts(fn), *args, use_reentrant=True)


def wrapped(fn, *args):
    return checkpoint(ep.recompute_contexts(fn), *args, use_reentrant=False)


KINDS = [non_reentrant, reentrant, wrapped]
NEW = ("dispatch", "combine")
FORWARD = [*NEW, *NEW]
# The second layer is recomputed and goes backward, then the first; only what is new counts.
BACKWARD = ["replay", "combine", "replay", "combine"] * 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_dispatches_are_replayed_and_the_bits_are_the_same(kind, layout):
    """Two layers, each checkpointed; ranks 1 and 2 receive nothing and skip their experts."""
    case = Case(layout=layout, num_tokens=(3, 0, 4))
    inputs = to_rank_0(case, make_inputs(case))

    def step(buf, _):
        mine = inputs[buf.rank]

        def layer(x, weights):
            return forward(buf, case, x, mine, weights, skip=True).x

        results = []
        for run in (lambda fn, *args: fn(*args), kind):
            x, weights = leaf(mine.x), leaf(mine.weights)
            with recording(buf) as calls:
                y = run(layer, x, weights)
                y = run(layer, y.tanh(), weights)
                assert calls.names() == FORWARD
                y.backward(mine.grad)
            results.append((y.detach(), x.grad, weights.grad))
        assert calls.names() == FORWARD + BACKWARD
        for got, want in zip(results[1], results[0], strict=True):
            assert_same("checkpointed", got, want)
        return calls.sequence()

    sequences = in_ranks(case, step)
    assert sequences[0] == sequences[1] == sequences[2]


def test_the_routing_of_the_forward_holds():
    """A router that decides otherwise at recompute changes nothing."""
    inputs = make_inputs(CASE)

    def step(buf, mine):
        x, weights, ids = leaf(mine.x), leaf(mine.weights), mine.ids.clone()

        def layer(x):
            out = ep.functional.dispatch(buf, x, ids, weights, layout="expert", ids="global")
            rows = out.x * (out.topk_idx[:, None] + 1)
            return ep.functional.combine(buf, rows, out.handle, weights=weights).x

        y = non_reentrant(layer, x)
        ids.copy_((ids + 1) % CASE.num_experts)
        y.backward(mine.grad)
        return x.grad

    for grad, mine in zip(in_ranks(CASE, step), inputs, strict=True):
        factor = torch.where(mine.ids < 0, 0, mine.ids + 1) * mine.weights
        torch.testing.assert_close(grad, factor.sum(1, keepdim=True) * mine.grad)


OPTIONS = [
    {"layout": "rank"},
    {"layout": "rank", "exact": False, "max_tokens": 4},
    {"layout": "expert", "expert_alignment": 4},
    {"layout": "expert", "max_rows": 9, "overflow": "drop"},
    {"layout": "expert", "outputs": "window", "ids": "global", "num_sms": 1},
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_any_options_may_be_recomputed(options, kind):
    """What a replay takes from its handle may be said again."""

    def step(buf, mine):
        grads = []
        for run in (lambda fn, *args: fn(*args), kind):
            x = leaf(mine.x)

            def layer(x):
                out = ep.functional.dispatch(buf, x, mine.ids, extras=[mine.weights], **options)
                alive = out.source[:, :1] >= 0
                rows = torch.where(alive, out.x.cos() * out.extras[0].sum(1, keepdim=True), 0)
                return ep.functional.combine(buf, rows, out.handle).x

            run(layer, x).backward(mine.grad)
            grads.append(x.grad)
        assert_same("x.grad", grads[1], grads[0])

    in_ranks(CASE, step)


def test_quantised_rows_are_quantised_again():
    case = Case(num_tokens=(2, 3), hidden=128)

    def step(buf, mine):
        grads = []
        for run in (lambda fn, *args: fn(*args), non_reentrant, reentrant):
            x = leaf(mine.x)

            def layer(x):
                out = ep.functional.dispatch(buf, x, mine.ids, quant="fp8_block128")
                return ep.functional.combine(buf, out.dequantize().cos(), out.handle).x

            run(layer, x).backward(mine.grad)
            grads.append(x.grad)
        assert grads[0].any()
        assert_same("non-reentrant", grads[1], grads[0])
        assert_same("reentrant", grads[2], grads[0])

    in_ranks(case, step)


@pytest.mark.parametrize("outer", KINDS)
@pytest.mark.parametrize("inner", KINDS)
def test_regions_may_be_nested(outer, inner):
    """A region within a region: no dispatch of either is made twice."""

    def step(buf, mine):
        grads = []
        for around, within in ((None, None), (outer, inner)):
            x, weights = leaf(mine.x), leaf(mine.weights)

            def layer(x):
                return forward(buf, CASE, x, mine, weights).x  # noqa: B023

            def both(x):
                y = layer(x).tanh()
                return layer(within(layer, y) if within else layer(y))  # noqa: B023

            with recording(buf) as calls:
                (around(both, x) if around else both(x)).backward(mine.grad)
            grads.append((x.grad, weights.grad))
        assert calls.names().count("dispatch") == 3
        assert_same("x.grad", grads[1][0], grads[0][0])
        torch.testing.assert_close(grads[1][1], grads[0][1])  # three layers' in another order
        return calls.sequence()

    sequences = in_ranks(CASE, step)
    assert sequences[0] == sequences[1] == sequences[2]


@pytest.mark.parametrize("kind", [non_reentrant, reentrant])
def test_micro_batches_in_any_order_and_a_retained_graph(kind):
    def step(buf, mine):
        leaves = [leaf(mine.x) for _ in range(3)]
        layer = lambda x: forward(buf, CASE, x, mine, mine.weights).x  # noqa: E731
        ys = [kind(layer, x) for x in leaves]
        with recording(buf) as calls:
            for i in (1, 2, 0):
                ys[i].backward(mine.grad, retain_graph=kind is non_reentrant and i == 0)
            if kind is non_reentrant:
                ys[0].backward(mine.grad)
        assert "dispatch" not in calls.names()
        return [x.grad for x in leaves]

    for (first, second, third), want in zip(
        in_ranks(CASE, step), reference_step(CASE, make_inputs(CASE)), strict=True
    ):
        assert_same("second", second, want.x)
        assert_same("third", third, want.x)
        assert_same("first", first, 2 * want.x if kind is non_reentrant else want.x)


def test_a_region_that_does_otherwise_at_recompute_is_an_error():
    """On rank 0, which dispatches once more; PeerError on the others; the next step is exact."""

    def step(buf, mine):
        runs = []

        def layer(x):
            runs.append(1)
            y = forward(buf, CASE, x, mine, mine.weights).x
            if len(runs) == 2 and buf.rank == 0:
                ep.functional.dispatch(buf, x, mine.ids)
            return y.tanh()

        y = reentrant(layer, leaf(mine.x))
        wanted, text = (
            (ep.InvalidArgument, "made 1 dispatches in its forward")
            if buf.rank == 0
            else (ep.PeerError, "refused")
        )
        with pytest.raises(wanted, match=text):
            y.backward(mine.grad)
        return run_step(buf, CASE, mine)

    assert_same_steps(in_ranks(CASE, step), reference_step(CASE, make_inputs(CASE)))


def test_a_wrapped_function_belongs_to_one_checkpoint_call():
    def step(buf, mine):
        layer = ep.recompute_contexts(lambda x: forward(buf, CASE, x, mine, mine.weights).x)
        y = checkpoint(layer, leaf(mine.x), use_reentrant=True)
        with pytest.raises(ep.InvalidArgument, match=r"wrap fn anew"):
            layer(mine.x)
        y.backward(mine.grad)

    in_ranks(CASE, step)


class _Alive:
    pass


@pytest.mark.parametrize("backward", [False, True], ids=["forward only", "with backward"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_region_outlives_its_results(kind, backward):
    """Records belong to the graph and keep none: no garbage is left for the collector."""
    case = Case(num_tokens=(4,))

    def steps(buf, mine):
        regions = []
        for _ in range(5):
            alive = _Alive()
            regions.append(weakref.ref(alive))

            def layer(x, alive=alive):
                return forward(buf, case, x, mine, mine.weights).x

            y = kind(layer, leaf(mine.x))
            del alive, layer
            if backward:
                y.backward(mine.grad)
        del y
        assert not any(region() for region in regions)
        assert buf.memory().used == 0

    gc.disable()
    try:
        in_ranks(case, steps)
    finally:
        gc.enable()
