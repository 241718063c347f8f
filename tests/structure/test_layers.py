"""Includes only ever point down, and the check that says so can fail."""

import pathlib

import pytest

from structure import layers

ROOT = pathlib.Path(__file__).parents[2]


def test_includes_point_down():
    assert layers.violations(ROOT) == []


def test_every_layer_has_a_rule():
    folders = {path.name for path in (ROOT / "csrc").iterdir() if path.is_dir()}
    assert folders <= set(layers.MAY_INCLUDE)


@pytest.mark.parametrize(
    ("file", "include", "why"),
    [
        ("include/ep/tensor.hpp", '"common/math.hpp"', "not for ep"),
        ("include/ep/tensor.hpp", "<cuda_runtime.h>", "no place in a public header"),
        ("csrc/common/check.hpp", '"layout/record.hpp"', "not for common"),
        ("csrc/layout/record.hpp", '"ep/tensor.hpp"', "not for layout"),
        ("csrc/kernels/dispatch.cuh", '"device/stream.hpp"', "not for kernels"),
        ("csrc/kernels/host/dispatch.cpp", '"ep/tensor.hpp"', "not for kernels"),
        ("csrc/jit/cache.cpp", '"kernels/dispatch.cuh"', "not for jit"),
        ("csrc/device/host/stream.cpp", '"kernels/ptx/copy.cuh"', "device leaf"),
        ("csrc/fabric/host/window.cpp", '"kernels/dispatch.cuh"', "not for fabric"),
        ("csrc/buffer/dispatch.cpp", '"kernels/dispatch.cuh"', "kernel's body"),
        ("csrc/buffer/dispatch.cpp", '"common/absent.hpp"', "not a file"),
        ("csrc/buffer/dispatch.cpp", '"../common/math.hpp"', "not for buffer"),
        ("csrc/buffer/dispatch.cpp", "<ep/tensor.hpp>", "in quotes"),
        ("csrc/utils/dispatch.cpp", '"common/math.hpp"', "no layer"),
    ],
)
def test_a_planted_violation_is_found(tmp_path, file, include, why):
    planted = {
        "include/ep/tensor.hpp": "",
        "csrc/common/math.hpp": "",
        "csrc/layout/record.hpp": '#include "common/math.hpp"\n',
        "csrc/kernels/dispatch.cuh": '#include "layout/record.hpp"\n',
        "csrc/kernels/ptx/copy.cuh": "",
        "csrc/device/stream.hpp": '#include "ep/tensor.hpp"\n',
    }
    for name, text in planted.items():
        _write(tmp_path / name, text)
    assert layers.violations(tmp_path) == []

    _write(tmp_path / file, f"#include {include}\n")
    found = layers.violations(tmp_path)
    assert any(why in line for line in found), found
    assert all(line.startswith(file) for line in found)


def _write(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
