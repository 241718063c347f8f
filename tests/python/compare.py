"""Bitwise comparison of what the package gives with what the oracle wants, told in coordinates."""

from __future__ import annotations

from typing import Any

import numpy as np

from python.formats import Array
from python.oracle import Combined, Received, Rules


def is_torch(tensor: Any) -> bool:
    return type(tensor).__module__.partition(".")[0] == "torch"


def dtype_name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def bits_of(tensor: Any) -> np.ndarray:
    """The elements of a torch or numpy tensor as unsigned integers of the same size."""
    if is_torch(tensor):
        import torch

        size = tensor.element_size()
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
        tensor = tensor.detach().view(integer).numpy()
    return tensor.view(f"u{tensor.itemsize}")


def check_pitch(what: str, tensor: Any) -> None:
    """x and scales: unit stride in the last dimension, rows a multiple of 16 bytes apart."""
    if 0 in tensor.shape:
        return
    if is_torch(tensor):
        strides = [s * tensor.element_size() for s in tensor.stride()]
        size = tensor.element_size()
    else:
        strides, size = tensor.strides, tensor.itemsize
    if tensor.shape[-1] > 1:
        assert strides[-1] == size, f"{what} has strides {strides} bytes"
    if tensor.shape[0] > 1:
        assert strides[0] % 16 == 0, f"{what} has strides {strides} bytes"


def expect_same(
    what: str, got: Any, want: Array | None, *, num_rows: int | None = None, places: str = ""
) -> None:
    """Kind, shape, dtype and bits are equal; `num_rows`: rows from there on are unspecified."""
    if want is None:
        assert got is None, f"{what} is given, but should be None"
        return
    assert got is not None, f"{what} is None"
    assert tuple(got.shape) == want.shape, f"{what} is {tuple(got.shape)}, want {want.shape}"
    dtype = want.dtype if is_torch(got) else str(want.data.dtype)
    assert dtype_name(got) == dtype, f"{what} is {dtype_name(got)}, want {dtype}"
    have, wanted = bits_of(got)[:num_rows], want.bits()[:num_rows]
    if np.array_equal(have, wanted):
        return
    wrong = np.argwhere(have != wanted)
    at = tuple(wrong[0].tolist())
    raise AssertionError(
        f"{what}{list(at)} is 0x{have[at]:x}, want 0x{wanted[at]:x}; {len(wrong)} elements in "
        f"{len(np.unique(wrong[:, 0]))} of {len(have)} rows differ{places}"
    )


def expect_ints(what: str, got: Any, want: list[int] | None) -> None:
    """A one-dimensional int32 tensor, or None."""
    expect_same(what, got, None if want is None else Array(np.array(want, np.int32), "int32"))


def expect_received(out: Any, want: Received, rules: Rules, *, status: int | None = 0) -> None:
    """Everything that a dispatch promises; waits for it first."""
    out.event.synchronize()
    if status is not None:
        expect_ints("status", out.status, [status])
    expect_ints("num_rows_device", out.num_rows_device, [want.num_rows])
    expect_ints("rows_needed_device", out.rows_needed_device, [want.rows_needed])
    expect_ints("tokens_per_expert_device", out.tokens_per_expert_device, want.tokens_per_expert)
    expect_ints("expert_offsets", out.expert_offsets, want.expert_offsets)
    expect_ints("rank_offsets", out.rank_offsets, want.rank_offsets)
    # Without host counts: None, never an empty list.
    assert out.num_rows == (want.num_rows if rules.exact else None)
    assert out.tokens_per_expert == (want.tokens_per_expert if rules.exact else None)
    expect_same("topk_idx", out.topk_idx, want.idx)
    expect_same("topk_weights", out.topk_weights, want.weights)
    expect_same("source", out.source, want.source)
    expect_same("x", out.x, want.x, num_rows=want.num_rows)
    check_pitch("x", out.x)
    expect_same("scales", out.scales, want.scales, num_rows=want.num_rows)
    if want.scales is not None:
        check_pitch("scales", out.scales)
    assert len(out.extras) == len(want.extras)
    for i, extra in enumerate(want.extras):
        expect_same(f"extras[{i}]", out.extras[i], extra, num_rows=want.num_rows)


def expect_combined(y: Any, want: Combined) -> None:
    """Everything that a combine promises; waits for it first."""
    y.event.synchronize()
    expect_ints("combine's status", y.status, [0])
    expect_same("combine's x", y.x, want.x)
    expect_same("combine's topk_weights", y.topk_weights, want.topk_weights)
