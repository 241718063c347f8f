"""Quantised dispatch and scales that travel along; user-report numbers stand in brackets."""

import numpy as np
import pytest

import ep
from python.compare import bits_of
from python.formats import E4M3_NAN, Array, e4m3_decode, encode
from python.oracle import FP8_FORMATS
from python.ranks import LAYOUTS, expect_refused, round_trip, run_cases, with_buffers
from python.routing import seeded
from python.trip import Case, dispatch_args, give, make_trip, with_ids

pytestmark = pytest.mark.torch_versions

SHAPE = {"num_experts": 6, "num_topk": 3}
DTYPES = ("bfloat16", "float16", "float32")


def exponents(scales: np.ndarray, num_groups: int) -> np.ndarray:
    """Documented byte order: group 4j + i of word j is its bits [8i, 8i + 8)."""
    groups = np.arange(num_groups)
    return scales[:, groups // 4] >> (8 * (groups % 4)) & 0xFF


def scale_values(quant: str, scales: np.ndarray, num_groups: int) -> np.ndarray:
    """[T, H/128] as numbers."""
    if quant != "fp8_block128_ue8m0":
        return scales
    return np.exp2(exponents(scales, num_groups) - 127.0)


def quantised(x: np.ndarray, quant: str, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    """(codes, scales) that come out of a dispatch of these rows, [T, H] fp32, to oneself."""
    rows = encode(x, dtype)
    args = {"num_experts": 1, "num_topk": 1, "hidden": x.shape[1], "max_tokens_per_rank": len(x)}
    with ep.EPBuffer(ep.Communicator.single(), **args) as buf:
        out = buf.dispatch(rows.torch(), np.zeros((len(x), 1), np.int64), quant=quant)
        return bits_of(out.x).copy(), out.scales.numpy().copy()


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quant", FP8_FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_format_of_every_dtype(layout, quant, dtype, kind):
    """[J1, J5, J6] Bits of codes and scales; inputs hold -0, subnormals, infinities, NaN."""
    shape = {**SHAPE, "layout": layout, "quant": quant, "x_dtype": dtype, "kind": kind}
    alignment = 4 if layout == "expert" else 1
    cases = [
        Case(
            num_tokens=(5, 9),
            hidden=hidden,
            **shape,
            routing="mixed",
            seed=hidden,
            alignment=alignment,
            exact=hidden != 512,
            strided=hidden == 384,
        )
        for hidden in (128, 384, 512, 640, 2688)
    ]
    run_cases(cases)


@pytest.mark.parametrize("quant", FP8_FORMATS)
def test_the_error_of_every_element_is_bounded(quant):
    """[J1, J2] Exact scales: 2^-4 relative (normals); rounded: twice that bound. Last group too."""
    rng = seeded(3)
    x = (rng.normal(size=(32, 1920)) * np.exp2(rng.integers(-8, 8, (32, 1)))).astype(np.float32)
    codes, scales = quantised(x, quant)
    scale = np.repeat(scale_values(quant, scales, 15), 128, axis=1)
    error = np.abs(e4m3_decode(codes) * scale - x)
    least_normal = 2.0**-6 * scale
    factor = 1 if quant == "fp8_block128" else 2
    bound = factor * (np.abs(x) * 2.0**-4 + 2.0**-10 * scale)
    assert np.all(error <= np.where(np.abs(x) >= least_normal, factor * np.abs(x) / 16, bound))
    amax = np.abs(x).reshape(32, 15, 128).max(axis=2)
    assert np.all(error[:, -128:] <= amax[:, -1:] / 16)


def test_only_the_formats_that_say_so_round_scales():
    """[J3] fp8_block128: scales are not all powers of two; fp8_block128_pow2: all are."""
    x = seeded(4).normal(size=(16, 512)).astype(np.float32)
    _, exact = quantised(x, "fp8_block128")
    _, rounded = quantised(x, "fp8_block128_pow2")
    assert np.any(np.frexp(exact)[0] != 0.5)
    assert np.all(np.frexp(rounded)[0] == 0.5)
    assert [ep.quant.describe(q).power_of_two for q in FP8_FORMATS] == [False, True, True]
    assert np.all((exact <= rounded) & (rounded < 2 * exact))


def test_packed_exponents_are_rounded_up():
    """[J4] A scale with mantissa bits becomes the next power of two, never the one below."""
    x = np.zeros((4, 640), np.float32)
    x[:, ::128] = [[448], [449], [895], [896]]  # scales 1, 1 + 1/448, ..., 2
    _, packed = quantised(x, "fp8_block128_ue8m0")
    assert packed.shape == (4, 2)
    assert exponents(packed, 5).tolist() == [[127] * 5, *[[128] * 5] * 3]
    assert (packed[:, 1] >> 8).tolist() == [0x7F7F7F] * 4  # past the last group: 127


@pytest.mark.parametrize("quant", FP8_FORMATS)
def test_a_group_of_zeros(quant):
    """[J5] Zero rows, zero groups and -0: a finite scale, zeros back."""
    x = np.zeros((3, 256), np.float32)
    x[1, 128:] = -0.0
    x[2, :128] = 1
    codes, scales = quantised(x, quant)
    values = scale_values(quant, scales, 2)
    assert np.all(np.isfinite(values)) and np.all(values > 0)
    assert np.all(codes[0] == 0) and np.all(codes[1, 128:] == 0x80) and np.all(codes[2, 128:] == 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quant", FP8_FORMATS)
def test_one_nan_touches_nothing_else(quant, dtype):
    """[J6] NaN in group 2 of 4 (also all NaN): 0x7F, and the scale is the others'."""
    x = encode(seeded(5).normal(size=(3, 512)), dtype).values()
    spoilt = x.copy()
    spoilt[0, 300], spoilt[1, 300], spoilt[2, 256:384] = np.nan, -np.nan, np.nan
    clean = np.where(np.isnan(spoilt), 0, x)
    (codes, scales), (want, want_scales) = (quantised(v, quant, dtype) for v in (spoilt, clean))
    assert np.array_equal(scales, want_scales)
    assert np.array_equal(codes, np.where(np.isnan(spoilt), E4M3_NAN, want))


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinity_becomes_the_greatest_number(dtype):
    """[J6, J7] inf -> 448, -inf -> -448; the rest of the group is scaled by FLT_MAX."""
    x = np.ones((1, 256), np.float32)
    x[0, :2] = [np.inf, -np.inf]
    codes, scales = quantised(x, "fp8_block128", dtype)
    assert codes[0, :3].tolist() == [0x7E, 0xFE, 0]
    assert scales[0, 0] == np.finfo(np.float32).max / np.float32(448)
    assert codes[0, 128] == 0x7E and scales[0, 1] == np.float32(1) / np.float32(448)


def test_the_greatest_code_is_448():
    """[J7] amax is code 0x7E = 448, not 240 (FNUZ) or 224; the constant is documented."""
    x = np.zeros((1, 128), np.float32)
    x[0, :4] = [448, -448, 240, 224]
    codes, scales = quantised(x, "fp8_block128")
    assert scales.tolist() == [[1]]
    assert codes[0, :4].tolist() == [0x7E, 0xFE, 0x77, 0x76]
    assert ep.quant.describe("fp8_block128").max_value == 448


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "int32", "float8_e8m0fnu"])
@pytest.mark.parametrize("columns", [1, 3, 56])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_of_any_width_and_pitch(layout, columns, dtype, kind):
    """[J4, J8] Rows quantised before, scales in a padded view: both travel as opaque bytes."""
    case = {**SHAPE, "num_tokens": (6, 3), "hidden": 112, "layout": layout, "routing": "mixed"}
    opaque = {"x_dtype": "float8_e4m3fn", "scales_dtype": dtype, "scale_columns": columns}
    alignment = 4 if layout == "expert" else 1
    cases = [
        Case(**case, **opaque, kind=kind, strided=strided, alignment=alignment)
        for strided in (False, True)
    ]
    run_cases(cases)


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "uint8", "float4_e2m1fn_x2"]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_quantised_before_need_no_scales(layout, dtype):
    """[J4] Any byte passes, also those that are NaN in the format."""
    case = {**SHAPE, "num_tokens": (6, 3), "hidden": 48, "layout": layout, "x_dtype": dtype}
    run_cases([Case(**case), Case(**case, exact=False)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_floats_with_scales_are_opaque(dtype):
    """[J4] NaN payloads and signs pass; nothing is quantised or canonicalised."""
    shape = {**SHAPE, "num_tokens": (6, 3), "hidden": 48, "kind": "numpy"}
    trip = make_trip(Case(**shape, x_dtype=dtype, scales_dtype="uint8", scale_columns=5))
    for tokens in trip.tokens:
        tokens.x.bits()[:, :2] = np.iinfo(tokens.x.bits().dtype).max  # a negative NaN
    spoilt = with_ids(trip, [t.idx.data for t in trip.tokens])
    with_buffers(spoilt, lambda buf: round_trip(buf, spoilt))


def test_bf16_has_no_scales():
    """[J9] fp8 is optional: without quant, scales are None and x keeps its dtype."""
    trip = make_trip(Case(num_tokens=(3, 2), hidden=128, **SHAPE))

    def body(buf):
        out = buf.dispatch(**dispatch_args(trip, buf.rank))
        return out.scales is None and str(out.x.dtype) == "torch.bfloat16"

    assert with_buffers(trip, body) == [True, True]


def test_what_is_quantised_is_not_quantised_again():
    """[J4] quant beside scales, or on fp8 rows: refused."""
    trip = make_trip(Case(num_tokens=(3, 2), hidden=128, **SHAPE))
    fp8 = give(Array(np.zeros((3, 128), np.uint8), "float8_e4m3fn"), trip.case)
    scales = give(Array(np.zeros((3, 1), np.float32), "float32"), trip.case)
    for change in ({"x": fp8}, {"scales": scales}):
        change = {"quant": "fp8_block128", **change}
        with_buffers(trip, lambda buf, c=change: expect_refused(buf, trip, 0, c, "quant"))


def test_formats_are_listed_and_described():
    """[J9] What there is can be asked for, and names that are reserved say so."""
    assert set(FP8_FORMATS) <= set(ep.quant.formats())
    for name in FP8_FORMATS:
        assert ep.quant.describe(name, "row") is not None
    with pytest.raises(ep.InvalidArgument, match="fp7"):
        ep.quant.describe("fp7", "row")
