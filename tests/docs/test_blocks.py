"""Every example of the documents runs, and prints what its page shows."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from docs import programs
from docs.pages import LANGUAGES, ROOT, Block, blocks, pages

PAGES = {path.relative_to(ROOT).as_posix(): blocks(path) for path in pages()}
ALL = [block for page in PAGES.values() for block in page]
# Examples that cannot run here; each says why behind its tag.
MOST_NOT_RUN = 3


def of(page: str, language: str) -> list[Block]:
    """The page's blocks of a language that run."""
    return [b for b in PAGES[page] if b.language == language and b.runs]


def with_blocks(language: str) -> list[str]:
    return [page for page in PAGES if of(page, language)]


@pytest.mark.parametrize("page", with_blocks("python"))
def test_python_blocks(page):
    """In order, in one process."""
    session = [
        {
            "page": page,
            "line": block.line,
            "text": block.text,
            "expected": block.expected,
            "any_order": block.any_order,
        }
        for block in of(page, "python")
        if block.tags != "script"
    ]
    _run_python([ROOT / "tests/docs/session.py"], json.dumps(session))


SCRIPTS = [block for page in PAGES for block in of(page, "python") if block.tags == "script"]


@pytest.mark.parametrize("block", SCRIPTS, ids=lambda block: block.where)
def test_python_programs(block, tmp_path):
    """A program of its own: spawned ranks import the file that they come from."""
    (tmp_path / "program.py").write_text(block.text)
    printed = _run_python([tmp_path / "program.py"], "")
    assert block.shows(printed), f"{block.where} prints\n{printed}"


@pytest.mark.parametrize("page", with_blocks("cpp"))
def test_cpp_blocks(page, tmp_path):
    """A page's fragments are one program, run by two ranks; a block with a main() is one alone."""
    if programs.library() is None:
        pytest.skip("needs libep.a: run scripts/setup.sh, or build any preset")
    shown = of(page, "cpp")
    fragments = [block for block in shown if not programs.is_program(block)]
    if fragments:
        printed = programs.run_program(programs.assemble(fragments), tmp_path)
        assert printed == "".join(block.expected or "" for block in fragments)
    for block in filter(programs.is_program, shown):
        printed = programs.run_program(block.text, tmp_path)
        assert block.shows(printed), f"{block.where} prints\n{printed}"


@pytest.mark.parametrize("page", with_blocks("cmake"))
def test_cmake_blocks(page, tmp_path):
    """The page's CMakeLists.txt builds the page's first program."""
    if not list(programs.PACKAGE.glob("lib*/cmake/ep")):
        pytest.skip("needs the installed package: run scripts/setup.sh")
    (cmake,) = of(page, "cmake")
    program = next(filter(programs.is_program, of(page, "cpp")))
    assert program.shows(programs.run_project(cmake.text, program.text, tmp_path))


COMMANDS = [block for block in ALL if block.language == "sh"]


@pytest.mark.parametrize("block", COMMANDS, ids=lambda block: block.where)
def test_commands(block):
    """All are good shell; those marked `run` do what the page shows."""
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
    if block.tags != "run":
        return
    env = {**os.environ, "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", "-e", "-o", "pipefail", "-c", block.text]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert block.expected is None or block.shows(done.stdout), done.stdout


def test_every_block_has_a_language():
    for block in ALL:
        assert block.language in LANGUAGES, f"{block.where}: ```{block.language}"


def test_few_examples_do_not_run():
    skipped = [block for block in ALL if not block.runs]
    for block in skipped:
        assert re.match(r"no-run: \w+ \w+", block.tags), f"{block.where}: say why"
    assert len(skipped) <= MOST_NOT_RUN, [block.where for block in skipped]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("print(1)", "prints"),
        ("raise ValueError('gone')", "gone"),
        ("import ep\nep.no_such_name", "no_such_name"),
    ],
)
def test_a_wrong_example_is_found(text, problem):
    block = {"page": "a.md", "line": 7, "text": text, "expected": "2\n", "any_order": False}
    with pytest.raises(AssertionError, match=problem) as error:
        _run_python([ROOT / "tests/docs/session.py"], json.dumps([block]))
    assert re.search(r"a\.md\D+[78]\b", str(error.value)), "which line of which page?"


def _run_python(arguments: list[pathlib.Path], given: str) -> str:
    """Runs Python as this process does, with tests/ to import from; returns what it printed."""
    paths = [str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        input=given,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"\n{done.stdout}{done.stderr}"
    return done.stdout
