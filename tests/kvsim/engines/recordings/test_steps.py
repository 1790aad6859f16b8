"""What is common to recordings with steps: their seconds, clients, and which steps tell something."""

from types import SimpleNamespace

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from kvsim.costs.pass_layout import Work
from kvsim.engines.recordings.steps import (
    FrontEnd,
    MeasuredStep,
    RecordedClients,
    SentAfter,
    fitting_half,
    one_after_another,
    since_last,
)
from kvsim.experiments.traffic import InMemoryRequests
from workloads import Request

ONE = Work(tokens=1, scans=((1, 5),), chunks=1, runs=1)
MANY = Work(tokens=4, scans=((4, 9),), chunks=1, runs=1)


def a_step(start_s, seconds=1.0, works=(ONE,)):
    return MeasuredStep(start_s, seconds, start_s + seconds, works)


def lasting(starts, own, idle):
    """Seconds of each step until the next could begin."""
    return [step.seconds for step in one_after_another(list(map(a_step, starts, own)), idle)]


def test_a_step_lasts_until_the_next_could_begin():
    """Between the second and the third the server was idle: it is taken to need what it needs elsewhere."""
    assert lasting([0.0, 1.1, 5.0, 6.2], [1.0, 1.0, 1.0, 1.0], [False, True, False, False]) == pytest.approx(
        [1.1, 1.2, 1.2, 1.2]
    )
    assert lasting([3.0], [0.5], [False]) == [0.5]
    assert lasting([], [], []) == []


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.floats(0, 0.5), st.floats(0.001, 2), st.booleans()), min_size=1, max_size=20),
)
def test_no_step_is_shorter_than_itself_and_only_idle_time_is_left_out(rows):
    starts, now = [], 0.0
    for between, own, idle in rows:
        starts.append(now)
        now += own + between + (50.0 if idle else 0.0)
    own, idle = [own for _, own, _ in rows], [idle for *_, idle in rows]
    seconds = lasting(starts, own, idle)
    betweens = [between for between, _, idle in rows[:-1] if not idle]
    for at, (each, least) in enumerate(zip(seconds, own, strict=True)):
        if idle[at] or at + 1 == len(own):
            assert least <= each <= least + max(betweens, default=0.0) + 1e-9
        else:
            assert each == pytest.approx(starts[at + 1] - starts[at])


def test_a_step_that_overlaps_the_next_keeps_its_own_seconds():
    assert lasting([0.0, 0.5], [1.0, 1.0], [False, False]) == [1.0, 1.0]


def test_how_long_after_a_step_something_came():
    steps = [a_step(0.0), a_step(1.0), a_step(2.0)]
    assert [since_last(at, steps) for at in (0.5, 1.0, 2.25, 9.0)] == [0.0, 0.0, 0.25, 6.0]


@given(st.lists(st.booleans(), max_size=40))
def test_every_other_step_of_each_regime_tells(mixed):
    steps = [a_step(float(i), works=(ONE, MANY) if each else (ONE,)) for i, each in enumerate(mixed)]
    told = fitting_half(steps)
    for kind in (True, False):
        own = [tells for tells, each in zip(told, mixed, strict=True) if each == kind]
        assert own == [at % 2 == 0 for at in range(len(own))]


def test_a_step_is_mixed_if_one_of_its_passes_is():
    assert a_step(0.0, works=(ONE, MANY)).regime == "mixed"
    assert a_step(0.0, works=(ONE, ONE)).regime == "decode"


class _Instant:
    """An inbox of a server that takes a second for each request; notes when they came."""

    def __init__(self, env):
        self.env, self.came, self.closed_s = env, {}, None

    def submit(self, request, *, notify):
        assert notify
        self.came[request.id] = self.env.now
        return SimpleNamespace(done=self.env.timeout(1.0))

    def close(self):
        self.closed_s = self.env.now


def came(after, front_end=FrontEnd(0.0, 0.0), there_s=None):  # noqa: B008
    """When the requests 0, 1 and 2, due at 0, 10 and 20, come to the server; and when no more will."""
    env = simpy.Environment()
    inbox = _Instant(env)
    workload = InMemoryRequests(tuple(Request(i, 10.0 * i, 3, 2) for i in range(3)))
    env.run(env.process(RecordedClients(after, front_end, there_s or {})(env, inbox, workload)))
    return inbox.came, inbox.closed_s


def test_clients_send_at_their_times():
    assert came({}) == ({0: 0.0, 1: 10.0, 2: 20.0}, 21.0)


def test_clients_send_when_others_have_ended_and_they_have_thought():
    found, closed_s = came({1: SentAfter((0,), 0.5), 2: SentAfter((0, 1), 0.25)})
    assert found == {0: 0.0, 1: 1.5, 2: 2.75}
    assert closed_s == 3.75


def test_the_front_end_delays_what_is_sent_and_what_is_heard():
    found, _ = came({1: SentAfter((0,), 0.5)}, FrontEnd(0.1, 0.2), {2: 0.7})
    assert found == pytest.approx({0: 0.1, 1: 0.1 + 1.0 + 0.2 + 0.5 + 0.1, 2: 20.7})
    assert FrontEnd(0.1, 0.2).both_s == pytest.approx(0.3)
