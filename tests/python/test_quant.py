"""ep.quant: what a format's rows look like, and that real dispatches give just that."""

import numpy as np
import pytest
import torch

import ep

FORMATS = ("fp8_block128", "fp8_block128_pow2", "fp8_block128_ue8m0")
RESERVED = ("mxfp8", "nvfp4", "int8_row")
RESERVED_LAYOUTS = ("col", "col_ue8m0x4", "swizzle_128x4")
MAX = 448.0


def buffer(hidden: int, num_tokens: int = 8) -> ep.EPBuffer:
    return ep.EPBuffer(
        ep.Communicator.single(),
        num_experts=2,
        num_topk=1,
        hidden=hidden,
        max_tokens_per_rank=num_tokens,
        device="cpu",
    )


def quantised(x: torch.Tensor, name: str):
    """x and scales as a real dispatch of one rank gives them, rows in token order; copies."""
    with buffer(x.shape[1]) as buf:
        out = buf.dispatch(x, torch.zeros(len(x), 1, dtype=torch.int64), quant=name)
        return out.x.clone(), out.scales.clone()


def sample(num_rows: int, hidden: int) -> torch.Tensor:
    """bf16 rows whose groups differ in magnitude by up to 2^16."""
    generator = torch.Generator().manual_seed(num_rows * 10007 + hidden)
    x = torch.randn(num_rows, hidden, generator=generator)
    groups = torch.arange(hidden) // 128
    return (x * torch.exp2(groups * 5.0 % 17 - 8)).to(torch.bfloat16)


def scales_of(x: torch.Tensor, name: str) -> torch.Tensor:
    """[T, groups] fp32, from the formula."""
    amax = x.float().abs().unflatten(1, (-1, 128)).amax(2)
    scale = torch.maximum(amax, torch.tensor(1e-4)) / MAX
    if name == "fp8_block128":
        return scale
    mantissa, exponent = torch.frexp(scale)  # mantissa in [0.5, 1)
    return torch.exp2((exponent - (mantissa == 0.5).int()).float())


def test_formats_are_the_ones_that_dispatch_takes():
    assert ep.quant.formats() == FORMATS
    for name in FORMATS:
        quantised(sample(2, 128), name)


@pytest.mark.parametrize("name", RESERVED)
def test_a_reserved_format_is_unsupported_and_says_what_would_do(name):
    with pytest.raises(ep.Unsupported, match=f'quant="{name}".*; .* (do|does)$'):
        ep.quant.describe(name)


@pytest.mark.parametrize("layout", RESERVED_LAYOUTS)
def test_a_reserved_scale_layout_is_unsupported_and_says_what_would_do(layout):
    with pytest.raises(ep.Unsupported, match=f'scale_layout="{layout}".*; .* do$'):
        ep.quant.describe("fp8_block128", layout)


@pytest.mark.parametrize("name", ["fp8", "", "FP8_BLOCK128", None, 3])
def test_an_unknown_format_is_an_invalid_argument_that_lists_the_names(name):
    with pytest.raises(ep.InvalidArgument, match="quant=") as caught:
        ep.quant.describe(name)
    assert all(known in str(caught.value) for known in FORMATS + RESERVED)


def test_an_unknown_scale_layout_is_an_invalid_argument_that_lists_the_names():
    with pytest.raises(ep.InvalidArgument, match="scale_layout='rows'") as caught:
        ep.quant.describe("fp8_block128", "rows")
    assert all(known in str(caught.value) for known in ("row", *RESERVED_LAYOUTS))


def test_a_format_cannot_be_changed():
    with pytest.raises(AttributeError):
        ep.quant.describe("fp8_block128").group = 64


@pytest.mark.parametrize("name", FORMATS)
def test_constants_are_the_formula_s(name):
    form = ep.quant.describe(name)
    assert (form.name, form.layout) == (name, "row")
    assert (form.dtype, form.group, form.hidden_multiple) == ("float8_e4m3fn", 128, 128)
    assert (form.max_value, form.min_amax) == (448.0, 1e-4)
    assert form.power_of_two == (name != "fp8_block128")
    # 448 is the largest finite value, byte 0x7E; the byte after it is NaN.
    assert torch.tensor([0x7E], dtype=torch.uint8).view(torch.float8_e4m3fn).float() == MAX
    assert "0x7F" in form.nan and "even" in form.rounding and "OCP" in form.source


@pytest.mark.parametrize(
    ("name", "hidden", "shape", "strides", "num_bytes"),
    [
        ("fp8_block128", 128, (3, 1), (4, 1), 132),
        ("fp8_block128", 7168, (3, 56), (56, 1), 7392),
        ("fp8_block128_pow2", 640, (3, 5), (8, 1), 660),
        ("fp8_block128_ue8m0", 128, (3, 1), (4, 1), 132),
        ("fp8_block128_ue8m0", 640, (3, 2), (4, 1), 648),
        ("fp8_block128_ue8m0", 7168, (3, 14), (16, 1), 7224),
    ],
)
def test_sizes_by_hand(name, hidden, shape, strides, num_bytes):
    form = ep.quant.describe(name)
    assert form.scale_shape(3, hidden) == shape
    assert form.scale_strides(hidden) == strides
    assert form.bytes_per_row(hidden) == num_bytes


@pytest.mark.parametrize("hidden", [0, -128, 64, 129, 192])
def test_a_hidden_that_is_no_multiple_of_128_has_no_scales(hidden):
    form = ep.quant.describe("fp8_block128")
    for ask in (lambda: form.scale_shape(1, hidden), lambda: form.bytes_per_row(hidden)):
        with pytest.raises(ep.InvalidArgument, match="multiple of 128"):
            ask()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("hidden", [128, 640, 1024])
@pytest.mark.parametrize("outputs", ["window", "caller"])
def test_a_dispatch_has_the_described_dtypes_shapes_and_strides(name, hidden, outputs):
    form = ep.quant.describe(name)
    with buffer(hidden) as buf:
        x, idx = sample(5, hidden), torch.zeros(5, 1, dtype=torch.int32)
        out = buf.dispatch(x, idx, quant=name, outputs=outputs)
        assert str(out.x.dtype) == f"torch.{form.dtype}"
        assert str(out.scales.dtype) == f"torch.{form.scale_dtype}"
        assert tuple(out.x.shape) == (5, hidden)
        assert tuple(out.scales.shape) == form.scale_shape(5, hidden)
        assert out.scales.stride() == form.scale_strides(hidden)


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_per_row_is_the_least_token_bytes_that_a_buffer_takes(name):
    hidden = 640
    need = ep.quant.describe(name).bytes_per_row(hidden)
    x, idx = sample(1, hidden), torch.zeros(1, 1, dtype=torch.int32)
    sizes = {
        "num_experts": 1,
        "num_topk": 1,
        "hidden": hidden,
        "max_tokens_per_rank": 1,
        "device": "cpu",
    }
    with ep.EPBuffer(ep.Communicator.single(), token_bytes=need, **sizes) as buf:
        buf.dispatch(x, idx, quant=name)
    with (
        ep.EPBuffer(ep.Communicator.single(), token_bytes=need - 4, **sizes) as buf,
        pytest.raises(ep.InvalidArgument, match=str(need)),
    ):
        buf.dispatch(x, idx, quant=name)


@pytest.mark.parametrize("name", FORMATS)
def test_gap_rows_have_the_described_scale(name):
    form = ep.quant.describe(name)
    with buffer(128) as buf:
        out = buf.dispatch(
            sample(3, 128),
            torch.tensor([[0], [1], [1]]),
            layout="expert",
            expert_alignment=4,
            quant=name,
        )
        gaps = out.topk_idx == -1
        assert gaps.sum() == 5
        assert (out.scales[gaps] == form.gap_scale).all()
        assert (ep.quant.dequantize(out.x, out.scales, name)[gaps] == 0).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("hidden", [128, 640, 1024])
def test_dequantised_rows_are_within_half_a_step_of_what_was_sent(name, hidden):
    x = sample(7, hidden)
    values = ep.quant.dequantize(*quantised(x, name), name)
    assert values.dtype == torch.float32 and tuple(values.shape) == (7, hidden)
    # Half a step: 2^-4 of a normal element, 2^-10 scales of a subnormal one.
    scale = scales_of(x, name).repeat_interleave(128, 1)
    bound = torch.maximum(x.float().abs() * 2.0**-4, scale * 2.0**-10)
    assert ((values - x.float()).abs() <= bound * (1 + 2.0**-20)).all()


@pytest.mark.parametrize("name", FORMATS)
def test_each_element_is_q_times_its_groups_scale(name):
    """640 columns: five groups, so that the last word of exponents is not full."""
    x = sample(7, 640)
    q, scales = quantised(x, name)
    want = q.float() * scales_of(x, name).repeat_interleave(128, 1)
    assert torch.equal(ep.quant.dequantize(q, scales, name), want)


def test_scales_that_are_not_rounded_are_not_all_powers_of_two():
    x = sample(7, 1024)
    for name in FORMATS:
        _, scales = quantised(x, name)
        if name == "fp8_block128_ue8m0":
            continue
        mantissa = torch.frexp(scales)[0]
        assert bool((mantissa == 0.5).all()) == (name == "fp8_block128_pow2")


def test_exponents_are_packed_from_the_lowest_byte_and_filled_with_127():
    """Group g of 5 has its own exponent, so that a swapped byte shows."""
    x = torch.exp2(torch.arange(5.0)).repeat_interleave(128)[None].to(torch.bfloat16)
    _, scales = quantised(x, "fp8_block128_ue8m0")
    words = scales.view(torch.uint8).flatten().tolist()
    # 2^g / 448 rounds up to 2^(g - 8).
    assert words == [119, 120, 121, 122, 123, 127, 127, 127]


@pytest.mark.parametrize("name", FORMATS)
def test_a_nan_stays_in_its_place_and_leaves_its_group_s_scale_alone(name):
    """One NaN in group 2 of 4."""
    x = sample(2, 512)
    clean = ep.quant.dequantize(*quantised(x, name), name)
    spoilt = x.clone()
    spoilt[0, 300] = torch.nan
    x.view(torch.int16)[0, 300] = 0  # no largest element there, in either
    values = ep.quant.dequantize(*quantised(spoilt, name), name)
    assert values[0, 300].isnan() and values.isnan().sum() == 1
    others = torch.ones_like(values, dtype=torch.bool)
    others[0, 256:384] = False
    assert torch.equal(values[others], clean[others])
    without = ep.quant.dequantize(*quantised(x, name), name)
    others[0, 256:384] = True
    others[0, 300] = False
    assert torch.equal(values[others], without[others])


@pytest.mark.parametrize("name", FORMATS)
def test_zero_rows_and_large_values_stay_finite(name):
    """A group of zeros has a scale that is not 0; 1e38 is near the end of fp32."""
    x = torch.zeros(2, 128, dtype=torch.float32)
    x[1] = 1e38
    q, scales = quantised(x, name)
    values = ep.quant.dequantize(q, scales, name)
    assert (values[0] == 0).all() and (scales[0] != 0).all()
    assert ((values[1] / 1e38 - 1).abs() <= 2.0**-4).all()


@pytest.mark.parametrize("name", FORMATS)
def test_an_infinity_comes_back_as_the_largest_value_of_its_scale(name):
    """448 scales; where the scale was rounded up that is more than fp32 holds."""
    x = torch.zeros(1, 128, dtype=torch.float32)
    x[0, 0], x[0, 1] = torch.inf, -torch.inf
    values = ep.quant.dequantize(*quantised(x, name), name)
    assert values.isfinite().all() == (name == "fp8_block128")
    assert values[0, 0] >= 3.4e38 and values[0, 1] == -values[0, 0]
    assert (values[0, 2:] == 0).all()


def test_every_byte_of_e4m3fn_is_read_as_torch_reads_it():
    codes = torch.arange(256, dtype=torch.uint8).reshape(2, 128)
    want = codes.view(torch.float8_e4m3fn).float()
    ones = torch.ones(2, 1)
    for x in (codes, codes.view(torch.float8_e4m3fn)):
        got = ep.quant.dequantize(x, ones, "fp8_block128")
        assert torch.equal(got.nan_to_num(7e7), want.nan_to_num(7e7))
    got = ep.quant.dequantize(codes.numpy(), ones.numpy(), "fp8_block128")
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, want.numpy())
    assert np.signbit(got[1, 0]) and not np.signbit(got[0, 0])  # -0 and 0


def test_every_byte_of_e8m0_is_read_as_torch_reads_it():
    """Also 0, whose value 2^-127 is subnormal in fp32, and 255, which is NaN."""
    codes = torch.arange(256, dtype=torch.uint8)
    want = codes.view(torch.float8_e8m0fnu).float()
    x = torch.full((256, 128), 0x38, dtype=torch.uint8)  # 1.0
    words = codes.to(torch.int32)[:, None]  # in the lowest byte
    for kind in (lambda t: t, lambda t: t.numpy()):
        got = ep.quant.dequantize(kind(x), kind(words), "fp8_block128_ue8m0")
        np.testing.assert_array_equal(np.asarray(got)[:, 5], want.numpy())


@pytest.mark.parametrize("name", FORMATS)
def test_numpy_gives_what_torch_gives(name):
    x = sample(4, 640)
    q, scales = quantised(x, name)
    want = ep.quant.dequantize(q, scales, name).numpy()
    got = ep.quant.dequantize(q.view(torch.uint8).numpy(), scales.numpy(), name)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", FORMATS)
def test_a_numpy_dispatch_is_dequantised_as_it_comes(name):
    x = sample(3, 256)
    with buffer(256) as buf:
        bits = x.view(torch.int16).numpy().view(np.uint16)
        out = buf.dispatch(bits, np.zeros((3, 1), np.int32), quant=name)
        got = ep.quant.dequantize(out.x, out.scales, name)
    assert isinstance(got, np.ndarray)
    np.testing.assert_array_equal(got, ep.quant.dequantize(*quantised(x, name), name).numpy())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("num_rows", [0, 1])
def test_no_rows_and_one_row_with_padded_scales(name, num_rows):
    x = sample(num_rows, 640)
    q, scales = quantised(x, name)
    wide = torch.zeros(num_rows, scales.shape[1] + 3, dtype=scales.dtype)
    wide[:, : scales.shape[1]] = scales
    padded = wide[:, : scales.shape[1]]
    values = ep.quant.dequantize(q, padded, name)
    assert tuple(values.shape) == (num_rows, 640)
    assert torch.equal(values, ep.quant.dequantize(q, scales.contiguous(), name))


@pytest.mark.parametrize(
    ("x", "scales", "name", "text"),
    [
        (torch.zeros(2, 128), torch.ones(2, 1), "fp8_block128", "x has dtype float32"),
        (torch.zeros(128, dtype=torch.uint8), torch.ones(1), "fp8_block128", "x has shape"),
        (torch.zeros(2, 64, dtype=torch.uint8), torch.ones(2, 1), "fp8_block128", "hidden=64"),
        (torch.zeros(2, 128, dtype=torch.uint8), torch.ones(2, 2), "fp8_block128", "scales has sh"),
        (torch.zeros(2, 128, dtype=torch.uint8), torch.ones(2, 1), FORMATS[2], "scales has dtype"),
    ],
)
def test_what_is_not_the_format_is_refused_by_name(x, scales, name, text):
    with pytest.raises(ep.InvalidArgument, match=text):
        ep.quant.dequantize(x, scales, name)
