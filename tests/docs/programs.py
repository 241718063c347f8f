"""Compiles what the pages show of C++, against the library that belongs to the package in use."""

import pathlib
import re
import shutil
import subprocess

import ep
from docs.pages import ROOT, Block

PACKAGE = pathlib.Path(ep.__file__).parent
# What surrounds the fragments of a page; docs/cpp.md says so.
_AROUND = """
int main() {
  std::vector<std::thread> ranks;
  for (const auto& each : ep::Communicator::threads(2))
    ranks.emplace_back(run_rank, each);
  for (std::thread& rank : ranks)
    rank.join();
}
"""
_NEEDED = ("<cstdio>", "<memory>", "<thread>", "<vector>", '"ep/ep.hpp"')


def library() -> tuple[pathlib.Path, pathlib.Path] | None:
    """The include folder and libep.a: of the installed package, else of the newest build here."""
    for archive in (PACKAGE / "lib/libep.a", PACKAGE / "lib64/libep.a"):
        if archive.is_file():
            return PACKAGE / "include", archive
    built = [build / "csrc/libep.a" for build in (ROOT / "build").glob("*")]
    plain = [a for a in built if a.is_file() and a.parts[-3] not in ("asan", "tsan")]
    newest = max(plain, key=lambda archive: archive.stat().st_mtime, default=None)
    return newest and (ROOT / "include", newest)


def is_program(block: Block) -> bool:
    return re.search(r"^int main\(", block.text, re.MULTILINE) is not None


def assemble(fragments: list[Block]) -> str:
    """One program of a page's fragments: what they include, what is `top`, then one function."""
    includes, top, body = [f"#include {each}" for each in _NEEDED], [], []
    for block in fragments:
        lines = block.text.splitlines()
        includes += [line for line in lines if line.startswith("#include")]
        # An include is hoisted; its place stays, so that lines count as in the page.
        kept = ["" if line.startswith("#include") else line for line in lines]
        (top if block.tags == "top" else body).append(
            "\n".join([f'#line {block.line} "{block.page}"', *kept])
        )
    function = ["void run_rank(std::shared_ptr<ep::Communicator> group) {", *body, "}"]
    return "\n".join([*includes, *top, *function, '#line 1 "around"', _AROUND])


def run_program(source: str, folder: pathlib.Path) -> str:
    """Compiles and runs; returns what it printed."""
    includes, archive = library()
    (folder / "main.cpp").write_text(source)
    command = ["g++", "-std=c++20", "-O0", f"-I{includes}", "main.cpp", str(archive), "-pthread"]
    if shutil.which("ccache"):
        command.insert(0, "ccache")
    _must([*command, "-o", "program"], folder)
    return _must(["./program"], folder)


def run_project(cmake: str, source: str, folder: pathlib.Path) -> str:
    """Builds source with that CMakeLists.txt and the installed package, and runs it."""
    (folder / "main.cpp").write_text(source)
    (folder / "CMakeLists.txt").write_text(cmake)
    config = next(PACKAGE.glob("lib*/cmake/ep"))
    _must(["cmake", "-S", ".", "-B", "build", "-G", "Ninja", f"-Dep_DIR={config}"], folder)
    _must(["cmake", "--build", "build"], folder)
    name = re.search(r"add_executable\((\w+)", cmake)[1]
    return _must([f"build/{name}"], folder)


def _must(command: list[str], folder: pathlib.Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout
