"""`python -m ep bench`: small sizes; every option does what it says."""

import json
import struct

import numpy as np
import pytest
import torch

import ep
import ep.testing
from ep.cli import bench_report, bench_verify
from ep.cli.bench_case import Case, Data
from ep.cli.bench_report import Measured, Spread
from ep.cli.bench_rounds import Barrier
from python.cli_process import hide, run_cli

SMALL = ("--tokens", "64", "--hidden", "256", "--rounds", "2", "--warmup", "1")
CONTENDERS = ["dispatch", "combine", "memcpy", "gloo_dispatch", "gloo_combine"]
PNG = b"\x89PNG\r\n\x1a\n"


def bench(*arguments: str, **options):
    return run_cli("bench", *arguments, **options)


@pytest.fixture(scope="module")
def no_torch(tmp_path_factory):
    """A folder that hides torch: the ranks use numpy and start in a tenth of the time."""
    return {"first_on_path": [hide(tmp_path_factory.mktemp("hidden"), "torch")]}


def report_of(done) -> dict:
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def small():
    """Two ranks, all contenders, verified; the JSON on standard output, the tables on stderr."""
    done = bench(*SMALL, "--verify", "--json", "-")
    return report_of(done), done.stderr


def test_json_has_the_documented_fields(small):
    report, _ = small
    assert report["program"] == "python -m ep bench" and report["mode"] == "throughput"
    assert (report["warmup"], report["rounds"]) == (1, 2)
    assert set(report["conditions"]) == {"cpu", "cores", "kernel", "python", "ep"}
    (run,) = report["runs"]
    assert run["tensors"] == f"torch {torch.__version__}"
    assert run["case"] == {
        "num_ranks": 2,
        "tokens": 64,
        "hidden": 256,
        "topk": 8,
        "experts": 64,
        "format": "none",
        "layout": "rank",
        "seed": 1,
    }
    assert list(run["contenders"]) == CONTENDERS
    assert run["skipped"] == {}
    assert run["verified_values"] > 0
    for name, contender in run["contenders"].items():
        assert contender["bytes"] == sum(run["rows_by_rank"]) * 512
        rounds = contender["us_by_round_and_rank"]
        assert len(rounds) == 2 and all(len(r) == 2 and min(r) > 0 for r in rounds)
        slowest = [max(r) for r in rounds]
        assert contender["median_us"] == pytest.approx(sum(slowest) / 2)
        assert min(slowest) <= contender["p10_us"] <= contender["p90_us"] <= max(slowest)
        assert contender["of_memcpy"] > 0
        assert (contender["gloo_over"] is not None) == (name in ("dispatch", "combine"))


def test_rows_are_those_of_the_routing(small):
    (run,) = small[0]["runs"]
    data = Data(Case(**run["case"]))
    want = [len(data.rows(rank).token) for rank in range(2)]
    assert run["rows_by_rank"] == want


def test_the_table_names_case_contenders_and_columns(small):
    _, table = small
    assert "2 processes, T 64, H 256, K 8 of 64, bf16, format none, layout rank" in table
    assert "x memcpy" in table and "x gloo [p10, p90]" in table
    for name in CONTENDERS:
        assert any(line.startswith(name) for line in table.splitlines())
    assert "verify: ok" in table


def test_a_format_is_verified_with_torch():
    few = ("--contenders", "dispatch,combine", "--format", "fp8_block128_ue8m0")
    (run,) = report_of(bench(*SMALL, *few, "--verify", "--json", "-"))["runs"]
    assert list(run["contenders"]) == ["dispatch", "combine"] and run["verified_values"] > 0


@pytest.mark.parametrize("form", ep.quant.formats())
def test_formats_have_a_memcpy_for_each_half(form, no_torch):
    few = ("--contenders", "dispatch,combine,memcpy", "--format", form)
    (run,) = report_of(bench(*SMALL, *few, "--verify", "--json", "-", **no_torch))["runs"]
    rows = sum(run["rows_by_rank"])
    assert list(run["contenders"]) == ["dispatch", "combine", "memcpy", "memcpy_out"]
    row_bytes = ep.quant.describe(form).bytes_per_row(256)
    of = {name: contender["bytes"] for name, contender in run["contenders"].items()}
    assert of == {
        "dispatch": rows * row_bytes,
        "memcpy": rows * row_bytes,
        "combine": rows * 512,
        "memcpy_out": rows * 512,
    }


def test_layout_expert_is_verified_with_gloo_beside_it():
    done = bench(*SMALL, "--layout", "expert", "--verify", "--json", "-")
    (run,) = report_of(done)["runs"]
    assert sum(run["rows_by_rank"]) == 2 * 64 * 8  # a row per token and slot
    assert list(run["contenders"]) == CONTENDERS and run["verified_values"] > 0


def test_lists_are_swept_and_one_rank_works(no_torch):
    few = ("--contenders", "dispatch,memcpy", "--rounds", "1", "--warmup", "0", "--hidden", "128")
    done = bench("--ranks", "1,3", "--tokens", "1,5", *few, "--json", "-", **no_torch)
    cases = [run["case"] for run in report_of(done)["runs"]]
    assert [(c["num_ranks"], c["tokens"]) for c in cases] == [(1, 1), (1, 5), (3, 1), (3, 5)]


def test_without_torch_gloo_is_skipped_and_says_so(tmp_path, no_torch):
    done = bench(*SMALL, "--verify", "--json", str(tmp_path / "out.json"), **no_torch)
    assert done.returncode == 0, done.stderr
    assert "gloo_dispatch: skipped, gloo needs torch" in done.stdout
    assert "verify: ok" in done.stdout
    report = json.loads((tmp_path / "out.json").read_text())
    (run,) = report["runs"]
    assert run["tensors"] == f"numpy {np.__version__}"
    assert list(run["contenders"]) == ["dispatch", "combine", "memcpy"]
    assert set(run["skipped"]) == {"gloo_dispatch", "gloo_combine"}


def test_without_numpy_it_says_what_to_install(tmp_path):
    done = bench(*SMALL, first_on_path=[hide(tmp_path, "torch", "numpy")])
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "pip install numpy" in done.stderr


def test_plot_draws_a_picture(tmp_path, no_torch):
    path = tmp_path / "out.png"
    few = ("--contenders", "dispatch,combine,memcpy", "--ranks", "1,2")
    done = bench(*SMALL, *few, "--plot", str(path), **no_torch)
    assert done.returncode == 0, done.stderr
    picture = path.read_bytes()
    assert picture[:8] == PNG
    width, height = struct.unpack(">II", picture[16:24])
    assert width >= 600 and height >= 300
    assert len(picture) > 10_000  # bars and words, not an empty page


def test_plot_without_matplotlib_says_so_before_it_measures(tmp_path):
    path = tmp_path / "out.png"
    done = bench("--plot", str(path), first_on_path=[hide(tmp_path, "matplotlib")])
    assert done.returncode == 1 and done.stdout == ""
    assert "pip install matplotlib" in done.stderr and done.stderr.count("\n") == 1
    assert not path.exists()


def test_latency_prints_a_line_for_each_call_in_microseconds(tmp_path):
    path, picture = tmp_path / "out.json", tmp_path / "out.png"
    sizes = ("--calls", "200", "--hidden", "256")
    done = bench("--latency", *sizes, "--json", str(path), "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    assert "1 process, T 0, H 256" in done.stdout and "median us [p10, p90]" in done.stdout
    report = json.loads(path.read_text())
    assert report["mode"] == "latency"
    assert list(report["calls"]) == [
        f"{what}{how}"
        for what in ("replayed dispatch", "combine")
        for how in (", async: call to return", ", async: until it is done", ", synchronous")
    ]
    for name, call in report["calls"].items():
        assert name in done.stdout
        assert len(call["us"]) == 200 and 0 < call["p10_us"] <= call["median_us"] <= call["p90_us"]
    assert picture.read_bytes()[:8] == PNG


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--ranks", "0"), "'0' is no whole number of at least 1"),
        (("--tokens", "8,x"), "'x' is no whole number"),
        (("--format", "fp8"), "'fp8' is none of none, fp8_block128"),
        (("--contenders", "nccl"), "'nccl' is none of dispatch"),
        (("--topk", "9", "--experts", "8"), "--topk 9 of --experts 8"),
        (("--layout", "batched"), "invalid choice: 'batched'"),
    ],
)
def test_a_wrong_option_is_bad_usage(arguments, text):
    done = bench(*arguments)
    assert done.returncode == 2 and text in done.stderr and "Traceback" not in done.stderr


def test_what_a_rank_refuses_ends_the_command_with_one_line(no_torch):
    """H 250 is no multiple of 8."""
    done = bench(*SMALL[:2], "--hidden", "250", "--contenders", "dispatch", **no_torch)
    assert done.returncode == 1
    assert done.stderr.startswith("python -m ep bench: InvalidArgument: ")
    assert "H=250" in done.stderr and "Traceback" not in done.stderr


def test_a_ratio_is_the_median_of_the_ratios_within_a_round():
    """Rounds that drift: ratios of medians would give 2.0 and 1.0."""
    measured = Measured(
        Case(2, 4, 128, 1, 2, "none", "rank"),
        "numpy",
        [3, 5],
        {
            "dispatch": [[1.0, 0.5], [10.0, 1.0], [3.0, 8.0]],
            "memcpy": [[4.0, 1.0], [5.0, 2.0], [4.0, 1.0]],
            "gloo_dispatch": [[6.0, 8.0], [20.0, 1.0], [40.0, 2.0]],
        },
        {},
        None,
    )
    summary = bench_report.summarise(measured)["dispatch"]
    assert summary.num_bytes == 8 * 256
    assert summary.us.median == 8.0  # of 1, 10, 8: the slowest rank of each round
    assert summary.of_memcpy == 2.0  # of 0.25, 2, 2
    assert summary.gloo_over.median == 5.0  # of 8, 2, 5
    assert summary.gb_per_s == pytest.approx(8 * 256 / 8.0 / 1e3)


def test_a_spread_lies_between_neighbours():
    assert Spread.of([5.0]) == (5.0, 5.0, 5.0)
    assert Spread.of([11.0, 1.0, 6.0, 3.0, 9.0, 2.0, 4.0, 5.0, 7.0, 8.0, 10.0]) == (6.0, 2.0, 10.0)
    assert Spread.of([0.0, 10.0]) == pytest.approx((5.0, 1.0, 9.0))


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_rows_follow_the_layout_s_order(layout):
    """5 experts of 3 ranks: rank 0 and 1 own two, rank 2 owns one."""
    data = Data(Case(3, 6, 128, 2, 5, "none", layout))
    assert data.owner.tolist() == [0, 0, 1, 1, 2]
    for rank in range(3):
        want = []
        for source in range(3):
            for token, experts in enumerate(data.topk_idx(source).tolist()):
                here = [e for e in experts if data.owner[e] == rank]
                if layout == "rank":
                    here = here[:1]
                want += [(e, source, token) for e in here]
        if layout == "expert":
            want.sort(key=lambda row: row[0])
        rows = data.rows(rank)
        got = zip(rows.expert.tolist(), rows.source.tolist(), rows.token.tolist(), strict=True)
        assert list(got) == want


def test_verify_names_the_first_value_that_differs():
    want = np.arange(6).reshape(2, 3)
    got = want.copy()
    got[1, 2] = 9
    assert bench_verify._same("combine: x", want, want) == 6
    with pytest.raises(
        ep.Error, match=r"combine: x: 1 values differ, the first at \[1, 2\]: 9, not"
    ):
        bench_verify._same("combine: x", got, want)
    with pytest.raises(ep.Error, match=r"shape \[1, 3\], not \[2, 3\]"):
        bench_verify._same("combine: x", want[:1], want)


def test_a_rank_that_is_ahead_waits_until_the_others_can_be_reached(tmp_path):
    """It sent to a socket that was not there yet: one of a dozen small runs failed."""

    def rank(comm, folder):
        if comm.rank == 1:
            while not (folder / "0").exists():
                pass
        barrier = Barrier(comm, str(folder), 30.0)
        times = [barrier.wait() for _ in range(3)]
        comm.all_gather(b"")
        barrier.close()
        return times

    for i in range(10):
        folder = tmp_path / str(i)
        folder.mkdir()
        assert len(set(map(tuple, ep.testing.run(rank, num_ranks=2, args=(folder,))))) == 1
