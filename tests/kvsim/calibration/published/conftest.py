"""The made-up package, for all tests of what was published."""

import pytest

from tests.kvsim.calibration.published.packages import install


@pytest.fixture
def package(monkeypatch):
    """The class that prices passes instead of ``aiconfigurator-core``."""
    return install(monkeypatch)
