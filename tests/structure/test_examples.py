"""The examples that the documents show are the files that are built and run."""

import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("page", "name", "language"),
    [("README.md", "two_ranks.py", "python"), ("docs/cpp.md", "two_ranks.cpp", "cpp")],
)
def test_the_page_shows_the_example_as_it_is(page, name, language):
    """tests/docs runs what the page shows, and compares what it prints."""
    example = (ROOT / "examples" / name).read_text()
    assert f"```{language}\n{example}```" in (ROOT / page).read_text()
