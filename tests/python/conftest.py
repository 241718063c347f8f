"""Hypothesis profiles and the opt-in of the Python tests."""

import pytest
from hypothesis import HealthCheck, settings

# The default repeats the same examples; `--hypothesis-profile=search` looks for new ones.
_COMMON = {
    "deadline": None,  # examples start threads
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
    "print_blob": True,
}
settings.register_profile("repeat", max_examples=100, derandomize=True, database=None, **_COMMON)
settings.register_profile("search", max_examples=2000, **_COMMON)
settings.load_profile("repeat")


@pytest.fixture
def big(request: pytest.FixtureRequest) -> None:
    """Skips unless --big is given."""
    if not request.config.getoption("--big", default=False):
        pytest.skip("needs 16 GB: pytest --big")
