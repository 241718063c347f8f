"""The README's examples are the files that are built and run."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("name", "language"), [("two_ranks.cpp", "cpp"), ("two_ranks.py", "python")]
)
def test_readme_shows_the_example_as_it_is(name, language):
    example = (ROOT / "examples" / name).read_text()
    assert f"```{language}\n{example}```" in README


def test_the_python_example_prints_what_the_readme_says():
    command = [sys.executable, ROOT / "examples/two_ranks.py"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert f"```\n{printed}```" in README
