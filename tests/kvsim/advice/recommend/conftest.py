"""Answers for devices that several files look at."""

import pytest

from tests.kvsim.advice.recommend.device_worlds import ask


@pytest.fixture(scope="session")
def one():
    return ask("rtx4090")


@pytest.fixture(scope="session")
def both():
    return ask("rtx4090", "h100_sxm", "l4", model="qwen3-14b", price="h100_sxm=2.5")


@pytest.fixture(scope="session")
def priced():
    return ask("rtx4090", "h100_sxm", price={"rtx4090": 0.4, "h100_sxm": 2.0})
