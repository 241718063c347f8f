"""The two ways in which ep is installed, and what is built once against each."""

import pathlib
import shutil

import pytest

from install import building


@pytest.fixture(scope="session")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A prefix that `cmake --install` filled and that was moved afterwards."""
    build = building.library_build()
    if build is None:
        pytest.fail("no build folder with libep.a below build/: run scripts/setup.sh first")
    base = tmp_path_factory.mktemp("installed")
    first = base / "first place"
    building.command("cmake", "--install", build, "--prefix", first, "--component", "devel")
    return first.rename(base / "ep prefix")


@pytest.fixture(scope="session")
def package(prefix: pathlib.Path) -> pathlib.Path:
    """The Python package's folder for find_package."""
    return building.python_package()


@pytest.fixture(scope="session", params=["python", "prefix"])
def installed(request: pytest.FixtureRequest) -> dict[str, object]:
    """The CMake definitions with which a project finds ep: each way in turn."""
    if request.param == "python":
        return {"ep_DIR": request.getfixturevalue("package")}
    return {"CMAKE_PREFIX_PATH": request.getfixturevalue("prefix")}


@pytest.fixture(scope="session", autouse=True)
def tools() -> None:
    """Skips where there is no C++ tool chain: the Python tests run without one."""
    missing = [tool for tool in ("cmake", "ninja", "g++") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
