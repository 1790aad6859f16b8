"""The policy on the page "Add a policy" works as it stands there."""

from collections import Counter
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

import kvsim
from kvsim.simulation.set_up import build_policy
from policies import CacheConfig, Chunk, Policy, available, plugins
from real_engine import Engine
from tests.docs.pages import blocks
from tests.kvsim.simulation.random_runs import outcome
from tests.policies.placement.stories import SEEDS, live, story
from tests.policies.test_invariants import SETTINGS, CacheMachine, FakeEntryPoint
from tests.real_engine.test_engine import MODEL, WORLD, serve_for_real, wrong_texts


@pytest.fixture(scope="module")
def page():
    """All names that the page defines, its code being run from its beginning to its end."""
    names = {"__name__": "page"}
    for source in blocks("add-a-policy.md", "python"):
        exec(compile(source, "add-a-policy.md", "exec"), names)
    return names


@pytest.fixture(scope="module")
def policy(page):
    """The class that the page defines."""
    return page["LowestCell"]


@pytest.fixture(scope="module")
def ruled(page):
    """The same with a placement rule."""
    return page["RuledLowestCell"]


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["llama-server", "vllm", "static"])
def test_it_serves_a_scenario(policy, scheduler):
    scenario = kvsim.load_scenario("chat", workload__requests=60, server__scheduler=scheduler)
    summary = kvsim.run(scenario, policy=policy).summary
    assert (summary["policy"], summary["completed"], summary["failed"]) == ("lowest-cell", 60, 0)
    assert summary["cache"]["external_fragmentation_mean"] == 0


@pytest.mark.slow
def test_it_serves_from_a_cache_as_large_as_a_gpus(policy):
    """Its work in a step does not grow with the cells of the cache."""
    scenario = kvsim.load_scenario("chat", workload__requests=60, server__scheduler="vllm", cache__cells=278_000)
    summary = kvsim.run(scenario, policy=policy).summary
    assert (summary["completed"], summary["cache"]["external_fragmentation_mean"]) == (60, 0)


@pytest.mark.slow
def test_it_is_no_worse_than_blocks_of_one_cell(policy):
    """It is what the paged policy does with blocks of one cell and no prefix cache, but for the order of free cells."""
    scenario = kvsim.load_scenario("chat", workload__requests=60, cache__block_size=1, cache__prefix_cache=False)
    mine, paged = (kvsim.run(scenario, policy=p).summary for p in (policy, "paged"))
    assert mine["cache"]["stored_cells_mean"] == pytest.approx(paged["cache"]["stored_cells_mean"], rel=0.05)


@pytest.mark.slow
def test_what_it_tells_of_its_cells_is_what_is_counted_where_a_policy_says_nothing(policy):
    class Silent(policy):
        """It has no more than the required methods, and what the server may do with a kept prefix."""

        usage, sequences = Policy.usage, Policy.sequences

    assert {*vars(policy)} >= Policy.__abstractmethods__
    for scheduler in ("llama-server-b4875", "vllm"):
        scenario = kvsim.load_scenario("chat", workload__requests=20, server__scheduler=scheduler, cache__cells=1500)
        assert outcome(scenario, Silent) == outcome(scenario, policy)
    mine, silent = (make(CacheConfig(cells=16)) for make in (policy, Silent))
    for each in (mine, silent):
        each.allocate([Chunk(seq, 0, 3) for seq in range(3)])
        each.free(1)
    assert silent.usage() == mine.usage()
    assert (silent.sequences(), silent.first_owners().tolist()) == ([0, 2], [0] * 3 + [-1] * 3 + [2] * 3 + [-1] * 7)


@pytest.mark.slow
def test_it_keeps_every_invariant(policy, monkeypatch):
    monkeypatch.setattr(plugins, "entry_points", lambda group: [FakeEntryPoint("lowest-cell", policy)])
    factory = available()["lowest-cell"]
    run_state_machine_as_test(partial(CacheMachine, factory), settings=settings(SETTINGS, max_examples=25))


@pytest.mark.slow
def test_a_real_model_writes_on_it_what_it_writes_without_a_cache(policy):
    built = build_policy(WORLD, policy)
    engine = Engine(MODEL, built.groups, built.kernel, WORLD.seed)
    assert wrong_texts(serve_for_real(built, engine), engine) == 0


@pytest.mark.slow
@given(seed=SEEDS, cells=st.sampled_from([30, 64, 300]), n_ubatch=st.sampled_from([2, 8, 64]))
@settings(deadline=None)
def test_its_rule_places_what_it_places_step_by_step(ruled, seed, cells, n_ubatch):
    class Leaves(ruled):
        """The rows of a story are freed as they are."""

        has_placement_rule = True

        def free(self, seq, start=0, stop=None):
            if seq in self.rule.by_seq:
                self.rule.leave(seq)
            super().free(seq, start, stop)

    live(lambda: Leaves(CacheConfig(cells=cells, n_ubatch=n_ubatch)), story(seed))


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["llama-server", "llama-server-b4875", "vllm", "static"])
def test_its_rule_changes_nothing_of_a_run(policy, ruled, scheduler):
    scenario = kvsim.load_scenario("chat", workload__requests=20, server__scheduler=scheduler, cache__cells=1500)
    without = outcome(scenario, policy)
    for most_steps in (1 << 62, 1, 0):
        assert outcome(scenario, ruled, most_steps=most_steps) == without


def test_by_its_rule_hardly_any_step_is_asked_for(policy, ruled, monkeypatch):
    asked = Counter()

    def count(self, step, *, views=False):
        asked[type(self)] += 1
        return place(self, step, views=views)

    place = policy.allocate
    monkeypatch.setattr(policy, "allocate", count)
    scenario = kvsim.load_scenario("chat", workload__requests=20)
    for each in (policy, ruled):
        kvsim.run(scenario, policy=each)
    assert 0 < asked[ruled] < 0.2 * asked[policy]
