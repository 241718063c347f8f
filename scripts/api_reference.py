"""Writes docs/reference.md from the package's docstrings; with --check, only says if it is stale.

    python scripts/api_reference.py [--check]

Needs the package with its binding, and torch for ep.functional and ep.nn.  Plain Markdown, in the
order of the sections below: the page is read in the repository, and its diff in a review.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "reference.md"
INTRODUCTION = """# Reference of the Python package

Made by `scripts/api_reference.py` from the docstrings: change those, and run it again. Symbols: R
ranks, T tokens of one rank in one call, H hidden, E experts, K top-k, L local experts, N rows
received. The C++ headers are their own reference: [cpp.md](cpp.md#reference).
"""

# A section: its title, the module, and the names in it; classes bring their public members.
SECTIONS = (
    ("The buffer", "ep", ("EPBuffer",)),
    ("Results", "ep", ("DispatchOutput", "CombineOutput", "Handle")),
    ("Records", "ep", ("TensorSpec", "Memory", "MemoryUse", "Stats", "RoutingLayout")),
    ("Streams and events", "ep", ("Stream", "Event")),
    ("How ranks meet", "ep", ("Communicator",)),
    ("What this version can do", "ep", ("supports", "Support")),
    (
        "Errors",
        "ep",
        (
            "Error",
            "InvalidArgument",
            "CapacityError",
            "Desync",
            "Timeout",
            "PeerError",
            "PeerLost",
            "Unsupported",
        ),
    ),
    (
        "ep.functional",
        "ep.functional",
        ("dispatch", "combine", "recompute_contexts", "DispatchResult", "CombineResult"),
    ),
    ("ep.nn", "ep.nn", ("MoE", "expert_mlp")),
    ("ep.quant", "ep.quant", ("formats", "layouts", "describe", "dequantize", "Format")),
    ("ep.routing", "ep.routing", ("from_map",)),
    ("ep.testing", "ep.testing", ("run",)),
)
NOT_YET = {"TensorSpec"}  # left out while the package does not have it
COMMANDS = ("doctor", "bench", "jit", "cmake_dir")


class Entry(NamedTuple):
    """A public thing: its full name, its signature or "", what it is, and its docstring."""

    name: str
    signature: str
    kind: str  # "class", "function", "method", "static method" or "property"
    doc: str
    value: Any


def entries(title: str, module: str, names: tuple[str, ...]) -> Iterator[Entry]:
    """The entries of a section, each class followed by its members."""
    home = importlib.import_module(module)
    for name in names:
        value = getattr(home, name, None)
        if value is None and name in NOT_YET:
            continue
        full = f"{module}.{name}"
        if not inspect.isclass(value):
            yield Entry(full, signature(value), "function", doc_of(value), value)
            continue
        yield Entry(full, constructor(value), "class", doc_of(value), value)
        for member, kind in members(value):
            inner = inspect.getattr_static(value, member)
            inner = getattr(inner, "__func__", inner)
            called = returned(inner) if kind == "property" else signature(getattr(value, member))
            yield Entry(f"{full}.{member}", called, kind, doc_of(inner), inner)


def members(cls: type) -> Iterator[tuple[str, str]]:
    """Public members that the class, or a base of ours, defines; in the order they are written."""
    seen = set()
    for base in cls.__mro__:
        # torch.nn.Module and Exception have their own documents.
        if not base.__module__.startswith("ep"):
            continue
        for name, value in vars(base).items():
            if name.startswith("_") or name in seen or name == "extra_repr":
                continue
            seen.add(name)
            if isinstance(value, property):
                yield name, "property"
            elif isinstance(value, (staticmethod, classmethod)):
                yield name, "static method"
            elif inspect.isroutine(value):
                yield name, "method"


def doc_of(value: Any) -> str:
    """The docstring, without the signature that pybind11 puts first."""
    doc = inspect.getdoc(value) or ""
    return re.sub(r"\A\w+\(.*\) -> .*\n*", "", doc).strip()


def returned(value: property) -> str:
    """What a property gives, as far as it is annotated."""
    annotations = getattr(value.fget, "__annotations__", {})
    return _arrow(_annotation(annotations.get("return", "")))


def constructor(cls: type) -> str:
    """How the class is made; "" where users do not, or where its docstring says it."""
    if issubclass(cls, tuple) or dataclasses.is_dataclass(cls):
        return "(" + ", ".join(inspect.signature(cls).parameters) + ")"
    made = vars(cls).get("__init__")
    is_public = cls.__name__ in ("EPBuffer", "MoE")
    return signature(made) if made is not None and is_public else ""


def signature(function: Callable[..., Any]) -> str:
    """The signature as text, without self; annotations as they are written."""
    try:
        known = inspect.signature(function)
    except ValueError:  # pybind11: the first line of the docstring
        match = re.match(r"\w+(\(.*\)) -> (.*)", function.__doc__ or "")
        if match is None:
            return ""
        return re.sub(r"\(self: [\w.]+(, )?", "(", _plain(match[1])) + _arrow(_plain(match[2]))
    return _laid_out(list(_parameters(known)), _arrow(_annotation(known.return_annotation)))


def _parameters(known: inspect.Signature) -> Iterator[str]:
    was_keyword = False
    for p in known.parameters.values():
        if p.name in ("self", "cls"):
            continue
        is_keyword = p.kind is p.KEYWORD_ONLY
        if is_keyword and not was_keyword:
            yield "*"
        was_keyword = is_keyword
        prefix = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        annotation = _annotation(p.annotation)
        default = "" if p.default is p.empty else f"{' = ' if annotation else '='}{p.default!r}"
        yield prefix + p.name + (f": {annotation}" if annotation else "") + default


def _laid_out(parameters: list[str], arrow: str) -> str:
    """On one line, or where that is long one parameter a line."""
    line = f"({', '.join(parameters)}){arrow}"
    if len(line) <= 88:
        return line
    return "(\n" + "".join(f"    {each},\n" for each in parameters) + ")" + arrow


def _annotation(annotation: Any) -> str:
    if annotation in (inspect.Signature.empty, "Any", Any):
        return ""
    return _plain(
        annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    )


def _arrow(returned: str) -> str:
    return f" -> {returned}" if returned not in ("", "None", "object") else ""


def _plain(text: str) -> str:
    for long, short in (("ep._C.", "ep."), ("_C.", "ep."), ("typing.", ""), (": object", "")):
        text = text.replace(long, short)
    return text


def fields(cls: type) -> Iterator[tuple[str, str]]:
    """Names and comments of a record's fields, as they are written in the source."""
    if not (dataclasses.is_dataclass(cls) or hasattr(cls, "_fields")):
        return
    for line in inspect.getsource(cls).splitlines():
        match = re.match(r"    (\w+): (.+?)(?:  # (.*))?$", line)
        if match and not line.strip().startswith(("def", "return")):
            yield match[1], f"`{match[2]}`" + (f": {match[3]}" if match[3] else "")


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION, contents()]
    for title, module, names in SECTIONS:
        parts.append(f"## {title}\n")
        if module != "ep":
            parts.append(fenced(inspect.getdoc(importlib.import_module(module))))
        parts += shown(list(entries(title, module, names)))
    parts.append("## The command line\n")
    parts += list(commands())
    return "\n".join(parts)


def contents() -> str:
    titles = [*(title for title, _, _ in SECTIONS), "The command line"]
    return "".join(f"- [{t}](#{t.lower().replace('.', '').replace(' ', '-')})\n" for t in titles)


def shown(found: list[Entry]) -> Iterator[str]:
    """The entries of a section; what has no arguments and one line of text is an item of a list."""
    for entry, following in zip(found, [*found[1:], None], strict=True):
        last = entry.name.rpartition(".")[2]
        if entry.kind == "property" and "\n" not in entry.doc:
            ends = following is None or following.kind != "property"
            yield f"- `{last}{entry.signature}`: {entry.doc}" + ("\n" if ends else "")
            continue
        yield f"{'###' if entry.kind in ('class', 'function') else '####'} {entry.name}\n"
        called = f"{last}{entry.signature}\n\n" if entry.signature else ""
        yield fenced(called + entry.doc)
        if inspect.isclass(entry.value):
            rows = [f"- `{name}` {text}" for name, text in fields(entry.value)]
            if rows:
                yield "\n".join(rows) + "\n"


def fenced(text: str) -> str:
    return f"```text\n{text}\n```\n"


def commands() -> Iterator[str]:
    for name in COMMANDS:
        try:
            module = importlib.import_module(f"ep.cli.{name}")
        except ModuleNotFoundError:
            continue
        title = f"### python -m ep {name.replace('_', '-')}\n"
        yield f"{title}\n{fenced(inspect.getdoc(module))}"


def main(arguments: list[str]) -> int:
    text = page()
    if arguments == ["--check"]:
        if PAGE.read_text(encoding="utf-8") == text:
            return 0
        print(f"{PAGE.name} is stale: run python scripts/api_reference.py", file=sys.stderr)
        return 1
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
