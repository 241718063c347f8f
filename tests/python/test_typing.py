"""The types that ep declares: py.typed, the stub of the binary, and a program that uses them.

scripts/lint.sh runs mypy over the package and over typed_user.py.
"""

from __future__ import annotations

import ast
import pathlib
import re
from typing import Any

import pytest

import ep
from ep import _C
from python import typed_user

STUB = ast.parse(pathlib.Path(ep.__file__).with_name("_C.pyi").read_text(encoding="utf-8"))
# What every class of pybind11 has.
COMMON = {"__init__", "_pybind11_conduit_v1_", "__module__", "__doc__", "__dict__"}


def parameters(arguments: ast.arguments) -> list[str]:
    """Names as in the stub: those that must be given by position have no name to agree on."""
    named = [a.arg for a in (*arguments.args, *arguments.kwonlyargs) if a.arg != "self"]
    positional = [a for a in arguments.posonlyargs if a.arg != "self"]
    return ["/" for _ in positional] + named


def in_stub(body: list[ast.stmt]) -> dict[str, Any]:
    """What the stub says of a module or a class, by name."""
    found: dict[str, Any] = {}
    for node in body:
        if isinstance(node, ast.AnnAssign):
            assert isinstance(node.target, ast.Name)
            if not re.match("_[^_]", node.target.id):  # else the package's own, set on an object
                found[node.target.id] = "settable"
        elif isinstance(node, ast.ClassDef):
            found[node.name] = in_stub(node.body)
        elif isinstance(node, ast.FunctionDef):
            decorators = [ast.unparse(d) for d in node.decorator_list]
            is_property = decorators == ["property"]
            found[node.name] = "readable" if is_property else parameters(node.args)
    return found


def in_binary(value: Any) -> Any:
    """The same of the binary, whose functions say their signature in their docstring."""
    if isinstance(value, property):
        return "readable" if value.fset is None else "settable"
    if isinstance(value, type):
        return {
            name: in_binary(member if isinstance(member, property) else getattr(value, name))
            for name, member in vars(value).items()
        }
    if not callable(value):
        return "settable"
    signature = re.match(r"\w+\((.*)\) -> ", value.__doc__ or "")
    if signature is None:
        return []
    names = re.findall(r"(?:^|, )(\w+)(?=: )", signature[1])
    return ["/" if re.fullmatch(r"arg\d", name) else name for name in names if name != "self"]


def test_the_package_says_that_it_is_typed():
    assert pathlib.Path(ep.__file__).with_name("py.typed").exists()


def test_the_stub_has_every_name_of_the_binary_and_no_other():
    stub = in_stub(STUB.body)
    binary = {name for name in vars(_C) if not re.fullmatch(r"__\w+__", name)}
    assert set(stub) == binary


@pytest.mark.parametrize("name", [n for n in vars(_C) if not re.fullmatch(r"__\w+__", n)])
def test_the_stub_says_of_each_name_what_the_binary_does(name):
    stub, binary = in_stub(STUB.body)[name], in_binary(getattr(_C, name))
    if isinstance(binary, dict):
        for each in COMMON - set(stub):
            binary.pop(each, None)
    assert stub == binary


def test_a_typed_program_runs():
    assert typed_user.main() == [2 * 4 * 8.0] * 2
