"""The README's example is the file that is built and run."""

import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_readme_shows_the_example_as_it_is():
    example = (ROOT / "examples" / "two_ranks.cpp").read_text()
    assert f"```cpp\n{example}```" in (ROOT / "README.md").read_text()
