"""Conversations: what each prompt says, what a seed means, and when each turn is sent."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.worlds
from kvsim.scenario.scenario import load_scenario
from tests.workloads.generators.test_synthetic import digest
from tests.worlds import Given, GivenTimes, Listed, scenario, serve
from workloads import Fixed, Lognormal, Request, Segment, Sessions, answer_of, gamma_gaps, no_gaps, poisson_gaps
from workloads.generators.sessions import MAX_TURNS

STANDARD_ERRORS = 4.5


def sessions_of(**changes):
    """A hundred conversations of a few turns, with keys changed."""
    usual = Sessions(
        seed=1,
        sessions=100,
        gaps=poisson_gaps(2.0),
        turns=Lognormal(1.2, 0.6, max=12),
        system_prompts=3,
        system_tokens=Lognormal(5.0, 0.5),
        popularity=1.0,
        user_tokens=Lognormal(3.0, 0.7),
        output_tokens=Lognormal(4.0, 0.7),
        think_s=2.0,
    )
    return replace(usual, **changes)


def by_session(workload):
    """The requests of each session, in the order of the workload."""
    found = {}
    for request in workload:
        found.setdefault(request.session, []).append(request)
    return found


def test_a_workload_spelled_out():
    workload = Sessions(
        1, 2, lambda rng: lambda n: np.full(n, 0.5), Fixed(3), 1, Fixed(10), 0.0, Fixed(4), Fixed(2), think_s=0.0
    )
    system, user = Segment(0, 0, 10), [Segment(1 + i, 0, 4) for i in range(6)]
    answer = [Segment(2**48 + i, 0, 2) for i in range(6)]
    first, second, third = (
        (system, user[0]),
        (system, user[0], answer[0], user[1]),
        (system, user[0], answer[0], user[1], answer[1], user[2]),
    )
    assert list(workload)[:3] == [
        Request(0, 0.5, 14, 2, 0.0, first, 0, kind=1, user_starts=(10,)),
        Request(1, 0.5, 20, 2, 0.0, second, 0, kind=2, user_starts=(10, 16)),
        Request(2, 0.5, 26, 2, 0.0, third, 0, kind=3, user_starts=(10, 16, 22)),
    ]
    assert list(workload)[3] == Request(3, 1.0, 14, 2, 0.0, (system, user[3]), 1, kind=1, user_starts=(10,))
    assert (workload.n_requests, workload.users) == (6, None)


@pytest.mark.parametrize("changes", [{}, {"system_prompts": 0}, {"max_context": 500}, {"turns": Fixed(1)}], ids=str)
def test_each_prompt_is_the_one_before_its_answer_and_a_new_message(changes):
    workload = sessions_of(**changes)
    messages = []
    for turns in by_session(workload).values():
        opening = turns[0].content[:-1]
        assert len(opening) == (1 if workload.system_prompts else 0)
        assert all(segment.source < workload.system_prompts for segment in opening)
        before = opening
        for turn in turns:
            assert turn.content[:-1] == before
            assert turn.prompt_tokens == sum(segment.n for segment in turn.content)
            messages.append(turn.content[-1].source)
            before = (*turn.content, answer_of(turn.id, turn.output_tokens))
            assert turn.answer == before[-1]
    assert len(set(messages)) == len(messages)
    assert all(workload.system_prompts <= source < 2**48 for source in messages)


def test_requests_are_numbered_and_those_of_a_session_are_adjacent():
    requests = list(sessions_of(gaps=gamma_gaps(2.0, 3.0)))
    assert [request.id for request in requests] == list(range(len(requests)))
    assert sessions_of().n_requests == len(list(sessions_of()))
    sessions = [request.session for request in requests]
    assert sessions == sorted(sessions)
    assert set(sessions) == set(range(100))
    arrivals = [request.arrival_s for request in requests]
    assert arrivals == sorted(arrivals)
    for turns in by_session(requests).values():
        assert len({turn.arrival_s for turn in turns}) == 1
        assert turns[0].think_s == 0.0
        assert all(turn.think_s > 0 for turn in turns[1:])


def test_a_system_prompt_has_one_length_for_all_who_share_it():
    openings = {request.content[0] for request in sessions_of()}
    assert len(openings) == len({segment.source for segment in openings}) == 3


@pytest.mark.parametrize(("most", "turns"), [(1, 1), (15, 1), (19, 1), (20, 2), (24, 2), (25, 3), (99, 5), (None, 5)])
def test_a_session_ends_before_the_turn_that_would_exceed_the_context(most, turns):
    """Prompt and output together are 15, 20, 25, ... tokens; the first turn is always sent."""
    workload = sessions_of(
        turns=Fixed(5), system_tokens=Fixed(10), user_tokens=Fixed(3), output_tokens=Fixed(2), max_context=most
    )
    assert {len(of_one) for of_one in by_session(workload).values()} == {turns}
    assert workload.n_requests == 100 * turns


def test_turns_have_an_end():
    assert sessions_of(sessions=1, turns=Fixed(10**6)).n_requests == MAX_TURNS


def test_the_same_seed_gives_the_same_requests_at_every_iteration():
    workload = sessions_of()
    assert list(workload) == list(workload) == list(sessions_of())
    assert [r.prompt_tokens for r in workload] != [r.prompt_tokens for r in sessions_of(seed=2)]


def test_a_shorter_workload_is_the_beginning_of_a_longer_one():
    long = list(sessions_of(sessions=4100, turns=Lognormal(0.3, 0.5)))
    for n in (1, 4095, 4096, 4097):
        short = list(sessions_of(sessions=n, turns=Lognormal(0.3, 0.5)))
        assert short == long[: len(short)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "216180da9e7b0be4"),
        ({"sessions": 9000}, "bed2d2bb5a860957"),
        ({"sessions": 5000, "max_context": 500}, "32f49989830281e3"),
        ({"system_prompts": 0, "think_s": 0.0}, "1aaa320998c010b2"),
        ({"sessions": 40, "turns": Fixed(300)}, "a7230953b8f1e0bb"),
        ({"seed": 7, "gaps": gamma_gaps(2.0, 4.0), "popularity": 2.5, "turns": Fixed(1)}, "d72f713994ead7a8"),
        ({"seed": 3, "sessions": 300, "max_context": 2, "turns": Lognormal(3.0, 1.0)}, "2eac48801043e854"),
    ],
    ids=["usual", "many", "cut", "without system prompts", "long", "bursty", "first turns only"],
)
def test_a_seed_means_what_it_always_meant(changes, expected):
    """Recorded when each session's turns were drawn alone; another NumPy may draw other numbers."""
    assert digest(sessions_of(**changes)) == expected


DRAWS = {
    "start": lambda turns: [turns[0].arrival_s],
    "turns": lambda turns: [len(turns)],
    "system": lambda turns: [turns[0].content[0].source],
    "user": lambda turns: [turn.content[-1].n for turn in turns],
    "output": lambda turns: [turn.output_tokens for turn in turns],
    "think": lambda turns: [turn.think_s for turn in turns],
}


@pytest.mark.parametrize(
    ("changed", "changes"),
    [
        ("start", {"gaps": no_gaps}),
        ("system", {"popularity": 5.0}),
        ("user", {"user_tokens": Lognormal(6.0, 2.0)}),
        ("output", {"output_tokens": Fixed(7)}),
        ("think", {"think_s": 0.0}),
    ],
)
def test_changing_one_quantity_leaves_the_draws_of_the_others_alone(changed, changes):
    one, other = by_session(sessions_of()).values(), by_session(sessions_of(**changes)).values()
    for name, draw in DRAWS.items():
        assert ([draw(turns) for turns in one] == [draw(turns) for turns in other]) == (name != changed)


def test_where_one_session_is_cut_the_next_is_the_same():
    whole, cut = by_session(sessions_of()), by_session(sessions_of(max_context=400))
    assert sum(map(len, cut.values())) < sum(map(len, whole.values()))
    for name in ("start", "system", "user", "output", "think"):
        for session, turns in cut.items():
            draw = DRAWS[name]
            assert draw(turns) == draw(whole[session])[: len(draw(turns))]


def follows_zipf(exponent, theory, prompts=5, n=20_000):
    """Whether system prompts are chosen in proportion to k ** -theory; shares within a few standard errors."""
    chosen = sessions_of(sessions=n, turns=Fixed(1), system_prompts=prompts, popularity=exponent)
    counts = Counter(request.content[0].source for request in chosen)
    shares = np.arange(1, prompts + 1) ** -float(theory)
    shares /= shares.sum()
    errors = np.sqrt(shares * (1 - shares) / n)
    return bool((np.abs([counts[k] / n for k in range(prompts)] - shares) < STANDARD_ERRORS * errors).all())


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.5])
def test_system_prompts_are_as_popular_as_zipf_says(exponent):
    assert follows_zipf(exponent, exponent)


def test_the_comparison_with_zipf_can_fail():
    """The control: an exponent a tenth off does not agree."""
    assert not follows_zipf(1.0, 1.1)
    assert not follows_zipf(0.0, 0.1)


def test_think_times_are_exponential():
    times = np.array([r.think_s for r in sessions_of(sessions=5000, turns=Fixed(5)) if r.think_s > 0])
    assert len(times) == 20_000
    assert np.mean(times) == pytest.approx(2.0, abs=STANDARD_ERRORS * 2.0 / np.sqrt(len(times)))
    # The variance of a sample variance is 8 / n times the fourth power of the mean.
    assert np.var(times) == pytest.approx(4.0, abs=STANDARD_ERRORS * 4.0 * np.sqrt(8 / len(times)))


def given_turns(*rows):
    """A workload of requests: (session, arrival, prompt tokens, output tokens, think time)."""
    return Given([Request(i, *times, think_s, session=of) for i, (of, *times, think_s) in enumerate(rows)])


def story(*rows, **keys):
    """When each request arrived and ended, where each pass takes one second."""
    recorder, jobs = serve(scenario(**keys), given_turns(*rows))
    assert len(recorder.requests.jobs) == len(rows)
    return [(jobs[i].arrival_s, jobs[i].finished_s) for i in range(len(rows))]


def test_a_turn_comes_a_think_time_after_the_end_of_the_one_before():
    assert story(
        (0, 0.25, 2, 3, 0.0),  # prefill and two decodes: ends at 3.25
        (0, 0.25, 9, 1, 4.0),
        (0, 0.25, 20, 2, 0.0),  # at once
    ) == [(0.25, 3.25), (7.25, 8.25), (8.25, 10.25)]


def test_the_first_turn_comes_at_its_arrival_whatever_its_think_time():
    assert story((0, 2.0, 2, 1, 50.0), (0, 2.0, 2, 1, 1.0)) == [(2.0, 3.0), (4.0, 5.0)]


def test_sessions_run_side_by_side_and_the_last_is_waited_for():
    assert story(
        (0, 0.0, 2, 2, 0.0),  # 0 to 2
        (0, 0.0, 2, 1, 100.0),  # long after everyone else has gone
        (1, 0.5, 2, 1, 0.0),  # from the pass at 1
        (1, 0.5, 2, 2, 0.5),  # 2.5 to 4.5
        (1, 0.5, 2, 1, 0.0),
        (None, 3.0, 2, 1, 0.0),  # of no session: from the pass at 3.5
        (2, 3.0, 2, 1, 0.0),
    ) == [(0.0, 2.0), (102.0, 103.0), (0.5, 2.0), (2.5, 4.5), (4.5, 5.5), (3.0, 4.5), (3.0, 4.5)]


def test_sessions_that_start_together_come_in_the_order_of_the_workload():
    rows = [(session, 0.0, 2, 1, 0.0) for session in (0, None, 1, None, 2)]
    assert story(*rows, server__slots=1) == [(0.0, float(end)) for end in (1, 2, 3, 4, 5)]


def test_after_a_failed_turn_the_user_goes_on():
    _, jobs = serve(
        scenario(server__slot_context=16), given_turns((0, 1.0, 99, 1, 0.0), (0, 1.0, 2, 1, 3.0), (1, 2.0, 2, 1, 0.0))
    )
    assert [jobs[i].status for i in range(3)] == ["failed", "completed", "completed"]
    assert [(jobs[i].arrival_s, jobs[i].finished_s) for i in range(3)] == [(1.0, 1.0), (4.0, 5.0), (2.0, 3.0)]


def test_the_turns_of_a_generated_workload_are_sent_as_drawn():
    workload = sessions_of(sessions=20, max_context=600)
    _, jobs = serve(scenario(), workload, GivenTimes(lambda _: 0.01))
    for turns in by_session(workload).values():
        assert jobs[turns[0].id].arrival_s == turns[0].arrival_s
        for before, turn in pairwise(turns):
            assert jobs[turn.id].arrival_s == jobs[before.id].finished_s + turn.think_s


def test_without_sessions_everything_is_sent_as_it_would_be_one_by_one(monkeypatch):
    """Against the plain loop: the same passes, the same times."""

    def plain(env, inbox, workload):
        for request in workload:
            if request.arrival_s > env.now:
                yield env.timeout(request.arrival_s - env.now)
            inbox.submit(request)
        inbox.close()

    rows = Listed([(0.37 * (i // 2), 3 + 7 * i % 31, 1 + 5 * i % 7) for i in range(60)])

    def run():
        backend = GivenTimes(lambda batch: 0.01 * len(batch.cells))
        _, jobs = serve(scenario(), rows, backend)
        chunks = [[tuple(chunk) for chunk in batch.chunks] for batch in backend.passes]
        return chunks, [(job.arrival_s, job.started_s, job.finished_s) for job in jobs.values()]

    ours = run()
    monkeypatch.setattr(tests.worlds, "send", plain)
    assert run() == ours


def test_the_default_sessions_are_a_hundred_short_chats():
    workload = load_scenario({"workload": {"kind": "sessions"}}).build_workload()
    turns = [len(of_one) for of_one in by_session(workload).values()]
    assert len(turns) == 100
    assert 3 < np.mean(turns) < 5
    assert {request.content[0].n for request in workload} == {200}


lengths = st.one_of(st.builds(Fixed, st.integers(1, 9)), st.builds(Lognormal, st.floats(-2, 4), st.floats(0, 2)))


@settings(deadline=None, max_examples=25)
@given(
    st.builds(
        Sessions,
        seed=st.integers(0, 2**63 - 1),
        sessions=st.integers(1, 30),
        gaps=st.sampled_from([no_gaps, poisson_gaps(1.0), gamma_gaps(1.0, 9.0)]),
        turns=st.builds(Lognormal, st.floats(-2, 2), st.floats(0, 1)),
        system_prompts=st.integers(0, 4),
        system_tokens=lengths,
        popularity=st.floats(0, 100),
        user_tokens=lengths,
        output_tokens=lengths,
        think_s=st.floats(0, 1e9),
        max_context=st.none() | st.integers(1, 300),
    )
)
def test_any_sessions_keep_their_promises(workload):
    requests = list(workload)
    assert requests == list(workload)
    assert len(requests) == workload.n_requests
    assert set(by_session(requests)) == set(range(workload.sessions))
    for turns in by_session(requests).values():
        for k, turn in enumerate(turns):
            assert len(turn.content) == 2 * k + (2 if workload.system_prompts else 1)
            assert turn.prompt_tokens == sum(segment.n for segment in turn.content)
            if k and workload.max_context is not None:
                assert turn.prompt_tokens + turn.output_tokens <= workload.max_context
