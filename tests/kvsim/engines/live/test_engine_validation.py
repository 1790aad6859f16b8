"""Validation: real and predicted runs follow the same schedule."""

import math

import pytest

from kvsim.costs.load_profile import load_profile
from kvsim.engines.live.engine_validation import validate
from kvsim.errors import UserError
from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.arrivals import Turn
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.run import drive
from kvsim.simulation.set_up import build_policy
from policies import in_group
from tests.worlds import GivenTimes
from workloads import Request

WORLD = load_scenario("chat", workload__requests=40, workload__rate=30.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["contiguous", "paged", "idle-compaction", "adaptive", "sliding-window"])
def test_a_script_gives_the_same_schedule_whatever_steps_take(name):
    runs = []
    script = None
    for seconds in (lambda b: 0.01 + 1e-4 * b.n_tokens, lambda b: 0.5, lambda b: 1e-5 * b.reads.span):
        recorder = Recorder(digest=True)
        result, script = drive(WORLD, build_policy(WORLD, name), GivenTimes(seconds), recorder, None, script)
        runs.append((recorder.schedule_digest, result.summary["completed"]))
    assert len(set(runs)) == 1


@pytest.mark.slow
def test_a_replay_with_the_same_times_gives_the_same_latencies():
    def times(batch):
        return 0.01 + 1e-4 * batch.n_tokens

    live, script = drive(WORLD, build_policy(WORLD), GivenTimes(times), Recorder(), None)
    again, _ = drive(WORLD, build_policy(WORLD), GivenTimes(times), Recorder(), None, script)
    for measure in ("ttft_s", "tpot_s", "e2e_s"):
        for statistic, value in live.summary[measure].items():
            assert math.isclose(again.summary[measure][statistic], value, rel_tol=1e-9)


@pytest.mark.slow
def test_without_a_script_other_times_give_another_schedule():
    """The control: the digest tells schedules apart."""
    digests = set()
    for step in (0.002, 0.05):
        recorder = Recorder(digest=True)
        drive(WORLD, build_policy(WORLD), GivenTimes(lambda _, s=step: s), recorder, None)
        digests.add(recorder.schedule_digest)
    assert len(digests) == 2


def test_a_request_arrives_when_the_same_share_of_the_step_has_passed():
    """The second request arrives after a quarter of the first one's only step, however long the step takes."""
    script = [
        Turn(0, 3.0, ((Request(0, 3.0, 4, 1), 1.0),)),
        Turn(0, 0.0, ((Request(1, 3.25, 4, 1), 0.25),)),
        Turn(0, 0.0, ()),
    ]
    result, _ = drive(WORLD, build_policy(WORLD), GivenTimes(lambda _: 8.0), Recorder(), None, script)
    assert result.requests["arrival_s"].tolist() == [3.0, 5.0]
    assert result.requests["finished_s"].tolist() == [11.0, 19.0]


@pytest.mark.slow
def test_validation_reports_every_policy_and_measure():
    short = load_scenario("chat", workload__output_tokens={"kind": "fixed", "value": 8})
    validation = validate(short, load_profile("default"), requests=2)
    assert set(validation.table["policy"]) == set(in_group("standard"))
    assert len(validation.table) == len(in_group("standard")) * (3 * 4 + 1)
    assert (validation.table["measured"] > 0).all()
    error = validation.table["predicted"] / validation.table["measured"] - 1
    assert (validation.table["error"] == error).all()


@pytest.mark.slow
def test_predictions_follow_the_machines_pace():
    """With a profile of a machine half as fast, scaled predictions stay right and unscaled ones are twice too long."""
    fast = load_profile("default")
    slow = fast.model_copy(update={"reference_passes_s": tuple(2 * s for s in fast.reference_passes_s)})
    usual, scaled = (validate("batch", profile, ["paged"], requests=6) for profile in (fast, slow))
    (low, high), (half, _) = usual.pace["paged"], scaled.pace["paged"]
    assert low == high
    assert half == pytest.approx(low / 2, rel=0.5)
    # All requests arrive at the start, so that the pace scales all times.
    throughput = scaled.table[scaled.table["measure"] == "throughput_tokens_per_s"].iloc[0]
    assert (1 + throughput["error"]) * half == pytest.approx(1 + throughput["unscaled"])
    assert scaled.worst_unscaled != scaled.worst


@pytest.mark.slow
def test_a_profile_of_another_processor_is_flagged():
    profile = load_profile("default")
    other = profile.model_copy(update={"machine": profile.machine.model_copy(update={"processor": "abacus"})})
    assert validate("batch", other, ["paged"], requests=2).elsewhere


@pytest.mark.slow
def test_a_profile_with_other_reference_passes_is_refused():
    profile = load_profile("default").model_copy(update={"reference_passes_s": (1e-3,)})
    with pytest.raises(UserError, match="calibrate anew"):
        validate("batch", profile, ["paged"], requests=2)


@pytest.mark.slow
def test_a_validation_warns_of_failed_requests():
    tight = load_scenario("chat", cache__cells=520, workload__requests=30, workload__rate=200.0)
    done = validate(tight, load_profile("default"), ["contiguous"], requests=30)
    (line,) = [line for line in done.warnings if "failed" in line]
    assert line.startswith("contiguous: ")
    assert "of 30 requests failed; the errors are of those that were left" in line
    assert done.to_dict()["warnings"] == list(done.warnings)
