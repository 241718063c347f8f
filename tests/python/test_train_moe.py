"""examples/train_moe.py: it trains, its --check can pass and can fail, its results are written."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch

import train_moe
from moe_lm import replay, report
from moe_lm.config import Config
from moe_lm.text import Shard, Vocabulary, load_text, longest_context
from moe_lm.train import Run

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
STEPS = 16
SMALL = "--layers 2 --hidden 128 --ffn-hidden 64 --heads 2 --context 16 --batch 4 --vocab 300"
PNG = b"\x89PNG\r\n\x1a\n"


def run_example(out: pathlib.Path, arguments: str) -> tuple[str, dict[str, Any]]:
    """Runs a small training; returns what it printed and its figures."""
    command = [sys.executable, EXAMPLES / "train_moe.py", "--out", out, "--steps", str(STEPS)]
    done = subprocess.run(
        [*command, *SMALL.split(), *arguments.split()], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads((out / "report.json").read_text())


@pytest.mark.parametrize(
    ("exchange", "ranks", "experts"),
    [
        ("fp32", 2, 5),  # rank 0 owns one expert more
        ("fp32", 3, 2),  # rank 2 owns none
        ("bf16", 2, 4),
        ("fp8", 2, 4),
    ],
)
def test_training_over_ranks_and_in_one_process_give_the_same_losses(
    exchange, ranks, experts, tmp_path
):
    arguments = f"--check --exchange {exchange} --ranks {ranks} --experts {experts}"
    printed, figures = run_example(tmp_path, arguments)
    losses, check = figures["losses"], figures["check"]
    assert len(losses) == STEPS and all(len(step) == ranks for step in losses)
    means = report.step_means(losses)
    assert sum(means[-3:]) / 3 < sum(means[:3]) / 3 - 0.2
    assert check["passed"] and check["compared"] == STEPS * ranks
    if exchange == "fp32":
        assert check["equal"] == check["compared"]
    else:  # what travels was rounded indeed
        assert check["equal"] < check["compared"]
        assert 0 < check["largest_difference"] <= 0.01
    tokens = ranks * 4 * 16
    assert all(sum(layer) == 2 * tokens for step in figures["load"] for layer in step)
    assert 0 < figures["exchange_share"] < 1
    assert len(figures["sample"]) > len(train_moe.PROMPTS[0])
    assert figures["sample"].startswith(train_moe.PROMPTS[0])
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG)
    assert str(tmp_path / "loss.png") in printed.splitlines()[-1]


def off_by_one_bit(losses: list[list[float]]) -> list[list[float]]:
    """Losses of which one of the last step is the next fp32 number."""
    value = torch.tensor(losses[-1][-1], dtype=torch.float32)
    following = torch.nextafter(value, torch.tensor(math.inf)).item()
    return [*losses[:-1], [*losses[-1][:-1], following]]


@pytest.fixture
def run_with(tmp_path, monkeypatch, capsys):
    """Runs the program's main on losses that were not trained; returns status, text, check."""
    losses = torch.tensor([[5.0, 5.1], [4.0, 4.2]]).tolist()
    run = Run(losses, [[[3, 5]], [[4, 4]]], 1.0, 0.25, 4.3, [65, 66])
    monkeypatch.setattr(train_moe, "run_ranks", lambda *_: run)

    def run_main(change, *arguments: str) -> tuple[int, str, dict | None]:
        monkeypatch.setattr(train_moe, "replay", lambda *_: change(losses))
        sizes = ["--ranks=2", "--steps=2", "--layers=1", "--experts=2", "--vocab=257"]
        status = train_moe.main([*sizes, f"--out={tmp_path}", *arguments])
        figures = json.loads((tmp_path / "report.json").read_text())
        return status, capsys.readouterr().out, figures["check"]

    return run_main


def test_a_loss_that_is_one_bit_off_fails_the_program(run_with):
    status, printed, check = run_with(list, "--check")
    assert status == 0 and "passed" in printed and check["first_difference"] is None
    status, printed, check = run_with(off_by_one_bit, "--check")
    assert status == 1 and "FAILED" in printed and check["first_difference"] == 1


def test_without_check_nothing_is_compared(run_with):
    status, printed, check = run_with(off_by_one_bit)
    assert status == 0 and "  check " not in printed and check is None


@pytest.mark.parametrize(
    ("factor", "passed"), [(1.009, True), (1.011, False), (0.989, False), (math.nan, False)]
)
def test_rounded_exchange_may_change_the_loss_by_one_percent(factor, passed):
    replayed = [[4.0, 6.0], [3.0, 3.0]]
    losses = [[4.0 * factor, 6.0 * factor], [3.0 * factor, 3.0 * factor]]
    assert report.compare(losses, replayed, "fp8").passed == passed


@pytest.mark.parametrize(("scatter", "passed"), [(0.3, True), (0.5, False)])
def test_ten_steps_are_averaged_before_the_one_percent_counts(scatter, passed):
    """One step of 25 is off, by 7.5 % or 12.5 % of a loss of 4."""
    replayed = [[4.0]] * 25
    losses = [*replayed[:12], [4.0 + scatter], *replayed[13:]]
    assert report.compare(losses, replayed, "bf16").passed == passed


def test_runs_of_different_lengths_are_not_compared():
    with pytest.raises(ValueError, match="shape"):
        report.compare([[1.0]], [[1.0], [1.0]], "fp32")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ("--exchange fp8 --hidden 64", "128"),
        ("--topk 9", "topk"),
        ("--hidden 130", "heads"),
        ("--ranks 0", "ranks"),
    ],
)
def test_sizes_that_cannot_be_are_refused_before_anything_starts(arguments, word, capsys):
    with pytest.raises(SystemExit) as left:
        train_moe.main(arguments.split())
    assert left.value.code == 2 and word in capsys.readouterr().err


def test_a_context_longer_than_a_ranks_held_out_text_is_refused_before_training(tmp_path, capsys):
    status = train_moe.main(["--vocab=257", "--context=9000", f"--out={tmp_path}"])
    assert status == 2 and "context may be" in capsys.readouterr().err


def test_gradients_of_the_replays_exchange_are_those_of_finite_differences():
    """Duplicates in a token's choices, a rank without tokens, an expert without rows."""
    generator = torch.Generator().manual_seed(3)
    topk_idx = (torch.tensor([[0, 3], [3, 3], [1, 0]]), torch.empty(0, 2, dtype=torch.int64))
    routes = replay.Routes(topk_idx, [0, 2, 4])
    assert routes.counts == [[2, 1], [0, 3]]

    def exchange(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows_0, rows_1, *weights = replay.Dispatch.apply(routes, *inputs)
        return replay.Combine.apply(routes, rows_0**2, rows_1**3, *weights)

    shapes = [(3, 4), (0, 4), (3, 2), (0, 2)]
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    assert torch.autograd.gradcheck(exchange, [x.requires_grad_() for x in inputs])
    x, weights = inputs[0].detach(), inputs[2].detach()
    combined, _ = exchange(*inputs)
    powers = torch.where((topk_idx[0] < 2)[..., None], x[:, None] ** 2, x[:, None] ** 3)
    torch.testing.assert_close(combined.detach(), (weights[..., None] * powers).sum(1))


def test_tokens_give_the_text_back_also_one_that_was_not_learnt_from():
    text = load_text()
    vocabulary = Vocabulary(text[:20000], 300)
    assert len(vocabulary.pieces) == 300
    for some in (text[:20000], text[-20000:], "Größe  \t\n\n  ∑x² 12345 __init__", ""):
        tokens = vocabulary.encode(some)
        assert vocabulary.decode(tokens.tolist()) == some
        assert len(tokens) <= len(some.encode())


def test_shards_are_equal_and_do_not_overlap():
    shards = [Shard(torch.arange(103), rank, 4, seed=1) for rank in range(4)]
    assert torch.equal(torch.cat([shard.tokens for shard in shards]), torch.arange(100))
    inputs, targets = shards[2].next_batch(50, 24)
    assert torch.equal(inputs + 1, targets) and inputs.shape == (50, 24)
    assert inputs.min() == 50 and targets.max() == 74
    assert longest_context(torch.arange(1000), 2) == 24  # 50 held out, 25 a rank, one is a target
    with pytest.raises(ValueError, match="25 tokens"):
        shards[2].next_batch(1, 25)


def test_the_replays_ranks_own_the_experts_that_a_buffers_own():
    """Ten experts on four ranks, two on three."""
    for experts, ranks, owned in [(10, 4, [3, 3, 2, 2]), (2, 3, [1, 1, 0])]:
        places = replay.places(dataclasses.replace(Config(), experts=experts, ranks=ranks))
        assert [len(place.local_experts) for place in places] == owned
