"""Seeded routings: the ones that routers make, and the ones that break libraries."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Draw = Callable[[np.random.Generator, int, int, tuple[int, ...], int], np.ndarray]


def seeded(*numbers: int) -> np.random.Generator:
    """A stream of its own for each tuple of numbers."""
    return np.random.Generator(np.random.PCG64(list(numbers)))


def _distinct(rng: np.random.Generator, num_tokens: int, k: int, popularity: np.ndarray):
    """K experts a token, distinct while there are enough, by the Gumbel trick."""
    num_experts = len(popularity)
    keys = np.log(popularity) + rng.gumbel(size=(num_tokens, num_experts))
    ids = np.argsort(-keys, axis=1)[:, :k]
    more = rng.integers(num_experts, size=(num_tokens, max(0, k - num_experts)))
    return np.concatenate([ids, more], axis=1)


def _uniform(rng, num_tokens, k, offsets, seed):
    return _distinct(rng, num_tokens, k, np.ones(offsets[-1]))


def _skewed(rng, num_tokens, k, offsets, seed):
    """Log-normal popularity, the same on all ranks."""
    return _distinct(rng, num_tokens, k, seeded(seed, 1).lognormal(0, 2, offsets[-1]))


def _one_rank(rng, num_tokens, k, offsets, seed):
    """Everything to the rank that owns most experts."""
    owner = int(np.argmax(np.diff(offsets)))
    num_local = offsets[owner + 1] - offsets[owner]
    return offsets[owner] + _distinct(rng, num_tokens, k, np.ones(num_local))


def _nobody(rng, num_tokens, k, offsets, seed):
    return np.full((num_tokens, k), -1)


def _mixed(rng, num_tokens, k, offsets, seed):
    """A third of the slots and a quarter of the tokens have no expert."""
    ids = _uniform(rng, num_tokens, k, offsets, seed)
    ids[rng.random(ids.shape) < 1 / 3] = -1
    ids[rng.random(num_tokens) < 1 / 4] = -1
    return ids


def _duplicates(rng, num_tokens, k, offsets, seed):
    """Few experts, drawn with replacement."""
    few = min(3, offsets[-1])
    first = seeded(seed, 2).integers(offsets[-1])
    return (first + rng.integers(few, size=(num_tokens, k))) % offsets[-1]


def _one_expert(rng, num_tokens, k, offsets, seed):
    """One slot of each token names the same expert; the other slots none."""
    ids = np.full((num_tokens, k), -1)
    ids[np.arange(num_tokens), rng.integers(k, size=num_tokens)] = seeded(seed, 2).integers(
        offsets[-1]
    )
    return ids


ROUTINGS: dict[str, Draw] = {
    "uniform": _uniform,
    "skewed": _skewed,
    "one_rank": _one_rank,
    "nobody": _nobody,
    "mixed": _mixed,
    "duplicates": _duplicates,
    "one_expert": _one_expert,
}


def draw_ids(
    routing: str, rank: int, num_tokens: int, num_topk: int, offsets: tuple[int, ...], *, seed: int
) -> np.ndarray:
    """[T, K] expert ids of one rank's tokens; -1 is no expert."""
    rng = seeded(seed, 3, rank)
    return ROUTINGS[routing](rng, num_tokens, num_topk, offsets, seed)
