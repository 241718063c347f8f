"""What the documents point at is there: files, anchors, paths, symbols."""

import pathlib
import re
import subprocess

import pytest

from docs.pages import ROOT, anchors, links, pages, prose

FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"build"}
_LISTED = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", "*.md"]
_NAMES = subprocess.run(_LISTED, cwd=ROOT, capture_output=True, text=True, check=True).stdout
MARKDOWN = [ROOT / name for name in sorted(set(_NAMES.splitlines())) if (ROOT / name).is_file()]


def broken_links(path: pathlib.Path) -> list[str]:
    found = []
    for target, anchor in links(path):
        if not target.exists():
            found.append(f"{path.name} links {target.name}, which is not there")
        elif anchor and anchor not in anchors(target):
            found.append(f"{path.name} links #{anchor}; {target.name} has no such heading")
    return found


def broken_paths(path: pathlib.Path) -> list[str]:
    """A word in backquotes that starts with a folder of ours is a path; `path: name` a symbol."""
    found = []
    for word in re.findall(r"`([^`\n]+)`", prose(path)):
        name, _, symbol = word.partition(": ")
        if "/" not in name or name.split("/")[0] not in FOLDERS or re.search(r"[\s*<{]", name):
            continue
        if not (ROOT / name).exists():
            found.append(f"{path.name} names {name}, which is not there")
        elif symbol and not _has_symbol(ROOT / name, symbol):
            found.append(f"{path.name} names {symbol}, which {name} does not have")
    return found


def _has_symbol(file: pathlib.Path, symbol: str) -> bool:
    text = file.read_text(encoding="utf-8")
    return re.search(rf"(?<!\w){re.escape(symbol)}(?!\w)", text) is not None


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path):
    assert broken_links(path) == []


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_paths_and_symbols_exist(path):
    assert broken_paths(path) == []


def unknown_names(path: pathlib.Path) -> list[str]:
    """Words in backquotes that look like functions of ours, and are in no source."""
    named = set(re.findall(r"`([a-z]+(?:_[a-z0-9]+)+)`", prose(path)))
    files = [f for folder in ("csrc", "include", "python", "tests") for f in _sources(folder)]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return sorted(name for name in named if not re.search(rf"\b{name}\b", text))


def _sources(folder: str) -> list[pathlib.Path]:
    endings = {".hpp", ".cpp", ".cuh", ".py", ".txt"}
    return [f for f in (ROOT / folder).rglob("*") if f.suffix in endings and "docs" not in f.parts]


@pytest.mark.parametrize("name", ["architecture.md", "contributing.md"])
def test_functions_exist(name):
    assert unknown_names(ROOT / "docs" / name) == []


def test_headers_exist():
    """`ep/name.hpp` in a page is a public header."""
    named = {h for path in pages() for h in re.findall(r"`(ep/\w+\.hpp)`", prose(path))}
    assert sorted(header for header in named if not (ROOT / "include" / header).is_file()) == []


def test_every_page_is_reachable_from_the_readme():
    linked = {target for target, _ in links(ROOT / "README.md")}
    assert set(pages()) - {ROOT / "README.md"} <= linked


def test_a_broken_page_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Two words: here\n[good](#two-words-here) [bad](#three) [gone](no.md)\n"
        "`csrc/buffer/call.hpp: Call` `csrc/buffer/call.hpp: Cell` `csrc/bufer/call.hpp`\n"
        "```text\n[not a link](never.md) `csrc/never.cpp`\n```\n"
    )
    links_of = broken_links(page)
    assert len(links_of) == 2 and "#three" in links_of[0] and "no.md" in links_of[1]
    page.write_text(page.read_text() + "`count_tokens` `count_tokns`")
    assert unknown_names(page) == ["count_tokns"]
    paths_of = broken_paths(page)
    assert len(paths_of) == 2 and "Cell" in paths_of[0] and "bufer" in paths_of[1]
