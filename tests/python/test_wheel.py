"""What is in the wheel and in the source distribution, and what is not."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile

import pytest

import ep
from python.wheels import ROOT, built_wheel, contents, metadata

MOST_BYTES = 8_000_000
INFO = r"ep_moe-[\d.]+\.dist-info"
# Every kind is in the wheel, and every file is of one kind.
KINDS = (
    r"ep/(\w+/)?\w+\.py",
    r"ep/py\.typed",
    r"ep/_C\.pyi",
    r"ep/_C\.[\w-]+\.so",
    r"ep/include/ep/\w+\.hpp",
    r"ep/lib/libep\.a",
    r"ep/lib/cmake/ep/ep-[\w-]+\.cmake",
    r"ep_moe-[\d.]+\.data/scripts/ep-bench",
    rf"{INFO}/METADATA",
    rf"{INFO}/WHEEL",
    rf"{INFO}/RECORD",
    rf"{INFO}/licenses/LICENSE",
    rf"{INFO}/licenses/LICENSES/\w+\.txt",
)


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return contents(built_wheel())


@pytest.mark.parametrize("kind", KINDS)
def test_the_wheel_has_every_kind_of_file(files, kind):
    assert [name for name in files if re.fullmatch(kind, name)]


def test_the_wheel_has_no_other_file(files):
    assert [n for n in files if not any(re.fullmatch(kind, n) for kind in KINDS)] == []


@pytest.mark.parametrize(
    ("folder", "inside", "suffixes"),
    [("python/ep", "ep", (".py", ".pyi", ".typed")), ("include/ep", "ep/include/ep", (".hpp",))],
    ids=["python", "headers"],
)
def test_the_wheel_has_the_files_of_the_tree(files, folder, inside, suffixes):
    tree = {
        f"{inside}/{path.relative_to(ROOT / folder).as_posix()}": path.read_bytes()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in suffixes
    }
    assert tree == {name: data for name, data in files.items() if name.endswith(suffixes)}


def test_the_wheel_is_small():
    assert built_wheel().stat().st_size <= MOST_BYTES


def test_no_path_of_the_build_machine_is_in_the_wheel(files):
    """Neither in texts nor in binaries, where it could also be a folder to load libraries from."""
    folders = {str(ROOT), sys.prefix, str(pathlib.Path.home()), tempfile.gettempdir()}
    bad = re.compile(b"|".join(re.escape(f"{folder}/".encode()) for folder in folders))
    assert [name for name, data in files.items() if bad.search(data)] == []


def test_the_metadata_says_what_it_is_and_that_it_needs_nothing(files):
    said = metadata(files)
    assert (said["Name"], said["Version"]) == ("ep-moe", ep.__version__)
    assert said["License-Expression"] == "Apache-2.0"
    assert said["Requires-Python"] == ">=3.10"
    assert said.get_all("Requires-Dist") is None
    pythons = [c for c in said.get_all("Classifier") if re.search(r"Python :: 3\.\d", c)]
    assert [c.rpartition(".")[2] for c in pythons] == ["10", "11", "12", "13"]


def test_the_licences_are_in_the_wheel(files):
    """Ours, and that of what is compiled into the binary."""
    [ours] = [data for name, data in files.items() if name.endswith("licenses/LICENSE")]
    assert ours == (ROOT / "LICENSE").read_bytes()
    [theirs] = [data for name, data in files.items() if name.endswith("LICENSES/pybind11.txt")]
    try:
        pybind11 = importlib.metadata.distribution("pybind11")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs pybind11: run scripts/setup.sh")
    [name] = [f for f in pybind11.files or () if f.name == "LICENSE"]
    assert theirs.decode() == name.read_text()


@pytest.mark.torch_versions
def test_the_installed_package_is_the_wheel(files):
    """The same files, bit for bit, in whichever environment this runs."""
    installed = importlib.metadata.distribution("ep-moe")
    package = pathlib.Path(ep.__file__).parent
    if package != pathlib.Path(str(installed.locate_file("ep"))):
        pytest.skip("needs the installed package; this is the one of a source tree")
    for name, data in files.items():
        if name.startswith("ep/"):
            assert pathlib.Path(str(installed.locate_file(name))).read_bytes() == data, name


def test_a_type_checker_reads_the_wheel(tmp_path):
    """A program with types, and marked mistakes, against the unpacked wheel and nothing else."""
    pytest.importorskip("mypy", reason="needs mypy: run scripts/setup.sh")
    with zipfile.ZipFile(built_wheel()) as archive:
        archive.extractall(tmp_path / "site")
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    command += ["--cache-dir", str(tmp_path / "cache"), str(ROOT / "tests/python/typed_user.py")]
    ran = subprocess.run(
        command,
        env=os.environ | {"MYPYPATH": str(tmp_path / "site")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


# --- the source distribution ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> pathlib.Path:
    """The folder of an unpacked source distribution."""
    pytest.importorskip("scikit_build_core", reason="needs the build tools: run scripts/setup.sh")
    folder = tmp_path_factory.mktemp("sdist")
    build = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, str(folder)], cwd=ROOT, check=True, capture_output=True
    )
    [archive] = folder.glob("ep_moe-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder)
    return folder / archive.name.removesuffix(".tar.gz")


def test_the_source_distribution_is_what_the_repository_tracks(sources):
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("needs the repository: this is an installed copy")
    tracked = {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    packed = {p.relative_to(sources).as_posix() for p in sources.rglob("*") if p.is_file()}
    assert packed - {"PKG-INFO"} == {name for name in tracked if not name.startswith(".ci/")}


def test_the_source_distribution_configures(sources, tmp_path):
    """With the options of a wheel's build; that no file is missing is the test above."""
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DEP_BUILD_PYTHON=ON", "-DEP_BUILD_BENCH=ON"]
    command = ["cmake", "-S", str(sources), "-B", str(tmp_path), "-G", "Ninja", *options]
    ran = subprocess.run(
        [*command, f"-DPython_EXECUTABLE={sys.executable}"], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
