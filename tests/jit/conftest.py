"""The NVRTC that the tests of this folder compile with."""

import pathlib
import sys

import pytest

from jit import nvrtc


@pytest.fixture(scope="session")
def nvrtc_library() -> pathlib.Path:
    library = nvrtc.find_library()
    if library is None:
        reason = "needs NVRTC: pip install -r requirements/dev.txt brings it with torch"
        if pathlib.Path(sys.prefix).resolve() == nvrtc.ROOT / ".venv":
            pytest.fail(f"the project's own environment {reason}")
        pytest.skip(reason)
    return library
