"""What remains of a run: report.json, a picture, and the verdict of --check."""

import dataclasses
import json
import pathlib

import torch

from moe_lm.config import Config
from moe_lm.train import Run

TOLERANCE = 0.01  # of the smoothed loss, where what travels is rounded
WINDOW = 10  # steps: rounding sends a few tokens to other experts, so single steps scatter


@dataclasses.dataclass(frozen=True)
class Check:
    """Two runs' losses, compared."""

    bit_by_bit: bool  # was that asked for?
    passed: bool
    equal: int  # losses with the same bits
    compared: int
    largest_difference: float  # of the smoothed losses, as a share
    first_difference: int | None  # step

    def __str__(self) -> str:
        if not self.bit_by_bit:
            return (
                f"losses smoothed over {WINDOW} steps differ by at most "
                f"{self.largest_difference:.2%} ({TOLERANCE:.0%} is allowed)"
            )
        first = self.first_difference
        where = "" if first is None else f"; the first others at step {first}"
        return f"{self.equal} of {self.compared} losses are equal to the bit{where}"


def compare(run: list[list[float]], replayed: list[list[float]], exchange: str) -> Check:
    """Compares losses [steps][ranks]: bit by bit with fp32 exchange, else smoothed and to 1 %.

    Raises ValueError if the runs have different shapes.
    """
    a, b = (torch.tensor(losses, dtype=torch.float64) for losses in (run, replayed))
    if a.shape != b.shape:
        raise ValueError(f"losses of shape {tuple(a.shape)} against {tuple(b.shape)}")
    same = a == b
    different = (~same.all(dim=1)).nonzero()
    window = min(WINDOW, len(a))
    smooth_a, smooth_b = (each.mean(dim=1).unfold(0, window, 1).mean(dim=1) for each in (a, b))
    largest = ((smooth_a - smooth_b).abs() / smooth_b).max().item()
    bit_by_bit = exchange == "fp32"
    return Check(
        bit_by_bit=bit_by_bit,
        # NaN is neither equal nor within any tolerance.
        passed=bool(same.all()) if bit_by_bit else largest <= TOLERANCE,
        equal=int(same.sum()),
        compared=same.numel(),
        largest_difference=largest,
        first_difference=int(different[0]) if len(different) else None,
    )


def step_means(losses: list[list[float]]) -> list[float]:
    """The mean over the ranks, step by step."""
    return [sum(step) / len(step) for step in losses]


def tokens_per_s(config: Config, run: Run) -> float:
    """Training tokens of all ranks a second."""
    return config.steps * config.ranks * config.tokens_per_rank / run.seconds


def write_json(
    path: pathlib.Path, config: Config, run: Run, sample: str, check: Check | None
) -> None:
    """All figures of a run; see `Run` and `Check` for their meaning and shapes."""
    figures = {
        "config": dataclasses.asdict(config),
        **dataclasses.asdict(run),
        "tokens_per_s": tokens_per_s(config, run),
        "sample": sample,
        "check": None if check is None else dataclasses.asdict(check),
    }
    path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def draw(path: pathlib.Path, config: Config, run: Run, replayed: list[list[float]] | None) -> None:
    """A PNG: the loss on the left, each layer's expert load over time on the right."""
    from matplotlib.figure import Figure  # slow to load, and every rank's process loads this file

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subfigures(1, 2)
    axes = left.subplots()
    axes.plot(step_means(run.losses), label=f"{config.ranks} ranks, {config.exchange} exchange")
    if replayed is not None:
        axes.plot(step_means(replayed), "--", label="one process, without ep")
    axes.axhline(run.held_out_loss, color="grey", linestyle=":", label="held-out text, at the end")
    axes.set(title="Loss", xlabel="step", ylabel="nats per token")
    axes.legend()
    load = torch.tensor(run.load, dtype=torch.float32)  # [steps, layers, experts]
    relative = load / load.mean(dim=2, keepdim=True)
    layers = right.subplots(config.layers, 1, sharex=True, squeeze=False)[:, 0]
    for layer, axes in enumerate(layers):
        image = axes.imshow(
            relative[:, layer].T.numpy(), aspect="auto", interpolation="nearest", vmin=0, vmax=2
        )
        axes.set(ylabel=f"layer {layer}\nexpert")
    layers[-1].set(xlabel="step")
    right.suptitle("Tokens per expert (1 = even)")
    right.colorbar(image, ax=list(layers), extend="max")
    figure.savefig(path, dpi=120)
