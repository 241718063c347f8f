"""The installed package: what it links, what it says when something is missing or switched off."""

import pathlib
import re
import shutil
import subprocess

import numpy as np
import pytest

import ep
import ep.testing
from python.fault_process import run_alone
from python.fault_support import (
    DEFAULT,
    call,
    caught,
    combine_call,
    dispatch,
    exact_again,
    make_buffer,
    refused,
    run,
    says,
)

ROOT = pathlib.Path(__file__).parents[2]


def test_the_package_links_no_mpi_cuda_nccl_or_torch():
    """Builds failed where MPI or a driver was not to be had (ROCm/DeepEP 5, DeepEP 383, 481)."""
    said = run_alone(
        """
        import ep, pathlib
        make_buffer(ep.Communicator.single()).close()
        for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
            if ".so" in line:
                print(line.split()[-1])
        """
    )
    loaded = {pathlib.PurePath(line).name for line in said.splitlines()}
    assert any(name.startswith("_C") for name in loaded)
    bad = re.compile(r"lib(mpi|cuda|cudart|nvrtc|nccl|torch|c10|ucp|ucs|ibverbs)\b")
    assert not [name for name in loaded if bad.match(name)]


def test_the_extension_needs_only_libraries_of_every_linux_machine():
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf (binutils)")
    dynamic = subprocess.run(
        ["readelf", "-d", ep._C.__file__], capture_output=True, text=True, check=True
    ).stdout
    needed = set(re.findall(r"NEEDED.*\[([^\]]+)\]", dynamic))
    allowed = re.compile(r"lib(c|m|stdc\+\+|gcc_s|pthread|dl|rt|ep)\.so|ld-linux")
    assert not [name for name in needed if not allowed.match(name)]
    assert not re.search(r"(RPATH|RUNPATH).*\[/", dynamic)  # no folder of the build machine


def test_the_version_and_the_features_are_asked_for_without_an_attribute_error():
    """Consumers met classes that a build lacked (DeepGEMM 306), or keywords (SGLang 6017)."""
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", ep.__version__)
    good = ep.supports("cpu")
    assert good.ok and good.why == ""
    for question in ({"mode": "latency"}, {"layout": "batched"}, {"quant": "mxfp8"}):
        answer = ep.supports("cpu", **question)
        assert not answer.ok and next(iter(question.values())) in answer.why
    for question in ({"layout": "expert"}, {"mode": "throughput"}, {"quant": "fp8_block128"}):
        assert ep.supports("cpu", **question).ok
    gpu = ep.supports("cuda")
    assert not gpu.ok and gpu.why


RESERVED_DISPATCH = [
    {"mode": "latency"},
    {"layout": "batched"},
    {"split": True},
    {"quant": "mxfp8"},
    {"quant": "nvfp4"},
    {"quant": "int8_row"},
    {"quant": "fp8_block128", "scale_layout": "col"},
    {"quant": "fp8_block128", "scale_layout": "swizzle_128x4"},
]


@pytest.mark.parametrize("changes", RESERVED_DISPATCH, ids=lambda c: str(list(c.values())[-1]))
def test_a_reserved_form_of_dispatch_says_what_is_missing_and_what_would_do(changes):
    def rank(buf):
        word = [*changes][-1]
        arguments = call(buf, x=np.ones((5, 128), np.float32), topk_idx=np.zeros((5, 2), int))
        del arguments["topk_weights"]
        wrong = arguments | (changes if buf.rank == 1 else {})
        refused(buf, 1, ep.Unsupported, (word,), lambda: buf.dispatch(**wrong))
        exact_again(buf)

    run(rank, 2, hidden=128)


@pytest.mark.parametrize("name", ["quant", "split", "ready"])
def test_a_reserved_form_of_combine_says_what_is_missing_and_what_would_do(name):
    value = {"quant": "fp8_block128", "split": True, "ready": np.zeros(1, np.int32)}[name]

    def rank(buf):
        out = dispatch(buf)
        wrong = {name: value} if buf.rank == 1 else {}
        arguments = combine_call(buf, DEFAULT, out.handle, **wrong)
        refused(buf, 1, ep.Unsupported, (name,), lambda: buf.combine(**arguments))
        exact_again(buf)

    run(rank, 2)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"elastic": True}, "elastic"),
        ({"expert_slot": np.arange(4, dtype=np.int32)}, "expert_slot"),
        ({"device": "cuda"}, "cuda"),
        ({"device": "cuda:1"}, "cuda:1"),
        ({"ranks_per_node": 1}, "ranks_per_node"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_reserved_option_is_unsupported_and_never_replaced(changes, word):
    """A requested backend was silently replaced by another (Megatron-Bridge 5992)."""

    def rank(comm):
        says(caught(ep.Unsupported, lambda: make_buffer(comm, **changes)), word)
        with make_buffer(comm) as buf:
            exact_again(buf)

    ep.testing.run(rank, 2)


def test_reserved_names_exist_and_raise_unsupported():
    def rank(buf):
        out = dispatch(buf)
        for action in (
            lambda: buf.active_ranks,
            lambda: buf.set_active([True, True]),
            lambda: buf.admit(),
            lambda: ep.EPBuffer.rejoin(),
            lambda: out.lost,
            lambda: out.receive(),
        ):
            error = caught(ep.Unsupported, action)
            assert len(str(error)) > 20
        exact_again(buf)

    run(rank, 2)


def test_set_up_without_a_compiler_names_what_is_missing_and_how_to_get_it(tmp_path):
    """A build failed, the script went on, and the program died at run time (srt-slurm 242)."""
    script = ROOT / "scripts" / "setup.sh"
    if not script.exists():
        pytest.skip("needs the repository: this is an installed copy")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "dirname", "echo", "id", "python3", "xargs"):
        (tools / name).symlink_to(shutil.which(name))
    # A copy, so that whatever it makes it makes there.
    copy = tmp_path / "repository"
    shutil.copytree(ROOT / "scripts", copy / "scripts")
    shutil.copytree(ROOT / "requirements", copy / "requirements")
    for name in ("pyproject.toml", "CMakeLists.txt"):
        shutil.copy(ROOT / name, copy / name)
    ran = subprocess.run(
        ["bash", str(copy / "scripts" / "setup.sh")],
        env={"PATH": str(tools), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode != 0
    assert "g++" in ran.stderr and "install" in ran.stderr
    assert not (copy / ".venv").exists()


NO_TORCH = """
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, Blocker())
from python.fault_support import *
"""


def test_importing_ep_does_not_import_torch():
    run_alone(
        """
        import ep
        assert "torch" not in sys.modules
        with make_buffer(ep.Communicator.single()) as buf:
            exact_again(buf)
        assert "torch" not in sys.modules
        """
    )


def test_everything_but_the_torch_parts_works_where_torch_cannot_be_imported():
    run_alone(
        """
        def rank(comm):
            with make_buffer(comm) as buf:
                exact_again(buf)
                out = round_trip(buf)
                assert isinstance(out.x, np.ndarray)
                buf.dispatch(call(buf)["x"], handle=out.handle)
                with_quant = np.ones((4, 128), np.float32)
                ids = np.zeros((4, 2), np.int64)
                coded = buf.dispatch(with_quant, ids, quant="fp8_block128")
                assert coded.x.dtype == np.uint8 and coded.scales.dtype == np.float32
        import functools, ep.testing
        make_buffer = functools.partial(make_buffer, hidden=128)
        ep.testing.run(rank, 2)
        assert ep.supports("cpu").ok
        assert "fp8_block128" in ep.quant.formats()
        """,
        prelude=NO_TORCH,
    )


def test_the_torch_parts_say_what_is_missing_where_torch_cannot_be_imported():
    run_alone(
        """
        for name in ("functional", "nn"):
            error = caught(ImportError, lambda: getattr(ep, name))
            assert "torch" in str(error), error
        """,
        prelude=NO_TORCH,
    )
