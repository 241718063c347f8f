"""Number formats by their bits, and arrays that know which format they hold.

numpy has no bfloat16 and no 8-bit floats: an `Array` holds their bits in unsigned integers, which
is also what the package gives for numpy inputs. Sources: bfloat16 is the upper half of an IEEE 754
binary32; e4m3fn is the OCP 8-bit floating point specification's E4M3 (bias 7, no infinity, 0x7F is
NaN).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

FLOATS = ("bfloat16", "float16", "float32")  # what experts compute in
# Formats that numpy lacks, and what holds their bits.
_HOLDERS = {
    "bfloat16": np.uint16,
    "float8_e4m3fn": np.uint8,
    "float8_e5m2": np.uint8,
    "float8_e8m0fnu": np.uint8,
    "float4_e2m1fn_x2": np.uint8,
}
QUIET_NAN = {"bfloat16": 0x7FC0, "float16": 0x7E00, "float32": 0x7FC00000}  # the one that leaves
E4M3_NAN = 0x7F
E4M3_MAX = np.float32(448)


def holder(dtype: str) -> np.dtype:
    """The numpy dtype that holds elements of `dtype`."""
    return np.dtype(_HOLDERS.get(dtype, dtype))


@dataclass(frozen=True)
class Array:
    """Elements of the format `dtype` (PyTorch's name of it), held in `data`."""

    data: np.ndarray
    dtype: str

    def __post_init__(self) -> None:
        assert self.data.dtype == holder(self.dtype), (self.data.dtype, self.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def row_bytes(self) -> int:
        """Bytes of one row [1, ...] without padding."""
        return int(np.prod(self.shape[1:], dtype=np.int64)) * self.data.itemsize

    def bits(self) -> np.ndarray:
        """The elements as unsigned integers of the same size."""
        return self.data.view(f"u{self.data.itemsize}")

    def values(self) -> np.ndarray:
        """The elements as fp32; exact for `FLOATS`."""
        if self.dtype == "bfloat16":
            return (self.data.astype(np.uint32) << 16).view(np.float32)
        return self.data.astype(np.float32)

    def torch(self) -> Any:
        """The same bits as a contiguous torch tensor, a copy."""
        import torch

        tensor = torch.from_numpy(np.array(self.data, order="C"))
        return tensor if self.dtype not in _HOLDERS else tensor.view(getattr(torch, self.dtype))


def zeros(dtype: str, *shape: int) -> Array:
    return Array(np.zeros(shape, holder(dtype)), dtype)


def encode(values: np.ndarray, dtype: str) -> Array:
    """fp32 values, rounded once to nearest even; every NaN becomes the format's quiet one."""
    values = np.asarray(values, np.float32)
    is_nan = np.isnan(values)
    if dtype == "bfloat16":
        bits = np.array(values).view(np.uint32)
        # Half a unit less one, plus the last kept bit: a carry is what rounds up.
        data = ((bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    else:
        with np.errstate(over="ignore", under="ignore"):
            data = values.astype(holder(dtype))
    data.view(f"u{data.itemsize}")[is_nan] = QUIET_NAN[dtype]
    return Array(data, dtype)


def _e4m3_magnitudes() -> np.ndarray:
    """The values of the codes 0x00 to 0x7E."""
    code = np.arange(0x7F)
    exponent, fraction = code >> 3, code & 7
    steps = np.where(exponent == 0, fraction, 8 + fraction)
    return np.ldexp(steps.astype(np.float64), np.maximum(exponent, 1) - 7 - 3)


_E4M3 = _e4m3_magnitudes()


def e4m3_decode(codes: np.ndarray) -> np.ndarray:
    """fp32 values of e4m3fn codes (uint8)."""
    magnitude = codes & 0x7F
    values = np.append(_E4M3, np.nan)[magnitude]
    return np.where(codes & 0x80, -values, values).astype(np.float32)


def e4m3_encode(values: np.ndarray) -> np.ndarray:
    """e4m3fn codes (uint8) of fp32 values in [-448, 448] or NaN: nearest, ties to the even code."""
    values = np.asarray(values, np.float32)
    is_nan = np.isnan(values)
    magnitude = np.where(is_nan, 0, np.abs(values)).astype(np.float64)
    assert np.all(magnitude <= E4M3_MAX), "clamp first"
    above = np.searchsorted(_E4M3, magnitude)  # the first code that is not less
    below = np.maximum(above - 1, 0)
    middle = (_E4M3[above] + _E4M3[below]) / 2
    takes_below = (magnitude < middle) | ((magnitude == middle) & (below % 2 == 0))
    code = np.where(takes_below, below, above) | np.where(np.signbit(values), 0x80, 0)
    return np.where(is_nan, E4M3_NAN, code).astype(np.uint8)
