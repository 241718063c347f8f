"""Every public header on its own, from the installed include folder and with nothing beside it."""

import pathlib
import re
import shutil

import pytest

from install import building

HEADERS = sorted(path.name for path in (building.ROOT / "include" / "ep").glob("*.hpp"))
WITH_TORCH = "torch.hpp"
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-pedantic", "-Wshadow", "-Wconversion")
FOREIGN = re.compile(r"(^|/)(Python\.h|pybind11|numpy|torch|ATen|c10|cuda|nccl|nvrtc|mpi)", re.I)


@pytest.fixture(scope="module")
def include(prefix: pathlib.Path) -> pathlib.Path:
    return prefix / "include"


@pytest.mark.parametrize(
    ("compiler", "standard"), [("g++", "c++20"), ("g++", "c++23"), ("clang++", "c++20")]
)
@pytest.mark.parametrize("header", [name for name in HEADERS if name != WITH_TORCH])
def test_a_header_compiles_alone(include, tmp_path, header, compiler, standard):
    if shutil.which(compiler) is None:
        pytest.skip(f"this machine has no {compiler}")
    unit = tmp_path / "unit.cpp"
    unit.write_text(f'#include "ep/{header}"\n#include "ep/{header}"\n')
    words = (compiler, f"-std={standard}", "-fsyntax-only", *WARNINGS, "-I", include, unit)
    building.command(*words)


def test_the_public_headers_are_all_installed(include, package):
    for folder in (include, package.parents[2] / "include"):
        assert sorted(path.name for path in (folder / "ep").iterdir()) == HEADERS


def test_no_header_of_python_torch_or_cuda_is_included(include, tmp_path):
    """Not even through another header: asked of the preprocessor."""
    unit = tmp_path / "unit.cpp"
    unit.write_text('#include "ep/ep.hpp"\n')
    said = building.command("g++", "-std=c++20", "-E", "-I", include, unit)
    included = set(re.findall(r'^# \d+ "([^"<]+)"', said, re.MULTILINE))
    assert any(name.endswith("ep/buffer.hpp") for name in included)
    assert not [name for name in included if FOREIGN.search(name.removeprefix(str(include)))]


def test_the_umbrella_header_brings_all_but_torch(include):
    text = (include / "ep" / "ep.hpp").read_text()
    named = re.findall(r'#include "ep/(\S+)"', text)
    assert sorted([*named, "ep.hpp", WITH_TORCH]) == HEADERS
