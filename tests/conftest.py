"""Options of all tests: pytest reads them from this folder, the one it is given by default."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--big",
        action="store_true",
        default=False,
        help="run the tests that need 16 GB of memory: pytest --big",
    )
