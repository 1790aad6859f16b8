"""Agents: what tools do to conversations, and that conversations without them stay as they are."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

import kvsim
from kvsim import UserError
from kvsim.scenario.scenario import load_scenario
from tests.workloads.generators.test_sessions import STANDARD_ERRORS, by_session, sessions_of
from tests.workloads.generators.test_synthetic import digest
from workloads import Fixed, Lognormal, Tools

TOOLS = Tools(0.7, Fixed(5000), 0.5)


def further(workload):
    """All turns but the first of each session."""
    return [turn for turns in by_session(workload).values() for turn in turns[1:]]


def is_result(turn):
    return turn.content[-1].n == 5000


def test_tools_bring_so_many_of_the_further_turns():
    turns = further(sessions_of(sessions=5000, turns=Fixed(5), tools=TOOLS))
    assert len(turns) == 20_000
    share = np.mean([is_result(turn) for turn in turns])
    assert share == pytest.approx(0.7, abs=STANDARD_ERRORS * np.sqrt(0.7 * 0.3 / len(turns)))
    assert abs(share - 0.72) > STANDARD_ERRORS * np.sqrt(0.7 * 0.3 / len(turns)), "the control"


def test_a_tool_never_opens_a_session():
    for turns in by_session(sessions_of(tools=replace(TOOLS, share=1.0))).values():
        assert not is_result(turns[0])
        assert turns[0].think_s == 0
        assert all(map(is_result, turns[1:]))


def test_results_and_users_take_their_own_times():
    turns = further(sessions_of(sessions=5000, turns=Fixed(5), tools=TOOLS, think_s=20.0))
    for mean, times in (
        (0.5, [t.think_s for t in turns if is_result(t)]),
        (20.0, [t.think_s for t in turns if not is_result(t)]),
    ):
        assert stats.kstest(times, stats.expon(scale=mean).cdf).pvalue > 1e-3
        assert stats.kstest(times, stats.expon(scale=1.1 * mean).cdf).pvalue < 1e-3, "the control"


def test_without_a_share_or_tools_sessions_are_as_ever():
    assert digest(sessions_of(tools=replace(TOOLS, share=0.0))) == digest(sessions_of()) == "216180da9e7b0be4"


def test_users_messages_and_answers_stay_where_no_tool_speaks():
    plain, agents = by_session(sessions_of()), by_session(sessions_of(tools=TOOLS))
    for session, turns in agents.items():
        for turn, before in zip(turns, plain[session], strict=True):
            assert turn.output_tokens == before.output_tokens
            assert turn.content[-1].source == before.content[-1].source
            if not is_result(turn):
                assert (turn.content[-1], turn.think_s) == (before.content[-1], before.think_s)


def test_longer_results_change_no_choice_and_no_time():
    one, other = (
        further(sessions_of(tools=replace(TOOLS, result_tokens=n))) for n in (Fixed(5000), Lognormal(6.0, 1.0))
    )
    assert [turn.think_s for turn in one] == [turn.think_s for turn in other]
    for a, b in zip(one, other, strict=True):
        assert is_result(a) or a.content[-1] == b.content[-1]


def test_the_context_grows_up_to_its_limit():
    workload = sessions_of(tools=TOOLS, max_context=12_000)
    assert workload.n_requests == len(list(workload)) < sessions_of().n_requests
    assert max(turn.prompt_tokens + turn.output_tokens for turn in further(workload)) <= 12_000


def test_fewer_agents_are_the_first_of_many():
    long = list(sessions_of(sessions=4100, turns=Lognormal(0.3, 0.5), tools=TOOLS))
    for n in (1, 4095, 4096, 4097):
        short = list(sessions_of(sessions=n, turns=Lognormal(0.3, 0.5), tools=TOOLS))
        assert short == long[: len(short)]


def test_a_seed_means_what_it_always_meant():
    """Another NumPy may draw other numbers."""
    assert digest(sessions_of(tools=Tools(0.7, Lognormal(5.0, 1.0), 0.5))) == "41756d696cf94c9a"


def test_the_default_agents_share_a_slot_s_context():
    workload = load_scenario({"workload": {"kind": "agents"}}).build_workload()
    requests = list(workload)
    assert len(by_session(requests)) == 40
    assert {request.content[0].n for request in requests} == {480}
    assert max(request.prompt_tokens + request.output_tokens for request in requests) <= 16384 // 8


@pytest.mark.parametrize("policy", ["paged", "contiguous"])
def test_the_default_agents_run(policy):
    summary = kvsim.run(load_scenario({"workload": {"kind": "agents"}, "cache": {"policy": policy}})).summary
    assert summary["completed"] == summary["requests"] > 200


def test_sessions_have_no_tools():
    with pytest.raises(UserError, match=r"workload\.tool_share: unknown key"):
        load_scenario({"workload": {"kind": "sessions", "tool_share": 0.5}})
