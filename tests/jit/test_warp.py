"""Warp's members become the instructions that their order, scope and width name."""

import itertools
import re

import pytest

from jit import nvrtc

ORDERS = {"kRelaxed": "relaxed", "kAcquire": "acquire", "kRelease": "release", "kAcqRel": "acq_rel"}
SCOPES = {"kBlock": "cta", "kDevice": "gpu", "kSystem": "sys"}
# member -> (orders, arguments, instruction; {} is order and scope, [] the width)
WORDS = {
    "load": (("kRelaxed", "kAcquire"), "word", "ld.{}.global.u[]"),
    "store": (("kRelaxed", "kRelease"), "word, value", "st.{}.global.u[]"),
    "fetch_add": (tuple(ORDERS), "word, value", "atom.{}.global.add.u[]"),
    "fetch_min": (tuple(ORDERS), "word, value", "atom.{}.global.min.u[]"),
    "exchange": (tuple(ORDERS), "word, value", "atom.{}.global.exch.b[]"),
    "compare_exchange": (tuple(ORDERS), "word, value, value", "atom.{}.global.cas.b[]"),
}
HEAD = """\
#include "device/cuda/warp.cuh"
using namespace ep::kernels;
using ep::device::cuda::Warp;
struct alignas(16) Pair { uint64_t low, high; };
"""


def _word_cases() -> dict:
    cases = {}
    for member, (orders, arguments, instruction) in WORDS.items():
        for order, scope, width in itertools.product(orders, SCOPES, (32, 64)):
            call = f"Warp::{member}<Order::{order}, Scope::{scope}>({arguments})"
            effect = f"{call};" if member == "store" else f"word[1] = {call};"
            name = f"{member}_{order}_{scope}_{width}"
            text = instruction.format(f"{ORDERS[order]}.{SCOPES[scope]}").replace("[]", str(width))
            cases[name] = (f"uint{width}_t", effect, [text])
    return cases


# name -> (element type, statement, the instructions in this order)
CASES = _word_cases() | {
    "sync": ("uint32_t", "Warp::sync();", ["bar.warp.sync"]),
    "uniform_32": ("uint32_t", "*word = Warp::uniform(value);", ["shfl.sync.idx", "bar.warp.sync"]),
    "uniform_64": (
        "uint64_t",
        "*word = Warp::uniform(value);",
        ["shfl.sync.idx", "shfl.sync.idx", "bar.warp.sync"],
    ),
    "match": ("uint32_t", "*word = Warp::match(value);", ["match.any.sync.b32"]),
    "count": ("uint32_t", "*word = Warp::count(value);", ["popc.b32"]),
    "max_all": ("float", "*word = Warp::max_all(value);", ["redux.sync.max.u32"]),
    "block_sync": ("uint32_t", "Warp::block_sync();", ["bar.sync"]),
    "block_broadcast": (
        "uint32_t",
        "*word = Warp::block_broadcast(value);",
        ["st.shared.u32", "bar.sync", "ld.shared.u32", "bar.sync"],
    ),
    "read_16": ("Pair", "Warp::write(word, value); word[2] = Warp::read(word + 1);", []),
    "now_ns": ("uint64_t", "*word = Warp::now_ns();", ["%globaltimer"]),
    "back_off": (
        "uint32_t",
        "auto b = Warp::make_backoff(); Warp::back_off(b); Warp::back_off(b);",
        ["nanosleep.u32", "nanosleep.u32"],
    ),
    "ring": ("ep::Doorbell", "Warp::ring(word);", []),
}


def _kernel(name: str) -> str:
    element, statement, _ = CASES[name]
    head = f'extern "C" __global__ void {name}({element}* word, {element} value)'
    return f"{head} {{\n  {statement}\n}}\n"


@pytest.fixture(scope="module")
def bodies(nvrtc_library) -> dict:
    """PTX by kernel name."""
    source = HEAD + "".join(_kernel(name) for name in CASES)
    result = nvrtc.Nvrtc(nvrtc_library).compile(source, nvrtc.OPTIONS)
    assert not result["error"], result["log"]
    assert "warning" not in result["log"], result["log"]
    return dict(re.findall(r"\.entry (\w+)\(.*?\)\s*(\{.*?\n\})", result["ptx"], re.DOTALL))


@pytest.mark.parametrize("name", CASES)
def test_instructions(name, bodies):
    position = 0
    for instruction in CASES[name][2]:
        position = bodies[name].find(instruction, position)
        assert position >= 0, f"{instruction} is not where it should be in\n{bodies[name]}"
        position += len(instruction)


def test_16_bytes_move_at_once(bodies):
    assert re.search(r"\bst\.global\.(v2\.[ub]64|v4\.[ub]32)", bodies["read_16"])
    assert re.search(r"\bld\.global\.(v2\.[ub]64|v4\.[ub]32)", bodies["read_16"])


def test_ring_is_nothing(bodies):
    assert not re.search(r"\b(st|atom|red)\.", bodies["ring"])


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("Warp::load<Order::kRelease, Scope::kSystem>(word);", "static assertion failed"),
        ("Warp::store<Order::kAcquire, Scope::kSystem>(word, 1u);", "static assertion failed"),
        ("auto b = Warp::make_backoff(); auto copy = b;", "deleted function"),
    ],
)
def test_misuse_does_not_compile(statement, why, nvrtc_library):
    source = HEAD + f"__global__ void misuse(uint32_t* word) {{ {statement} }}\n"
    result = nvrtc.Nvrtc(nvrtc_library).compile(source, nvrtc.OPTIONS)
    assert result["error"] and why in result["log"]
