"""Times dispatch and combine between processes, beside memcpy and gloo.

In every round all contenders run in turn behind a barrier, in an order that is shuffled anew. Time
runs from the moment the last rank reached the barrier; a contender's time is that of the slowest
rank, a ratio is the median over rounds of the ratio within a round.

MB        rows received times row bytes, of all ranks, in 10^6: the same for both halves of bf16
memcpy    each rank copies as many bytes from private memory into its window; memcpy_out: those of
          combine, where a format makes the halves differ
x memcpy  time / memcpy's time
x gloo    how many times faster than the same exchange over torch.distributed's gloo, which sends
          bf16 rows whatever the format
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from contextlib import redirect_stdout
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from ep import quant
from ep.cli import Failure, bench_report
from ep.cli.bench_case import Case

_CONTENDERS = ("dispatch", "combine", "memcpy", "gloo_dispatch", "gloo_combine")
_FORMATS = ("none", *quant.formats())
_LAYOUTS = ("rank", "expert")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def add(group: argparse._ArgumentGroup, name: str, kind: Any, default: str, text: str) -> None:
        group.add_argument(
            f"--{name}", type=kind, default=default, metavar="N", help=f"{text} [%(default)s]"
        )

    swept = parser.add_argument_group("lists (2,4): every combination is measured")
    add(swept, "ranks", _numbers, "2", "processes")
    add(swept, "tokens", _numbers, "2048", "tokens of each rank")
    add(swept, "hidden", _numbers, "7168", "elements of a token")
    _add_names(swept, "format", _FORMATS, "none", "what dispatch makes of bf16 rows")
    of_all = parser.add_argument_group("of every case")
    add(of_all, "topk", _number, "8", "experts of a token")
    add(of_all, "experts", _number, "64", "of all ranks together")
    of_all.add_argument(
        "--layout", choices=_LAYOUTS, default="rank", help="of received rows [%(default)s]"
    )
    add(of_all, "seed", _count, "1", "of routing and data")
    add(of_all, "warmup", _count, "5", "rounds that do not count")
    add(of_all, "rounds", _number, "30", "rounds that count")
    _add_names(of_all, "contenders", _CONTENDERS, ",".join(_CONTENDERS), "what runs in a round")
    of_all.add_argument(
        "--verify", action="store_true", help="compare results before and after the rounds"
    )
    add(of_all, "timeout", _number, "600", "seconds that a case may take")
    latency = parser.add_argument_group("instead")
    latency.add_argument(
        "--latency", action="store_true", help="host time of one rank's replayed calls at T = 0"
    )
    add(latency, "calls", _number, "10000", "calls that the median is taken of")
    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="write everything; -: to standard output")
    output.add_argument("--plot", metavar="FILE", help="draw medians and spread (matplotlib)")


def _add_names(
    group: argparse._ArgumentGroup, name: str, known: tuple[str, ...], default: str, text: str
) -> None:
    group.add_argument(
        f"--{name}",
        type=partial(_names, known),
        default=default,
        metavar="NAME",
        help=f"{text}: {', '.join(known)} [%(default)s]",
    )


def run(args: argparse.Namespace) -> int:
    """Measures and prints; returns 0. Raises what a rank raised."""
    if args.topk > args.experts:
        args.usage_error(f"--topk {args.topk} of --experts {args.experts}")
    try:
        importlib.import_module("numpy")
    except ImportError as error:
        raise Failure(f"bench needs numpy ({error}): pip install numpy") from error
    if args.plot:
        bench_report.plotter()  # what is missing is said now, not after minutes
    for path in (args.json, args.plot):
        if path not in (None, "-"):
            with Path(path).open("ab"):  # as above
                pass
    # Where the JSON has standard output, the tables make room.
    with redirect_stdout(sys.stderr if args.json == "-" else sys.stdout):
        report, bars = _latency(args) if args.latency else _throughput(args)
    if args.json:
        bench_report.write_json(args.json, report)
    if args.plot:
        bench_report.plot(args.plot, bars, "us")
    return 0


# What a mode measured, for JSON, and the bars of its picture: by title, then name.
_Result = tuple[dict[str, Any], dict[str, dict[str, bench_report.Spread]]]


def _throughput(args: argparse.Namespace) -> _Result:
    results = []
    print(
        f"{bench_report.conditions_line()}; {args.rounds} rounds after {args.warmup}; "
        "times: slowest rank of a round"
    )
    for num_ranks, tokens, hidden, form in product(
        args.ranks, args.tokens, args.hidden, args.format
    ):
        case = Case(
            num_ranks, tokens, hidden, args.topk, args.experts, form, args.layout, args.seed
        )
        results.append(_measure(args, case))
        bench_report.print_measured(results[-1])
    report = {
        "mode": "throughput",
        "conditions": bench_report.conditions(),
        "warmup": args.warmup,
        "rounds": args.rounds,
        "runs": [bench_report.json_of(result) for result in results],
    }
    bars = {
        _wrapped(result.case.headline()): {
            name: summary.us for name, summary in bench_report.summarise(result).items()
        }
        for result in results
    }
    return report, bars


def _wrapped(title: str) -> str:
    return title.replace(", format", ",\nformat").replace(", layout", ",\nlayout")


def _measure(args: argparse.Namespace, case: Case) -> bench_report.Measured:
    from ep import testing
    from ep.cli.bench_rounds import Plan, run_rank

    chosen = list(args.contenders)
    if case.quant and {"memcpy", "combine"} <= set(chosen):
        chosen.append("memcpy_out")  # the halves differ in bytes, and need a memcpy each
    with tempfile.TemporaryDirectory(prefix="ep-bench-") as folder:
        plan = Plan(
            case, tuple(chosen), args.rounds, args.warmup, args.verify, args.timeout, folder
        )
        ranks = testing.run(
            partial(run_rank, plan), case.num_ranks, how="processes", timeout_s=args.timeout
        )
    us = {
        name: [list(of_round) for of_round in zip(*(rank.us[name] for rank in ranks), strict=True)]
        for name in ranks[0].us
    }
    skipped = {name: "gloo needs torch" for name in chosen if name not in us}
    verified = sum(rank.compared for rank in ranks) if args.verify else None
    rows_by_rank = [rank.num_rows for rank in ranks]
    return bench_report.Measured(case, ranks[0].tensors, rows_by_rank, us, skipped, verified)


def _latency(args: argparse.Namespace) -> _Result:
    from ep.cli import bench_latency

    tensors, results = bench_latency.measure(args.hidden[0], args.topk, args.experts, args.calls)
    print(bench_report.conditions_line())
    title = (
        f"1 process, T 0, H {args.hidden[0]}, K {args.topk} of {args.experts}, layout rank, "
        f"num_sms 1, {tensors}: median us [p10, p90] of {args.calls} calls"
    )
    print(f"\n{title}")
    spreads = {name: bench_report.Spread.of(us) for name, us in results.items()}
    for name, spread in spreads.items():
        print(f"  {name:<42}{spread.median:>9.2f}  [{spread.p10:.2f}, {spread.p90:.2f}]")
    report = {
        "mode": "latency",
        "conditions": bench_report.conditions(),
        "tensors": tensors,
        "case": {"hidden": args.hidden[0], "topk": args.topk, "experts": args.experts},
        "calls": {
            name: {**bench_report.spread_json(spread), "us": results[name]}
            for name, spread in spreads.items()
        },
    }
    return report, {_wrapped(title): spreads}


def _number(text: str, least: int = 1) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
    return value


def _count(text: str) -> int:
    return _number(text, least=0)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_number(part) for part in text.split(","))


def _names(known: tuple[str, ...], text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
    return names
