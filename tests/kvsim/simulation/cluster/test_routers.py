"""The rule of each router."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from kvsim.scenario.routers import ROUTERS
from kvsim.simulation.cluster.routers import Prompt, Router, ServerLoad, make_router
from kvsim.simulation.cluster.routers.hash_ring import HashRing, server_names
from policies import load_plugin
from policies.registry import FILES

THREE = 3
BUILT_IN = list(ROUTERS.built_in)


def router(name: str, servers: int = THREE, seed: int = 7, **settings: Any) -> Router:
    if name == "clairvoyant":
        settings.setdefault("truth", lambda prompt: [(0, 0)] * servers)
    return make_router(name, servers, np.random.default_rng(seed), **settings)


def prompt(source: int, tokens: int = 100, *, shared: int = 0, session: int | None = None) -> Prompt:
    """``shared``: tokens of a beginning that all have in common."""
    text = ((0, 0, shared),) * (shared > 0) + ((source, 0, tokens - shared),)
    return Prompt(source, text, tokens, session)


def sent(router: Router, prompts: list[Prompt], now: float = 0.0) -> list[int]:
    return [router.route(each, now) for each in prompts]


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_router_sends_every_request_somewhere_and_the_same_way_twice(name):
    def run() -> list[int]:
        made = router(name)
        chosen = []
        for i in range(300):
            made.polled([ServerLoad(i % 5, i % 3, i % 7 / 7)] * THREE, i)
            request = prompt(1 + i % 40, 100 + i, shared=i % 50, session=i % 20)
            chosen.append(made.route(request, float(i)))
            if i % 3:
                made.ended(chosen[-1], request, float(i))
        return chosen

    first = run()
    assert set(first) <= {0, 1, 2}
    assert first == run()


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_router_takes_the_one_server_that_there_is(name):
    assert sent(router(name, 1), [prompt(i, session=i) for i in range(1, 9)]) == [0] * 8


def test_an_unknown_router_is_named_with_those_that_there_are():
    with pytest.raises(ValueError, match="no router called 'x'; there are round-robin, random"):
        router("x")


def test_a_router_of_one_s_own_comes_from_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from kvsim.simulation.cluster.routers import Router\n"
        "class Last(Router):\n"
        "    def route(self, prompt, now):\n"
        "        return self.servers - 1\n"
        'ROUTERS = {"last": Last}\n'
    )
    load_plugin(file)
    try:
        assert sent(router("last"), [prompt(1)]) == [2]
    finally:
        del FILES[str(file)]


def test_round_robin_takes_turns():
    assert sent(router("round-robin"), [prompt(i) for i in range(1, 7)]) == [0, 1, 2, 0, 1, 2]


def test_least_load_takes_the_first_of_those_with_the_fewest_in_flight():
    made = router("least-load")
    assert sent(made, [prompt(1), prompt(2), prompt(3), prompt(4)]) == [0, 1, 2, 0]
    made.ended(2, prompt(3), 1.0)
    assert made.route(prompt(5), 1.0) == 2


def test_least_tokens_counts_tokens():
    made = router("least-tokens")
    assert sent(made, [prompt(1, 300), prompt(2, 10), prompt(3, 20), prompt(4, 15), prompt(5, 15)]) == [0, 1, 2, 1, 2]
    made.ended(0, prompt(1, 300), 1.0)
    assert made.route(prompt(6), 1.0) == 0


def test_power_of_two_never_takes_the_most_loaded():
    made = router("power-of-two")
    made.in_flight[:] = [5, 1, 3]
    chosen = Counter(sent(made, [prompt(1)])[0] for made.in_flight[:] in [[5, 1, 3]] * 600)
    assert chosen[0] == 0
    assert chosen[1] == pytest.approx(400, abs=60)  # In two pairs of three.


@pytest.mark.parametrize("name", ["vllm-router/cache_aware", "sglang-router/cache_aware", "smg/cache_aware"])
def test_a_known_beginning_goes_where_it_went(name):
    made = router(name)
    first = made.route(prompt(1), 0.0)
    made.route(prompt(2), 0.0)
    assert made.route(Prompt(9, ((1, 0, 31), (9, 0, 69)), 100), 0.0) == first


@pytest.mark.parametrize("name", ["vllm-router/cache_aware", "sglang-router/cache_aware"])
def test_too_short_a_beginning_goes_to_the_least_loaded(name):
    made = router(name)
    assert sent(made, [prompt(1), prompt(2, shared=30), prompt(3, shared=30)]) == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "split"), [("vllm-router/cache_aware", [65, 18, 17]), ("sglang-router/cache_aware", [76, 12, 12])]
)
def test_one_beginning_leaves_its_server_when_loads_differ_by_more_than_64(name, split):
    """vllm-router then prefers, of the servers that have it, the least loaded; sglang-router the first."""
    chosen = Counter(sent(router(name), [prompt(i, shared=90) for i in range(1, 101)]))
    assert [chosen[server] for server in range(THREE)] == split


def test_smg_spreads_one_beginning_by_the_mean():
    chosen = Counter(sent(router("smg/cache_aware"), [prompt(i, shared=90) for i in range(1, 101)]))
    assert sorted(chosen.values())[-1] <= 50  # Half more than the mean, at most.


def test_trees_forget_at_their_interval():
    made = router("vllm-router/cache_aware")
    made.max_tree_size = 50 * made.characters_per_token
    first = made.route(prompt(1), 0.0)
    assert made.route(prompt(1), 119.0) == first
    assert made.tree.find(prompt(1).text).matched == 100
    made.route(prompt(2), 120.0)
    assert made.tree.find(prompt(1).text).matched == 0


def test_smg_waits_by_reports_and_by_what_was_sent_since():
    made = router("smg/least_load")
    made.polled([ServerLoad(4, 0, 0.1), ServerLoad(0, 1, 0.1), ServerLoad(0, 0, 0.99)], 0.0)
    # 1,024 tokens take half a second; a cache that is nearly full is left out.
    assert sent(made, [prompt(i) for i in range(1, 4)]) == [1, 1, 1]
    made.polled([ServerLoad(0, 0, 0.79), ServerLoad(1, 0, 0.1), ServerLoad(9, 0, 0.1)], 10.0)
    assert made.route(prompt(9), 10.0) == 0  # 0.56 s, and 1.55 s for the three that it has at the other.
    made.polled([ServerLoad(0, 0, 0.9), ServerLoad(0, 8, 0.1), ServerLoad(9, 0, 0.8)], 20.0)
    assert made.route(prompt(10), 20.0) == 2  # All are left out: the one with the fewest in flight.


def test_a_session_keeps_its_server_by_hash():
    made = router("consistent-hash")
    chosen = [made.route(prompt(i, session=i % 10), 0.0) for i in range(1, 200)]
    assert chosen[:100] == chosen[10:110]
    assert set(chosen) == {0, 1, 2}


def test_a_ring_s_shares_are_as_even_as_160_marks_make_them():
    ring = HashRing(server_names(8), 160)
    shares = Counter(ring.server(f"key {i}") for i in range(4000))
    assert min(shares.values()) > 300
    assert max(shares.values()) < 750


def test_prefix_hash_goes_by_the_first_256_tokens_until_its_server_has_10_more_than_the_mean():
    made = router("prefix-hash", 2)
    prompts = [prompt(i, 400, shared=256) for i in range(1, 41)]
    chosen = sent(made, prompts)
    assert len(set(chosen[:20])) == 1
    assert len(set(chosen)) == 2


def test_sessions_stick_and_new_ones_go_where_the_fewest_are():
    made = router("sticky-least-loaded")
    first = [made.route(prompt(1, session=i), 0.0) for i in range(3)]
    assert sorted(first) == [0, 1, 2]
    assert [made.route(prompt(1, session=i), 10.0) for i in range(3)] == first
    made.route(prompt(1, session=0), 7000.0)
    made.route(prompt(1, session=9), 7300.0)  # Of the three, two have been silent for two hours.
    assert made._sessions.keys() == {0, 9}
    assert sum(made._counts) == 2


def test_vllm_begins_to_look_one_engine_later_each_time():
    made = router("vllm/data-parallel")
    assert sent(made, [prompt(i) for i in range(1, 7)]) == [0, 1, 2, 0, 1, 2]


def test_vllm_weighs_waiting_requests_by_a_full_cache():
    made = router("vllm/data-parallel", 2)
    made.polled([ServerLoad(4, 2, 0.9), ServerLoad(9, 0, 0.9)], 0.0)
    assert made.route(prompt(1), 0.0) == 1  # 6 + 2 × 6 × 0.4 against 9.
    made.polled([ServerLoad(4, 2, 0.5), ServerLoad(9, 0, 0.9)], 0.1)
    assert made.route(prompt(2), 0.1) == 0


def test_production_stack_weighs_a_hit_against_relative_load():
    made = router("production-stack/prefix-aware", 2)
    assert made.route(prompt(1), 0.0) == 0
    # All of the prompt is there, and loads of 1 and 0 are half a request from their mean: 1 - 0.5 against 0 + 0.5.
    assert made.route(prompt(1), 0.0) == 0
    assert made.route(prompt(1), 0.0) == 1


def test_llm_d_adds_its_scores():
    made = router("llm-d", 2)
    made.polled([ServerLoad(0, 0, 0.8), ServerLoad(0, 0, 0.0)], 0.0)
    assert made.route(prompt(1), 0.0) == 1
    made.polled([ServerLoad(0, 0, 0.0), ServerLoad(0, 0, 1.0)], 0.05)
    assert made.route(prompt(1), 0.05) == 1  # 2 + 0 + 3 against 2 + 2.
    made.polled([ServerLoad(0, 0, 0.0), ServerLoad(0, 3, 1.0)], 0.1)
    assert made.route(prompt(1), 0.1) == 0  # 0 + 0 + 3 against 2 + 2.


def test_the_clairvoyant_one_takes_the_least_work():
    made = router("clairvoyant", truth=lambda prompt: [(80, 90), (0, 0), (100, 110)])
    assert made.route(prompt(1), 0.0) == 1
    made = router("clairvoyant", truth=lambda prompt: [(80, 70), (0, 0), (100, 80)])
    assert made.route(prompt(1), 0.0) == 2
