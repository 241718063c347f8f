"""The wheel that scripts/setup.sh has built, for the tests that look into it."""

from __future__ import annotations

import email.message
import email.parser
import pathlib
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "build" / "wheels"


def built_wheel() -> pathlib.Path:
    """Its path; skips where there is none, as beside a build by hand."""
    found = sorted(FOLDER.glob("*.whl"))
    if not found:
        pytest.skip("needs the wheel: run scripts/setup.sh")
    assert len(found) == 1, f"which one of {found} is it?"
    return found[0]


def contents(path: pathlib.Path) -> dict[str, bytes]:
    """The files of a wheel by name."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def metadata(files: dict[str, bytes]) -> email.message.Message:
    """The METADATA of a wheel."""
    [name] = [name for name in files if name.endswith(".dist-info/METADATA")]
    return email.parser.BytesParser().parsebytes(files[name])
