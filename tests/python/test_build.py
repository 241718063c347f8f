"""What a build needs, and what it says when it cannot be had: nothing fails later than here."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import textwrap

from python.cli_process import hide
from python.wheels import ROOT


def configure(folder: pathlib.Path, first_on_path: pathlib.Path, *options: str) -> str:
    """What CMake says; it must refuse."""
    command = ["cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", "-DEP_BUILD_PYTHON=ON"]
    ran = subprocess.run(
        [*command, f"-DPython_EXECUTABLE={sys.executable}", *options],
        env=os.environ | {"PYTHONPATH": str(first_on_path)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode != 0, ran.stdout
    return " ".join(ran.stderr.split())


def test_a_free_threaded_python_is_refused_by_name(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    text = """
    import sysconfig
    sysconfig.get_config_vars()["Py_GIL_DISABLED"] = 1
    """
    (site / "sitecustomize.py").write_text(textwrap.dedent(text))
    said = configure(tmp_path / "build", site)
    assert "is a free-threaded Python, which ep does not support" in said
    assert "Build with the Python that has one" in said


def test_a_missing_pybind11_stops_the_build_with_its_name(tmp_path):
    """A build went on without its header, and the program died when it ran (srt-slurm 242)."""
    site = tmp_path / "site"
    site.mkdir()
    hide(site, "pybind11")
    no_system_copy = "-DCMAKE_DISABLE_FIND_PACKAGE_pybind11=ON"
    said = configure(tmp_path / "build", site, no_system_copy)
    assert "needs pybind11 3.0 or newer" in said
    assert "-m pip install pybind11" in said


def test_a_wheel_is_built_from_two_packages_of_a_registry():
    """In isolation a build cannot see torch (uv 15316): it must not want to."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    required = re.search(r"^requires = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)[1]
    assert [r.partition("==")[0] for r in re.findall(r'"([^"]+)"', required)] == [
        "scikit-build-core",
        "pybind11",
    ]


def test_a_build_looks_for_nothing_that_a_machine_may_lack():
    """Builds failed where MPI, a driver or torch was not to be had (ROCm/DeepEP 5, DeepEP 383)."""
    files = [ROOT / "CMakeLists.txt", *(ROOT / "cmake").glob("*.cmake")]
    files += [f for name in ("csrc", "python") for f in (ROOT / name).rglob("CMakeLists.txt")]
    texts = [f.read_text(encoding="utf-8") for f in files]
    wanted = {name for text in texts for name in re.findall(r"^ *find_package\((\w+)", text, re.M)}
    assert wanted == {"Threads", "Python", "pybind11"}
