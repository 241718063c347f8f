"""DDP and FSDP around an ep.nn.MoE train as one process does that holds all tokens and experts."""

from __future__ import annotations

import pytest
import torch

import ep.testing
from python.parallel_training import TOKENS, train

pytestmark = pytest.mark.torch_versions


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_losses_are_those_of_one_process(kind, tmp_path):
    """Of the first step to the last bits, and of the later ones within the rounding of gradients,
    which are added over the ranks in another order. Rank 1 has no tokens."""
    parts = [7, 0, 5] if kind == "fsdp" else [8, 4]
    one = ep.testing.run(train, 1, args=("one process", [TOKENS], ""))
    how = {"how": "processes", "timeout_s": 120}
    ranks = ep.testing.run(train, len(parts), **how, args=(kind, parts, str(tmp_path / "store")))
    losses = torch.tensor(ranks).sum(0)
    want = torch.tensor(one[0])
    torch.testing.assert_close(losses, want, rtol=1e-6, atol=0)
    assert len(set(want.tolist())) == len(want)
