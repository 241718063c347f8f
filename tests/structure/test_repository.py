"""What the repository says about itself is true: map, pins, variables, file rules; tests/docs has
links, paths and examples."""

import importlib.metadata
import pathlib
import re
import subprocess

import pytest

import check_files

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def tracked_files() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("csrc/buffer/dispatch.cpp", "\n" * 401, "longer than 400"),
        ("csrc/buffer/dispatch.cpp", "int x;  // TO" + "DO: size", "leftover"),
        ("docs/wire.md", "fix" + "me".lower() + " and FIX" + "ME", "leftover"),
        ("scripts/any.sh", 'cd "/home' + '/someone/ep"', "path of one machine"),
    ],
)
def test_the_file_check_finds_a_planted_violation(name, text, why):
    found = check_files.violations(name, text)
    assert len(found) == 1 and why in found[0]


def test_the_file_check_lets_good_files_pass():
    assert check_files.violations("csrc/buffer/dispatch.cpp", "\n" * 400) == []
    assert check_files.violations("README.md", "see docs/home/index.md\n" * 500) == []


def test_licence_is_the_one_that_is_declared():
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in licence and "Version 2.0" in licence
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_map_names_every_folder():
    """The README's map has one line for every folder below csrc/."""
    for path in (ROOT / "csrc").iterdir():
        if path.is_dir() and any(path.iterdir()):
            assert f"csrc/{path.name}" in README


@pytest.mark.parametrize("folder", ["csrc", "python/binding", "bench", "tests", "examples"])
def test_every_source_is_built(folder):
    """Sources are listed, not globbed; none may be left out of the nearest CMakeLists.txt."""
    for path in (ROOT / folder).rglob("*.cpp"):
        base = next(parent for parent in path.parents if (parent / "CMakeLists.txt").is_file())
        listed = (base / "CMakeLists.txt").read_text(encoding="utf-8")
        name = path.relative_to(base).as_posix()
        assert re.search(rf"(?<![\w/]){re.escape(name)}(?![\w.])", listed), f"{base}: {name}"


def test_environment_variables_are_the_documented_ones():
    """Every EP_ variable the code reads is a row of the README's table, and the other way round."""
    read = set()
    for name in tracked_files():
        if re.match(r"(csrc|include|bench|python|examples)/", name):
            text = (ROOT / name).read_text(encoding="utf-8")
            read |= set(re.findall(r'getenv\(\s*"(\w+)"', text))
            read |= set(re.findall(r'environ(?:\.get\(|\[)\s*"(\w+)"', text))
    documented = set(re.findall(r"^\| `(\w+)` \|", _section("Environment variables"), re.MULTILINE))
    assert read == documented


def test_build_requirements_are_pinned_alike():
    """The package is built without isolation, so both lists must name the same version."""
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    required = re.search(r"^requires = \[(.*?)\]", pyproject, re.MULTILINE | re.DOTALL)[1]
    pinned = (ROOT / "requirements/dev.txt").read_text(encoding="utf-8").splitlines()
    for requirement in re.findall(r'"([^"]+)"', required):
        assert requirement in pinned


def test_every_requirement_is_pinned():
    for path in (ROOT / "requirements").glob("*.txt"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line and not line.startswith("#"):
                assert re.match(r"^[\w.\-]+==[\w.]+( ; .*)?$", line), f"{path.name}: {line}"


def test_the_installed_package_is_this_version():
    """ep.__version__ and the package's metadata are the version that the C++ header has."""
    ep = pytest.importorskip("ep", reason="needs the package: run scripts/setup.sh")
    header = (ROOT / "include/ep/version.hpp").read_text(encoding="utf-8")
    version = ".".join(re.findall(r"#define EP_VERSION_[A-Z]+ (\d+)", header))
    assert ep.__version__ == version
    assert importlib.metadata.version("ep-moe") == version


def _section(title: str) -> str:
    """Returns the README's section with this title, or nothing."""
    match = re.search(rf"^## {title}$(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)
    return match[1] if match else ""
