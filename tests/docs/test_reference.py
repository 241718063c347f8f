"""docs/reference.md is what the docstrings say, and these say what a caller needs to know."""

import re

import pytest

pytest.importorskip("torch", reason="ep.functional and ep.nn need torch")
pytest.importorskip("ep", reason="needs the package: run scripts/setup.sh")

import ep
from api_reference import PAGE, SECTIONS, Entry, entries, page

# Parameters that are tensors; a docstring says their shapes.
TENSORS = {
    *("x", "topk_idx", "topk_weights", "scales", "extras", "weights", "row_weights", "bias"),
    *("rows", "tokens", "routing_map", "probs"),
}
# What can fail in no way of its own.
CANNOT_FAIL = {
    *("EPBuffer.memory", "EPBuffer.stats", "EPBuffer.close", "EPBuffer.abort"),
    *("DispatchOutput.record_stream", "Event.wait", "Event.query", "Stream.record"),
    *("Stream.wait", "Stream.synchronize", "Communicator.single", "supports"),
    *("quant.formats", "quant.layouts", "nn.expert_mlp"),
}
ENTRIES = [entry for section in SECTIONS for entry in entries(*section)]
CALLABLE = [e for e in ENTRIES if e.kind not in ("property", "class") and e.signature]
CALLABLE = [e for e in CALLABLE if not e.doc.startswith("Reserved")]


def ids(entry: Entry) -> str:
    return entry.name


def parameters(entry: Entry) -> set[str]:
    """The names in a signature, as the page shows it."""
    inside = re.sub(r"\A\(\s*|,?\s*\)( -> .*)?\Z", "", entry.signature)
    found = re.findall(r"(?:\A|,\s*)\*{0,2}(\w+)(?=\s*[:=,]|\Z)", inside)
    return {name for name in found if name not in ("None", "int", "str", "float", "bool")}


def test_the_page_is_made_of_the_docstrings():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python scripts/api_reference.py"


def test_every_public_name_is_in_it():
    """What the package exports, but for modules and the version."""
    documented = {entry.name.removeprefix("ep.") for entry in ENTRIES}
    modules = {"quant", "routing", "functional", "nn", "testing"}
    assert {name for name in dir(ep) if not name.startswith("_")} - modules - {
        "recompute_contexts"
    } <= documented


@pytest.mark.parametrize("entry", ENTRIES, ids=ids)
def test_it_has_a_docstring(entry):
    assert entry.doc, f"{entry.name} has no docstring"


@pytest.mark.parametrize("entry", CALLABLE, ids=ids)
def test_its_docstring_names_every_parameter(entry):
    missing = {name for name in parameters(entry) if not re.search(rf"\b{name}\b", entry.doc)}
    assert not missing, f"{entry.name}: nothing about {missing}"


@pytest.mark.parametrize("entry", CALLABLE, ids=ids)
def test_its_docstring_says_what_it_raises(entry):
    if entry.name.removeprefix("ep.") in CANNOT_FAIL:
        return
    assert re.search(r"\b[Rr]aises?\b", entry.doc), f"{entry.name}: which errors?"


@pytest.mark.parametrize("entry", [e for e in CALLABLE if parameters(e) & TENSORS], ids=ids)
def test_its_docstring_gives_shapes(entry):
    assert re.search(r"\[[NTnLE]\w*('?|\+1)(, ?[\w']+)*\]", entry.doc), f"{entry.name}: shapes?"
