"""What `bench` says of its measurements: summaries, tables, JSON and a picture."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import ep
from ep.cli import Failure, machine
from ep.cli.bench_case import Case

MEMCPY, MEMCPY_OUT = "memcpy", "memcpy_out"


class Spread(NamedTuple):
    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        ordered = sorted(values)

        def at(share: float) -> float:  # between neighbours, linearly
            position = share * (len(ordered) - 1)
            low = int(position)
            high = min(low + 1, len(ordered) - 1)
            return ordered[low] + (position - low) * (ordered[high] - ordered[low])

        return cls(median(ordered), at(0.1), at(0.9))


@dataclass(frozen=True)
class Measured:
    """A case's result: us[contender][round][rank]."""

    case: Case
    tensors: str  # the library they are of, and its version
    rows_by_rank: list[int]
    us: dict[str, list[list[float]]]
    skipped: dict[str, str]  # contender: why it was not measured
    verified: int | None  # values compared; None: without --verify


@dataclass(frozen=True)
class Summary:
    num_bytes: int  # of all ranks
    us: Spread  # of the slowest rank, over rounds
    gb_per_s: float  # all ranks together, 10^9
    of_memcpy: float | None  # time / memcpy's, median over rounds
    gloo_over: Spread | None  # gloo's time / this one's, over rounds


def summarise(measured: Measured) -> dict[str, Summary]:
    """By contender. A ratio is taken within a round, between the slowest ranks."""
    slowest = {name: [max(r) for r in rounds] for name, rounds in measured.us.items()}
    return {name: _summary(measured, name, slowest) for name in measured.us}


def _summary(measured: Measured, name: str, slowest: Mapping[str, list[float]]) -> Summary:
    is_out = name.endswith(("combine", MEMCPY_OUT))
    row_bytes = measured.case.combine_row_bytes
    if not is_out and not name.startswith("gloo"):
        row_bytes = measured.case.dispatch_row_bytes
    num_bytes = sum(measured.rows_by_rank) * row_bytes
    us = Spread.of(slowest[name])

    def over(other: str) -> list[float] | None:
        if other not in slowest:
            return None
        return [b / a for a, b in zip(slowest[name], slowest[other], strict=True)]

    memcpy = over(MEMCPY_OUT if is_out and MEMCPY_OUT in slowest else MEMCPY)
    gloo = over(f"gloo_{name}")
    return Summary(
        num_bytes,
        us,
        num_bytes / us.median / 1e3,
        median(1 / r for r in memcpy) if memcpy else None,
        Spread.of(gloo) if gloo else None,
    )


def conditions() -> dict[str, Any]:
    """The machine and the software that a figure belongs to."""
    return {
        "cpu": machine.cpu_field("model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "ep": ep.__version__,
    }


def conditions_line() -> str:
    c = conditions()
    return (
        f"{c['cpu']}, {c['cores']} core{'' if c['cores'] == 1 else 's'}, Linux {c['kernel']}, "
        f"Python {c['python']}, ep {c['ep']}"
    )


def print_measured(measured: Measured) -> None:
    print(f"\n{measured.case.headline()}, {measured.tensors}")
    print(
        f"{'contender':<14}{'MB':>10}{'median us':>12}{'p10':>12}{'p90':>12}{'GB/s':>8}"
        f"{'x memcpy':>10}{'x gloo [p10, p90]':>24}"
    )
    for name, s in summarise(measured).items():
        memcpy = "-" if s.of_memcpy is None else f"{s.of_memcpy:.3f}"
        gloo = s.gloo_over
        times = "-" if gloo is None else f"{gloo.median:.1f} [{gloo.p10:.1f}, {gloo.p90:.1f}]"
        print(
            f"{name:<14}{s.num_bytes / 1e6:>10.3f}{s.us.median:>12.1f}{s.us.p10:>12.1f}"
            f"{s.us.p90:>12.1f}{s.gb_per_s:>8.2f}{memcpy:>10}{times:>24}"
        )
    for name, why in measured.skipped.items():
        print(f"{name}: skipped, {why}")
    if measured.verified is not None:
        print(f"verify: ok ({measured.verified} values)")


def json_of(measured: Measured) -> dict[str, Any]:
    contenders = {}
    for name, s in summarise(measured).items():
        contenders[name] = {
            "bytes": s.num_bytes,
            **spread_json(s.us),
            "gb_per_s": s.gb_per_s,
            "of_memcpy": s.of_memcpy,
            "gloo_over": s.gloo_over._asdict() if s.gloo_over else None,
            "us_by_round_and_rank": measured.us[name],
        }
    return {
        "case": asdict(measured.case),
        "tensors": measured.tensors,
        "rows_by_rank": measured.rows_by_rank,
        "verified_values": measured.verified,
        "skipped": measured.skipped,
        "contenders": contenders,
    }


def spread_json(us: Spread) -> dict[str, float]:
    return {"median_us": us.median, "p10_us": us.p10, "p90_us": us.p90}


def write_json(path: str, report: dict[str, Any]) -> None:
    """Writes to a file, or with "-" to standard output."""
    text = json.dumps({"program": "python -m ep bench", **report}, indent=1) + "\n"
    if path == "-":
        print(text, end="")
    else:
        Path(path).write_text(text, encoding="utf-8")


def plotter() -> Any:
    """matplotlib's pyplot, drawing to files only. Raises Failure without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise Failure(f"--plot needs matplotlib ({error}): pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot(path: str, bars: dict[str, dict[str, Spread]], unit: str) -> None:
    """Draws a group of bars for each title: medians, with p10 to p90 as the error bar."""
    pyplot = plotter()
    figure, axes = pyplot.subplots(
        1, len(bars), figsize=(1 + 5 * len(bars), 5), squeeze=False, layout="constrained"
    )
    for axis, (title, by_name) in zip(axes[0], bars.items(), strict=True):
        medians = [s.median for s in by_name.values()]
        below = [s.median - s.p10 for s in by_name.values()]
        above = [s.p90 - s.median for s in by_name.values()]
        bar = axis.bar(range(len(by_name)), medians, yerr=(below, above), capsize=4)
        axis.bar_label(bar, fmt="{:.4g}")
        axis.set_xticks(range(len(by_name)), by_name, rotation=30, ha="right")
        axis.set_title(title, fontsize=9)
        axis.set_ylabel(f"{unit}, median [p10, p90]")
    figure.suptitle(conditions_line(), fontsize=8)
    figure.savefig(path)
    pyplot.close(figure)
