"""ep.supports answers what a real buffer does."""

import re
import subprocess
import sys

import pytest
import torch

import ep

SIZES = {"num_experts": 2, "num_topk": 1, "hidden": 128, "max_tokens_per_rank": 4}


def make(**arguments) -> ep.EPBuffer:
    return ep.EPBuffer(ep.Communicator.single(), **{**SIZES, "device": "cpu", **arguments})


def dispatch(buf: ep.EPBuffer, dtype: torch.dtype = torch.bfloat16, hidden: int = 128, **arguments):
    x = torch.zeros(1, hidden).to(dtype)
    return buf.dispatch(x, torch.zeros(1, 1, dtype=torch.int64), **arguments)


def construct(**arguments) -> None:
    make(**arguments).close()


def call(**arguments) -> None:
    with make() as buf:
        dispatch(buf, **arguments)


def combine(**arguments) -> None:
    with make() as buf:
        out = dispatch(buf)
        buf.combine(out.x, out.handle, **arguments)


# A question, and the same thing done.
RESERVED = [
    ({"device": "cuda"}, lambda: construct(device="cuda")),
    ({"device": "cuda:1"}, lambda: construct(device="cuda:1")),
    ({"device": 0}, lambda: construct(device=0)),
    ({"device": torch.device("cuda", 0)}, lambda: construct(device=torch.device("cuda", 0))),
    ({"elastic": True}, lambda: construct(elastic=True)),
    ({"expert_slot": True}, lambda: construct(expert_slot=[1, 0])),
    ({"mode": "latency"}, lambda: call(mode="latency")),
    ({"layout": "batched"}, lambda: call(layout="batched")),
    ({"split": True}, lambda: call(split=True)),
    *(
        ({"quant": name}, lambda name=name: call(quant=name))
        for name in ("mxfp8", "nvfp4", "int8_row")
    ),
    *(
        ({"scale_layout": name}, lambda name=name: call(quant="fp8_block128", scale_layout=name))
        for name in ("col", "col_ue8m0x4", "swizzle_128x4")
    ),
    ({"global_scale": True}, lambda: call(quant="fp8_block128", global_scale=1.0)),
    ({"split": True}, lambda: combine(split=True)),
    ({"combine_quant": "fp8_block128"}, lambda: combine(quant="fp8_block128")),
    ({"ready": True}, lambda: combine(ready=torch.zeros(1, dtype=torch.int32))),
]
WORKS = [
    ({"device": "auto"}, lambda: construct(device="auto")),
    ({"device": "cpu"}, lambda: construct(device="cpu")),
    ({"device": torch.device("cpu")}, lambda: construct(device=torch.device("cpu"))),
    ({"mode": "throughput"}, lambda: call(mode="throughput")),
    ({"mode": None, "layout": None, "exact": None}, call),
    ({"layout": "rank"}, lambda: call(layout="rank")),
    ({"layout": "expert"}, lambda: call(layout="expert")),
    ({"exact": False}, lambda: call(exact=False)),
    ({"exact": False, "overflow": "drop"}, lambda: call(max_rows=4, overflow="drop")),
    *(
        ({"outputs": name}, lambda name=name: construct(outputs=name))
        for name in ("auto", "window", "caller")
    ),
    *(
        ({"quant": name, "hidden": 128}, lambda name=name: call(quant=name))
        for name in ep.quant.formats()
    ),
    ({"dtype": "float8_e5m2", "hidden": 16}, lambda: call(dtype=torch.float8_e5m2, hidden=16)),
]
INVALID = [
    ({"device": "tpu"}, lambda: construct(device="tpu")),
    ({"mode": "fast"}, lambda: call(mode="fast")),
    ({"layout": "experts"}, lambda: call(layout="experts")),
    ({"quant": "fp8"}, lambda: call(quant="fp8")),
    ({"scale_layout": "rows"}, lambda: call(quant="fp8_block128", scale_layout="rows")),
    ({"overflow": "wrap"}, lambda: call(max_rows=4, overflow="wrap")),
    ({"outputs": "arena"}, lambda: construct(outputs="arena")),
    ({"num_experts": 4097}, lambda: construct(num_experts=4097)),
    ({"num_experts": 0}, lambda: construct(num_experts=0)),
    ({"num_topk": 33}, lambda: construct(num_topk=33)),
    ({"num_ranks": 1025}, lambda: ep.EPBuffer.bytes_needed(**SIZES, num_ranks=1025)),
    ({"num_ranks": 0}, lambda: ep.EPBuffer.bytes_needed(**SIZES, num_ranks=0)),
    ({"hidden": 20}, lambda: call(hidden=20)),
    ({"hidden": 20, "dtype": "float8_e4m3fn"}, lambda: call(dtype=torch.float8_e4m3fn, hidden=20)),
    ({"hidden": 6, "dtype": torch.float32}, lambda: call(dtype=torch.float32, hidden=6)),
    ({"hidden": 64, "quant": "fp8_block128"}, lambda: call(hidden=64, quant="fp8_block128")),
    ({"dtype": "float64"}, lambda: call(dtype=torch.float64)),
    (
        {"dtype": "int8", "quant": "fp8_block128"},
        lambda: call(dtype=torch.int8, quant="fp8_block128"),
    ),
]
LIMITS = [
    {"num_ranks": 1, "num_experts": 1, "num_topk": 1, "hidden": 8},
    {"num_ranks": 1024, "num_experts": 4096, "num_topk": 32, "hidden": 1 << 24},
    {"hidden": 4, "dtype": "float32"},
]


def named(question: dict) -> str:
    return ",".join(f"{name}={value}" for name, value in question.items())


@pytest.mark.parametrize(("question", "act"), RESERVED, ids=[named(q) for q, _ in RESERVED])
def test_what_a_buffer_calls_unsupported_is_not_supported(question, act):
    with pytest.raises(ep.Unsupported):
        act()
    answer = ep.supports(**question)
    assert not answer and not answer.ok
    # It names what was asked for and what would do.
    value = next(iter(question.values()))
    assert next(iter(question)) in answer.why or str(value) in answer.why
    assert re.search(r"is not supported by this version[:;] .", answer.why)


@pytest.mark.parametrize(("question", "act"), INVALID, ids=[named(q) for q, _ in INVALID])
def test_what_a_buffer_calls_invalid_is_not_supported(question, act):
    with pytest.raises(ep.InvalidArgument):
        act()
    answer = ep.supports(**question)
    assert not answer and next(iter(question)) in answer.why


@pytest.mark.parametrize(("question", "act"), WORKS, ids=[named(q) for q, _ in WORKS])
def test_what_a_buffer_does_is_supported(question, act):
    act()
    assert ep.supports(**question) == (True, "")


@pytest.mark.parametrize("question", LIMITS, ids=named)
def test_the_largest_and_least_sizes_are_supported(question):
    answer = ep.supports(**question)
    assert answer and answer.ok and answer.why == ""


def test_the_default_question_is_answered_with_yes():
    assert ep.supports()
    assert ep.supports() == ep.Support(True, "")


def test_several_nodes_are_not_supported():
    assert not ep.supports(num_nodes=2)
    assert "num_nodes=2" in ep.supports(num_nodes=2).why


def test_all_that_is_missing_is_named_at_once():
    why = ep.supports("cuda:0", mode="latency", elastic=True, num_experts=5000).why
    assert all(text in why for text in ("cuda:0", "latency", "elastic", "num_experts=5000"))


def test_a_keyword_of_another_version_is_an_answer_not_an_error():
    answer = ep.supports(use_fp8=True)
    assert not answer and "use_fp8" in answer.why


def test_the_question_imports_no_torch_and_no_numpy():
    code = (
        "import sys, ep; assert not ep.supports('cuda', quant='mxfp8'); "
        "assert ep.supports(quant='fp8_block128', hidden=256); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
