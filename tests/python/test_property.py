"""Any shape, routing and options, as hypothesis finds them, against the oracle, bit for bit.

`pytest tests/python/test_property.py --hypothesis-profile=search` looks for new examples.
"""

from hypothesis import given, note
from hypothesis import strategies as st

from python.formats import FLOATS
from python.oracle import FP8_FORMATS
from python.ranks import LAYOUTS, run_cases
from python.routing import ROUTINGS
from python.trip import Case

EXTRA_DTYPES = ("uint8", "bool", "int16", "float16", "bfloat16", "int32", "int64", "float64")
OPAQUE_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8", "uint8")
UNIT = {"bfloat16": 8, "float16": 8, "float32": 4}


def floats() -> st.SearchStrategy[str]:
    return st.sampled_from(FLOATS)


@st.composite
def worlds(draw) -> dict:
    """What the calls of one buffer have in common: R, E and who owns what."""
    num_ranks = draw(st.integers(1, 4))
    num_experts = draw(st.integers(1, 20))
    offsets = None
    if draw(st.booleans()):
        inner = [draw(st.integers(0, num_experts)) for _ in range(num_ranks - 1)]
        offsets = (0, *sorted(inner), num_experts)
    return {"num_ranks": num_ranks, "num_experts": num_experts, "offsets": offsets}


@st.composite
def payloads(draw) -> dict:
    """dtypes and sizes of x, scales and extras."""
    shapes = st.lists(st.integers(1, 4), max_size=2).map(tuple)
    extras = st.lists(st.tuples(st.sampled_from(EXTRA_DTYPES), shapes), max_size=2).map(tuple)
    made = {"extras": draw(extras) if draw(st.booleans()) else ()}
    style = draw(st.sampled_from(["plain", "plain", "quant", "opaque", "scales"]))
    if style == "quant":
        made |= {"quant": draw(st.sampled_from(FP8_FORMATS)), "x_dtype": draw(floats())}
        return made | {"hidden": 128 * draw(st.integers(1, 5))}
    if style == "opaque":
        made |= {"x_dtype": draw(st.sampled_from(OPAQUE_DTYPES))}
        return made | {"hidden": 16 * draw(st.integers(1, 20))}
    x_dtype = draw(floats())
    if style == "scales":
        made |= {"scale_columns": draw(st.integers(1, 9))}
        made |= {"scales_dtype": draw(st.sampled_from(("uint8", "float16", "float32", "int32")))}
    return made | {"x_dtype": x_dtype, "hidden": UNIT[x_dtype] * draw(st.integers(1, 40))}


@st.composite
def options(draw) -> dict:
    """Layout and sizes, and what concerns them."""
    layout = draw(st.sampled_from(LAYOUTS))
    made = {"layout": layout, "ids": draw(st.sampled_from(("local", "global")))}
    if layout == "expert":
        made["alignment"] = draw(st.sampled_from((1, 1, 2, 3, 8, 16)))
        made["combine_weights"] = draw(st.booleans())
    sizes = draw(st.sampled_from(("exact", "fixed", "drop")))
    made["exact"] = sizes == "exact"
    if sizes == "drop":
        made |= {"max_rows": draw(st.integers(1, 40)), "overflow": "drop"}
    return made


@st.composite
def answers(draw) -> dict:
    """What the experts answer and how it is added up."""
    dtype = draw(floats())
    return {
        "answer_dtype": dtype,
        "answer_hidden": UNIT[dtype] * draw(st.integers(1, 30)),
        "out_dtype": draw(st.none() | floats()),
        "row_weights": draw(st.booleans()),
        "bias": tuple(draw(st.lists(floats(), max_size=2))),
    }


@st.composite
def cases(draw, world: dict) -> Case:
    tokens = st.one_of(st.just(0), st.integers(0, 3), st.integers(0, 14))
    num_ranks = world["num_ranks"]
    num_topk = draw(st.one_of(st.integers(1, 4), st.integers(1, 32)))
    num_tokens = tuple(draw(tokens) for _ in range(num_ranks))
    kind = draw(st.sampled_from(("torch", "numpy")))
    # numpy has no bfloat16 weights.
    weights = st.sampled_from(("float32", "float16", "bfloat16" if kind == "torch" else "float32"))
    most = max(num_tokens)
    return Case(
        num_tokens=num_tokens,
        num_experts=world["num_experts"],
        offsets=world["offsets"],
        num_topk=num_topk,
        routing=draw(st.sampled_from(sorted(ROUTINGS))),
        seed=draw(st.integers(0, 2**32 - 1)),
        idx_dtype=draw(st.sampled_from(("int32", "int64"))),
        weights_dtype=draw(st.none() | weights),
        max_tokens=draw(st.none() | st.integers(max(1, most), most + 5)),
        buffer_tokens=draw(st.integers(0, 20)),
        kind=kind,
        strided=draw(st.booleans()),
        **draw(payloads()),
        **draw(options()),
        **draw(answers()),
    )


@given(st.data())
def test_any_sequence_of_round_trips(data):
    """One to three unlike calls on one buffer; outputs in the window or copied out."""
    world = data.draw(worlds())
    sequence = data.draw(st.lists(cases(world), min_size=1, max_size=3))
    outputs = data.draw(st.sampled_from(("auto", "window", "caller")))
    in_window = data.draw(st.booleans())
    num_sms = data.draw(st.sampled_from((None, 1, 3)))
    note(f"{outputs=} {in_window=} {num_sms=}")
    run_cases(sequence, in_window=in_window, outputs=outputs, num_sms=num_sms)
