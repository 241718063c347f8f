"""What travels when dispatch quantises: the formats by name, and how to read them back.

dispatch(quant=name) encodes each token's row once, at its source. Per group of 128 columns, in
fp32:

    a = min(max |x| over the group's non-NaN x, FLT_MAX)
    s = max(a, 1e-4) / 448
    q = e4m3fn(clamp(x * (1 / s), -448, 448))

and x is about q * s. `describe(name)` says what such a row looks like; `dequantize` reads it.

Sources: e4m3fn is E4M3 of the OCP 8-bit floating point specification 1.0; groups of 1 x 128 with
fp32 scales are those of DeepSeek-V3 (arXiv:2412.19437, section 3.3.2); exponent bytes are E8M0 of
the OCP Microscaling formats specification 1.0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from ep.errors import InvalidArgument, Unsupported

_GROUP = 128  # columns that share a scale
_PITCH = 16  # bytes that a row of scales is padded to
_SCALES_PER_WORD = 4  # exponent bytes in an int32

# Reserved names, and what would do.
_RESERVED_FORMATS = {
    "mxfp8": '"fp8_block128_ue8m0" (groups of 128, not 32) or scales of your own (scales=) does',
    "nvfp4": "x and scales quantised by you (dtype float4_e2m1fn_x2, scales=) do",
    "int8_row": "x and scales quantised by you (dtype int8, scales=) do",
}
_RESERVED_LAYOUTS = {
    "col": '"row" and a transpose of out.scales do',
    "col_ue8m0x4": '"row" of "fp8_block128_ue8m0" and a transpose of out.scales do',
    "swizzle_128x4": '"row" and a permutation of out.scales do',
}


class Format(NamedTuple):
    """How the rows of a quantised dispatch look: N rows of H columns.

    x is [N, H] of `dtype`, scales is `scale_shape(N, H)` of `scale_dtype` with `scale_strides(H)`.
    With numpy, whose dtypes lack e4m3fn, x is uint8.
    """

    name: str  # what quant= takes
    layout: str  # what scale_layout= takes
    dtype: str  # of x, PyTorch's name
    scale_dtype: str  # of an element of scales
    scales_per_element: int  # 1, or 4 exponent bytes in an int32
    group: int  # columns that share a scale
    hidden_multiple: int  # H must be a multiple of it
    max_value: float  # largest magnitude of an element: byte 0x7E of e4m3fn
    min_amax: float  # a group's largest magnitude counts as at least this (fp32)
    power_of_two: bool  # are all scales powers of two?
    gap_scale: float | int  # an element of scales in a gap row, whose scale is 1
    rounding: str
    nan: str
    source: str

    def scale_shape(self, num_rows: int, hidden: int) -> tuple[int, int]:
        """Shape of scales of `num_rows` rows of `hidden` elements, in elements of `scale_dtype`.

        Raises InvalidArgument when `hidden` is no positive multiple of `hidden_multiple`.
        """
        if hidden < 1 or hidden % self.hidden_multiple:
            raise InvalidArgument(
                f"hidden={hidden}: {self.name} needs a positive multiple of {self.hidden_multiple}"
            )
        return num_rows, math.ceil(hidden / self.group / self.scales_per_element)

    def scale_strides(self, hidden: int) -> tuple[int, int]:
        """Strides of scales, in elements: a row starts at a multiple of 16 bytes.

        For rows of `hidden` elements; raises as `scale_shape`.
        """
        num_bytes = 4 * self.scale_shape(1, hidden)[1]
        return math.ceil(num_bytes / _PITCH) * _PITCH // 4, 1

    def bytes_per_row(self, hidden: int) -> int:
        """Bytes of a row that travel: `hidden` of x, and its scales; what token_bytes must hold.

        Raises as `scale_shape`.
        """
        return hidden + 4 * self.scale_shape(1, hidden)[1]


def _format(name: str, scale_rounding: str, **differences: Any) -> Format:
    """One of the fp8_block128 family; `differences` from the first of it."""
    fields: dict[str, Any] = {
        "layout": "row",
        "dtype": "float8_e4m3fn",
        "scale_dtype": "float32",
        "scales_per_element": 1,
        "group": _GROUP,
        "hidden_multiple": _GROUP,
        "max_value": 448.0,
        "min_amax": 1e-4,
        "power_of_two": False,
        "gap_scale": 1.0,
        "rounding": f"elements to nearest, ties to even; {scale_rounding}; infinities become +-448",
        "nan": "a NaN becomes byte 0x7F and does not touch its group's scale",
        "source": "OCP OFP8 E4M3 elements in DeepSeek-V3's groups of 1 x 128",
    }
    return Format(name=name, **(fields | differences))


_UP = "scales up, to a power of two"
_FORMATS = {
    f.name: f
    for f in (
        _format("fp8_block128", "scales to nearest fp32"),
        _format("fp8_block128_pow2", _UP, power_of_two=True),
        _format(
            "fp8_block128_ue8m0",
            _UP,
            power_of_two=True,
            scale_dtype="int32",
            scales_per_element=_SCALES_PER_WORD,
            gap_scale=0x7F7F7F7F,
            source="OCP OFP8 E4M3 elements in DeepSeek-V3's groups of 1 x 128, scales as OCP MX's "
            "E8M0 exponent bytes: word j of a row holds groups 4j to 4j+3, group 4j in bits 0 to "
            "7; bytes past the last group are 127",
        ),
    )
}


def formats() -> tuple[str, ...]:
    """Names that dispatch(quant=) accepts in this version."""
    return tuple(_FORMATS)


def layouts() -> tuple[str, ...]:
    """Names that dispatch(scale_layout=) accepts in this version."""
    return ("row",)


def describe(name: str, layout: str = "row") -> Format:
    """What a row of the format `name` looks like, with its scales laid out as `layout` says.

    Raises:
        Unsupported: a name that is reserved for a later version; says what would do.
        InvalidArgument: a name that is none; lists the names.
    """
    if name in _RESERVED_FORMATS:
        raise Unsupported(
            f'quant="{name}" is not supported by this version; {_RESERVED_FORMATS[name]}'
        )
    if name not in _FORMATS:
        raise InvalidArgument(_unknown("quant", name, formats(), _RESERVED_FORMATS))
    if layout in _RESERVED_LAYOUTS:
        raise Unsupported(
            f'scale_layout="{layout}" is not supported by this version; {_RESERVED_LAYOUTS[layout]}'
        )
    if layout not in layouts():
        raise InvalidArgument(_unknown("scale_layout", layout, layouts(), _RESERVED_LAYOUTS))
    return _FORMATS[name]


def _unknown(argument: str, value: object, good: Sequence[str], reserved: dict[str, str]) -> str:
    return (
        f"{argument}={value!r} is none of {', '.join(good)} "
        f"(reserved for later: {', '.join(reserved)})"
    )


def dequantize(x: Any, scales: Any, name: str) -> Any:
    """The values of quantised rows: fp32 [N, H], each element q * s with one rounding.

    Args:
        x: [N, H] of e4m3fn, or its bytes as uint8; a torch tensor of any device or a numpy array.
        scales: `describe(name).scale_shape(N, H)` of its dtype and x's kind, any strides.
        name: one of `formats()`.

    Returns a tensor of x's kind and device, without gradient. NaN bytes give NaN; an infinity that
    was sent is 448 s, which only "fp8_block128" keeps within fp32.
    Raises InvalidArgument for a shape or dtype that is not the format's, and as `describe` does.
    """
    form = describe(name)
    if x.ndim != 2:
        raise InvalidArgument(f"x has shape {list(x.shape)}; [N, H] is needed")
    num_rows, hidden = x.shape
    _check(x, "x", ("float8_e4m3fn", "uint8"), (num_rows, hidden))
    _check(scales, "scales", (form.scale_dtype,), form.scale_shape(num_rows, hidden))
    values, factors = _decode(x, scales, form)
    grouped = values.reshape(num_rows, hidden // _GROUP, _GROUP) * factors[:, :, None]
    return grouped.reshape(num_rows, hidden)


def _check(tensor: Any, what: str, dtypes: Sequence[str], shape: tuple[int, ...]) -> None:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in dtypes:
        raise InvalidArgument(f"{what} has dtype {dtype}; {' or '.join(dtypes)} is needed")
    if tuple(tensor.shape) != shape:
        raise InvalidArgument(f"{what} has shape {list(tensor.shape)}; {list(shape)} is needed")


def _decode(x: Any, scales: Any, form: Format) -> tuple[Any, Any]:
    """Elements [N, H] and scales [N, groups] as fp32, in the library that x comes from."""
    num_groups = x.shape[1] // _GROUP
    is_packed = form.scales_per_element != 1
    if type(x).__module__.partition(".")[0] == "numpy":
        import numpy as np

        if is_packed:  # the bytes of a little-endian word, from its lowest
            exponents = np.ascontiguousarray(scales, "<i4").view(np.uint8)[:, :num_groups]
            scales = np.array(_e8m0_values(), np.float32)[exponents]
        return np.array(_e4m3fn_values(), np.float32)[x], scales
    import torch

    if is_packed:
        shifts = torch.arange(0, 32, 8, device=scales.device)
        exponents = (scales.detach().to(torch.int64)[:, :, None] >> shifts) & 0xFF
        exponents = exponents.flatten(1)[:, :num_groups]
        scales = torch.tensor(_e8m0_values(), dtype=torch.float32, device=x.device)[exponents]
    return x.detach().view(torch.float8_e4m3fn).to(torch.float32), scales.detach()


@cache
def _e4m3fn_values() -> tuple[float, ...]:
    """By byte: 1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinity, 0x7F and 0xFF are NaN."""

    def magnitude(code: int) -> float:
        exponent, mantissa = code >> 3, code & 7
        if code == 0x7F:
            return math.nan
        return math.ldexp(mantissa if exponent == 0 else 8 + mantissa, max(exponent, 1) - 10)

    return tuple(math.copysign(magnitude(b & 0x7F), -1.0 if b & 0x80 else 1.0) for b in range(256))


@cache
def _e8m0_values() -> tuple[float, ...]:
    """By byte b: 2^(b - 127); 255 is NaN. All are exact in fp32, 2^-127 as a subnormal."""
    return (*(math.ldexp(1.0, b - 127) for b in range(255)), math.nan)
