"""The documents as data: fenced blocks, headings and links of a Markdown page.

The word behind a fence is the block's language; what follows it says how the tests treat the block:

    ```python              runs, as part of its page: blocks of a page run in order, in one process
    ```python script       runs, as a program of its own
    ```python no-run: why  does not run; the tests count these
    ```cpp                 compiles and runs: a program if it has a main(), else part of its page's
    ```cpp top             the same, but outside the function that the page's fragments make up
    ```cmake               the CMakeLists.txt of the page's program
    ```sh run              runs with bash;  ```sh alone is checked for its syntax only
    ```text                what the block before it prints;  ```text any-order: lines in any order
"""

import pathlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).parents[2]
LANGUAGES = {"python", "cpp", "cmake", "sh", "text", ""}  # without one: a drawing
_FENCE = re.compile(r"^```(.*)$")


@dataclass(frozen=True)
class Block:
    """One fenced block; `line` is where its text begins, `expected` the output it shows."""

    page: str
    line: int
    language: str
    tags: str
    text: str
    expected: str | None = None
    any_order: bool = False

    @property
    def runs(self) -> bool:
        return not self.tags.startswith("no-run")

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    def shows(self, printed: str) -> bool:
        """Is `printed` what the page says?  Whatever a block prints must be shown."""
        wanted = self.expected or ""
        if self.any_order:
            return sorted(printed.splitlines()) == sorted(wanted.splitlines())
        return printed == wanted


def pages() -> list[pathlib.Path]:
    """Every page whose examples run: the README and docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(path: pathlib.Path) -> list[Block]:
    """The blocks of a page, each with the output that follows it."""
    found: list[Block] = []
    for block in _fenced(path):
        if block.language != "text":
            found.append(block)
        elif found and found[-1].expected is None:
            last = found.pop()
            shown = {"expected": block.text, "any_order": block.tags == "any-order"}
            found.append(Block(**{**vars(last), **shown}))
    return found


def _fenced(path: pathlib.Path) -> Iterator[Block]:
    page = path.relative_to(ROOT).as_posix()
    start, info, lines = 0, None, []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        fence = _FENCE.match(line)
        if fence is None:
            lines.append(line)
        elif info is None:
            start, info, lines = number + 1, fence[1].strip(), []
        else:
            language, _, tags = info.partition(" ")
            text = "".join(f"{each}\n" for each in lines)
            yield Block(page, start, language, tags.strip(), text)
            info = None
    assert info is None, f"{page}:{start}: a fence is not closed"


def prose(path: pathlib.Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(path: pathlib.Path) -> set[str]:
    """What a link into the page may name: its headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {_slug(each) for each in headings}


def _slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def links(path: pathlib.Path) -> Iterator[tuple[pathlib.Path, str]]:
    """Every link of a page that stays in the repository: the file and the anchor, or ""."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if "://" not in target and not target.startswith("mailto:"):
            name, _, anchor = target.partition("#")
            yield (path.parent / name).resolve() if name else path, anchor
