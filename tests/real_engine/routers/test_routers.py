"""Real routers, recorded now and compared; each draws anew where it draws."""

import os

import pytest

from kvsim.engines.live.router_recording import record_router
from kvsim.engines.recordings.conformance import ENGINES
from kvsim.engines.recordings.router_replay import OURS

pytestmark = pytest.mark.skipif(
    "KVSIM_ROUTERS" not in os.environ, reason="KVSIM_ROUTERS names no routers; make test-routers installs them"
)
POLICIES = [(package, policy) for package, policies in OURS.items() for policy in policies]
TIGHT = ("--cache-threshold", "0.4", "--balance-abs-threshold", "3", "--balance-rel-threshold", "1.1")


def agrees(path):
    found = ENGINES["router"](path)
    assert found.first is None
    assert found.agree == found.total > 50


@pytest.mark.parametrize(("package", "policy"), POLICIES)
def test_our_router_decides_as_the_real_one(package, policy, tmp_path):
    record_router(package, policy, tmp_path / "a.jsonl", workers=4, requests=200, seed=101)
    agrees(tmp_path / "a.jsonl")


@pytest.mark.parametrize("package", OURS)
def test_with_other_thresholds(package, tmp_path):
    record_router(package, "cache_aware", tmp_path / "a.jsonl", workers=5, requests=200, seed=102, flags=TIGHT)
    agrees(tmp_path / "a.jsonl")


@pytest.mark.parametrize("package", OURS)
def test_what_trees_forget(package, tmp_path):
    level = "info" if package == "smg" else "debug"
    flags = ("--eviction-interval-secs", "5", "--max-tree-size", "6000", "--log-level", level)
    record_router(package, "cache_aware", tmp_path / "a.jsonl", requests=200, seed=104, flags=flags)
    agrees(tmp_path / "a.jsonl")


@pytest.mark.parametrize("policy", ["cache_aware", "least_load"])
def test_where_workers_report_loads(policy, tmp_path):
    record_router("smg", policy, tmp_path / "a.jsonl", requests=200, seed=103, loads=True)
    agrees(tmp_path / "a.jsonl")
