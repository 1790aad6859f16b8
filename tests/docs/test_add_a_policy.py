"""The policy on the page "Add a policy" works as it stands there."""

from functools import partial

import pytest
from hypothesis.stateful import run_state_machine_as_test

import kvsim
from kvsim.simulation.run import build_policy
from policies import available, plugins
from real_engine import Engine
from tests.docs.pages import blocks
from tests.policies.test_invariants import SETTINGS, CacheMachine, FakeEntryPoint, settings
from tests.real_engine.test_engine import MODEL, WORLD, serve_for_real, wrong_texts


@pytest.fixture(scope="module")
def policy():
    """The class that the page defines."""
    source, *_ = (block for block in blocks("add-a-policy.md", "python") if "(Policy)" in block)
    names = {"__name__": "page"}
    exec(compile(source, "add-a-policy.md", "exec"), names)
    return names["LowestCell"]


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["llama-server", "vllm", "static"])
def test_it_serves_a_scenario(policy, scheduler):
    scenario = kvsim.load_scenario("chat", workload__requests=60, server__scheduler=scheduler)
    summary = kvsim.run(scenario, policy=policy).summary
    assert (summary["policy"], summary["completed"], summary["failed"]) == ("lowest-cell", 60, 0)
    assert summary["cache"]["external_fragmentation_mean"] == 0


def test_it_is_no_worse_than_blocks_of_one_cell(policy):
    """It is what the paged policy does with blocks of one cell and no prefix cache, but for the order of free cells."""
    scenario = kvsim.load_scenario("chat", workload__requests=60, cache__block_size=1, cache__prefix_cache=False)
    mine, paged = (kvsim.run(scenario, policy=p).summary for p in (policy, "paged"))
    assert mine["cache"]["stored_cells_mean"] == pytest.approx(paged["cache"]["stored_cells_mean"], rel=0.05)


@pytest.mark.slow
def test_it_keeps_every_invariant(policy, monkeypatch):
    monkeypatch.setattr(plugins, "entry_points", lambda group: [FakeEntryPoint("lowest-cell", policy)])
    factory = available()["lowest-cell"]
    run_state_machine_as_test(partial(CacheMachine, factory), settings=settings(SETTINGS, max_examples=50))


@pytest.mark.slow
def test_a_real_model_writes_on_it_what_it_writes_without_a_cache(policy):
    built = build_policy(WORLD, policy)
    engine = Engine(MODEL, built.groups, built.kernel, WORLD.seed)
    assert wrong_texts(serve_for_real(built, engine), engine) == 0
