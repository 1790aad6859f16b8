"""Mixes: in which order requests come, what they are called, and whose texts are whose."""

from collections import deque
from itertools import pairwise

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

import kvsim
from kvsim import UserError
from kvsim.scenario.scenario import load_scenario
from tests.workloads.generators.test_sessions import by_session, sessions_of
from tests.workloads.generators.test_synthetic import chat, digest
from tests.workloads.traces.test_streaming import peak
from tests.worlds import Given, GivenTimes, Listed, command, scenario, serve
from workloads import Mix, Request, Segment, WorkloadError, answer_of, named_rng, no_gaps, part_seed

SOURCES = 2**48


def test_a_mix_spelled_out():
    own = Segment(0, 0, 10)
    first = Given(
        [
            Request(0, 1.0, 12, 4, 0.0, (own, Segment(1, 0, 2)), 0, kind=1),
            Request(1, 1.0, 19, 5, 3.0, (own, Segment(1, 0, 2), answer_of(0, 4), Segment(2, 0, 3)), 0, kind=2),
            Request(2, 2.0, 10, 1, 0.0, (own,), 1, kind=1),
        ]
    )
    second = Given(
        [Request(0, 0.5, 7, 1), Request(1, 1.0, 8, 1, 0.0, (own,)), Request(2, 9.0, 8, 1, 0.0, (Segment(5, 2, 8),))]
    )
    ours = Segment(0, 0, 10)
    assert list(Mix([first, second])) == [
        Request(0, 0.5, 7, 1, kind=2),
        Request(1, 1.0, 12, 4, 0.0, (ours, Segment(2, 0, 2)), 0, kind=3),
        Request(2, 1.0, 19, 5, 3.0, (ours, Segment(2, 0, 2), answer_of(1, 4), Segment(4, 0, 3)), 0, kind=5),
        Request(3, 1.0, 8, 1, 0.0, (Segment(1, 0, 10),), kind=2),
        Request(4, 2.0, 10, 1, 0.0, (ours,), 1, kind=3),
        Request(5, 9.0, 8, 1, 0.0, (Segment(11, 2, 8),), kind=2),
    ]
    assert Mix([first, second]).n_requests == 6


def test_all_requests_come_in_order_and_are_numbered():
    parts = [sessions_of(), chat(seed=3, n=500), sessions_of(seed=2, sessions=30), chat(seed=4, n=20, gaps=no_gaps)]
    mix = Mix(parts)
    requests = list(mix)
    assert requests == list(mix)
    assert mix.n_requests == len(requests) == sum(part.n_requests for part in parts)
    assert [request.id for request in requests] == list(range(len(requests)))
    times = [request.arrival_s for request in requests]
    assert times == sorted(times)
    lengths = sorted((r.arrival_s, r.prompt_tokens, r.output_tokens, r.think_s) for part in parts for r in part)
    assert sorted((r.arrival_s, r.prompt_tokens, r.output_tokens, r.think_s) for r in requests) == lengths


def test_sessions_stay_together_and_quote_their_own_answers():
    requests = list(Mix([sessions_of(), sessions_of(seed=2), chat(n=300)]))
    talks = by_session(request for request in requests if request.session is not None)
    assert set(talks) == set(range(200))
    for turns in talks.values():
        assert [turn.id for turn in turns] == list(range(turns[0].id, turns[0].id + len(turns)))
        said = turns[0].content
        for turn in turns:
            assert turn.content[: len(said)] == said
            said = (*turn.content, turn.answer)


def texts(requests):
    """The sources of what was not answered."""
    return {segment.source for request in requests for segment in request.content if segment.source < SOURCES}


def test_parts_share_no_text():
    parts = [sessions_of(), sessions_of(seed=5), sessions_of(seed=6)]
    mixed = list(Mix(parts))
    found = []
    for part in parts:
        starts = {request.arrival_s for request in part}
        found.append(texts(request for request in mixed if request.arrival_s in starts))
        assert len(found[-1]) == len(texts(part))
    assert len(set.union(*found)) == sum(map(len, found))


def test_of_equal_times_the_earlier_part_is_first():
    parts = [Listed([(1.0, 10 + k, 1), (1.0, 20 + k, 1)]) for k in range(3)]
    assert [request.prompt_tokens for request in Mix(parts)] == [10, 20, 11, 21, 12, 22]


@pytest.mark.parametrize("limit", [1, 7, 100, 10**6])
def test_a_limit_keeps_the_first(limit):
    whole, some = Mix([sessions_of(), chat()]), Mix([sessions_of(), chat()], limit)
    assert list(some) == list(whole)[:limit]
    assert some.n_requests == len(list(some)) == min(limit, whole.n_requests)


def test_a_limit_may_cut_a_session_short_and_it_still_runs():
    _, jobs = serve(scenario(), Mix([sessions_of(sessions=4), sessions_of(sessions=4)], 9), GivenTimes(lambda _: 0.01))
    assert len(jobs) == 9


def test_part_of_an_answer_may_be_quoted():
    turns = [Request(0, 0.0, 3, 9, session=0), Request(1, 0.0, 4, 1, 0.0, (Segment(SOURCES, 0, 4),), 0)]
    requests = list(Mix([Listed([(0.0, 1, 1)]), Given(turns)]))
    assert requests[2].content == (Segment(SOURCES + 1, 0, 4),)


def test_answers_of_other_sessions_may_be_quoted_but_not_those_to_come():
    after = [Request(0, 0.0, 3, 9), Request(1, 0.0, 4, 1, 0.0, (Segment(SOURCES, 0, 4),))]
    mixed = list(Mix([Listed([(0.0, 1, 1)]), Given(after)]))
    assert mixed[2].content == (Segment(SOURCES + 1, 0, 4),)
    ahead = [Request(0, 0.0, 4, 9, 0.0, (Segment(SOURCES + 1, 0, 4),)), Request(1, 0.0, 3, 1)]
    with pytest.raises(WorkloadError, match="part 1 quotes the answer to a later request"):
        list(Mix([chat(n=1), Given(ahead)]))


def test_texts_are_numbered_within_their_limit():
    def of(source):
        return Given([Request(0, 0.0, 4, 1, 0.0, (Segment(source, 0, 4),))])

    assert next(iter(Mix([chat(n=1), of(2**47 - 1)]))).content[0].source == SOURCES - 1
    with pytest.raises(
        WorkloadError, match=r"part 1: text 140737488355328 is numbered too high .* 0 to 140737488355327"
    ):
        list(Mix([chat(n=1), of(2**47)]))


def test_what_cannot_be_mixed_is_refused():
    with pytest.raises(ValueError, match="closed loop"):
        Mix([chat(), chat(users=3)])
    with pytest.raises(ValueError, match="at least 2"):
        Mix([chat()])


def test_the_notes_of_all_parts_are_kept():
    class Noted(Listed):
        notes = ("one row left out",)

    assert Mix([chat(), Noted([(0.0, 1, 1)]), sessions_of()]).notes == ("part 1: one row left out",)
    assert Mix([chat(), sessions_of()]).notes == chat().notes == sessions_of().notes == ()


def test_parts_have_seeds_of_their_own():
    seeds = [part_seed(seed, place) for seed in (0, 1, 2**63 - 1) for place in range(100)]
    assert len(set(seeds)) == 300
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert part_seed(7, 1) == named_rng(7, "mix-part-1").integers(2**63)


def test_a_further_part_leaves_the_others_alone():
    two = [{"kind": "poisson", "requests": 30}, {"kind": "poisson", "requests": 30}]
    short, long = (
        load_scenario({"workload": {"kind": "mix", "parts": parts}}).build_workload() for parts in (two, two * 2)
    )
    times = [{request.arrival_s for request in workload} for workload in (short, long)]
    assert times[0] < times[1]
    assert len(times[0]) == 60, "the parts do not repeat each other"


@pytest.mark.slow
def test_a_mix_holds_little():
    big = {"sessions": 2_000}
    made = Mix([sessions_of(**big), chat(n=10_000), sessions_of(seed=2, **big)])
    assert peak(lambda: deque(made, maxlen=0)) < 4e6


def test_the_turns_of_a_mix_are_sent_as_drawn():
    workload = Mix([sessions_of(sessions=10), sessions_of(sessions=10, seed=2), chat(n=20)])
    _, jobs = serve(scenario(), workload, GivenTimes(lambda _: 0.01))
    for request in workload:
        if request.session is None:
            assert jobs[request.id].arrival_s == request.arrival_s
    for turns in by_session(r for r in workload if r.session is not None).values():
        assert jobs[turns[0].id].arrival_s == turns[0].arrival_s
        for before, turn in pairwise(turns):
            assert jobs[turn.id].arrival_s == jobs[before.id].finished_s + turn.think_s


TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:47,1,2\n"
ROW = '{"timestamp": 100, "input_length": 600, "output_length": 3, "hash_ids": [0, 7]}\n'
PARTS = [
    {"kind": "azure", "path": "traces/day.csv"},
    {"kind": "mooncake", "path": "traces/day.jsonl"},
    {"kind": "agents", "sessions": 3},
    {
        "requests": 20,
        "output_tokens": {"kind": "given-prompt", "edges": [9], "tables": [{"kind": "fixed", "value": 2}] * 2},
    },
    {"kind": "mmpp", "requests": 20, "rates": [1, 9], "prompt_tokens": {"kind": "zipf", "exponent": 1, "max": 9}},
]


@pytest.fixture
def mine(tmp_path):
    """A scenario file with a mix of traces and generated parts."""
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "day.csv").write_text(TRACE)
    (tmp_path / "traces" / "day.jsonl").write_text(ROW)
    path = tmp_path / "mine.toml"
    path.write_text(tomli_w.dumps({"seed": 3, "workload": {"kind": "mix", "parts": PARTS}}))
    return path


def test_a_mix_of_traces_survives_its_own_file_in_another_folder(mine, tmp_path, monkeypatch):
    ours = load_scenario(mine)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    copy = tmp_path / "elsewhere" / "copy.toml"
    copy.write_text(ours.to_toml(), encoding="utf-8")
    assert load_scenario(copy).to_toml() == load_scenario(load_scenario(copy)).to_toml()
    assert load_scenario(copy, name="mine").to_toml() == ours.to_toml()
    assert str(tmp_path / "traces" / "day.csv") in ours.to_toml()
    for other in (load_scenario(copy), load_scenario(ours), load_scenario("copy.toml")):
        assert digest(other.build_workload()) == digest(ours.build_workload())
    assert hash(ours) == hash(load_scenario(ours))


@pytest.mark.parametrize("policy", ["paged", "contiguous"])
def test_a_mix_runs(mine, policy):
    summary = kvsim.run(load_scenario(mine, cache__policy=policy)).summary
    assert summary["completed"] == summary["requests"] == load_scenario(mine).build_workload().n_requests


def test_the_number_of_requests_can_be_set_where_it_is_run(mine):
    assert load_scenario(mine).workload.count_key == "limit"
    done = command("run", str(mine), "--requests", "9", "--json")
    assert done.returncode == 0, done.stderr
    assert '"requests": 9' in done.stdout


def test_a_trace_that_is_not_there_is_named(mine):
    (mine.parent / "traces" / "day.csv").unlink()
    with pytest.raises(WorkloadError, match=r"day\.csv: no such file"):
        load_scenario(mine).build_workload()


def test_every_fault_of_every_part_has_its_line():
    parts = [{"rate": 0}, {"kind": "gamma", "cv": "x", "zzz": 1}, {"kind": "sessions", "turns": {"kind": "fixed"}}]
    with pytest.raises(UserError) as fault:
        load_scenario({"workload": {"kind": "mix", "parts": parts}})
    keys = [line.split(": ")[1] for line in str(fault.value).splitlines()]
    assert sorted(keys) == [
        "workload.parts.0.rate",
        "workload.parts.1.cv",
        "workload.parts.1.zzz",
        "workload.parts.2.turns.value",
    ]


scalars = st.sampled_from([None, True, -1, 0, 1, 5, 2**70, 0.5, -0.0, 1e300, float("nan"), "", "mix", "gamma", "fixed"])
KEYS = """kind rate rates dwell_s profile quantiles shape exponent min max value edges tables parts requests limit turns
output_tokens prompt_tokens x"""
keys = st.sampled_from(KEYS.split())
kinds = st.sampled_from(["poisson", "weibull", "mmpp", "diurnal", "renewal", "agents", "mix", "gamma", "zipf"])
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.builds(
            lambda kind, rest: {**rest, "kind": kind},
            kinds | st.sampled_from(["empirical", "given-prompt", "fixed"]),
            st.dictionaries(keys, inner, max_size=4),
        )
    ),
    max_leaves=12,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(kind=kinds, table=st.dictionaries(keys, values, max_size=5))
def test_any_table_is_loaded_or_refused(kind, table):
    message = ""
    try:
        ours = load_scenario({"workload": {**table, "kind": kind}})
    except UserError as e:
        message = str(e)
    else:
        assert load_scenario(ours).to_toml() == ours.to_toml()
    assert all(line.startswith("scenario: ") for line in message.splitlines())
