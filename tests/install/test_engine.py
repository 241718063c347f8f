"""examples/engine, built from the installed package: ranks as threads and as processes, that meet
at an address (IPv4, IPv6) or through callbacks.

Use from C++ and with MPI: DeepEP 358, ROCm/DeepEP 5; IPv6: DeepEP 237.
"""

import pathlib
import re
import subprocess

import pytest

from install import building

RANKS = (1, 2, 3)
VERDICT = "engine: all equal to one rank's evaluation"


@pytest.fixture(scope="module")
def engine(installed: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("engine")
    return building.build(building.ROOT / "examples" / "engine", folder, **installed) / "engine"


def address(host: str) -> str:
    try:
        port = building.free_port(host)
    except OSError as error:
        pytest.skip(f"this machine has no {host}: {error}")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check(said: str, num_ranks: int) -> None:
    """Every rank reports once that all is equal, and nothing else is said about results."""
    lines = re.findall(r"^rank (\d) of (\d): (.*)$", said, re.MULTILINE)
    assert sorted(lines) == [
        (str(rank), str(num_ranks), line) for rank, (*_, line) in enumerate(sorted(lines))
    ]
    assert len(lines) == num_ranks
    for *_, line in lines:
        assert line.count("equal") == 3 and "wrong id refused" in line
    assert VERDICT in said


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("how", ["threads", "callbacks"])
def test_ranks_of_one_program(engine, how, num_ranks):
    check(building.command(engine, how, num_ranks), num_ranks)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_processes_that_meet_at_an_address(engine, host, num_ranks):
    check(building.command(engine, "processes", num_ranks, address(host)), num_ranks)


def test_processes_that_a_launcher_started(engine):
    """The last comes first, as it happens."""
    at = address("127.0.0.1")
    ranks = [
        subprocess.Popen(
            [engine, "process", "3", at, str(rank)],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in (2, 1, 0)
    ]
    try:
        said = [rank.communicate(timeout=building.BOUND_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0, 0], said
    check("".join(said), 3)


def test_the_log_goes_where_the_engine_sends_it(engine):
    said = building.command(engine, "threads", 2)
    assert re.search(r"^rank 1: buffer of 2 ranks on cpu", said, re.MULTILINE)


@pytest.mark.parametrize("arguments", [(), ("threads",), ("threads", 0), ("process", 2, "a:1")])
def test_bad_usage(engine, arguments):
    done = building.attempt(engine, *arguments)
    assert done.returncode == 2 and done.stdout.startswith("usage:")


def test_it_links_neither_python_nor_torch_nor_mpi(engine):
    needed = re.findall(r"NEEDED.*\[([^\]]+)\]", building.command("readelf", "-d", engine))
    allowed = re.compile(r"lib(c|m|stdc\+\+|gcc_s|pthread|dl|rt)\.so|ld-linux")
    assert needed and [name for name in needed if not allowed.match(name)] == []
