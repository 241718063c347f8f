"""Activations of many layers, kept for one backward: whose memory they are."""

from __future__ import annotations

import pytest

import ep
import ep.functional
from python.functional_support import Case, assert_same, in_ranks, leaf

LAYERS = 60
CASE = Case(num_tokens=(6, 5), num_experts=4, num_topk=2, hidden=64)
# Two worst cases of 2 x 6 tokens' rows of 64 fp32, each beside its combine's.
SMALL = {"arena_bytes": 4 * 2 * 6 * 2 * 64 * 4 + (1 << 14)}
ROOMY = {"arena_bytes": 1 << 24}


def stack(buf, x, mine, outputs):
    for _ in range(LAYERS):
        out = ep.functional.dispatch(buf, x, mine.ids, layout="expert", outputs=outputs)
        # sin saves the rows that it gets
        x = ep.functional.combine(buf, out.x.sin(), out.handle).x
    return x


def test_the_caller_s_allocator_keeps_the_activations_of_sixty_layers():
    """outputs="caller", the default: the arena stays as empty as after one layer."""

    def step(buf, mine):
        x = leaf(mine.x)
        y = stack(buf, x, mine, "caller")
        assert buf.memory().used == 0
        assert buf.memory().peak <= SMALL["arena_bytes"]
        y.sum().backward()
        calls = buf.stats()
        assert (calls.dispatches, calls.combines) == (2 * LAYERS, 2 * LAYERS)
        assert calls.window_outputs == 0
        return x.grad

    small = in_ranks(CASE, step, **SMALL)
    roomy = in_ranks(CASE, window_step, **ROOMY)
    for got, want in zip(small, roomy, strict=True):
        assert got.any()
        assert_same("x.grad", got, want)


def window_step(buf, mine):
    x = leaf(mine.x)
    y = stack(buf, x, mine, "window")
    assert buf.memory().used > SMALL["arena_bytes"]
    y.sum().backward()
    return x.grad


def test_windows_that_are_full_say_so_on_all_ranks():
    """outputs="window": CapacityError in the layer that finds no room, with its numbers; when the
    graph is dropped the next step is exact."""

    def step(buf, mine):
        x = leaf(mine.x)
        with pytest.raises(ep.CapacityError, match="arena") as full:
            stack(buf, x, mine, "window")
        assert full.value.needed > full.value.available
        layers = buf.stats().combines
        del full
        again = leaf(mine.x)
        stack(buf, again, mine, "caller").sum().backward()
        return layers, again.grad

    results = in_ranks(CASE, step, **SMALL)
    assert results[0][0] == results[1][0] < LAYERS
    for (_, got), want in zip(
        results, in_ranks(CASE, window_step, arena_bytes=1 << 24), strict=True
    ):
        assert_same("x.grad", got, want)
