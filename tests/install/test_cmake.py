"""find_package(ep), and ep inside another project."""

import json
import pathlib
import re

import pytest

import ep
from install import building

APP = "int main() {}\n"


def write_project(folder: pathlib.Path, text: str, languages: str = "CXX") -> pathlib.Path:
    folder.mkdir(exist_ok=True)
    (folder / "app.cpp").write_text(APP)
    start = f"cmake_minimum_required(VERSION 3.18)\nproject(app LANGUAGES {languages})\n"
    (folder / "CMakeLists.txt").write_text(start + text)
    return folder


def test_the_python_package_prints_where_its_cmake_package_is(package):
    assert package.is_absolute() and (package / "ep-config.cmake").is_file()
    assert package.is_relative_to(pathlib.Path(ep.__file__).resolve().parent)


def test_that_folder_works_as_a_prefix_too(package, tmp_path):
    source = write_project(tmp_path / "app", "find_package(ep 0.1 REQUIRED)\n")
    said = building.command(
        *building.configure(source, tmp_path / "build", CMAKE_PREFIX_PATH=package)
    )
    assert "error" not in said.lower()


def test_nothing_of_the_build_machine_is_in_the_package(prefix, package):
    for folder in (prefix / "lib" / "cmake" / "ep", package):
        for file in folder.glob("*.cmake"):
            text = file.read_text()
            assert str(building.ROOT) not in text and "first place" not in text, file


@pytest.mark.parametrize("wanted", ["0.2", "1.0", "0.1.99"])
def test_another_version_is_refused_with_both_numbers(installed, tmp_path, wanted):
    """Headers and libraries of different versions were mixed (SGLang 12949, DeepEP 521)."""
    source = write_project(tmp_path / "app", f"find_package(ep {wanted} REQUIRED)\n")
    done = building.attempt(*building.configure(source, tmp_path / "build", **installed))
    assert done.returncode != 0
    assert wanted in done.stdout and f"version: {ep.__version__}" in done.stdout


def test_a_project_without_cxx_is_told(installed, tmp_path):
    source = write_project(tmp_path / "app", "find_package(ep REQUIRED)\n", languages="NONE")
    done = building.attempt(*building.configure(source, tmp_path / "build", **installed))
    assert done.returncode != 0 and "enable_language(CXX)" in done.stdout


def test_find_package_twice_and_in_several_folders(installed, tmp_path):
    source = write_project(
        tmp_path / "app",
        "find_package(ep REQUIRED)\nfind_package(ep REQUIRED)\nadd_subdirectory(inner)\n",
    )
    (source / "inner").mkdir()
    (source / "inner" / "CMakeLists.txt").write_text("find_package(ep 0.1 REQUIRED)\n")
    building.command(*building.configure(source, tmp_path / "build", **installed))


@pytest.fixture(scope="module")
def outer(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The build folder of a project that has ep's sources inside; nothing is compiled."""
    folder = tmp_path_factory.mktemp("outer")
    source = write_project(
        folder / "app",
        f"""add_subdirectory("{building.ROOT}" ep EXCLUDE_FROM_ALL)
add_executable(app app.cpp)
target_link_libraries(app PRIVATE ep::ep)
install(TARGETS app)
file(WRITE "${{CMAKE_BINARY_DIR}}/settings.txt"
     "type=[${{CMAKE_BUILD_TYPE}}] standard=[${{CMAKE_CXX_STANDARD}}] "
     "flags=[${{CMAKE_CXX_FLAGS}}] modules=[${{CMAKE_MODULE_PATH}}]")
""",
    )
    defines = {"CMAKE_CXX_FLAGS": "-O1", "CMAKE_EXPORT_COMPILE_COMMANDS": "ON"}
    building.command(*building.configure(source, folder / "build", **defines))
    return folder / "build"


def test_ep_inside_another_project_sets_nothing_there(outer):
    settings = (outer / "settings.txt").read_text()
    assert "type=[] standard=[] flags=[-O1] modules=[]" in settings
    targets = building.command("ninja", "-C", outer, "-t", "targets", "all")
    assert "csrc/libep.a:" in targets and "/tests/" not in targets and "ep-bench" not in targets
    assert not (outer / "CTestTestfile.cmake").exists()
    assert "ep-config" not in (outer / "ep" / "cmake_install.cmake").read_text()


def test_ep_inside_another_project_brings_its_headers_and_cxx20_only(outer):
    """What its own sources are compiled with stays with them."""
    units = json.loads((outer / "compile_commands.json").read_text())
    (mine,) = [unit["command"] for unit in units if unit["file"].endswith("app.cpp")]
    assert f"-I{building.ROOT}/include" in mine and re.search(r"-std=(gnu|c)\+\+20", mine)
    assert not re.search(r"-W|-f|-D|csrc/?( |$)", mine), mine
    theirs = [unit for unit in units if "/csrc/" in unit["file"]]
    assert len(theirs) > 30 and all("-ffp-contract=off" in unit["command"] for unit in theirs)
    linked = building.command("ninja", "-C", outer, "-t", "commands", "app").splitlines()[-1]
    assert "libep.a" in linked
