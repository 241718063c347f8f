"""What compiled graphs share with eager calls: handles, buffers, memory, shapes."""

from __future__ import annotations

import gc
import pickle

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import ep
import ep.functional
import ep.nn
from ep import _packing
from python.calls import recording
from python.functional_support import Case, assert_same, leaf, make_buffer, make_inputs

pytestmark = pytest.mark.torch_versions

CASE = Case(num_tokens=(5,), num_experts=4, num_topk=2, hidden=8)
GRAPH = {"backend": "aot_eager", "fullgraph": True}


@pytest.fixture
def buf():
    torch._dynamo.reset()
    with make_buffer(ep.Communicator.single(), CASE, max_tokens_per_rank=8) as buf:
        yield buf


def step(buf, x, ids, weights):
    out = ep.functional.dispatch(buf, x, ids, weights, layout="expert")
    return ep.functional.combine(buf, out.x.sin(), out.handle, weights=weights).x


def run(function, mine, **changes):
    """The result and the gradients of x and weights."""
    given = {"x": mine.x, "ids": mine.ids, "weights": mine.weights} | changes
    x, weights = leaf(given["x"]), leaf(given["weights"])
    y = function(x, given["ids"], weights)
    y.backward(torch.ones_like(y))
    return y.detach(), x.grad, weights.grad


def assert_same_runs(got, want):
    for name, mine, wanted in zip(("y", "x.grad", "weights.grad"), got, want, strict=True):
        assert_same(name, mine, wanted)


# --- shapes and dtypes ----------------------------------------------------------------------------

SHAPES = [
    {},
    {"layout": "expert", "expert_alignment": 4},
    {"layout": "rank", "exact": False},
    {"layout": "expert", "exact": False, "max_tokens": 5, "ids": "global"},
    {"layout": "expert", "max_rows": 7, "overflow": "drop"},
    {"quant": "fp8_block128"},
    {"quant": "fp8_block128_ue8m0", "layout": "expert", "exact": False},
]


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("options", SHAPES, ids=str)
def test_shapes_strides_and_dtypes_are_known_before_the_call(options, ids):
    """Of every result of the operations, also of replays, with and without weights (K4, S2)."""
    case = Case(num_tokens=(5,), num_experts=3, num_topk=2, hidden=640)
    mine = make_inputs(case)[0]
    check = {"test_utils": ("test_schema", "test_faketensor")}
    scales = None if "quant" in options else torch.ones(5, 3, dtype=torch.float16)
    x = mine.x if scales is None else (mine.x * 8).to(torch.uint8)
    with make_buffer(ep.Communicator.single(), case, token_bytes=4096) as buf:
        start = (buf._token, buf._name, x)
        extras = [mine.x[:, :4].contiguous(), mine.ids.clone()]
        given = (mine.ids.to(ids), mine.weights.bfloat16(), scales, extras, [])
        arguments = (*start, *given, -1, _packing.encode(options))
        torch.library.opcheck(torch.ops.ep.dispatch, arguments, **check)
        got = _packing.named(torch.ops.ep.dispatch(*arguments))
        handle = [got[name] for name in ("header", "ids", "weights", "routes", "plan")]
        rows = got["x"].shape[0]
        facts = {"layout": options.get("layout", "rank"), "recorded_weights": True}
        replay = (*start, None, None, scales, [], handle, rows, _packing.encode(facts))
        torch.library.opcheck(torch.ops.ep.dispatch, replay, **check)
        home = torch.ones(got["topk_weights"].shape)
        back = (torch.ones(rows, 8), None, None, home, [torch.ones(5, 8).bfloat16()], handle)
        torch.library.opcheck(
            torch.ops.ep.combine,
            (buf._token, buf._name, None, *back, _packing.encode({"out_dtype": "bfloat16"})),
            **check,
        )


def test_the_number_of_tokens_may_change(buf):
    """One graph for many T, down to none; ids of either dtype, weights of bf16 (R3, R4)."""
    mine = make_inputs(CASE)[0]
    graph = torch.compile(step, **GRAPH)
    for tokens in (3, 5, 8, 0, 1):
        rng = torch.Generator().manual_seed(tokens)
        given = {
            "x": torch.randn(tokens, 8, generator=rng),
            "ids": torch.randint(-1, 4, (tokens, 2), generator=rng),
            "weights": torch.rand(tokens, 2, generator=rng),
        }
        if tokens == 1:
            given["ids"] = given["ids"].int()
        got = run(lambda *args: graph(buf, *args), mine, **given)
        assert_same_runs(got, run(lambda *args: step(buf, *args), mine, **given))
    bf16 = {"weights": mine.weights.bfloat16(), "x": mine.x.half()}
    got = run(lambda *args: graph(buf, *args), mine, **bf16)
    assert got[2].dtype == torch.bfloat16
    assert_same_runs(got, run(lambda *args: step(buf, *args), mine, **bf16))


@pytest.mark.parametrize("quant", ep.quant.formats())
def test_quantised_rows_are_dequantised_in_the_graph(quant):
    case = Case(num_tokens=(4,), hidden=128)
    mine = make_inputs(case)[0]
    torch._dynamo.reset()
    with make_buffer(ep.Communicator.single(), case) as buf:

        def quantised(x, ids, weights):
            out = ep.functional.dispatch(buf, x, ids, weights, layout="expert", quant=quant)
            rows = out.dequantize().sin()
            return ep.functional.combine(buf, rows, out.handle, weights=weights).x

        assert_same_runs(run(torch.compile(quantised, **GRAPH), mine), run(quantised, mine))


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_the_layer_compiles_whole(layout):
    """ep.nn.MoE with fixed sizes: the bits of the layer that is not compiled, in every form."""
    case = Case(num_tokens=(4,), num_experts=3, hidden=8)
    torch._dynamo.reset()
    with make_buffer(ep.Communicator.single(), case) as buf:
        layer = ep.nn.MoE(buf, 3, 2, 8, 16, layout=layout, exact=False)
        exact = ep.nn.MoE(buf, 3, 2, 8, 16, layout=layout)
        graph = torch.compile(layer, **GRAPH)
        x = make_inputs(case)[0].x
        results = []
        for forward in (graph, layer, exact):
            forward.zero_grad()
            given = leaf(x)
            y = forward(given)
            y.square().sum().backward()
            grads = [each.grad.clone() for each in forward.parameters()]
            results.append([y.detach(), given.grad, *grads])
        for got, want, near in zip(*results, strict=True):
            assert_same("compiled", got, want)
            torch.testing.assert_close(got, near)


# --- handles and order across graphs --------------------------------------------------------------


def test_handles_cross_between_graphs_and_eager_calls(buf):
    """dispatch and combine each eager or in a graph, four ways; and through pickle (K4)."""
    mine = make_inputs(CASE)[0]

    def first(x, ids, weights):
        return ep.functional.dispatch(buf, x, ids, weights, layout="expert")

    def second(rows, handle, weights):
        return ep.functional.combine(buf, rows.sin(), handle, weights=weights).x

    want = run(lambda *args: step(buf, *args), mine)
    for begin in (first, torch.compile(first, **GRAPH)):
        for end in (second, torch.compile(second, **GRAPH)):

            def both(x, ids, weights, begin=begin, end=end):
                out = begin(x, ids, weights)
                return end(out.x, out.handle, weights)

            got = run(both, mine)
            assert_same("y", got[0], want[0])
            assert_same("x.grad", got[1], want[1])
            torch.testing.assert_close(got[2], want[2])
        out = begin(mine.x, mine.ids, mine.weights)
        kept = pickle.loads(pickle.dumps(out.handle))
        back = buf.combine(out.x.sin(), kept, weights=mine.weights)
        assert_same("pickled", back.x, want[0])
        again = buf.dispatch(2 * mine.x, handle=out.handle)
        assert_same("replayed", again.x, 2 * out.x)
        assert out.handle.num_tokens == 5 and sum(out.tokens_per_expert) == out.num_rows


def test_regions_and_eager_calls_keep_the_order_of_the_code(buf):
    """A graph, an eager call, a broken graph, another graph."""
    mine = make_inputs(CASE)[0]

    def broken(x, ids, weights):
        out = ep.functional.dispatch(buf, x, ids, weights, layout="rank")
        torch._dynamo.graph_break()
        y = ep.functional.combine(buf, out.x, out.handle).x
        return step(buf, y, ids, weights)

    def several(x, ids, weights, graph=lambda f, **_: f):
        y = graph(lambda *args: step(buf, *args), **GRAPH)(x, ids, weights)
        y = step(buf, y, ids, weights)
        y = graph(broken, backend="aot_eager")(y, ids, weights)
        return graph(lambda *args: step(buf, *args), **GRAPH)(y, ids, weights)

    results = []
    for graph in (lambda f, **_: f, torch.compile):
        with recording(buf) as calls:
            got = run(lambda *args, graph=graph: several(*args, graph=graph), mine)
        results.append((calls.sequence(), got))
    assert results[1][0] == results[0][0]
    assert len(results[0][0]) == 20
    assert_same_runs(results[1][1], results[0][1])


def test_weights_edited_between_dispatch_and_combine(buf):
    """In a graph: the gradient is that of the weights as combine got them."""
    mine = make_inputs(CASE)[0]

    def edited(x, ids, weights):
        weights = weights * 1
        out = ep.functional.dispatch(buf, x, ids, weights, layout="expert")
        weights.mul_(2)
        return ep.functional.combine(buf, out.x.sin(), out.handle, weights=weights).x

    assert_same_runs(run(torch.compile(edited, **GRAPH), mine), run(edited, mine))


def test_checkpointed_graphs_replay(buf):
    """checkpoint() around a compiled function, and a selective one that saves both operations."""
    mine = make_inputs(CASE)[0]
    saved = (torch.ops.ep.dispatch.default, torch.ops.ep.combine.default)

    def policy(_ctx, op, *_args, **_kwargs):
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts():
        return create_selective_checkpoint_contexts(policy)

    want = run(lambda *args: step(buf, *args), mine)
    compiled = torch.compile(lambda *args: step(buf, *args), **GRAPH)
    forms = (
        (compiled, ep.recompute_contexts, "dispatch combine replay combine replay combine"),
        (lambda *args: step(buf, *args), contexts, "dispatch combine replay combine"),
    )
    for function, context_fn, names in forms:
        with recording(buf) as calls:
            got = run(
                lambda *args, f=function, c=context_fn: checkpoint(
                    f, *args, use_reentrant=False, context_fn=c
                ),
                mine,
            )
        assert_same_runs(got, want)
        assert " ".join(calls.names()) == names


# --- what lives how long --------------------------------------------------------------------------


def test_a_buffer_that_was_closed_since_it_was_compiled(buf):
    """The eager call's error, forward and backward."""
    mine = make_inputs(CASE)[0]
    graph = torch.compile(step, **GRAPH)
    y = graph(buf, leaf(mine.x), mine.ids, mine.weights)
    buf.close()
    with pytest.raises(ep.Error, match="closed") as eager:
        step(buf, mine.x, mine.ids, mine.weights)
    with pytest.raises(ep.Error) as compiled:
        graph(buf, leaf(mine.x), mine.ids, mine.weights)
    assert str(compiled.value) == str(eager.value)
    with pytest.raises(ep.Error, match="closed"):
        y.sum().backward()


def test_only_the_output_is_kept():
    """Its values stay, its backward says that the buffer is gone (Q5)."""
    mine = make_inputs(CASE)[0]
    torch._dynamo.reset()
    buf = make_buffer(ep.Communicator.single(), CASE)
    graph = torch.compile(lambda buf, *args: step(buf, *args), **GRAPH)
    y = graph(buf, leaf(mine.x), mine.ids, mine.weights)
    want = y.detach().clone()
    buf.close()
    del buf
    gc.collect()
    assert_same("y", y.detach(), want)
    with pytest.raises(ep.InvalidArgument, match=r"EPBuffer .* is gone"):
        y.sum().backward()


@pytest.mark.parametrize("backward", [False, True], ids=["forward only", "with backward"])
def test_a_graph_dies_with_its_results(buf, backward):
    """The token that stays on the buffer keeps nothing: saved rows leave the arena."""
    mine = make_inputs(CASE)[0]

    def window(x, ids, weights):
        out = ep.functional.dispatch(buf, x, ids, weights, outputs="window")
        return ep.functional.combine(buf, out.x.sin(), out.handle).x

    graph = torch.compile(window, **GRAPH)
    for _ in range(3):
        y = graph(leaf(mine.x), mine.ids, leaf(mine.weights))
        assert buf.memory().used
        if backward:
            y.sum().backward()
        del y
        assert buf.memory().used == 0
