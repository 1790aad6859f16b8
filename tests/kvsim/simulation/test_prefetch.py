"""What is brought back from the host tier, when, and who waits for it; to the second."""

import pytest
import simpy

from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.job import Job
from kvsim.simulation.prefetch import Prefetcher
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.run import run
from policies import Exported, Transfer
from tests.worlds import Diary, Given, scenario, serve
from workloads import Request, Segment, answer_of

COPY_S = 3.0
"""To bring one block back. Copies to the host tier take no time here."""


def copying(transfers):
    return COPY_S * sum(transfer.n for transfer in transfers if not transfer.to_host) / 4


def says(number, at, *pieces, output=1, **others):
    """A request by what its prompt says: (source, first token, tokens)."""
    content = tuple(Segment(*piece) for piece in pieces)
    return Request(number, at, sum(piece.n for piece in content), output, content=content, **others)


def tell(mode, requests, blocks=6, **keys):
    """Blocks of four tokens; a pass takes a second, and the time of the copies that it must make first."""
    world = scenario(
        **{
            "server__scheduler": "vllm",
            "server__slots": 1,
            "server__prefetch": mode,
            "cache__policy": "paged",
            "cache__block_size": 4,
            "cache__cells": 4 * (blocks + 1),
            "cache__host_cells": 64,
            **keys,
        }
    )
    diary = Diary(seconds=lambda batch: 1.0 + copying(batch.places[0].transfers), copying=copying)
    recorder, jobs = serve(world, Given(requests), diary)
    return diary, recorder, [job for _, job in sorted(jobs.items())]


def out_and_back(output, *others):
    """0 says nine tokens, 1 drives its two blocks out, 2 keeps the server busy from 3 s on, and 3 begins as 0 did."""
    return [
        says(0, 0.0, (1, 0, 9)),
        says(1, 1.5, (2, 0, 24 - 1)),
        says(2, 3.0, (3, 0, 3), output=output),
        says(3, 3.5, (1, 0, 9), (4, 0, 1)),
        *others,
    ]


def test_without_prefetching_a_request_brings_its_prefix_when_it_starts():
    diary, recorder, jobs = tell("none", out_and_back(2))
    assert diary.steps[-1] == [(3, 8, 2)]
    assert (jobs[3].started_s, jobs[3].finished_s, jobs[3].cached) == (5.0, 5.0 + 2 * COPY_S + 1.0, 8)
    assert diary.copies == []
    assert (
        recorder.counts.host.cells_in,
        recorder.counts.host.cells_prefetched,
        recorder.counts.host.prefetch_wait_s,
    ) == (8, 0, 0.0)


def test_what_a_waiting_request_needs_comes_while_others_run_and_its_step_waits_for_the_rest():
    """It has been waiting since 3.5, and is seen at 4: two blocks are there at 10."""
    for output, starts, waits in ((2, 5.0, 5.0), (4, 7.0, 3.0), (7, 10.0, 0.0), (8, 11.0, 0.0)):
        diary, recorder, jobs = tell("on-resume", out_and_back(output))
        assert jobs[2].finished_s == starts, "who runs is not held up"
        assert (jobs[3].started_s, jobs[3].finished_s, jobs[3].cached) == (starts, starts + waits + 1.0, 8)
        assert all(transfer.to_host for transfer in diary.passes[-1].places[0].transfers)
        assert [transfer.n for transfer in diary.copies if not transfer.to_host] == [4, 4]
        assert (
            recorder.counts.host.cells_in,
            recorder.counts.host.cells_prefetched,
            recorder.counts.host.prefetch_wait_s,
        ) == (8, 8, waits)


DRIVEN_OUT = [
    says(0, 0.0, (1, 0, 9)),
    says(1, 1.5, (2, 0, 9)),
    says(2, 3.0, (3, 0, 39)),
    says(3, 4.0, (4, 0, 3), output=4),
]
"""0 and 1 are driven out by 2; 3 runs from 4 s on."""


def test_one_copy_follows_another():
    """4 and 5 are seen at 5 and want their blocks back, which takes until 11 and 17."""
    requests = [*DRIVEN_OUT, says(4, 4.5, (1, 0, 9)), says(5, 4.5, (2, 0, 9))]
    _, recorder, jobs = tell("on-resume", requests, blocks=10)
    assert [(job.started_s, job.finished_s) for job in jobs[3:]] == [(4.0, 8.0), (8.0, 12.0), (12.0, 18.0)]
    assert recorder.counts.host.prefetch_wait_s == 3.0 + 5.0


def test_a_step_waits_for_the_last_of_those_that_it_starts():
    """Prefetching under a scheduler that starts 4 and 5 together, when 3 has ended."""
    requests = [*DRIVEN_OUT, says(4, 4.5, (1, 0, 9)), says(5, 4.5, (2, 0, 9))]
    diary, recorder, jobs = tell("on-resume", requests, blocks=10, server__slots=2, server__scheduler="static")
    assert diary.steps[-1] == [(4, 8, 1), (5, 8, 1)]
    assert [(job.started_s, job.finished_s) for job in jobs[3:]] == [(4.0, 8.0), (8.0, 18.0), (8.0, 18.0)]
    assert recorder.counts.host.prefetch_wait_s == 9.0


def test_whoever_needs_blocks_that_are_on_their_way_waits_for_them():
    """4 waits, and its two blocks are there at 11. 5 is more urgent, says the same, and starts at 8."""
    requests = [*DRIVEN_OUT, says(4, 4.5, (1, 0, 9), priority=1), says(5, 7.5, (1, 0, 9))]
    _, _, jobs = tell("on-resume", requests, blocks=10, server__order="priority")
    assert (jobs[5].started_s, jobs[5].cached) == (8.0, 8)
    assert jobs[5].finished_s == 12.0


def test_a_step_that_found_no_room_still_makes_its_own_copies():
    """4 finds one block in the host tier, and its step does not fit; then one is fetched ahead for 5, which waits.

    The half step that follows must bring 4's block first.
    """
    requests = [
        says(0, 0.0, (1, 0, 5)),
        says(1, 2.0, (2, 0, 5)),
        says(2, 4.0, (3, 0, 27)),  # drives both out
        says(3, 6.0, (4, 0, 8), output=9),
        says(4, 6.5, (1, 0, 4), (5, 0, 16)),
        says(5, 6.5, (2, 0, 5)),
    ]
    keys = {"server__scheduler": "llama-server", "server__slots": 2, "server__keep_idle_slots": False}
    diary, recorder, jobs = tell("on-resume", requests, blocks=7, **keys)
    assert (jobs[4].cached, jobs[5].cached) == (4, 4)
    assert recorder.counts.cache.batch_splits > 0
    first = next(number for number, step in enumerate(diary.steps) if step[-1][0] == 4)
    transfers = diary.passes[first].places[0].transfers
    assert [transfer.n for transfer in transfers if not transfer.to_host] == [4]
    assert [transfer.n for transfer in diary.copies if not transfer.to_host] == [4]
    assert recorder.counts.host.cells_prefetched == 4


# Predictions, with nothing around them


class Tier:
    """Stands in for policy and backend: every prefix is in the host tier, and takes ten seconds. Writes down when."""

    block_size = 4

    def __init__(self):
        self.env = simpy.Environment()
        self.recorder = Recorder()
        self.fetched = []

    def prefetcher(self, mode):
        return Prefetcher(self.env, mode, self, self, self.recorder)

    def fetch(self, content, tokens):
        self.fetched.append((self.env.now, content.n, tokens))
        return content.keys(self.block_size, (tokens - 1) // self.block_size)

    def settle_transfers(self):
        return (Transfer(False, 0, 0, 4),)

    def transfer(self, transfers):
        return 10.0

    def at(self, time, what, job):
        """Something happens to a job at some time."""

        def happen():
            yield self.env.timeout(time)
            what(job)

        self.env.process(happen())


def turn(number, arrival, session, *, prompt=5, output=3):
    return Job(Request(number, 0.0, prompt, output, session=session), arrival)


def started(content, held):
    """A job with ``held`` tokens in the cache already."""
    job = Job(Request(99, 0.0, sum(piece.n for piece in content), 1, content=tuple(content)), 0.0)
    job.computed = held
    return job


def pause(tier, prefetcher, seconds, session):
    """A session that is answered now, and asks again after so long; its next turn is never answered."""
    now = tier.env.now
    prefetcher.ended(turn(2 * session, now, session))
    tier.env.run(now + seconds)
    prefetcher.arrived(turn(2 * session + 1, now + seconds, session))


def test_the_next_turn_is_expected_when_a_quarter_of_the_pauses_are_over():
    """Pauses of 8, 16, 24 and 32 s: the quarter lies at 14 s. The next turn begins with all that was said."""
    tier = Tier()
    prefetcher = tier.prefetcher("predictive")
    tier.at(0.0, prefetcher.ended, turn(0, 0.0, 7))
    for session, seconds in enumerate((8.0, 16.0, 24.0, 32.0)):
        tier.at(0.0, prefetcher.ended, turn(10 + session, 0.0, session))
        tier.at(seconds, prefetcher.arrived, turn(20 + session, seconds, session))
    tier.env.run(40.0)
    assert tier.fetched == [], "when these were answered, no pause had been seen"
    prefetcher.ended(turn(30, 39.0, 9, prompt=5, output=3))
    tier.env.run(53.5)
    assert tier.fetched == []
    tier.env.run(60.0)
    assert tier.fetched == [(54.0, 8, 9)], "one token more than was said, so that all of it is looked for"


def test_whoever_found_what_was_fetched_waits_for_the_rest_of_it():
    """The next turn, or another prompt that begins in the same way, if only for a block."""
    tier = Tier()
    prefetcher = tier.prefetcher("predictive")
    pause(tier, prefetcher, 4.0, session=0)
    said = (Segment(7, 0, 5), answer_of(10, 3))
    prefetcher.ended(Job(Request(10, 0.0, 5, 3, content=said[:1], session=1), 4.0))
    tier.env.run(11.0)
    assert tier.fetched == [(8.0, 8, 9)]
    more = Segment(8, 0, 9)
    assert prefetcher.wait_s([started((*said, more), 8)]) == 7.0
    assert prefetcher.wait_s([started((said[0], more), 4)]) == 7.0
    assert prefetcher.wait_s([started((*said, more), 0), started((more,), 8)]) == 0.0, "they found none of it"
    tier.env.run(15.5)
    assert prefetcher.wait_s([started((more,), 8), started((*said, more), 8)]) == 2.5
    tier.env.run(18.0)
    assert prefetcher.wait_s([started((*said, more), 8)]) == 0.0


def test_nothing_is_fetched_for_a_turn_that_has_come_already():
    tier = Tier()
    prefetcher = tier.prefetcher("predictive")
    pause(tier, prefetcher, 4.0, session=0)
    prefetcher.ended(turn(10, 4.0, 1))
    tier.env.run(7.0)
    prefetcher.arrived(turn(11, 7.0, 1))
    tier.env.run(20.0)
    assert tier.fetched == []


def test_the_answer_that_came_last_counts():
    """A session is answered again before the next turn was expected: only the later expectation holds."""
    tier = Tier()
    prefetcher = tier.prefetcher("predictive")
    pause(tier, prefetcher, 8.0, session=0)
    prefetcher.ended(turn(10, 8.0, 1))  # expected at 16
    tier.env.run(10.0)
    prefetcher.arrived(turn(11, 10.0, 1))  # pauses: 8 and 2, a quarter: 3.5
    prefetcher.ended(turn(11, 10.0, 1, prompt=20))
    tier.env.run(30.0)
    assert tier.fetched == [(13.5, 23, 24)]


def test_only_the_last_two_hundred_pauses_are_remembered():
    """Fifty of 1 s and a hundred and fifty of 101 s are left: the quarter lies at three quarters between the two."""
    tier = Tier()
    prefetcher = tier.prefetcher("predictive")
    for session in range(350):
        pause(tier, prefetcher, 1.0 if session < 200 else 101.0, session)
    tier.fetched.clear()
    answered = tier.env.now
    prefetcher.ended(turn(999, answered, 999))
    tier.env.run(answered + 200.0)
    assert [time - answered for time, _, _ in tier.fetched] == [1.0 + 0.75 * 100.0]


@pytest.mark.parametrize("mode", ["none", "on-resume"])
def test_only_predictions_look_at_sessions(mode):
    tier = Tier()
    prefetcher = tier.prefetcher(mode)
    for session in range(3):
        pause(tier, prefetcher, 2.0, session)
    tier.env.run(100.0)
    assert tier.fetched == []


def test_single_requests_have_no_next_turn():
    tier = Tier()
    prefetcher = tier.prefetcher("predictive")
    pause(tier, prefetcher, 2.0, session=0)
    prefetcher.ended(Job(Request(1, 0.0, 5, 3), 2.0))
    prefetcher.arrived(Job(Request(2, 0.0, 5, 3), 3.0))
    tier.env.run(100.0)
    assert tier.fetched == []


def test_the_first_eight_of_those_that_wait_are_looked_after_each_once():
    tier = Tier()
    prefetcher = tier.prefetcher("on-resume")
    waiting = [turn(number, 0.0, None, prompt=10 + number) for number in range(20)]
    for job in waiting:
        job.computed = 8
    prefetcher.look_after(waiting)
    assert [tokens for _, _, tokens in tier.fetched] == list(range(10, 18))
    prefetcher.look_after(waiting)
    assert len(tier.fetched) == 8
    prefetcher.look_after(waiting[4:])
    assert [tokens for _, _, tokens in tier.fetched[8:]] == [18, 19, 20, 21]
    assert prefetcher.wait_s(waiting[:2]) == 20.0, "one after another"
    assert prefetcher.wait_s(waiting[11:12]) == 120.0
    assert prefetcher.wait_s(waiting[12:]) == 0.0
    assert tier.recorder.counts.host.cells_prefetched == 12 * 4


def test_what_was_swapped_out_is_not_fetched():
    """It comes back whole, when there is room for all of it."""
    tier = Tier()
    job = turn(0, 0.0, None)
    job.exported = Exported(3)
    tier.prefetcher("on-resume").look_after([job])
    assert tier.fetched == []


def test_nothing_is_fetched_where_that_was_not_asked_for():
    tier = Tier()
    prefetcher = tier.prefetcher("none")
    prefetcher.look_after([turn(0, 0.0, None)])
    assert (tier.fetched, prefetcher.wait_s([turn(0, 0.0, None)])) == ([], 0.0)


def test_predictions_in_a_server():
    """Two sessions by turns, and between their turns a prompt that drives them out.

    Session 0 asks again 20 s after its answer, so session 1 is expected 20 s after its own; it asks after 21 s. Session
    0 is expected once more, at 42 s, and does not come.
    """
    requests = [
        says(0, 0.0, (1, 0, 9), session=0),
        says(1, 0.0, (1, 0, 9), (2, 0, 1), session=0, think_s=20.0),  # at 21, answered at 22
        says(2, 30.0, (3, 0, 9), session=1),  # answered at 31
        says(3, 30.0, (3, 0, 9), (4, 0, 1), session=1, think_s=21.0),  # at 52, expected at 51
        says(4, 40.0, (5, 0, 23)),
    ]
    for mode, waits, ahead in (("none", 0.0, 0), ("on-resume", 0.0, 0), ("predictive", 5.0, 16)):
        _, recorder, jobs = tell(mode, requests)
        assert (jobs[3].started_s, jobs[3].cached) == (52.0, 8)
        assert (recorder.counts.host.prefetch_wait_s, recorder.counts.host.cells_prefetched) == (waits, ahead)
        assert jobs[3].finished_s == 52.0 + (waits or 2 * COPY_S) + 1.0


def test_a_turn_that_is_refused_has_ended_at_once():
    """It is refused at 1, and its session asks again at 1, while a step runs until 2: a pause of 0 s, not of -1."""
    requests = [
        says(0, 0.0, (1, 0, 3), output=5),
        says(1, 0.5, (2, 0, 99), session=0),
        says(2, 0.5, (2, 0, 99), (3, 0, 1), session=0),
        says(3, 0.5, (4, 0, 3), session=0),
    ]
    _, _, jobs = tell("predictive", requests)
    assert [job.status for job in jobs] == ["completed", "failed", "failed", "completed"]


def test_a_request_that_is_refused_while_a_step_is_composed_has_ended_by_then(monkeypatch):
    """Not only when the step has run: the next turn of its session may have come by then."""
    late, tell = [], Prefetcher.ended
    monkeypatch.setattr(
        Prefetcher,
        "ended",
        lambda self, job: (late.append(self._env.now - job.finished_s), tell(self, job)),
    )
    lengths = {"kind": "lognormal", "mu": 1.5, "sigma": 0.8, "min": 1, "max": 20}
    world = load_scenario(
        {
            "seed": 247,
            "workload": {
                "kind": "sessions",
                "sessions": 6,
                "rate": 10.0,
                "turns": {"kind": "fixed", "value": 5},
                "system_prompts": 1,
                "system_tokens": {"kind": "fixed", "value": 5},
                "user_tokens": lengths,
                "output_tokens": lengths,
                "think_s": 0.0,
            },
            "server": {"slots": 5, "n_batch": 64, "n_ubatch": 4, "keep_idle_slots": False, "prefetch": "predictive"},
            "cache": {"policy": "paged", "cells": 40, "block_size": 4, "prefix_cache": True, "host_cells": 128},
        }
    )
    summary = run(world).summary
    assert summary["failed"] > 0
    assert summary["completed"] > 0
    assert max(late) == pytest.approx(0, abs=1e-9)
