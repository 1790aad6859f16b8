"""The order of admission on few-shot questions in a cache that does not hold all subjects, as in docs/reproduced.md."""

import pytest

from kvsim.scenario.prefixes import InfiniteCache
from kvsim.scenario.scenario import load_scenario, table_of
from kvsim.simulation.run import run
from tests.paths import ROOT


def hit_rate(order, limit=0):
    table, _, folder = table_of(ROOT / "examples" / "reproduced" / "radix-mmlu.toml")
    table["workload"]["sessions"] = 150
    table["server"] |= {"order": order, "longest_prefix_limit": limit}
    scenario = load_scenario({**table, "folder": folder})
    cache = InfiniteCache(1, "tokens")
    for request in scenario.build_workload():
        cache.serve(request)
    return run(scenario, detail="requests").summary["prefix"]["hit_rate"] / cache.reuse.hit_rate


@pytest.mark.slow
def test_longest_prefix_first_comes_near_the_optimum_and_depth_first_order_reaches_it():
    found = {order: hit_rate(order) for order in ("fcfs", "longest-prefix", "depth-first")}
    assert found["depth-first"] == 1
    assert 0.95 < found["longest-prefix"] <= 1
    assert found["fcfs"] < 0.75
    assert found["fcfs"] < hit_rate("longest-prefix", limit=128) < found["longest-prefix"]
