"""Errors of ep.functional, graphs walked twice or made anew, and what lives how long."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ep
import ep.functional
from python.functional_support import (
    LAYOUTS,
    Case,
    assert_same,
    assert_same_steps,
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

# --- walking a graph twice ------------------------------------------------------------------------


def test_a_second_backward_through_a_freed_graph_is_an_error():
    """On both ranks, and the next step is exact."""
    case = Case()

    def twice(buf, mine):
        y = forward(buf, case, leaf(mine.x), mine, leaf(mine.weights))
        y.x.backward(mine.grad)
        calls = buf.stats()
        with pytest.raises(RuntimeError, match="second time"):
            y.x.backward(mine.grad)
        assert buf.stats()[:2] == calls[:2]
        return run_step(buf, case, mine)

    assert_same_steps(in_ranks(case, twice), reference_step(case, make_inputs(case)))


def test_a_retained_graph_gives_the_same_gradient_again():
    case = Case()

    def twice(buf, mine):
        x, weights = leaf(mine.x), leaf(mine.weights)
        y = forward(buf, case, x, mine, weights)
        y.x.backward(mine.grad, retain_graph=True)
        y.x.backward(mine.grad)
        return x.grad, weights.grad

    want = reference_step(case, make_inputs(case))
    for (x_grad, w_grad), step in zip(in_ranks(case, twice), want, strict=True):
        assert_same("x.grad", x_grad, 2 * step.x)
        assert_same("weights.grad", w_grad, 2 * step.weights)


@pytest.mark.parametrize("of", ["combine", "dispatch"])
def test_the_gradient_of_a_gradient_is_refused(of):
    case = Case()

    def twice(buf, mine):
        x = leaf(mine.x)
        out = ep.functional.dispatch(buf, x, mine.ids, layout="expert")
        result = out.x * out.x
        if of == "combine":
            result = ep.functional.combine(buf, result, out.handle).x
        [grad] = torch.autograd.grad(result.sum(), [x], create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()

    in_ranks(case, twice)


# --- errors ---------------------------------------------------------------------------------------


def test_rows_changed_in_place_after_combine_are_noticed():
    """The gradient of weights needs the rows as they were: an error on the rank that changed them,
    PeerError on the other, and the next step is exact."""
    case = Case()

    def changed(buf, mine):
        weights = leaf(mine.weights)
        out = ep.functional.dispatch(buf, leaf(mine.x), mine.ids, weights, layout="expert")
        rows = out.x * 1.0
        y = ep.functional.combine(buf, rows, out.handle, weights=weights)
        if buf.rank == 0:
            rows.add_(1)
        wanted, text = (RuntimeError, "inplace") if buf.rank == 0 else (ep.PeerError, "refused")
        with pytest.raises(wanted, match=text):
            y.x.backward(mine.grad)
        return run_step(buf, case, mine)

    assert_same_steps(in_ranks(case, changed), reference_step(case, make_inputs(case)))


def test_an_exception_in_one_rank_s_backward_reaches_the_other_ranks():
    """Rank 0's expert fails in its backward and aborts; rank 1 waits in the dispatch's."""
    case = Case()

    def fails(buf, mine):
        x = leaf(mine.x)
        out = ep.functional.dispatch(buf, x, mine.ids, layout="expert")
        if buf.rank == 0:
            out.x.register_hook(lambda grad: 1 / 0)
        y = ep.functional.combine(buf, out.x, out.handle)
        if buf.rank != 0:
            with pytest.raises(ep.PeerError, match="division"):
                y.x.backward(mine.grad)
            return
        try:
            y.x.backward(mine.grad)
        except ZeroDivisionError as error:
            buf.abort(str(error))

    in_ranks(case, fails)


def test_async_op_is_refused_with_the_reason():
    """On rank 0 only: PeerError on the other rank; the next step is exact."""
    case = Case()

    def refused(buf, mine):
        wanted, text = (
            (ep.InvalidArgument, "async_op=True: autograd")
            if buf.rank == 0
            else (ep.PeerError, "refused")
        )
        mode = {"async_op": True} if buf.rank == 0 else {}
        for x in (mine.x, leaf(mine.x)):
            with pytest.raises(wanted, match=text):
                ep.functional.dispatch(buf, x, mine.ids, **mode)
            out = ep.functional.dispatch(buf, x, mine.ids)
            with pytest.raises(wanted, match=text):
                ep.functional.combine(buf, out.x, out.handle, **mode)
        return run_step(buf, case, mine)

    assert_same_steps(in_ranks(case, refused), reference_step(case, make_inputs(case)))


@pytest.mark.parametrize("what", ["extras", "scales", "opaque x", "out"])
def test_a_gradient_that_would_be_lost_is_refused(what):
    """Extras and scales that require grad, x that travels as bytes, out= of the caller."""
    case = Case(num_tokens=(2,))

    def refused(buf, mine):
        x = leaf(mine.x)
        options = {
            "extras": {"extras": [leaf(mine.x)]},
            "scales": {"scales": leaf(mine.x)},
            "opaque x": {"scales": mine.x},
            "out": {"out": mine.x},
        }[what]
        with pytest.raises(ep.InvalidArgument, match=r"grad|differentiable"):
            ep.functional.dispatch(buf, x, mine.ids, **options)
        out = ep.functional.dispatch(buf, x, mine.ids)
        if what == "out":
            with pytest.raises(ep.InvalidArgument, match="autograd"):
                ep.functional.combine(buf, out.x, out.handle, out=torch.zeros(2, 8))

    in_ranks(case, refused)


def test_the_buffer_s_own_calls_refuse_inputs_that_require_grad():
    """They would cut the graph silently; the text says what to use instead."""
    case = Case()

    def refused(buf, mine):
        x = leaf(mine.x)
        with pytest.raises(ep.InvalidArgument, match=r"x requires grad: use ep\.functional"):
            buf.dispatch(x, mine.ids)
        out = ep.functional.dispatch(buf, x, mine.ids)
        with pytest.raises(ep.InvalidArgument, match=r"requires grad: use ep\.functional"):
            buf.combine(out.x, out.handle)
        with torch.no_grad():
            plain = buf.dispatch(x, mine.ids)
        assert_same("rows", plain.x, out.x.detach())

    in_ranks(case, refused)


def test_reserved_names_say_what_would_do():
    case = Case(num_tokens=(2,))

    def reserved(buf, mine):
        with pytest.raises(ep.Unsupported, match="split"):
            ep.functional.dispatch(buf, leaf(mine.x), mine.ids, split=True)

    in_ranks(case, reserved)


# --- recomputation and lifetimes ------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_plain_checkpointing_has_the_same_bits(layout):
    """Non-reentrant: the recomputed calls are the same on all ranks, also where one skips."""
    case = Case(layout=layout)
    inputs = to_rank_0(case, make_inputs(case))

    def step(buf, _):
        mine = inputs[buf.rank]
        x, weights = leaf(mine.x), leaf(mine.weights)

        def layer(x, weights):
            return forward(buf, case, x, mine, weights, skip=True).x

        for _ in range(2):  # a second layer behind it
            y = checkpoint(layer, x, weights, use_reentrant=False)
        y.backward(mine.grad)
        return x.grad, weights.grad

    for (x_grad, w_grad), want in zip(
        in_ranks(case, step), reference_step(case, inputs), strict=True
    ):
        assert_same("x.grad", x_grad, want.x)
        assert_same("weights.grad", w_grad, want.weights)


class _Marker(torch.autograd.Function):
    """An identity whose node is alive as long as `alive` is."""

    @staticmethod
    def forward(ctx, alive, x):
        ctx.alive = alive
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return None, grad


class _Alive:
    pass


@pytest.mark.parametrize("backward", [False, True], ids=["forward only", "with backward"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_graph_outlives_its_results(layout, backward):
    """50 iterations, results rebound and not deleted, no garbage collection: at most one graph is
    alive besides the one being made, and the arena is empty at the end."""
    case = Case(layout=layout, num_tokens=(4,))

    def steps(buf, mine):
        nodes = []
        for _ in range(50):
            alive = _Alive()
            nodes.append(weakref.ref(alive))
            x = _Marker.apply(alive, leaf(mine.x))
            del alive
            weights = leaf(mine.weights)
            out = ep.functional.dispatch(buf, x, mine.ids, weights, layout=layout, ids="global")
            y = combine_rows(buf, case, out, weights)
            if backward:
                y.x.backward(mine.grad)
            assert sum(node() is not None for node in nodes) <= 2
        del x, out, y
        assert not any(node() is not None for node in nodes)
        assert buf.memory().used == 0

    gc.disable()
    try:
        in_ranks(case, steps)
    finally:
        gc.enable()


def test_a_handle_kept_is_all_that_is_kept_after_backward():
    """What the graph saved of rows and weights is freed, though result and handle live on."""
    case = Case(num_tokens=(4,))

    def step(buf, mine):
        weights = leaf(mine.weights)
        out = ep.functional.dispatch(buf, leaf(mine.x), mine.ids, weights, layout="expert")
        rows = out.x * 2
        saved = weakref.ref(rows)
        y = ep.functional.combine(buf, rows, out.handle, weights=weights)
        del rows
        y.x.backward(mine.grad)
        assert saved() is None
        assert out.handle.num_tokens == 4

    in_ranks(case, step)
