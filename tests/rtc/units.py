"""The translation units that reach a GPU: one kernel each, written as the library writes them."""

import dataclasses
import itertools

LAYOUTS = ("kRank", "kExpert")
FORMATS = ("kFp8Block128", "kFp8Block128Pow2", "kFp8Block128Ue8m0")
ELEMENTS = ("kBF16", "kFP16", "kFP32")


@dataclasses.dataclass(frozen=True)
class Unit:
    name: str
    source: str
    max_registers: int  # as recorded; lower it when a kernel gets smaller


def _unit(name: str, header: str, params: str, body: str, max_registers: int) -> Unit:
    source = f"""\
#include "device/cuda/warp.cuh"
#include "kernels/{header}"
using namespace ep::kernels;
using ep::device::cuda::Warp;
extern "C" __global__ void __launch_bounds__(1024, 1)
ep_kernel(const __grid_constant__ {params} params) {{
  {body}
}}
"""
    return Unit(name, source, max_registers)


def _dispatch(layout: str, fmt: str, element: str) -> Unit:
    config = f"DispatchConfig{{LayoutKind::{layout}, Format::{fmt}, Element::{element}}}"
    body = f"dispatch<{config}>(Warp{{}}, params);"
    name = f"dispatch-{layout}-{fmt}-{element}"
    return _unit(name, "dispatch.cuh", "DispatchParams", body, 104)


def _combine(layout: str, element_in: str, element_out: str) -> Unit:
    config = f"CombineConfig{{LayoutKind::{layout}, Element::{element_in}, Element::{element_out}}}"
    body = f"combine<{config}>(Warp{{}}, params);"
    name = f"combine-{layout}-{element_in}-{element_out}"
    return _unit(name, "combine.cuh", "CombineParams", body, 96)


def kernels() -> list[Unit]:
    """Whole kernels: each layout with each format, each element type with each.

    Only one leaf of a kernel depends on the pair (format, element) or (in, out); leaves() has all
    pairs, so that not every kernel need be compiled with every pair.
    """
    units = [_dispatch(layout, "kBytes", "kBF16") for layout in LAYOUTS]
    for i, (layout, fmt) in enumerate(itertools.product(LAYOUTS, FORMATS)):
        units.append(_dispatch(layout, fmt, ELEMENTS[(i + i // 3) % 3]))
    units += [_combine(layout, e, e) for layout in LAYOUTS for e in ELEMENTS]
    units += [
        _unit("refuse", "turns.cuh", "RefuseParams", "refuse(Warp{}, params);", 96),
        _unit("close", "turns.cuh", "CloseParams", "close(Warp{}, params);", 32),
        _unit("copy_out", "turns.cuh", "CopyOutParams", "copy_out(Warp{}, params);", 40),
    ]
    return units


def leaves() -> list[Unit]:
    """The leaves that a pair of types specialises, each in a kernel of its own."""
    units = []
    for fmt, element in itertools.product(FORMATS, ELEMENTS):
        body = (
            "Warp warp;\n"
            f"  encode_row<Element::{element}, Format::{fmt}>(\n"
            "      warp, params.to, params.scales, params.from, params.num_columns);"
        )
        header = "dispatch.cuh"
        unit = _unit(f"encode-{fmt}-{element}", header, "EncodeTest", body, 32)
        units.append(_with_struct(unit))
    for element_in, element_out in itertools.product(ELEMENTS, ELEMENTS):
        body = (
            "Warp warp;\n"
            "  const Terms& terms = *reinterpret_cast<const Terms*>(params.plan);\n"
            f"  reduce_row<Element::{element_in}, Element::{element_out}>(\n"
            "      warp, params, terms, blockIdx.x);"
        )
        name = f"reduce-{element_in}-{element_out}"
        units.append(_unit(name, "combine.cuh", "CombineParams", body, 32))
    return units


def _with_struct(unit: Unit) -> Unit:
    struct = """\
struct EncodeTest {
  std::byte *to, *scales;
  const std::byte* from;
  uint32_t num_columns;
};
"""
    return dataclasses.replace(unit, source=unit.source.replace("extern", struct + "extern", 1))
