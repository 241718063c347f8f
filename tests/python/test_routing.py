"""ep.routing.from_map: a map of booleans becomes top-k form."""

import numpy as np
import pytest
import torch

import ep

pytestmark = pytest.mark.torch_versions

MAP = np.array([[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 0]], dtype=bool)
PROBS = np.array([[9, 0.25, 9, 0.5], [9, 9, 9, 9], [0.125, 2, -3, 9]], dtype=np.float32)
IDX = [[1, 3, -1], [-1, -1, -1], [0, 1, 2]]
WEIGHTS = [[0.25, 0.5, 0], [0, 0, 0], [0.125, 2, -3]]


def test_numpy_gives_experts_ascending_then_blanks():
    idx, weights = ep.routing.from_map(MAP, PROBS, 3)
    assert type(idx) is np.ndarray and idx.dtype == np.int64 and idx.tolist() == IDX
    assert type(weights) is np.ndarray and weights.dtype == np.float32
    assert weights.tolist() == WEIGHTS


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_torch_takes_every_float(dtype):
    probs = torch.from_numpy(PROBS).to(getattr(torch, dtype))
    idx, weights = ep.routing.from_map(torch.from_numpy(MAP), probs, 3)
    assert idx.dtype == torch.int64 and idx.tolist() == IDX
    assert weights.dtype == torch.float32 and weights.tolist() == WEIGHTS


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_numpy_takes_other_floats(dtype):
    _, weights = ep.routing.from_map(MAP, PROBS.astype(dtype), 3)
    assert weights.dtype == np.float32 and weights.tolist() == WEIGHTS


def test_gradients_reach_probs_where_the_map_is_set_and_only_there():
    probs = torch.from_numpy(PROBS).clone().requires_grad_()
    _, weights = ep.routing.from_map(torch.from_numpy(MAP), probs, 4)
    factor = torch.arange(12, dtype=torch.float32).reshape(3, 4) + 1
    (weights * factor).sum().backward()
    assert probs.grad.tolist() == [[0, 1, 0, 2], [0, 0, 0, 0], [9, 10, 11, 0]]


def test_nan_where_the_map_is_not_set_reaches_nobody():
    probs = np.where(MAP, PROBS, np.nan)
    _, weights = ep.routing.from_map(MAP, probs, 3)
    assert weights.tolist() == WEIGHTS


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
def test_strided_inputs(kind):
    wide_map, wide_probs = np.repeat(MAP, 2, axis=1), np.repeat(PROBS, 2, axis=1)
    idx, weights = ep.routing.from_map(kind(wide_map)[:, ::2], kind(wide_probs)[:, ::2], 3)
    assert idx.tolist() == IDX and weights.tolist() == WEIGHTS


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
def test_no_tokens(kind):
    idx, weights = ep.routing.from_map(kind(MAP[:0]), kind(PROBS[:0]), 2)
    assert tuple(idx.shape) == (0, 2) and tuple(weights.shape) == (0, 2)


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
def test_k_above_the_number_of_experts_is_filled_up(kind):
    idx, weights = ep.routing.from_map(kind(MAP), kind(PROBS), 6)
    assert idx.tolist() == [row + [-1] * 3 for row in IDX]
    assert weights.tolist() == [row + [0] * 3 for row in WEIGHTS]


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
def test_a_token_with_more_than_k_experts_is_named(kind):
    with pytest.raises(ep.InvalidArgument, match=r"token 2 has 3 experts, more than k=2"):
        ep.routing.from_map(kind(MAP), kind(PROBS), 2)


def test_random_maps_agree_with_a_loop():
    rng = np.random.default_rng(5)
    routing_map = rng.random((50, 16)) < 0.2
    probs = rng.random((50, 16))
    k = int(routing_map.sum(axis=1).max())
    idx, weights = ep.routing.from_map(routing_map, probs, k)
    torch_idx, torch_weights = ep.routing.from_map(
        torch.from_numpy(routing_map), torch.from_numpy(probs), k
    )
    for t in range(50):
        experts = [e for e in range(16) if routing_map[t, e]]
        blanks = k - len(experts)
        assert idx[t].tolist() == experts + [-1] * blanks
        expected = [np.float32(probs[t, e]) for e in experts] + [0] * blanks
        assert weights[t].tolist() == expected
    assert np.array_equal(torch_idx.numpy(), idx)
    assert np.array_equal(torch_weights.numpy(), weights)


@pytest.mark.parametrize(
    ("routing_map", "probs", "k", "error", "text"),
    [
        (MAP, PROBS[:2], 3, ep.InvalidArgument, r"\(3, 4\), probs \(2, 4\)"),
        (MAP[0], PROBS[0], 3, ep.InvalidArgument, r"\(4,\).*\[T, E\]"),
        (MAP.astype(np.int64), PROBS, 3, ep.InvalidArgument, "int64; it must be bool"),
        (MAP, PROBS.astype(np.int32), 3, ep.InvalidArgument, "int32; it must be a floating"),
        (MAP, PROBS.astype(complex), 3, ep.InvalidArgument, "complex128"),
        (MAP, PROBS, 0, ep.InvalidArgument, "k=0"),
        (MAP, PROBS, 2.0, TypeError, "float"),
        (MAP, torch.from_numpy(PROBS), 3, TypeError, "Tensor.*ndarray"),
        (torch.from_numpy(MAP), PROBS, 3, TypeError, "ndarray.*Tensor"),
        (MAP.tolist(), PROBS, 3, TypeError, "list"),
        (torch.from_numpy(MAP).int(), torch.from_numpy(PROBS), 3, ep.InvalidArgument, "int32"),
        (torch.from_numpy(MAP), torch.from_numpy(PROBS).int(), 3, ep.InvalidArgument, "int32"),
        (
            torch.from_numpy(MAP),
            torch.from_numpy(PROBS).to("meta"),
            3,
            ep.InvalidArgument,
            "cpu, probs on meta",
        ),
    ],
)
def test_wrong_arguments_are_named(routing_map, probs, k, error, text):
    with pytest.raises(error, match=text):
        ep.routing.from_map(routing_map, probs, k)
